"""Reward functions: Python functions of responses (docs/data.md).

A function with a parameter `completions` gets all responses to one prompt, as in TRL, and returns
as many rewards; any other gets one response and returns one. Both take any column by name. A reward
of None means that the function does not apply.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import json
import math
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import Any

from lowroll.envs.answers.equality import Unjudged, equal, last_answer
from lowroll.envs.base import bounded
from lowroll.envs.data.columns import ODD, plain
from lowroll.envs.data.reward_models import RewardModel, is_model
from lowroll.envs.return_values import (
    MAX_METRICS,
    MAX_REWARD,
    InvalidScore,
    ScorerFailed,
    as_number,
    awaited,
    metric_name,
)
from lowroll.envs.table import import_file, split_file
from lowroll.envs.user_errors import describe, place
from lowroll.types import Message, nearest

ANSWER = "answer"  # the built-in function
TEXTS = ("text", "solution_str")  # the second name is verl's
ONE = (*TEXTS, "completion", "prompt", "rollout")
# TRL's arguments that are not columns
OF_ROLLOUTS = ("completion_ids", "trainer_state")
LOGS = ("log_extra", "log_metric")
SEVERAL = ("completions", "prompts", *OF_ROLLOUTS, *LOGS)
NO_COLUMNS = ("prompt", "completion")  # not passed to **columns, as in TRL
MAX_EXTRA = 500_000  # characters per prompt
SAID = frozenset((*TEXTS, "completion", "rollout", "completions"))  # names of the response
UNKNOWN_HERE = dict.fromkeys((*OF_ROLLOUTS, *LOGS), "only functions of completions are given it")
UNKNOWN_HERE["environments"] = "TRL's environments are not passed here"


@dataclass(frozen=True)
class Response:
    """A function's `rollout` argument. `messages` follow the prompt; `columns` is the row with
    `answer`."""

    text: str
    prompt: str | list[Message]
    messages: list[Message]
    columns: dict[str, Any]


@dataclass(frozen=True)
class TrainerState:
    """The run's finished steps and their total (0: unknown)."""

    global_step: int = 0
    max_steps: int = 0

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"trainer_state has global_step and max_steps here, and no {name!r}")


class Logged:
    """Logged values for the responses to one prompt. InvalidScore for an unusable value."""

    def __init__(self, count: int, names: Sequence[str]) -> None:
        self.count, self.names = count, names
        self.columns: dict[str, list[Any]] = {}
        self._metrics: dict[str, list[float]] = {}
        self._size = 0

    @property
    def metrics(self) -> dict[str, float]:
        return {name: sum(values) / len(values) for name, values in self._metrics.items()}

    def extra(self, i: int) -> dict[str, Any] | None:
        return {name: self.columns[name][i] for name in self.columns} or None

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Log one value per response, kept with its sample."""
        column = metric_name(column)
        if column in self.columns:
            raise InvalidScore(f"log_extra: {column!r} was logged before")
        logged_values = [
            plain(value.tolist() if hasattr(value, "tolist") else value) for value in values
        ]
        if len(logged_values) != self.count:
            raise InvalidScore(
                f"log_extra: {column!r} has {len(logged_values)} values for {self.count} completions"
            )
        if any(value is ODD for value in logged_values):
            raise InvalidScore(f"log_extra: {column!r} holds what is no JSON data")
        self._size += len(json.dumps(logged_values))
        if self._size > MAX_EXTRA:
            raise InvalidScore(
                f"log_extra: more than {MAX_EXTRA:,} characters about the responses to one prompt"
            )
        self.columns[column] = logged_values

    def log_metric(self, name: str, value: float) -> None:
        if metric_name(name) in self.names:
            raise InvalidScore(f"log_metric: {name!r} is the name of a reward function")
        if name == "mean":
            raise InvalidScore("log_metric: 'mean' is the mean reward; choose another name")
        if name not in self._metrics and len(self._metrics) + len(self.names) >= MAX_METRICS:
            raise InvalidScore(f"log_metric: more than {MAX_METRICS} metrics")
        if hasattr(value, "item"):
            value = value.item()
        self._metrics.setdefault(name, []).append(as_number(f"the metric {name!r}", value))


@dataclass(frozen=True)
class PromptResponses:
    """The responses to one prompt for functions, and the functions' log."""

    prompt: str | list[Message]
    said: Sequence[list[Message]]
    columns: dict[str, Any]
    log: Logged
    completion_ids: Sequence[list[int]]
    state: TrainerState = TrainerState()

    @property
    def texts(self) -> list[str]:
        return [str(messages[-1].get("content") or "") for messages in self.said]

    @property
    def completions(self) -> list[Any]:
        """Texts if the prompt is text, else lists of messages."""
        return (
            self.texts
            if isinstance(self.prompt, str)
            else [list(messages) for messages in self.said]
        )


class RewardFunction:
    """A named function. `columns`: those it takes; None: all."""

    def __init__(self, name: str, function: Callable[..., Any], file: str | None) -> None:
        """Read the signature. ValueError for a parameter without a name, or none for the
        response."""
        self.name, self.function, self.file = name, function, file
        parameters = inspect.signature(function).parameters.values()
        self.takes_rest = any(p.kind is p.VAR_KEYWORD for p in parameters)
        for parameter in parameters:
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL):
                raise ValueError(f"{self.where}: {parameter} must be a parameter that can be named")
        self.wanted = {p.name: p.default is p.empty for p in parameters if p.kind != p.VAR_KEYWORD}
        self.is_of_several = "completions" in self.wanted
        self.own = SEVERAL if self.is_of_several else ONE
        self.takes: tuple[str, ...] = ()
        if self.is_of_several:
            self.takes = tuple(n for n in OF_ROLLOUTS if self.takes_rest or n in self.wanted)
        if not self.takes_rest and SAID.isdisjoint(self.wanted):
            raise ValueError(
                f"{self.where} takes nothing of the response; it may take {', '.join(sorted(SAID))}"
            )

    @property
    def where(self) -> str:
        """A place such as "rewards.py:3: reward 'brevity'"."""
        code = getattr(_unwrapped(self.function), "__code__", None)
        line = f"{self.file}:{code.co_firstlineno}: " if self.file and code else ""
        return f"{line}reward {self.name!r}"

    @property
    def columns(self) -> frozenset[str] | None:
        return None if self.takes_rest else frozenset(self.wanted) - frozenset(self.own)

    def check(self, columns: Sequence[str]) -> None:
        """Raise ValueError for a required parameter that is not a column."""
        for name, needed in self.wanted.items():
            if needed and name not in self.own and name not in columns:
                reason = UNKNOWN_HERE.get(name, "there is no such column")
                available = [*self.own, *columns]
                raise ValueError(
                    f"{self.where} takes {name!r}, and {reason}{nearest(name, available, repr)}; it may take "
                    f"{', '.join(available)}"
                )

    def prepare(self) -> None:
        """Do nothing: the function needs no preparation."""

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(_unwrapped(self.function))

    def rewards(self, asked: PromptResponses) -> list[float | None]:
        """Return one reward per response. InvalidScore and ScorerFailed name function, file and
        line."""
        returned = [self._call(arguments) for arguments in self._calls(asked)]
        return self._read(returned, len(asked.said))

    async def later(self, asked: PromptResponses) -> list[float | None]:
        returned = await gathered([self._await(arguments) for arguments in self._calls(asked)])
        return self._read(returned, len(asked.said))

    def _calls(self, asked: PromptResponses) -> list[dict[str, Any]]:
        if self.is_of_several:
            return [self._of_several(asked)]
        return [self._of_one(asked, i) for i in range(len(asked.said))]

    def _read(self, returned: list[Any], count: int) -> list[float | None]:
        if not self.is_of_several:
            return [self._number(value) for value in returned]
        (rewards,) = returned
        if hasattr(rewards, "tolist"):
            rewards = rewards.tolist()
        is_list = isinstance(rewards, (list, tuple))
        if not is_list or len(rewards) != count:
            returned_text = f"{len(rewards)}" if is_list else _value_and_type(rewards)
            raise InvalidScore(
                f"{self.where} returned {returned_text} for {count} completions; it must return a list "
                "with a number or None for each"
            )
        return [self._number(value) for value in rewards]

    def _of_several(self, asked: PromptResponses) -> dict[str, Any]:
        count = len(asked.said)
        arguments = {
            "completions": asked.completions,
            "prompts": [asked.prompt] * count,
            "completion_ids": list(asked.completion_ids),
            "trainer_state": asked.state,
            "log_extra": asked.log.log_extra,
            "log_metric": asked.log.log_metric,
        }
        column_lists = {
            key: [value] * count
            for key, value in asked.columns.items()
            if key in self.wanted or key not in NO_COLUMNS
        }
        return self._taken(column_lists | arguments)

    def _of_one(self, asked: PromptResponses, i: int) -> dict[str, Any]:
        text = asked.texts[i]
        rollout = Response(text, asked.prompt, list(asked.said[i]), asked.columns)
        arguments = {
            **dict.fromkeys(TEXTS, text),
            "completion": asked.completions[i],
            "prompt": asked.prompt,
            "rollout": rollout,
        }
        return self._taken(asked.columns | arguments)

    def _taken(self, known: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in known.items() if self.takes_rest or key in self.wanted}

    def _call(self, known: Mapping[str, Any]) -> Any:
        with self._blamed():
            return awaited(self.function(**known))

    async def _await(self, known: Mapping[str, Any]) -> Any:
        with self._blamed():
            return await self.function(**known)

    @contextlib.contextmanager
    def _blamed(self) -> Iterator[None]:
        try:
            yield
        except MemoryError:
            raise
        except InvalidScore as error:
            raise InvalidScore(f"{self.where}: {error}") from error
        except (Exception, SystemExit) as error:
            position = f"{place(error, self.file)}: " if self.file else ""
            raise ScorerFailed(f"{position}reward {self.name!r}: {describe(error)}") from error

    def _number(self, value: object) -> float | None:
        if value is None:
            return None
        if not isinstance(value, Real) and getattr(value, "ndim", None) == 0:
            value = value.item()  # type: ignore[attr-defined]  # of numpy or torch
        if not isinstance(value, Real):
            raise InvalidScore(
                f"{self.where} returned {_value_and_type(value)}; it must be a number or None"
            )
        number = float(value)
        if not math.isfinite(number) or abs(number) > MAX_REWARD:
            raise InvalidScore(
                f"{self.where} returned {number}; it must be finite, {MAX_REWARD:g} at most"
            )
        return number


async def gathered(calls: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Return the results of concurrent calls. All end before the first error is raised, so that
    none overlaps the next responses."""
    import asyncio  # imported only to wait

    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def rewards_of(
    functions: Sequence[RewardFunction | RewardModel],
    asked: PromptResponses,
    tell: Callable[[str], object],
) -> list[list[float | None]]:
    """Return each function's rewards. Async ones are awaited together at the end, as in TRL; `tell`
    gets the names of running functions."""
    rewards_by_name: dict[str, list[float | None]] = {}
    async_functions = [f for f in functions if isinstance(f, RewardFunction) and f.is_async]
    for function in functions:
        if function not in async_functions:
            tell(function.where)
            rewards_by_name[function.name] = function.rewards(asked)
    if async_functions:
        tell(", ".join(function.where for function in async_functions))
        results = awaited(gathered([function.later(asked) for function in async_functions]))
        rewards_by_name |= {
            f.name: rewards for f, rewards in zip(async_functions, results, strict=True)
        }
    return [rewards_by_name[function.name] for function in functions]


def load(ids: Sequence[str]) -> list[RewardFunction | RewardModel]:
    """Load functions by id: `rewards.py:brevity`, `package.module:brevity`, a reward model's folder
    or hub id, or `answer`. A file runs once. ValueError for a missing function or a duplicate name.
    """
    modules: dict[str, ModuleType] = {}
    functions = [_load_function(id, modules) for id in ids]
    names = [function.name for function in functions]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"reward_funcs: two functions are called {name!r}; rename one")
    return functions


def _load_function(id: str, modules: dict[str, ModuleType]) -> RewardFunction | RewardModel:
    if id == ANSWER:
        return RewardFunction(ANSWER, answer, None)
    file, name = split_file(id)
    if file is None and is_model(id):
        return RewardModel(id)
    module_name, _, last_part = id.rpartition(":")
    name = name or last_part
    if (file is None and not module_name) or not name:
        raise ValueError(
            f"reward_funcs: {id!r} names no function; write file.py:function, "
            f"package.module:function, a folder or owner/name of a reward model, or {ANSWER}"
        )
    key = str(file or module_name)
    if key not in modules:
        modules[key] = _import_module(file, module_name)
    module = modules[key]
    function: Any = vars(module).get(name)
    if not callable(function) or inspect.isclass(function):
        defined = [k for k, v in vars(module).items() if inspect.isfunction(v)]
        raise ValueError(
            f"{key}: no function {name!r}{nearest(name, defined, repr)}; it has: {', '.join(defined) or 'none'}"
        )
    # the function may be imported from another file, which its errors name
    code = getattr(_unwrapped(function), "__code__", None)
    source_file = code.co_filename if code else getattr(module, "__file__", None)
    return RewardFunction(name, function, source_file)


def _unwrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    while isinstance(function, functools.partial):
        function = function.func
    if not hasattr(function, "__code__") and not hasattr(function, "__wrapped__"):
        function = getattr(type(function), "__call__", function)  # noqa: B004
    return inspect.unwrap(function)


def _import_module(file: Path | None, home: str) -> ModuleType:
    if file is not None:
        if not file.is_file():
            raise ValueError(f"reward_funcs: the file {file} does not exist")
        return import_file(file)
    try:
        return importlib.import_module(home)
    except Exception as error:
        raise ValueError(
            f"reward_funcs: module {home!r} cannot be imported: {describe(error)}"
        ) from error


def answer(text: str, answer: str | None = None) -> float:
    r"""Return 1 when the final answer, in `\boxed{}` or after `####`, equals the gold one, else
    0."""
    if answer is None:
        raise ValueError("the row has no answer; give reward_funcs, or name its column")
    final_answer = last_answer(bounded(text))
    try:
        return float(final_answer is not None and equal(answer, final_answer))
    except Unjudged:
        return 0.0


def _value_and_type(value: object) -> str:
    return "None" if value is None else f"{str(value)[:60]!r} ({type(value).__name__})"
