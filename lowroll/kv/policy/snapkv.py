"""SnapKV (arXiv 2404.14469) for decoding, as in R-KV's code (arXiv 2505.24133): the keys that the
last queries attend to, and those queries' own keys.

A KV head's score of a key, over the n cached keys and the last A = `window` queries:

    s_an = max over the head's group of q_a . k_n / sqrt(d)
    p_an = softmax of s_a over the first n - A keys
    importance_n = max over n - kernel // 2 .. n + kernel // 2 of mean_a p_an

The last A keys always stay. Ties go to the older key.

Legend: `kv`; A queries of the window.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lowroll.kernels.kv_eviction import score
from lowroll.kernels.kv_eviction.choose import best_and_last
from lowroll.kernels.kv_eviction.recording import remember
from lowroll.kv.batch import DecodeRows, PromptChunk
from lowroll.kv.cache import KVCache
from lowroll.kv.policy.base import Selector, copy_slots, num_slots
from lowroll.kv.policy.bounded import Bounded
from lowroll.kv.policy.logits import MOST_SCORED, grouped_logits
from lowroll.kv.policy.table import KERNEL, WINDOW
from lowroll.model.spec import ModelSpec

SCORES = 6  # numbers of a key and head between kernels


@dataclass(frozen=True)
class SnapKV(Bounded):
    """The SnapKV policy. window: last queries, whose own keys stay; kernel: an odd number of keys
    over which a score spreads."""

    name = "snapkv"
    window: int = WINDOW.default
    kernel: int = KERNEL.default

    def selector(self, spec: ModelSpec, cache: KVCache, max_batch: int) -> Selector:
        return AttentionSelector(self, spec, cache, max_batch)

    def state_bytes(self, spec: ModelSpec, max_batch: int, bytes_per_number: int) -> int:
        token = spec.num_layers * spec.num_heads * spec.head_dim * bytes_per_number
        return num_slots(max_batch) * self.window * token

    def scores(self, q_BAHd: Tensor, k_BGNd: Tensor, lengths_B: Tensor) -> Tensor:
        """Return scores [B, G, N], float32, of which keys 0..length - window - 1 are read."""
        return importance(q_BAHd, k_BGNd, lengths_B, self.kernel)

    def paged_scores(self, ring_LSAHd: Tensor, cache: KVCache, rows: DecodeRows) -> Tensor:
        """Return the scores of all layers, [L, B, G, N]. ring_LSAHd: queries by slot."""
        keys, table_BP = cache.key_pages(rows.table_BP)
        lengths_B = rows.lengths_B
        important_LBGN = score.importance(ring_LSAHd, keys, rows.slots_B, table_BP, lengths_B)
        return score.join(important_LBGN, None, lengths_B, self.window, self.kernel)


class AttentionSelector(Selector):
    """The selector of SnapKV and R-KV. ring_LSAHd holds the queries of a slot's last A tokens, by
    position modulo A: of one sample when read, as a compacted cache has more than A tokens."""

    watches = True

    def __init__(self, policy: SnapKV, spec: ModelSpec, cache: KVCache, max_batch: int) -> None:
        self.policy, self.cache = policy, cache
        self.ring_LSAHd = torch.zeros(
            (spec.num_layers, num_slots(max_batch), policy.window, spec.num_heads, spec.head_dim),
            dtype=cache.dtype,
            device=cache.device,
        )

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        copy_slots(self.ring_LSAHd, pairs)

    def prefilled(self, layer: int, q_THd: Tensor, chunks: Sequence[PromptChunk]) -> None:
        window = self.policy.window
        queries = q_THd.split([chunk.num_tokens for chunk in chunks])
        for chunk, q_CHd in zip(chunks, queries, strict=True):
            start = max(chunk.start, chunk.stop - window)
            index_A = torch.arange(start, chunk.stop, device=q_THd.device) % window
            self.ring_LSAHd[layer, chunk.slot].index_copy_(0, index_A, q_CHd[start - chunk.start :])

    def decoded(self, layer: int, q_BHd: Tensor, rows: DecodeRows) -> None:
        remember(self.ring_LSAHd[layer], rows.slots_B, rows.positions_B, q_BHd)

    def compact(self, rows: DecodeRows, kept: int) -> Tensor:
        layers, num_heads = len(self.cache.keys), self.cache.keys[0].shape[2]
        if not score.supports(self.ring_LSAHd, num_heads):
            return torch.stack([self._compact_layer(layer, rows, kept) for layer in range(layers)])
        kept_parts = []
        for portion in _portions(rows, SCORES * layers * num_heads * self.cache.page_size):
            score_LBGN = self.policy.paged_scores(self.ring_LSAHd, self.cache, portion)
            kept_parts.append(
                best_and_last(score_LBGN, portion.lengths_B, kept, self.policy.window)
            )
        return torch.cat(kept_parts, 1)

    def _compact_layer(self, layer: int, rows: DecodeRows, kept: int) -> Tensor:
        kept_parts = []
        numbers_per_page = self.cache.page_size * self.ring_LSAHd[0, 0].numel()
        for portion in _portions(rows, numbers_per_page):
            q_BAHd = self.ring_LSAHd[layer, portion.slots_B]
            k_BGNd = self.cache.gather_keys(layer, portion.table_BP)
            score_BGN = self.policy.scores(q_BAHd, k_BGNd, portion.lengths_B)
            kept_parts.append(best_and_last(score_BGN, portion.lengths_B, kept, self.policy.window))
        return torch.cat(kept_parts)


def _portions(rows: DecodeRows, each: int) -> Iterator[DecodeRows]:
    rows_at_once = max(1, MOST_SCORED // (rows.table_BP.shape[1] * each))
    for start in range(0, len(rows.slots_B), rows_at_once):
        portion = slice(start, start + rows_at_once)
        yield DecodeRows(
            rows.slots_B[portion],
            rows.table_BP[portion],
            rows.lengths_B[portion],
            rows.positions_B[portion],
        )


def importance(q_BAHd: Tensor, k_BGNd: Tensor, lengths_B: Tensor, kernel: int) -> Tensor:
    """Return how much the last A queries attend to each earlier key, spread over `kernel` keys:
    float32 [B, G, N], meaningless from key length - A on. Source: R-KV's code, `SnapKV` and `R1KV`.
    """
    logits_BGAN = grouped_logits(q_BAHd, k_BGNd).amax(2)
    n_N = torch.arange(k_BGNd.shape[2], device=k_BGNd.device)
    is_old_BN = n_N < lengths_B[:, None] - q_BAHd.shape[1]
    logits_BGAN = logits_BGAN.masked_fill(~is_old_BN[:, None, None], -torch.inf)
    mean_BGN = logits_BGAN.softmax(-1).mean(2).masked_fill(~is_old_BN[:, None], -torch.inf)
    return F.max_pool1d(mean_BGN, kernel, stride=1, padding=kernel // 2)
