"""R-KV (arXiv 2505.24133): keys that recent queries attend to and no newer key repeats.

Beside SnapKV's importance I, over the n keys of a head:

    C_ij = cos(k_i, k_j), 0 for i = j; of the j with C_ij > 0.5 the last one's C_ij is set to 0, so
           that the newest of several duplicates is not penalized
    R    = softmax over all keys j of mean_i C_ij
    Z    = mix I - (1 - mix) R

and the best Z stay. With `zero_first`, C_i0 is 0 where no C_ij exceeds 0.5, as in the published
code by an accident of its argmax.

Legend: `kv.policy.snapkv`; R rows of C.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lowroll.kernels.kv_eviction import score
from lowroll.kernels.kv_eviction.score import DUPLICATE, EPS
from lowroll.kv.batch import DecodeRows
from lowroll.kv.cache import KVCache
from lowroll.kv.policy.logits import MOST_SCORED
from lowroll.kv.policy.snapkv import SnapKV, importance
from lowroll.kv.policy.table import MIX, ZERO_FIRST


@dataclass(frozen=True)
class RKV(SnapKV):
    """The R-KV policy. mix: weight of importance against redundancy, the paper's lambda, 0 to 1.
    zero_first: treat keys without duplicates as the published code does."""

    name = "rkv"
    mix: float = MIX.default
    zero_first: bool = ZERO_FIRST.default

    def scores(self, q_BAHd: Tensor, k_BGNd: Tensor, lengths_B: Tensor) -> Tensor:
        important_BGN = importance(q_BAHd, k_BGNd, lengths_B, self.kernel)
        redundant_BGN = redundancy(k_BGNd, lengths_B, self.zero_first)
        return self.mix * important_BGN - (1 - self.mix) * redundant_BGN

    def paged_scores(self, ring_LSAHd: Tensor, cache: KVCache, rows: DecodeRows) -> Tensor:
        keys, table_BP = cache.key_pages(rows.table_BP)
        lengths_B = rows.lengths_B
        return score.join(
            score.importance(ring_LSAHd, keys, rows.slots_B, table_BP, lengths_B),
            score.redundancy(keys, table_BP, lengths_B, self.zero_first),
            lengths_B,
            self.window,
            self.kernel,
            self.mix,
        )


def redundancy(k_BGNd: Tensor, lengths_B: Tensor, zero_first: bool = False) -> Tensor:
    """Return the softmax over a row's keys of their mean similarity to the others: float32 [B, G,
    N], 0 beyond the row."""
    k_BGNd = k_BGNd.float()
    unit_BGNd = k_BGNd / (k_BGNd.norm(dim=-1, keepdim=True) + EPS)
    n_N = torch.arange(k_BGNd.shape[2], device=k_BGNd.device)
    live_BN = n_N < lengths_B[:, None]
    sum_BGN = k_BGNd.new_zeros(k_BGNd.shape[:3])
    for i_R in n_N.split(max(1, MOST_SCORED // sum_BGN.numel())):
        cos_BGRN = unit_BGNd[:, :, i_R] @ unit_BGNd.transpose(2, 3)
        is_pair_BRN = live_BN[:, i_R, None] & live_BN[:, None] & (i_R[:, None] != n_N)
        cos_BGRN = cos_BGRN.masked_fill(~is_pair_BRN[:, None], 0)
        # the last duplicate of each key i; -1 without any
        newest_BGR1 = torch.where(cos_BGRN > DUPLICATE, n_N, -1).amax(-1, keepdim=True)
        if zero_first:
            newest_BGR1 = newest_BGR1.clamp(min=0)
        sum_BGN += cos_BGRN.masked_fill(n_N == newest_BGR1, 0).sum(2)
    mean_BGN = sum_BGN / lengths_B[:, None, None]
    return mean_BGN.masked_fill(~live_BN[:, None], -torch.inf).softmax(-1)
