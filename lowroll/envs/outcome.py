"""The values that an environment may return, and their conversion: a scorer returns a number, a
Score, or an awaitable of one; `respond` returns messages, None, or an awaitable of them."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Awaitable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from numbers import Real
from typing import TYPE_CHECKING, Any, Protocol

from lowroll.tool_calls import MOST_DEPTH, depths
from lowroll.types import Message, Prompt, Score

if TYPE_CHECKING:
    import asyncio

Outcome = Score | float | Awaitable[Score | float]
Reply = list[Message] | None | Awaitable[list[Message] | None]

MAX_REWARD = 1e6  # a reward beyond it is a bug of the scorer
MAX_NAME = 100  # characters of a metric's name
MAX_METRICS = 100  # numbers beside a reward
MAX_ANSWER = 500_000  # characters of an environment's messages, as JSON
ANSWERING = ("user", "tool", "system", "developer", "function")  # roles that an environment has


class InvalidScore(ValueError):
    """A scorer returned a value that is no score."""


class Inapplicable(InvalidScore):
    """No reward function applies to a response, which is no failure. `metrics` and `extra` are the
    values that were logged beside."""

    def __init__(
        self, message: str, metrics: dict[str, float], extra: dict[str, Any] | None
    ) -> None:
        super().__init__(message)
        self.metrics, self.extra = metrics, extra


class ScorerFailed(Exception):
    """An exception that a scorer's code raised, with its place, in words."""


class InvalidReply(InvalidScore):
    """An environment answered with values that are no messages."""


class Judging(Protocol):
    """The part of an environment that scores and answers."""

    def score(self, prompt: Prompt, text: str) -> Outcome: ...

    def score_conversation(self, prompt: Prompt, messages: list[Message]) -> Outcome: ...

    def respond(self, prompt: Prompt, messages: list[Message]) -> Reply: ...


def judge(env: Judging, prompt: Prompt, said: str | list[Message]) -> Score:
    """Return the score of a response, or of a whole conversation. InvalidScore says what was
    returned instead; what the scorer raises passes through.

    An `async def score` runs on an event loop that lives as long as this process, so that it may
    keep a client open.
    """
    if isinstance(said, str):
        return as_score(awaited(env.score(prompt, said)))
    return as_score(awaited(env.score_conversation(prompt, said)))


def answer(env: Judging, prompt: Prompt, messages: list[Message]) -> list[Message] | None:
    """Return the environment's answer to a conversation; None: it is done. Raises InvalidReply,
    which names what was returned instead of messages; what the environment raises passes
    through."""
    return as_messages(awaited(env.respond(prompt, messages)))


def awaited(value: Any) -> Any:
    """Return a value, or the result of an awaitable."""
    if not inspect.isawaitable(value):
        return value
    thread, runner = _loop()
    return thread.submit(runner.run, _result(value)).result()


@cache
def _loop() -> tuple[ThreadPoolExecutor, asyncio.Runner]:
    """Return an event loop and a thread of its own for it: a notebook has a loop in the main thread
    already."""
    import asyncio  # only who waits pays for it

    return ThreadPoolExecutor(1, thread_name_prefix="async-scorer"), asyncio.Runner()


async def _result(value: Awaitable[Any]) -> Any:
    return await value


def as_score(value: object) -> Score:
    """Return a number or a Score as a Score of finite floats. Raises InvalidScore for anything
    else."""
    if isinstance(value, Real):
        value = Score(float(value))
    if not isinstance(value, Score):
        raise InvalidScore(f"score returned {_show(value)}; it must return a number or a Score")
    if not isinstance(value.metrics, dict) or len(value.metrics) > MAX_METRICS:
        raise InvalidScore(
            f"the metrics of a Score must be a dict of at most {MAX_METRICS} numbers, not "
            f"{_show(value.metrics)}"
        )
    reward = as_number("the reward", value.reward)
    if abs(reward) > MAX_REWARD:
        raise InvalidScore(f"the reward is {reward:g}, which is beyond {MAX_REWARD:g}")
    return Score(
        reward,
        {
            metric_name(key): as_number(f"the metric {key!r}", number)
            for key, number in value.metrics.items()
        },
        value.extra,
    )


def as_messages(value: object) -> list[Message] | None:
    """Return the messages of an environment as JSON data. Raises InvalidReply for anything else."""
    if value is None:
        return None
    if not isinstance(value, list) or not value:
        raise InvalidReply(
            f"respond returned {_show(value)}; it must return a list of messages, or None when the "
            "conversation is done"
        )
    for message in value:
        if not isinstance(message, dict) or message.get("role") not in ANSWERING:
            raise InvalidReply(
                f"respond returned the message {_show(message)}; it must be a dict whose role is one "
                f"of {', '.join(ANSWERING)}"
            )
        if not isinstance(message.get("content"), str):
            raise InvalidReply(
                f"respond returned the message {_show(message)}; its content must be text"
            )
    try:
        text = json.dumps(value, allow_nan=False)
        json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair is no text
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidReply(f"respond returned messages that are no JSON data: {error}") from None
    if len(text) > MAX_ANSWER:
        raise InvalidReply(
            f"respond returned messages of {len(text):,} characters; {MAX_ANSWER:,} at most"
        )
    found: list[Message] = json.loads(text)
    if any(depth > MOST_DEPTH for depth in depths(found)):
        raise InvalidReply(f"respond returned messages that are nested more than {MOST_DEPTH} deep")
    return found


def as_number(what: str, value: object) -> float:
    """Return a finite float. InvalidScore names a value that is none."""
    if not isinstance(value, Real):
        raise InvalidScore(f"{what} is {_show(value)}; it must be a number")
    if not math.isfinite(value):
        raise InvalidScore(f"{what} is {float(value)}; it must be finite")
    return float(value)


def metric_name(key: object) -> str:
    """Return a name that a metric may have. Raises InvalidScore for any other."""
    if not isinstance(key, str) or not key.isprintable() or not 0 < len(key) <= MAX_NAME:
        raise InvalidScore(
            f"a metric is named {_show(key)}; it must be text of 1 to {MAX_NAME} printable "
            f"characters"
        )
    return key


def _show(value: object) -> str:
    """Return a value's text for an error: how it prints, and its type."""
    try:
        text = repr(value)
    except Exception as error:
        text = f"(its repr raises {type(error).__name__})"
    text = text if len(text) <= 60 else text[:60] + "..."
    return "None" if value is None else f"{text}, of type {type(value).__name__}"
