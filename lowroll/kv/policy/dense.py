"""The dense cache: every key stays."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from lowroll.kv.policy.base import CachePolicy

if TYPE_CHECKING:
    from lowroll.kv.cache import KVCache
    from lowroll.model.spec import ModelSpec


class DensePolicy(CachePolicy):
    """The policy that never compacts."""

    name = "dense"
    budget = None

    def room(self, cached: int) -> int:
        return sys.maxsize

    def kept(self, cached: int) -> int:
        return cached

    def selector(self, spec: ModelSpec, cache: KVCache, max_batch: int) -> None:
        return None


DENSE = DensePolicy()
