"""StreamingLLM (arXiv 2309.17453): the first keys, which attention leans on, and the last ones, the
same in all layers and heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lowroll.kv.batch import DecodeRows
from lowroll.kv.cache import KVCache
from lowroll.kv.policy.base import Selector
from lowroll.kv.policy.bounded import Bounded
from lowroll.kv.policy.table import SINKS
from lowroll.model.spec import ModelSpec


@dataclass(frozen=True)
class Streaming(Bounded):
    """The StreamingLLM policy. sinks: first keys, which always stay."""

    name = "streaming"
    sinks: int = SINKS.default

    def selector(self, spec: ModelSpec, cache: KVCache, max_batch: int) -> Selector:
        return FirstAndLast(self.sinks, spec)


class FirstAndLast(Selector):
    def __init__(self, sinks: int, spec: ModelSpec) -> None:
        self.sinks, self.layers, self.heads = sinks, spec.num_layers, spec.num_kv_heads

    def compact(self, rows: DecodeRows, kept: int) -> Tensor:
        kept_BK = first_and_last(rows.lengths_B, kept, self.sinks)
        return kept_BK[:, None].expand(self.layers, -1, self.heads, -1)


def first_and_last(lengths_B: Tensor, kept: int, sinks: int) -> Tensor:
    """Return indices int64 [B, kept] of the first `sinks` keys and the last others, ascending."""
    k_K = torch.arange(kept, device=lengths_B.device)
    dropped_B1 = (lengths_B.long() - kept)[:, None]
    return torch.where(k_K < sinks, k_K, k_K + dropped_B1)
