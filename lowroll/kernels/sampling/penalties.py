"""Repetition penalty and bans by marks on the device: a byte for each slot and token id.

    SEEN   in the prompt or response: a penalty divides a positive logit and multiplies a
           negative one (Keskar et al. 2019, arXiv:1909.05858)
    STOPS  ends the sample: the logit is -inf at positions before `banned_until`

Legend: `kernels.sampling`; S slots.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lowroll.kernels.launch import after_others, early_start, jit, tl, triton_supports

SEEN = 1
STOPS = 2
TILE = 2048
WARPS = 4


class Marked(NamedTuple):
    """Marks, uint8 [S, V] (`blank`), and B rows' slots (int64), penalties (float64, 1 is none) and
    positions before which stops are banned (int64)."""

    marks_SV: Tensor
    slots_B: Tensor
    penalty_B: Tensor
    banned_until_B: Tensor


def blank(slots: int, tokens: int, device: torch.device) -> Tensor:
    """Return empty marks; rows are aligned to 16 bytes."""
    row_bytes = -(-tokens // 16) * 16
    return torch.zeros((slots, row_bytes), dtype=torch.uint8, device=device)[:, :tokens]


def clear(marks_SV: Tensor, slots_N: Tensor) -> None:
    slots, row_bytes = len(marks_SV), marks_SV.stride(0)
    marks_SV.as_strided((slots, row_bytes), (row_bytes, 1)).view(torch.int64).index_fill_(
        0, slots_N, 0
    )


def add(marks_SV: Tensor, mark: int, slots_N: Tensor, tokens_N: Tensor) -> None:
    """Mark tokens of slots; a pair may be repeated. All int64."""
    marks, index_N = flat(marks_SV), slots_N * marks_SV.stride(0) + tokens_N
    marks[index_N] = marks[index_N] | mark


def flat(marks_SV: Tensor) -> Tensor:
    """Return the marks in one row; slot s begins at s * stride(0)."""
    return marks_SV.as_strided((len(marks_SV) * marks_SV.stride(0),), (1,))


def shape(logits_BV: Tensor, marked: Marked, next_B: Tensor) -> Tensor:
    """Apply penalties and bans; return float32 logits, in place if they are already. next_B: int64,
    the position of the token to draw."""
    logits_BV = logits_BV.float()
    rows, tokens = logits_BV.shape
    marks_SV, slots_B, penalty_B, banned_until_B = marked
    if triton_supports(logits_BV):
        tiles = -(-tokens // TILE)
        _shape_kernel[(rows * tiles,)](
            logits_BV,
            marks_SV,
            slots_B,
            penalty_B,
            banned_until_B,
            next_B,
            tokens,
            tiles,
            logits_BV.stride(0),
            marks_SV.stride(0),
            SEEN=SEEN,
            STOPS=STOPS,
            TILE=TILE,
            num_warps=WARPS,
            **early_start(),
        )
        return logits_BV
    marks_BV = marks_SV[slots_B]
    penalty_B1 = penalty_B.float()[:, None]
    penalised_BV = torch.where(logits_BV > 0, logits_BV / penalty_B1, logits_BV * penalty_B1)
    seen_BV = (marks_BV & SEEN > 0) & (penalty_B1 != 1)
    banned_BV = (marks_BV & STOPS > 0) & (next_B < banned_until_B)[:, None]
    logits_BV.copy_(torch.where(seen_BV, penalised_BV, logits_BV))
    return logits_BV.masked_fill_(banned_BV, -torch.inf)


# -- Triton ----------------------------------------------------------------------------------------


@jit
def _shape_kernel(
    logits_ptr,
    marks_ptr,
    slots_ptr,
    penalty_ptr,
    banned_ptr,
    next_ptr,
    tokens,
    tiles,
    stride,
    marks_stride,
    SEEN: tl.constexpr,
    STOPS: tl.constexpr,
    TILE: tl.constexpr,
    EARLY: tl.constexpr,
):
    after_others(EARLY)
    row, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    penalty = tl.load(penalty_ptr + row).to(tl.float32)
    bans = tl.load(next_ptr + row) < tl.load(banned_ptr + row)
    active_marks = tl.where(penalty != 1, SEEN, 0) + tl.where(bans, STOPS, 0)
    if active_marks != 0:
        offs_n = tile * TILE + tl.arange(0, TILE)
        marks_ptr += tl.load(slots_ptr + row) * marks_stride
        mark_n = (
            tl.load(marks_ptr + offs_n, mask=offs_n < tokens, other=0).to(tl.int32) & active_marks
        )
        if tl.max(mark_n, 0) != 0:
            logits_ptr += row.to(tl.int64) * stride
            x_n = tl.load(logits_ptr + offs_n, mask=mark_n != 0, other=0.0)
            penalised_n = tl.where(x_n > 0, x_n / penalty, x_n * penalty)
            x_n = tl.where(mark_n & SEEN != 0, penalised_n, x_n)
            x_n = tl.where(mark_n & STOPS != 0, float("-inf"), x_n)
            tl.store(logits_ptr + offs_n, x_n, mask=mark_n != 0)
