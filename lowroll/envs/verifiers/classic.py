"""Environments of verifiers below 0.4: `load_environment(id, **args)` with a data set and a rubric.

verifiers' `rollout` runs with a client that replays the drawn turns and then raises with the
environment's new messages (`source.TurnPending`). A failed reward function, which its rubric logs
and scores 0, is an error here.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import verifiers as vf
from verifiers.clients import Client
from verifiers.types import Response, ResponseMessage, ToolCall

from lowroll.envs.verifiers.source import TurnPending, VerifiersSource, calls_of, plain
from lowroll.types import Message, Score


class Classic(VerifiersSource):
    """An environment by id; ValueError names a missing requirement."""

    def __init__(self, env_id: str, args: dict[str, Any]) -> None:
        self.env = vf.load_environment(env_id, **args)
        if not isinstance(self.env, vf.MultiTurnEnv):
            kinds = "SingleTurnEnv, MultiTurnEnv, ToolEnv and what is made of them are known"
            raise ValueError(f"{env_id} is a {type(self.env).__name__}; {kinds}")
        if self.env.requires_group_rollouts:
            raise ValueError(
                f"{env_id} scores the rollouts of a group together; lowroll scores them one by one"
            )
        self.max_turns = self.env.max_turns
        self.has_tools, self.endless = bool(self.env.tool_defs), False

    def tools(self) -> tuple[dict[str, Any], ...]:
        schema_fields = {"name", "description", "parameters"}
        return tuple(
            {"type": "function", "function": tool.model_dump(include=schema_fields)}
            for tool in self.env.tool_defs or ()
        )

    def tasks(self, split: str) -> tuple[Iterator[Any], bool]:
        """Return the rows of its data sets; without an evaluation set all are from training."""
        held_out = self.env.build_eval_dataset()
        if held_out is None:
            return map(dict, self.env.get_dataset()), False
        rows = held_out if split == "test" else self.env.build_dataset()
        return map(dict, rows if rows is not None else ()), True

    def key(self, task: Any) -> str:
        return json.dumps(task, sort_keys=True, default=str)

    async def judge(self, task: Any, turns: list[Message]) -> Score:
        """Score these turns; ValueError for a reward function that raised."""
        state = await self._run(task, turns, scored=True)
        with _logged_failures() as failed:
            await self.env.rubric.score_rollout(state)
        if failed:
            raise ValueError("; ".join(failed))
        return Score(float(state["reward"]), {k: float(v) for k, v in state["metrics"].items()})

    async def _run(self, task: Any, turns: list[Message], scored: bool) -> Any:
        script = _Script(turns, ends=scored)
        state = await self.env.rollout(dict(task), script, "lowroll", {})
        if state.get("error") is not None:
            raise state["error"]
        return state


class _Script(Client):
    """A client that replays the drawn turns. ends: the conversation then counts as too long."""

    def __init__(self, turns: list[Message], ends: bool) -> None:
        super().__init__(None)
        self.turns, self.ends = iter(turns), ends
        self.told: list[Message] = []

    async def get_response(self, prompt: Any, *_: Any, **__: Any) -> Any:
        """Return the next turn; after the last, raise TurnPending with the messages that followed
        it, or OverlongPromptError (`ends`). ValueError for an environment that changes earlier
        messages."""
        messages = [plain(prompt_message) for prompt_message in prompt]
        num_told = len(self.told)
        if messages[:num_told] != self.told:
            raise ValueError(
                "the environment changes earlier messages; only what follows a turn can be new here"
            )
        next_turn = next(self.turns, None)
        if next_turn is None and self.ends:
            raise vf.OverlongPromptError("no more turns were drawn")
        if next_turn is None:
            raise TurnPending(messages[num_told:])
        content = next_turn["content"]
        calls = [ToolCall(**call) for call in _all_calls(next_turn)] or None
        told_turn = plain(vf.AssistantMessage(content=content, tool_calls=calls))
        self.told = [*messages, told_turn]
        message = ResponseMessage(
            content=content, tool_calls=calls, finish_reason="stop", is_truncated=False
        )
        return Response(id="lowroll", created=0, model="lowroll", message=message)

    async def _unused(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError

    def setup_client(self, config: Any) -> Any:
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing."""

    to_native_tool = to_native_prompt = get_native_response = _unused
    raise_from_native_response = from_native_response = _unused


def _all_calls(said: Message) -> list[dict[str, str]]:
    unreadable_calls = [
        {"id": "malformed", "name": "malformed", "arguments": reason}
        for reason in said.get("ill_formed", ())
    ]
    return calls_of(said) + unreadable_calls


@contextmanager
def _logged_failures() -> Iterator[list[str]]:
    messages: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("verifiers")
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
