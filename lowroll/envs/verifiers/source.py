"""The interface of both kinds of verifiers environments."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

from lowroll.types import Message, Score


class TurnPending(BaseException):
    """The loop's request for a new turn, with the messages before it. A BaseException, so that no
    environment handles it."""

    def __init__(self, messages: list[Message]) -> None:
        super().__init__("a turn that is not drawn yet")
        self.messages = messages


class VerifiersSource(ABC):
    """An environment of verifiers, with opaque tasks."""

    max_turns: int
    has_tools: bool
    endless: bool

    @abstractmethod
    def tools(self) -> tuple[dict[str, Any], ...]:
        """Return the JSON schemas of the tools that the model may call."""

    @abstractmethod
    def tasks(self, split: str) -> tuple[Iterator[Any], bool]:
        """Return a split's tasks, and whether they are its own; else a share is held out."""

    @abstractmethod
    def key(self, task: Any) -> str:
        """Return a text that identifies a task in every process."""

    async def play(self, task: Any, turns: list[Message]) -> list[Message] | None:
        """Return the environment's messages after these turns; None when done."""
        try:
            await self._run(task, turns, scored=False)
        except TurnPending as asked:
            return asked.messages
        return None

    @abstractmethod
    async def _run(self, task: Any, turns: list[Message], scored: bool) -> Any:
        """Run verifiers' loop with these turns and return its record. `scored`: the loop ends after
        them, instead of TurnPending."""

    @abstractmethod
    async def judge(self, task: Any, turns: list[Message]) -> Score:
        """Return the score of these turns."""


def refuse_missing(name: str, error: ImportError) -> ValueError:
    """Return an error with the command that installs a missing package."""
    missing_module = (error.name or "").partition(".")[0]
    module = name.rpartition("/")[2].partition("@")[0].replace("-", "_").lower()
    if missing_module == "verifiers":
        return ValueError(
            "it needs the package 'verifiers' (pip install 'lowroll[verifiers]'), and the "
            f"environment {name!r} beside it (prime env install {name})"
        )
    if missing_module in ("", module) or missing_module.endswith(module):
        return ValueError(
            f"no environment {name!r} is installed (prime env install {name}, or pip install the "
            f"package whose module is {module!r})"
        )
    return ValueError(
        f"environment {name!r} needs the module {missing_module!r} (pip install {missing_module})"
    )


def text_of(content: Any) -> str:
    """Return a message's content as text; ValueError for images and the like."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = [part if isinstance(part, dict) else part.model_dump() for part in content]
    if any(part.get("type") != "text" for part in parts):
        raise ValueError("a message holds more than text, which lowroll's models cannot read")
    return "\n".join(part["text"] for part in parts)


def plain(message: Any) -> Message:
    """Convert a verifiers message for chat templates."""
    fields = message if isinstance(message, dict) else message.model_dump(exclude_none=True)
    converted: Message = {"role": fields["role"], "content": text_of(fields.get("content"))}
    converted |= {key: fields[key] for key in ("name", "tool_call_id") if fields.get(key)}
    if calls := fields.get("tool_calls"):
        converted["tool_calls"] = [
            {
                "type": "function",
                "id": call["id"],
                "function": {
                    "name": call["name"],
                    "arguments": _parse_arguments(call["arguments"]),
                },
            }
            for call in calls
        ]
    return converted


def _parse_arguments(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def calls_of(turn: Message) -> list[dict[str, str]]:
    """Return a turn's calls in verifiers' form."""
    return [
        {
            "id": call["id"],
            "name": call["function"]["name"],
            "arguments": json.dumps(call["function"]["arguments"]),
        }
        for call in turn.get("tool_calls", ())
    ]
