"""An environment of verifiers as a lowroll Environment."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from itertools import islice
from random import Random
from typing import Any

from lowroll.envs.base import Environment, assistant_turns, split_of
from lowroll.envs.return_values import awaited
from lowroll.envs.tools import with_counts
from lowroll.envs.user_errors import describe
from lowroll.envs.verifiers.source import VerifiersSource, refuse_missing
from lowroll.types import Message, Prompt, Score

MOST_TURNS = 8  # in an environment without a bound
MOST_TASKS = 1_000_000  # of a finite data set


class Verifiers(Environment):
    """The installed environment `env_id`; further arguments are its own, with `env_args` for names
    that lowroll uses. `max_turns`: null for the environment's bound, or 8. `eval_args`: other
    arguments of the test split; without them or a test set, a quarter of the tasks is held out."""

    def __init__(
        self,
        *,
        name: str,
        seed: int = 0,
        env_id: str,
        max_turns: int | None = None,
        env_args: dict[str, Any] | None = None,
        eval_args: dict[str, Any] | None = None,
        **args: Any,
    ) -> None:
        super().__init__(name=name, seed=seed)
        args |= env_args or {}
        self.source = self._load(env_id, args)
        self.eval_source = None
        if eval_args is not None:
            self.eval_source = self._load(env_id, args | eval_args)
        env_max_turns = self.source.max_turns
        bound = env_max_turns if env_max_turns > 0 else MOST_TURNS
        self.max_turns = bound if max_turns is None else max_turns
        self._tasks: dict[str, _Tasks] = {}
        self._order = lru_cache(maxsize=4)(self._shuffled)

    def _load(self, env_id: str, args: dict[str, Any]) -> VerifiersSource:
        try:
            return load(env_id, args)
        except ImportError as error:
            raise ValueError(f"env {self.name!r}: {refuse_missing(env_id, error)}") from error
        except Exception as error:
            raise ValueError(f"env {self.name!r}: verifiers: {describe(error)}") from error

    @property
    def tools(self) -> tuple[dict[str, Any], ...]:  # type: ignore[override]
        return self.source.tools()

    def size(self, split: str = "train") -> int | None:
        return None if self._of(split).endless else self.tasks(split).size()

    def prompt(self, index: int, split: str = "train") -> Prompt:
        self.check_task(index, split)
        task_index, size = index, self.size(split)
        if size == 0:
            raise ValueError(f"env {self.name!r}: no {split} task")
        if size is not None and split == "train":
            task_index = self._order(size, index // size)[index % size]
        elif size is not None:
            task_index = index % size
        task = self.tasks(split)[task_index]
        source = self._of(split)
        messages = awaited(source.play(task, []))
        if not messages:
            raise ValueError(f"env {self.name!r}: task {task_index} of {split} asks nothing")
        info = {"task": [split, task_index], "digest": _digest(source.key(task))}
        return Prompt(f"{split}/{index}", self.name, messages, info)

    async def respond(self, prompt: Prompt, messages: list[Message]) -> list[Message] | None:
        task, source = self._task(prompt)
        return await source.play(task, assistant_turns(prompt, messages))

    async def score_conversation(self, prompt: Prompt, messages: list[Message]) -> Score:
        task, source = self._task(prompt)
        score = await source.judge(task, assistant_turns(prompt, messages))
        return with_counts(score, messages) if source.has_tools else score

    async def score(self, prompt: Prompt, text: str) -> Score:
        reply = {"role": "assistant", "content": text}
        return await self.score_conversation(prompt, [*prompt.messages, reply])

    def gold(self, prompt: Prompt) -> str:
        raise NotImplementedError("an environment of verifiers says no right response")

    def perturbed(self, prompt: Prompt) -> str:
        raise NotImplementedError("an environment of verifiers says no wrong response")

    def tasks(self, split: str) -> _Tasks:
        if split not in self._tasks:
            source = self._of(split)
            split_tasks, has_own_split = source.tasks(split)
            if self.eval_source is None and not has_own_split:
                split_tasks = (task for task in split_tasks if split_of(source.key(task)) == split)
            self._tasks[split] = _Tasks(split_tasks)
        return self._tasks[split]

    def _of(self, split: str) -> VerifiersSource:
        held_out = split == "test" and self.eval_source is not None
        return self.eval_source if held_out else self.source  # type: ignore[return-value]

    def _task(self, prompt: Prompt) -> tuple[Any, VerifiersSource]:
        split, task_index = prompt.info["task"]
        task, source = self.tasks(split)[task_index], self._of(split)
        if _digest(source.key(task)) != prompt.info["digest"]:
            raise ValueError(
                f"{self.name} does not make the task of {prompt.id} again: another version of it, "
                "or it is not reproducible"
            )
        return task, source

    def _shuffled(self, size: int, epoch: int) -> list[int]:
        return Random(f"verifiers/{self.seed}/{epoch}").sample(range(size), size)


class _Tasks:
    def __init__(self, found: Any) -> None:
        self._rest = iter(found)
        self._read: list[Any] = []

    def __getitem__(self, place: int) -> Any:
        self._read += islice(self._rest, max(0, place + 1 - len(self._read)))
        return self._read[place]

    def size(self) -> int:
        self._read += islice(self._rest, MOST_TASKS - len(self._read))
        return len(self._read)


def load(env_id: str, args: dict[str, Any]) -> VerifiersSource:
    import verifiers

    if hasattr(verifiers, "load_environment"):
        from lowroll.envs.verifiers.classic import Classic

        return Classic(env_id, args)
    from lowroll.envs.verifiers.tasksets import Tasksets

    return Tasksets(env_id, args)


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()[:16]
