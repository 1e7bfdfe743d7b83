"""Hidden tests, resource limits of a program, and the comparison of outputs (docs/programs.md).

`11` is not `0011`, but words with a decimal point or exponent compare by value, as in TACO's judge.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from decimal import Decimal
from typing import Any, Literal

Status = Literal["passed", "wrong", "timeout", "crash", "output", "compile"]
TOLERANCE = 1e-9
MAX_NUMBER = 400  # characters
NUMBER = re.compile(
    r"[+-]?(?:(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,9})?|[0-9]+[eE][+-]?[0-9]{1,9})"
)


@dataclass(frozen=True)
class Case:
    """A hidden test: standard input and output, or with `fn_name` the arguments and result of that
    function (or method of `Solution`)."""

    input: Any  # text; with fn_name a list
    output: Any
    fn_name: str | None = None


@dataclass(frozen=True)
class SandboxLimits:
    """Resource limits of a program (docs/programs.md)."""

    seconds: float = 4.0  # CPU time of a process in a case
    wall_seconds: float = 6.0  # of a case
    total_seconds: float = 8.0  # of all cases; later ones are timeouts
    memory_mb: int = 512  # address space of a process
    processes: int = 8  # processes and threads, with the program itself
    files: int = 64  # open at once in a process
    output_kb: int = 4096  # of a case, with standard error
    disk_mb: int = 64  # of /tmp, which is in memory

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (isinstance(value, (int, float)) and 0 < value < 1e9):
                raise ValueError(f"limits: {field.name} must be a positive number, got {value!r}")


@dataclass(frozen=True)
class Result:
    """A case's result. `message`: the end of standard error, or the fault."""

    status: Status
    seconds: float = 0.0
    message: str = ""


@dataclass(frozen=True)
class CaseResults:
    results: tuple[Result, ...]

    def count(self, status: Status) -> int:
        return sum(result.status == status for result in self.results)

    @property
    def share(self) -> float:
        return self.count("passed") / len(self.results)

    @property
    def all_passed(self) -> bool:
        return self.count("passed") == len(self.results)


def is_right(case: Case, output: str, value: Any = None) -> bool:
    """Return whether a program's output, or a function's result, is the expected one."""
    if case.fn_name is None:
        return same_text(as_text(case.output), output)
    return same_value(case.output, value)


def same_text(expected: str, output: str) -> bool:
    gold, lines = (
        [line.strip() for line in text.strip().splitlines()] for text in (expected, output)
    )
    return len(gold) == len(lines) and all(map(_same_line, gold, lines))


def _same_line(gold: str, line: str) -> bool:
    if gold == line:
        return True
    expected, words = gold.split(), line.split()
    return len(expected) == len(words) and all(map(_same_word, expected, words))


def _same_word(gold: str, word: str) -> bool:
    if gold == word:
        return True
    if max(len(gold), len(word)) > MAX_NUMBER:
        return False
    if NUMBER.fullmatch(gold) is None or NUMBER.fullmatch(word) is None:
        return False
    return Decimal(gold) == Decimal(word)


def same_value(expected: Any, value: Any) -> bool:
    if isinstance(expected, bool) or isinstance(value, bool):
        return expected is value
    if isinstance(expected, (int, float)) and isinstance(value, (int, float)):
        return expected == value or _is_close(expected, value)
    if isinstance(expected, Sequence) and not isinstance(expected, str):
        return (
            isinstance(value, list)
            and len(value) == len(expected)
            and all(map(same_value, expected, value))
        )
    if isinstance(expected, dict):
        return (
            isinstance(value, dict)
            and value.keys() == expected.keys()
            and all(same_value(expected[key], value[key]) for key in expected)
        )
    return type(expected) is type(value) and bool(expected == value)


def _is_close(expected: float, value: float) -> bool:
    if isinstance(expected, int) and isinstance(value, int):
        return False
    try:
        return math.isclose(expected, value, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    except OverflowError:
        return False


def as_text(value: Any) -> str:
    """Return an input or output as text; some data sets have a list of lines."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)
