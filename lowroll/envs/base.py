"""The interface of an environment: a source of prompts and a scorer that can be checked.

`prompt(index, split)` is a pure function of these, the arguments and the seed, so that resumed work
sees the same task. `score(prompt, text)` is pure too; an exception becomes a ScoreError, never a
reward of 0.

A hash of a generated task's text decides its split, so that splits are disjoint.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from lowroll.envs.curriculum import Curriculum
from lowroll.envs.return_values import InvalidScore, Outcome, Reply, as_score, awaited
from lowroll.types import Message, Prompt, Score

SPLITS = ("train", "test")
MAX_TEXT = 50_000  # scored characters of a response
TEST_BYTES = 64  # of 256: the held-out share of generated tasks
MAX_DRAWS = 200  # failed draws, after which the task space counts as too small
NUM_FAILURES = 5  # examples that a Validation keeps


def bounded(text: str) -> str:
    """Return the last `MAX_TEXT` characters, where the answer is."""
    return text[-MAX_TEXT:]


def split_of(text: str) -> str:
    """Return a generated task's split, by the first byte of its SHA-256."""
    return "test" if hashlib.sha256(text.encode()).digest()[0] < TEST_BYTES else "train"


def assistant_turns(prompt: Prompt, messages: list[Message]) -> list[Message]:
    """Return the assistant's messages after the prompt."""
    later_messages = messages[len(prompt.messages) :]
    return [message for message in later_messages if message["role"] == "assistant"]


def judge(env: Environment, prompt: Prompt, said: str | list[Message]) -> Score:
    """Score a response or a conversation. InvalidScore for a wrong return value; the scorer's own
    exceptions pass."""
    score = (
        env.score(prompt, said) if isinstance(said, str) else env.score_conversation(prompt, said)
    )
    return as_score(awaited(score))


@dataclass(frozen=True)
class Validation:
    """The outcome of `Environment.validate`."""

    env: str
    split: str
    count: int
    gold_accepted: int
    gold_missing: int  # tasks without a gold or a perturbed answer
    perturbed_rejected: int
    failures: tuple[str, ...] = ()  # the first NUM_FAILURES, a line each

    @property
    def ok(self) -> bool:
        return self.gold_accepted == self.perturbed_rejected == self.count - self.gold_missing


class Environment(ABC):
    """The base class of environments. Subclasses take keywords of their own, and validate them."""

    exact = False  # no partial rewards, so a perturbed answer must score 0
    # the score of a response that exceeds the time limit; None: an error
    overtaxed: Score | None = None
    together = False  # `score_together` scores all responses to a prompt
    # a worker sets it, to learn what a slow scorer is doing
    tell: Callable[[str], object] = staticmethod(lambda doing: None)
    max_turns = 1  # turns of the assistant; with 1 `respond` is never called
    # tokens of a whole conversation with its prompt; None: the run's limit
    max_sequence_tokens: int | None = None
    # JSON schemas of callable functions, for the chat template
    tools: Sequence[dict[str, Any]] = ()
    curriculum: Curriculum | None = None  # its tasks have their level as `info["level"]`

    def __init__(
        self, *, name: str, seed: int = 0, system: str | None = None, template: str = "{text}"
    ) -> None:
        if "{text}" not in template:
            raise ValueError(f"env {name!r}: template must contain '{{text}}', got {template!r}")
        self.name, self.seed, self.system, self.template = name, seed, system, template

    @abstractmethod
    def prompt(self, index: int, split: str = "train") -> Prompt:
        """Return task number `index` (0, 1, ...) of a split. ValueError if there is none."""

    @abstractmethod
    def score(self, prompt: Prompt, text: str) -> Outcome:
        """Score the response `text` by a number or a Score; may be async."""

    def prepare(self) -> None:  # noqa: B027  # most environments have nothing to load
        """Load slow parts, such as a reward model, before a worker is ready."""

    def respond(self, prompt: Prompt, messages: list[Message]) -> Reply:
        """Return new messages (user, tool or system) after the assistant's, or None when done; may
        be async.

        It must be pure, as a turn may be requested again in another process. Exceptions become a
        ScoreError of the sample. `max_turns` bounds the calls.
        """
        return None

    def score_conversation(self, prompt: Prompt, messages: list[Message]) -> Outcome:
        """Score a conversation, prompt included; by default its last assistant message."""
        replies = assistant_turns(prompt, messages)
        return self.score(prompt, bounded(str(replies[-1].get("content") or "")) if replies else "")

    def score_together(
        self, prompt: Prompt, said: Sequence[str | list[Message]]
    ) -> Sequence[Score | InvalidScore]:
        """Score several responses or conversations of one prompt, in order (`together`)."""
        raise NotImplementedError

    @abstractmethod
    def gold(self, prompt: Prompt) -> str:
        """Return a response with a reward of 1, which is also the SFT demonstration, or raise
        NotImplementedError."""

    @abstractmethod
    def perturbed(self, prompt: Prompt) -> str:
        """Return a wrong response close to the gold one, or raise NotImplementedError."""

    def matching(self, prompt: Prompt, text: str) -> Prompt | None:
        """Return the task whose right answer is that of `text`, for majority votes, or None."""
        return None

    def size(self, split: str = "train") -> int | None:
        """Return the number of tasks in a split; None when endless, 0 without such a split."""
        return None

    def check_task(self, index: int, split: str) -> None:
        """Raise ValueError for an unknown split or a negative index."""
        if split not in SPLITS:
            raise ValueError(f"env {self.name!r}: split must be 'train' or 'test', got {split!r}")
        if index < 0:
            raise ValueError(f"env {self.name!r}: index must be >= 0, got {index}")

    def rng(self, split: str, index: int, draw: int = 0) -> Random:
        """Return the generator of one draw of a task. ValueError as of `check_task`."""
        self.check_task(index, split)
        return Random(f"{type(self).__name__}/{self.seed}/{split}/{index}/{draw}")

    def ask(self, text: str, index: int, split: str, info: dict[str, Any]) -> Prompt:
        messages = [{"role": "system", "content": self.system}] if self.system else []
        messages.append({"role": "user", "content": self.template.replace("{text}", text)})
        return Prompt(id=f"{split}/{index}", env=self.name, messages=messages, info=info)

    def validate(self, count: int = 64, split: str = "train") -> Validation:
        """Score the gold and the perturbed response of the first `count` tasks of a split, in this
        process and without time limits. A scorer that raises counts as a failure."""
        size = self.size(split)
        count = count if size is None else min(count, size)
        accepted = missing = rejected = 0
        failures: list[str] = []
        for index in range(count):
            prompt = self.prompt(index, split)
            try:
                gold, perturbed = self.gold(prompt), self.perturbed(prompt)
            except NotImplementedError:
                missing += 1
                continue
            reward = self._reward_or_error(prompt, gold)
            if reward == 1.0:
                accepted += 1
            else:
                failures.append(f"{prompt.id}: gold {gold[-80:]!r} scored {reward}")
            reward = self._reward_or_error(prompt, perturbed)
            if isinstance(reward, float) and (reward == 0.0 if self.exact else reward < 1.0):
                rejected += 1
            else:
                failures.append(f"{prompt.id}: perturbed {perturbed[-80:]!r} scored {reward}")
        return Validation(
            self.name, split, count, accepted, missing, rejected, tuple(failures[:NUM_FAILURES])
        )

    def _reward_or_error(self, prompt: Prompt, text: str) -> float | str:
        try:
            return judge(self, prompt, text).reward
        except Exception as error:
            return f"{type(error).__name__}: {error}"


class GeneratedEnvironment(Environment):
    """An endless environment: `prompt` keeps the first drawn `task` of the split."""

    @abstractmethod
    def task(self, rng: Random) -> tuple[str, dict[str, Any]]:
        """Draw a task: its text, and the JSON data for the scorer."""

    def prompt(self, index: int, split: str = "train") -> Prompt:
        for draw in range(MAX_DRAWS):
            text, info = self.task(self.rng(split, index, draw))
            if split_of(text) == split:
                return self.ask(text, index, split, info)
        raise ValueError(
            f"env {self.name!r}: no {split} task in {MAX_DRAWS} draws: its arguments allow too few "
            f"tasks"
        )
