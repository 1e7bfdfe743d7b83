"""The common part of all bounded policies: a cache grows to `budget + buffer` keys, and is then
compacted to `budget` (Sparse-RL, section 4.1).

A prompt counts, and its keys stay only if they are chosen. One of `budget + buffer` tokens or more
attends to all of itself and is compacted before the first decode step.
"""

from __future__ import annotations

from dataclasses import dataclass

from lowroll.kv.policy.base import CachePolicy
from lowroll.kv.policy.table import BUDGET, BUFFER, POLICIES, check


@dataclass(frozen=True)
class Bounded(CachePolicy):
    """budget: keys that a compaction leaves; buffer: keys that a cache takes until the next one. A
    multiple of the steps between two plans (16 on CUDA) keeps rows from waiting for theirs.

    Options have the defaults and the bounds of the policy's row in `kv.policy.table`. ValueError
    names the one that is wrong.
    """

    budget: int = BUDGET.default
    buffer: int = BUFFER.default

    def __post_init__(self) -> None:
        if self.name in POLICIES:
            check(self.name, vars(self))

    def room(self, cached: int) -> int:
        return max(0, self.budget + self.buffer - cached)

    def kept(self, cached: int) -> int:
        return min(cached, self.budget)
