"""Conversion of an environment's return values: a score is a number, a Score or an awaitable; a
reply is messages, None or an awaitable.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Awaitable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from numbers import Real
from typing import TYPE_CHECKING, Any

from lowroll.tool_calls import MOST_DEPTH, depths
from lowroll.types import Message, Score

if TYPE_CHECKING:
    import asyncio

Outcome = Score | float | Awaitable[Score | float]
Reply = list[Message] | None | Awaitable[list[Message] | None]

MAX_REWARD = 1e6  # a larger reward is a bug of the scorer
MAX_NAME = 100  # characters of a metric's name
MAX_METRICS = 100  # numbers of a Score beside its reward
MAX_ANSWER = 500_000  # characters of an environment's messages, as JSON
ANSWERING = (  # roles of an environment's messages
    "user",
    "tool",
    "system",
    "developer",
    "function",
)


class InvalidScore(ValueError):
    """A returned value that is not a score."""


class Inapplicable(InvalidScore):
    """A response to which no reward function applies, not a failure."""

    def __init__(
        self, message: str, metrics: dict[str, float], extra: dict[str, Any] | None
    ) -> None:
        super().__init__(message)
        self.metrics, self.extra = metrics, extra


class ScorerFailed(Exception):
    """An exception of a scorer's code, with its place."""


class InvalidReply(InvalidScore):
    """A reply that is not a list of messages."""


def awaited(value: Any) -> Any:
    """Return a call's result, awaited if needed. All calls share one event loop, so that a scorer
    may keep a client open."""
    if not inspect.isawaitable(value):
        return value
    thread, runner = _event_loop()
    return thread.submit(runner.run, _result(value)).result()


@cache
def _event_loop() -> tuple[ThreadPoolExecutor, asyncio.Runner]:
    """Return an event loop in its own thread: a notebook's main thread already has one."""
    import asyncio

    return ThreadPoolExecutor(1, thread_name_prefix="async-scorer"), asyncio.Runner()


async def _result(value: Awaitable[Any]) -> Any:
    return await value


def as_score(value: object) -> Score:
    """Convert to a Score of finite floats; InvalidScore for anything else."""
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
    """Convert to messages of JSON data; InvalidReply for anything else."""
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
        json.dumps(value, ensure_ascii=False).encode()  # refuses lone surrogates
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidReply(f"respond returned messages that are no JSON data: {error}") from None
    if len(text) > MAX_ANSWER:
        raise InvalidReply(
            f"respond returned messages of {len(text):,} characters; {MAX_ANSWER:,} at most"
        )
    messages: list[Message] = json.loads(text)
    if any(depth > MOST_DEPTH for depth in depths(messages)):
        raise InvalidReply(f"respond returned messages that are nested more than {MOST_DEPTH} deep")
    return messages


def as_number(what: str, value: object) -> float:
    """Return a finite float; InvalidScore for anything else."""
    if not isinstance(value, Real):
        raise InvalidScore(f"{what} is {_show(value)}; it must be a number")
    if not math.isfinite(value):
        raise InvalidScore(f"{what} is {float(value)}; it must be finite")
    return float(value)


def metric_name(key: object) -> str:
    """Return a valid metric name; InvalidScore for any other."""
    if not isinstance(key, str) or not key.isprintable() or not 0 < len(key) <= MAX_NAME:
        raise InvalidScore(
            f"a metric is named {_show(key)}; it must be text of 1 to {MAX_NAME} printable "
            f"characters"
        )
    return key


def _show(value: object) -> str:
    try:
        text = repr(value)
    except Exception as error:
        text = f"(its repr raises {type(error).__name__})"
    text = text if len(text) <= 60 else text[:60] + "..."
    return "None" if value is None else f"{text}, of type {type(value).__name__}"
