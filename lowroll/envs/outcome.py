"""What a scorer may return, and what becomes of it: a number, a Score, or an awaitable of one."""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from numbers import Real
from typing import TYPE_CHECKING, Any

from lowroll.types import Prompt, Score

if TYPE_CHECKING:
    import asyncio

    from lowroll.envs.base import Environment

Outcome = Score | float | Awaitable[Score | float]

MAX_REWARD = 1e6  # a reward beyond it is a bug of the scorer
MAX_NAME = 100  # characters of a metric's name
MAX_METRICS = 100  # numbers beside a reward


class InvalidScore(ValueError):
    """A scorer returned what is no score."""


class ScorerFailed(Exception):
    """What a scorer's code raised, with its place, in words."""


def judge(env: Environment, prompt: Prompt, text: str) -> Score:
    """The score of a response. InvalidScore says what came in its place; what the scorer raises
    goes through.

    An `async def score` runs on an event loop that lives as long as this process, so that it may
    keep a client open.
    """
    return as_score(awaited(env.score(prompt, text)))


def awaited(value: Any) -> Any:
    """A value, or the result of an awaitable."""
    if not inspect.isawaitable(value):
        return value
    thread, runner = _loop()
    return thread.submit(runner.run, _result(value)).result()


@cache
def _loop() -> tuple[ThreadPoolExecutor, asyncio.Runner]:
    """A thread of its own for the event loop: a notebook has one in the main thread already."""
    import asyncio  # only who waits pays for it

    return ThreadPoolExecutor(1, thread_name_prefix="async-scorer"), asyncio.Runner()


async def _result(value: Awaitable[Any]) -> Any:
    return await value


def as_score(value: object) -> Score:
    """A number or a Score as a Score of finite floats. InvalidScore for anything else."""
    if isinstance(value, Real):
        value = Score(float(value))
    if not isinstance(value, Score):
        raise InvalidScore(f"score returned {_show(value)}; it must return a number or a Score")
    if not isinstance(value.metrics, dict) or len(value.metrics) > MAX_METRICS:
        raise InvalidScore(
            f"the metrics of a Score must be a dict of at most {MAX_METRICS} numbers, not "
            f"{_show(value.metrics)}"
        )
    reward = _number("the reward", value.reward)
    if abs(reward) > MAX_REWARD:
        raise InvalidScore(f"the reward is {reward:g}, which is beyond {MAX_REWARD:g}")
    return Score(
        reward,
        {
            _name(key): _number(f"the metric {key!r}", number)
            for key, number in value.metrics.items()
        },
    )


def _number(what: str, value: object) -> float:
    if not isinstance(value, Real):
        raise InvalidScore(f"{what} is {_show(value)}; it must be a number")
    if not math.isfinite(value):
        raise InvalidScore(f"{what} is {float(value)}; it must be finite")
    return float(value)


def _name(key: object) -> str:
    if not isinstance(key, str) or not key.isprintable() or not 0 < len(key) <= MAX_NAME:
        raise InvalidScore(
            f"a metric is named {_show(key)}; it must be text of 1 to {MAX_NAME} printable "
            f"characters"
        )
    return key


def _show(value: object) -> str:
    """A value in an error: how it prints, and its type."""
    try:
        text = repr(value)
    except Exception as error:
        text = f"(its repr raises {type(error).__name__})"
    text = text if len(text) <= 60 else text[:60] + "..."
    return "None" if value is None else f"{text}, of type {type(value).__name__}"
