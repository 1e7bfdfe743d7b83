"""The table of cache policies, importable without torch. A policy is one file and one row."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import Any, Generic, TypeVar

from lowroll.kv.policy.base import CachePolicy

T = TypeVar("T", bool, int, float)


@dataclass(frozen=True)
class Option(Generic[T]):
    """A boolean, integer or float option of a policy, typed as its default.

    stays: it counts keys of the budget that are kept whatever their scores.
    """

    default: T
    least: float = -math.inf
    most: float = math.inf
    odd: bool = False
    stays: bool = False

    def problem(self, value: object) -> str:
        if isinstance(self.default, bool):
            return "" if isinstance(value, bool) else f"expects true or false, got {value!r}"
        if isinstance(self.default, float):
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if is_number and self.least <= value <= self.most:  # type: ignore[operator]
                return ""
            return f"expects a number of {self._range}, got {value!r}"
        if isinstance(value, bool) or not isinstance(value, int):
            return f"expects a whole number, got {value!r}"
        if not self.least <= value <= self.most:
            return f"expects {self._range}, got {value}"
        if self.odd and value % 2 == 0:
            return f"expects an odd number, got {value}"
        return ""

    @property
    def _range(self) -> str:
        return (
            f"at least {self.least:g}"
            if self.most == math.inf
            else f"{self.least:g} to {self.most:g}"
        )


@dataclass(frozen=True)
class CachePolicyRow:
    """A policy's facts before torch is loaded."""

    home: str  # module:class
    options: Mapping[str, Option[Any]] = field(default_factory=dict)


BUDGET = Option(512, least=1)
BUFFER = Option(128, least=1)
SINKS = Option(4, least=0, stays=True)
WINDOW = Option(8, least=1, stays=True)
KERNEL = Option(7, least=1, odd=True)
MIX = Option(0.1, least=0, most=1)
ZERO_FIRST = Option(False)

BOUNDED: dict[str, Option[Any]] = {"budget": BUDGET, "buffer": BUFFER}
SCORED: dict[str, Option[Any]] = {**BOUNDED, "window": WINDOW, "kernel": KERNEL}

POLICIES: dict[str, CachePolicyRow] = {
    "dense": CachePolicyRow("lowroll.kv.policy.dense:DensePolicy"),
    "streaming": CachePolicyRow(
        "lowroll.kv.policy.streaming:Streaming", {**BOUNDED, "sinks": SINKS}
    ),
    # half of its budget is for the last keys
    "h2o": CachePolicyRow("lowroll.kv.policy.h2o:H2O", {**BOUNDED, "budget": Option(512, least=2)}),
    "snapkv": CachePolicyRow("lowroll.kv.policy.snapkv:SnapKV", SCORED),
    "rkv": CachePolicyRow(
        "lowroll.kv.policy.rkv:RKV", {**SCORED, "mix": MIX, "zero_first": ZERO_FIRST}
    ),
}


def make(name: str, **options: Any) -> CachePolicy:
    """Return a policy by name, with defaults. ValueError names the wrong option."""
    check(name, options)
    policy: CachePolicy = resolve_name(POLICIES[name].home)(**filled(name, options))
    return policy


def check(name: str, options: Mapping[str, Any]) -> None:
    """Raise ValueError for the first wrong option."""
    for option, problem in problems(name, options):
        raise ValueError(f"kv.{option}: {problem}")


def filled(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    return {key: option.default for key, option in POLICIES[name].options.items()} | dict(options)


def problems(name: str, options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each wrong option of a policy, or `policy` for its name, and the reason."""
    if name not in POLICIES:
        yield "policy", f"unknown policy {name!r}; known: {', '.join(POLICIES)}"
        return
    known_options = POLICIES[name].options
    is_valid = True
    for key, value in options.items():
        if key in known_options:
            problem = known_options[key].problem(value)
        else:
            problem = _unknown_option_reason(name)
        if problem:
            is_valid = False
            yield key, f"{name} {problem}"
    if is_valid and "budget" in known_options:
        yield from _budget_problems(name, filled(name, options))


def _unknown_option_reason(name: str) -> str:
    names = ", ".join(POLICIES[name].options)
    return f"has no such option; its options: {names}" if names else "has no options"


def _budget_problems(name: str, options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    reserved = {key: options[key] for key, option in POLICIES[name].options.items() if option.stays}
    least = sum(reserved.values()) + 1
    if options["budget"] < least:
        reserved_text = " and ".join(f"{key} {count}" for key, count in reserved.items())
        budget = options["budget"]
        yield "budget", f"{name} expects at least {least} ({reserved_text} and 1), got {budget}"
