"""The base of the bounded policies: a cache grows to `budget + buffer` keys, and is then compacted
to `budget` (Sparse-RL, section 4.1).

Prompt keys count, and may be dropped too. A prompt of `budget + buffer` tokens or more attends to
all of itself and is compacted before the first decode step.
"""

from __future__ import annotations

from dataclasses import dataclass

from lowroll.kv.policy.base import CachePolicy
from lowroll.kv.policy.table import BUDGET, BUFFER, POLICIES, check


@dataclass(frozen=True)
class Bounded(CachePolicy):
    """A bounded policy. budget: keys that a compaction leaves; buffer: keys added until the next
    one. A buffer that is a multiple of the steps between two plans (16 on CUDA) keeps rows from
    waiting. ValueError names the wrong option."""

    budget: int = BUDGET.default
    buffer: int = BUFFER.default

    def __post_init__(self) -> None:
        if self.name in POLICIES:
            check(self.name, vars(self))

    def room(self, cached: int) -> int:
        return max(0, self.budget + self.buffer - cached)

    def kept(self, cached: int) -> int:
        return min(cached, self.budget)
