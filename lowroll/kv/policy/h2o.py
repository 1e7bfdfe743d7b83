"""H2O (arXiv 2306.14048): the keys to which all queries so far have attended most, and the last
ones.

A KV head's score of a key is the sum of its attention probabilities over all queries of the head's
group since the prompt began. Half of the budget is for the last keys. All queries of a prompt must
be seen, so none of its tokens comes from the prefix cache.

Legend: `kv`; C queries of a row, Q query heads of a group.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lowroll.kernels.kv_eviction.choose import best_and_last
from lowroll.kernels.kv_eviction.recording import add_attended, add_supports
from lowroll.kv.batch import DecodeRows, PromptChunk
from lowroll.kv.cache import KVCache
from lowroll.kv.policy.base import Selector, copy_slots, num_pages, num_slots
from lowroll.kv.policy.bounded import Bounded
from lowroll.kv.policy.logits import MOST_SCORED, grouped_logits
from lowroll.model.spec import ModelSpec


@dataclass(frozen=True)
class H2O(Bounded):
    name = "h2o"
    window = sys.maxsize

    def selector(self, spec: ModelSpec, cache: KVCache, max_batch: int) -> Selector:
        return HeavyHitters(self, spec, cache, max_batch)

    def state_bytes(self, spec: ModelSpec, max_batch: int, bytes_per_number: int) -> int:
        """Return the bytes of the scores, without a long prompt's."""
        return num_slots(max_batch) * spec.num_layers * spec.num_kv_heads * self.most(spec) * 4

    def most(self, spec: ModelSpec) -> int:
        return min(self.budget + self.buffer, spec.max_position)


class HeavyHitters(Selector):
    """The scores of H2O. score_LSGN: of each cached key, else 0. A prompt's longer cache has its
    scores [G, n] in `long`, by layer and slot, until it is compacted."""

    watches = True

    def __init__(self, policy: H2O, spec: ModelSpec, cache: KVCache, max_batch: int) -> None:
        self.cache, self.last = cache, policy.budget // 2
        self.most = policy.most(spec)
        self.score_LSGN = torch.zeros(
            (spec.num_layers, num_slots(max_batch), spec.num_kv_heads, self.most),
            device=cache.device,
        )
        self.long: dict[tuple[int, int], Tensor] = {}

    def begin(self, slots: Sequence[int]) -> None:
        self.score_LSGN[:, list(slots)] = 0
        self._forget_long(slots)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        copy_slots(self.score_LSGN, pairs)
        self._forget_long([target for _, target in pairs])

    def _forget_long(self, slots: Sequence[int]) -> None:
        self.long = {key: score for key, score in self.long.items() if key[1] not in slots}

    def prefilled(self, layer: int, q_THd: Tensor, chunks: Sequence[PromptChunk]) -> None:
        queries = q_THd.split([chunk.num_tokens for chunk in chunks])
        for chunk, q_CHd in zip(chunks, queries, strict=True):
            score_GN = self._prompt_score(layer, chunk)
            table_1P = torch.tensor([chunk.pages], device=q_THd.device)
            k_1GNd = self.cache.gather_keys(layer, table_1P)[:, :, : chunk.stop]
            queries_at_once = max(1, MOST_SCORED // (q_CHd.shape[1] * chunk.stop))
            last_C = torch.arange(chunk.start, chunk.stop, device=q_THd.device)
            for q_cHd, last_c in zip(
                q_CHd.split(queries_at_once), last_C.split(queries_at_once), strict=True
            ):
                score_GN += attended(q_cHd[None], k_1GNd, last_c[None])[0]

    def _prompt_score(self, layer: int, chunk: PromptChunk) -> Tensor:
        """Return the scores [G, stop] of a prompt's keys, to add to in place."""
        if chunk.stop <= self.most:
            return self.score_LSGN[layer, chunk.slot, :, : chunk.stop]
        earlier_GN = self.long.get((layer, chunk.slot), self.score_LSGN[layer, chunk.slot])
        earlier_GN = earlier_GN[:, : chunk.start]
        score_GN = earlier_GN.new_zeros(earlier_GN.shape[0], chunk.stop)
        score_GN[:, : chunk.start] = earlier_GN
        self.long[layer, chunk.slot] = score_GN
        return score_GN

    def decoded(self, layer: int, q_BHd: Tensor, rows: DecodeRows) -> None:
        keys = self.cache.keys[layer]  # the kernel does not take 8-bit codes
        if add_supports(keys, q_BHd.shape[1]):
            row_tensors = rows.slots_B, rows.table_BP, rows.lengths_B
            add_attended(self.score_LSGN[layer], q_BHd, keys, *row_tensors)
            return
        table_BP = rows.table_BP[:, : num_pages(self.most, self.cache.page_size)]
        k_BGNd = self.cache.gather_keys(layer, table_BP)[:, :, : self.most]
        added_BGN = attended(q_BHd[:, None], k_BGNd, rows.lengths_B[:, None] - 1)
        score_SGN = self.score_LSGN[layer, :, :, : k_BGNd.shape[2]]
        score_SGN[rows.slots_B] = score_SGN[rows.slots_B] + added_BGN

    def compact(self, rows: DecodeRows, kept: int) -> Tensor:
        score_LBGN = self._scores(rows)
        kept_LBGK = best_and_last(score_LBGN, rows.lengths_B, kept, self.last)
        new_score_LBGN = self.score_LSGN.new_zeros(*score_LBGN.shape[:3], self.most)
        new_score_LBGN[..., :kept] = score_LBGN.gather(3, kept_LBGK)
        self.score_LSGN[:, rows.slots_B] = new_score_LBGN
        return kept_LBGK

    def _scores(self, rows: DecodeRows) -> Tensor:
        score_LBGN = self.score_LSGN[:, rows.slots_B]
        if not self.long:
            return score_LBGN
        slots = rows.slots_B.tolist()
        long_scores = {
            (layer, slots.index(slot)): self.long.pop((layer, slot))
            for layer, slot in list(self.long)
            if slot in slots
        }
        max_keys = max([self.most, *(score_GN.shape[1] for score_GN in long_scores.values())])
        padded_LBGN = F.pad(score_LBGN, (0, max_keys - self.most))
        for (layer, b), score_GN in long_scores.items():
            padded_LBGN[layer, b, :, : score_GN.shape[1]] = score_GN
        return padded_LBGN


def attended(q_BCHd: Tensor, k_BGNd: Tensor, last_BC: Tensor) -> Tensor:
    """Return each key's attention probability, summed over a row's queries and the group: float32
    [B, G, N]. A query sees the keys 0..last; with -1 none."""
    logits_BGQCN = grouped_logits(q_BCHd, k_BGNd)
    n_N = torch.arange(k_BGNd.shape[2], device=k_BGNd.device)
    sees_BCN = n_N <= last_BC[..., None]
    sees_BGQCN = sees_BCN[:, None, None]
    p_BGQCN = logits_BGQCN.masked_fill(~sees_BGQCN, -torch.inf).softmax(-1)
    return p_BGQCN.masked_fill(~sees_BGQCN, 0).flatten(2, 3).sum(2)
