"""SnapKV (arXiv 2404.14469) in the form that decodes: the keys that the last queries attend to, and
the keys of those queries' own tokens. The form is that of R-KV's code (arXiv 2505.24133).

A KV head's score of a key, over the n cached keys and the last A = `window` queries:

    s_an = max over the head's group of q_a . k_n / sqrt(d)
    p_an = softmax of s_a over the first n - A keys
    importance_n = max over n - kernel // 2 .. n + kernel // 2 of mean_a p_an

The last A keys always stay. Ties go to the older key.

Legend: B rows, S slots, A queries of the window, H query heads, G key-value heads, Q query heads of
a group, d head size, N keys of the longest row, K keys that stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lowroll.kv.cache import Chunk, KVCache, Rows
from lowroll.kv.policy.base import Selector, num_slots
from lowroll.kv.policy.bounded import Bounded
from lowroll.kv.policy.table import KERNEL, WINDOW
from lowroll.model.spec import ModelSpec

# numbers of keys or scores, float32, that exist at once while rows are scored
MOST_SCORED = 1 << 26


@dataclass(frozen=True)
class SnapKV(Bounded):
    """window: last queries that score, whose tokens' keys stay; kernel: keys, an odd number, over
    which a score spreads."""

    name = "snapkv"
    window: int = WINDOW.default
    kernel: int = KERNEL.default

    def selector(self, spec: ModelSpec, cache: KVCache, max_batch: int) -> Selector:
        return Attended(self, spec, cache, max_batch)

    def state_bytes(self, spec: ModelSpec, max_batch: int, bytes_per_number: int) -> int:
        token = spec.num_layers * spec.num_heads * spec.head_dim * bytes_per_number
        return num_slots(max_batch) * self.window * token

    def scores(self, q_BAHd: Tensor, k_BGNd: Tensor, lengths_B: Tensor) -> Tensor:
        """Scores [B, G, N], float32, of which those of keys 0..length - window - 1 are read.

        q_BAHd: the last queries, in any order; k_BGNd: keys, of which a row has `lengths_B`.
        """
        return importance(q_BAHd, k_BGNd, lengths_B, self.kernel)


class Attended(Selector):
    """ring_LSAHd: the queries of the last A tokens of a slot, by position modulo A. They are of one
    sample alone when they are read: a cache that is compacted has more than A tokens."""

    watches = True

    def __init__(self, policy: SnapKV, spec: ModelSpec, cache: KVCache, max_batch: int) -> None:
        self.policy, self.cache = policy, cache
        keys = cache.keys[0]
        self.ring_LSAHd = torch.zeros(
            (spec.num_layers, num_slots(max_batch), policy.window, spec.num_heads, spec.head_dim),
            dtype=keys.dtype,
            device=keys.device,
        )

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        sources, targets = (list(slots) for slots in zip(*pairs, strict=True))
        self.ring_LSAHd[:, targets] = self.ring_LSAHd[:, sources]

    def prefilled(self, layer: int, q_THd: Tensor, chunks: Sequence[Chunk]) -> None:
        window = self.policy.window
        packed = q_THd.split([chunk.num_tokens for chunk in chunks])
        for chunk, q_CHd in zip(chunks, packed, strict=True):
            first = max(chunk.start, chunk.stop - window)
            at_A = torch.arange(first, chunk.stop, device=q_THd.device) % window
            self.ring_LSAHd[layer, chunk.slot].index_copy_(0, at_A, q_CHd[first - chunk.start :])

    def decoded(self, layer: int, q_BHd: Tensor, rows: Rows) -> None:
        at_B = rows.positions_B % self.policy.window
        self.ring_LSAHd[layer, rows.slots_B, at_B] = q_BHd

    def compact(self, layer: int, rows: Rows, kept: int) -> Tensor:
        widest = rows.table_BP.shape[1] * self.cache.page_size
        together = max(1, MOST_SCORED // (widest * self.ring_LSAHd[0, 0].numel()))
        portions = zip(
            rows.slots_B.split(together),
            rows.table_BP.split(together),
            rows.lengths_B.split(together),
            strict=True,
        )
        chosen = []
        for slots_B, table_BP, lengths_B in portions:
            q_BAHd = self.ring_LSAHd[layer, slots_B]
            k_BGNd = self.cache.gather_keys(layer, table_BP)
            score_BGN = self.policy.scores(q_BAHd, k_BGNd, lengths_B)
            chosen.append(best_and_last(score_BGN, lengths_B, kept, self.policy.window))
        return torch.cat(chosen)


def importance(q_BAHd: Tensor, k_BGNd: Tensor, lengths_B: Tensor, kernel: int) -> Tensor:
    """How much the last A queries attend to each key before theirs, spread over `kernel` keys:
    float32 [B, G, N]. Meaningless from key length - A on.

    The order of the queries does not matter. Source: R-KV's code, `SnapKV` and `R1KV`.
    """
    num_heads, d = k_BGNd.shape[1], k_BGNd.shape[3]
    q_BGQAd = q_BAHd.float().unflatten(2, (num_heads, -1)).permute(0, 2, 3, 1, 4)
    k_BGdN = k_BGNd.float().transpose(2, 3)
    logits_BGAN = (q_BGQAd.flatten(2, 3) @ k_BGdN).unflatten(2, q_BGQAd.shape[2:4]).amax(2)
    n_N = torch.arange(k_BGNd.shape[2], device=k_BGNd.device)
    is_old_BN = n_N < lengths_B[:, None] - q_BAHd.shape[1]
    logits_BGAN = (logits_BGAN * d**-0.5).masked_fill(~is_old_BN[:, None, None], -torch.inf)
    mean_BGN = logits_BGAN.softmax(-1).mean(2).masked_fill(~is_old_BN[:, None], -torch.inf)
    return F.max_pool1d(mean_BGN, kernel, stride=1, padding=kernel // 2)


def best_and_last(score_BGN: Tensor, lengths_B: Tensor, kept: int, window: int) -> Tensor:
    """Indices int64 [B, G, kept], ascending: the last `window` keys of each row, and those of the
    best scores before them. Equal scores: the lower index."""
    n_N = torch.arange(score_BGN.shape[2], device=score_BGN.device)
    lengths_B11 = lengths_B[:, None, None]
    score_BGN = score_BGN.masked_fill(n_N >= lengths_B11 - window, torch.inf)
    score_BGN = score_BGN.masked_fill(n_N >= lengths_B11, -torch.inf)
    best_BGN = score_BGN.argsort(dim=2, descending=True, stable=True)
    return best_BGN[..., :kept].sort(2).values
