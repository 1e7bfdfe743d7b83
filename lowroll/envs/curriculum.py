"""Difficulty that follows the measured reward (docs/tools.md).

Position p is task p // levels of level p % levels, so `prompt` stays pure. The training level is in
the run's ledger.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Curriculum:
    """A rule over an environment's `levels`, counted from 0."""

    levels: int
    start: int = 0
    window: int = 32  # groups
    raise_at: float = 0.8  # mean rewards
    lower_at: float = 0.2

    def __post_init__(self) -> None:
        counts = {"levels": self.levels, "start": self.start, "window": self.window}
        for name, value in counts.items():
            if type(value) is not int or value < (name != "start"):
                raise ValueError(f"curriculum: {name} must be a count, got {value!r}")
        if self.start >= self.levels:
            raise ValueError(
                f"curriculum: start is {self.start}, and the levels are 0 to {self.levels - 1}"
            )
        for name, share in (("raise_at", self.raise_at), ("lower_at", self.lower_at)):
            if isinstance(share, bool) or not isinstance(share, int | float):
                raise ValueError(f"curriculum: {name} must be a number, got {share!r}")
        if not self.lower_at < self.raise_at:
            raise ValueError(
                f"curriculum: lower_at ({self.lower_at}) must lie below raise_at ({self.raise_at})"
            )

    def position(self, number: int, level: int) -> int:
        return number * self.levels + level


@dataclass(frozen=True)
class LevelProgress:
    """The current level, and its counted groups and summed mean rewards."""

    level: int
    groups: int = 0
    total: float = 0.0

    def after(self, rule: Curriculum, means: Sequence[float]) -> LevelProgress:
        """Return the progress after groups of this level with these mean rewards."""
        groups, total = self.groups + len(means), self.total + sum(means)
        if groups < rule.window:
            return LevelProgress(self.level, groups, total)
        step = int(total / groups >= rule.raise_at) - int(total / groups <= rule.lower_at)
        return LevelProgress(min(max(self.level + step, 0), rule.levels - 1))

    @classmethod
    def of(cls, state: Any) -> LevelProgress:
        """Read the progress from JSON; ValueError names the field."""
        if not isinstance(state, Mapping) or set(state) != set(cls.__dataclass_fields__):
            raise ValueError(f"ledger.levels: expected {sorted(cls.__dataclass_fields__)}")
        for name in ("level", "groups"):
            if type(state[name]) is not int or state[name] < 0:
                raise ValueError(f"ledger.levels.{name}: expected a count, got {state[name]!r}")
        if type(state["total"]) not in (int, float) or state["total"] != state["total"]:
            raise ValueError(f"ledger.levels.total: expected a number, got {state['total']!r}")
        return cls(**state)
