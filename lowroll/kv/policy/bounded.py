"""What all bounded policies have in common: a cache grows to `budget + buffer` keys, and is then
compacted to `budget` (Sparse-RL, section 4.1).

A prompt counts, and its keys stay only if they are chosen. One of `budget + buffer` tokens or more
attends to all of itself and is compacted before the first decode step.
"""

from __future__ import annotations

from dataclasses import dataclass

from lowroll.kv.policy.base import CachePolicy


@dataclass(frozen=True)
class Bounded(CachePolicy):
    """budget: keys that a compaction leaves; buffer: keys that a cache takes until the next one. A
    multiple of the steps between two plans (16 on CUDA) keeps rows from waiting for theirs.

    ValueError names the option that is wrong.
    """

    budget: int = 512
    buffer: int = 128

    def __post_init__(self) -> None:
        require(self.name, "budget", self.budget, 1)
        require(self.name, "buffer", self.buffer, 1)

    def room(self, cached: int) -> int:
        return max(0, self.budget + self.buffer - cached)

    def kept(self, cached: int) -> int:
        return min(cached, self.budget)


def require(policy: str, option: str, value: int, least: int, why: str = "") -> None:
    """ValueError unless the option is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"kv.{option}: {policy} expects a whole number, got {value!r}")
    if value < least:
        raise ValueError(f"kv.{option}: {policy} expects at least {least}{why}, got {value}")
