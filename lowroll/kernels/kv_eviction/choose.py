"""The choice of the keys that stay.

The K-th best score is built from its highest bit down, as the largest integer that at least K
order-preserving keys reach. Ties go to the older keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowroll.kernels.launch import block, jit, tl, triton_supports


def best_and_last(score_BGN: Tensor, lengths_B: Tensor, kept: int, window: int) -> Tensor:
    """Return ascending indices int64 [..., B, G, kept]: each row's last `window` keys, and the best
    scores [..., B, G, N] before them. A row has at least `kept` keys and no NaN."""
    if triton_supports(score_BGN):
        return _launch(score_BGN.contiguous(), lengths_B, kept, window)
    n_N = torch.arange(score_BGN.shape[-1], device=score_BGN.device)
    lengths_B11 = lengths_B[:, None, None]
    score_BGN = score_BGN.masked_fill(n_N >= lengths_B11 - window, torch.inf)
    score_BGN = score_BGN.masked_fill(n_N >= lengths_B11, -torch.inf)
    best_BGN = score_BGN.argsort(dim=-1, descending=True, stable=True)
    return best_BGN[..., :kept].sort(-1).values


def _launch(score_BGN: Tensor, lengths_B: Tensor, kept: int, window: int) -> Tensor:
    *heads, widest = score_BGN.shape
    kept_BGK = torch.empty((*heads, kept), dtype=torch.int64, device=score_BGN.device)
    _choose_kernel[(score_BGN[..., 0].numel(),)](
        score_BGN.float(),
        lengths_B,
        kept_BGK,
        len(lengths_B),
        widest,
        kept,
        window,
        G=heads[-1],
        BLOCK=min(1024, block(widest)),
        num_warps=4,
    )
    return kept_BGK


# -- Triton ----------------------------------------------------------------------------------------


@jit
def _load_ranks(score_ptr, n_N, length, window):
    """Return scores as ordered integers: the window's keys highest, those beyond the row lowest."""
    is_old_N = n_N < length - window
    score_N = tl.load(score_ptr + n_N, mask=is_old_N, other=0.0)
    score_N = tl.where(score_N == 0, 0.0, score_N)  # both zeros are one score
    bits_N = score_N.to(tl.int32, bitcast=True)
    rank_N = (bits_N ^ ((bits_N >> 31) & 0x7FFFFFFF)).to(tl.int64) + 2147483648
    rank_N = tl.where(is_old_N, rank_N, 4294967295)
    return tl.where(n_N < length, rank_N, 0)


@jit
def _choose_kernel(
    score_ptr,
    lengths_ptr,
    kept_ptr,
    rows,
    widest,
    kept,
    window,
    G: tl.constexpr,
    BLOCK: tl.constexpr,
):
    pid = tl.program_id(0)
    length = tl.load(lengths_ptr + (pid // G) % rows)
    score_ptr += pid.to(tl.int64) * widest
    kept_ptr += pid.to(tl.int64) * kept
    least = tl.zeros([], tl.int64)  # rank of the last key that stays
    for bit in range(32):
        candidate = least + (tl.full([], 1, tl.int64) << (31 - bit))
        count = 0
        for start in range(0, length, BLOCK):
            rank_N = _load_ranks(score_ptr, start + tl.arange(0, BLOCK), length, window)
            count += tl.sum((rank_N >= candidate).to(tl.int32), 0)
        least = tl.where(count >= kept, candidate, least)
    num_above = 0
    for start in range(0, length, BLOCK):
        rank_N = _load_ranks(score_ptr, start + tl.arange(0, BLOCK), length, window)
        num_above += tl.sum((rank_N > least).to(tl.int32), 0)
    num_equal, num_stored = 0, 0
    for start in range(0, length, BLOCK):
        n_N = start + tl.arange(0, BLOCK)
        rank_N = _load_ranks(score_ptr, n_N, length, window)
        equal_N = (rank_N == least) & (n_N < length)
        nth_N = num_equal + tl.cumsum(equal_N.to(tl.int32), 0)
        stays_N = ((rank_N > least) | (equal_N & (nth_N <= kept - num_above))) & (n_N < length)
        index_N = num_stored + tl.cumsum(stays_N.to(tl.int32), 0) - 1
        tl.store(kept_ptr + index_N, n_N.to(tl.int64), mask=stays_N)
        num_equal += tl.sum(equal_N.to(tl.int32), 0)
        num_stored += tl.sum(stays_N.to(tl.int32), 0)
