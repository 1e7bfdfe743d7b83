"""Quantized rows times 8-bit weights when the rows are few: every program streams some channels
past all of them.

    y[m, n] = (sum_k x[m, k] w[n, k]) * row[m] * column[n] + bias[n]

A decode step for a few sequences is as long as reading the weights, and tensor cores only stand in
the way: a program reads whole rows of weights, 16 bytes a thread at a time, and multiplies on CUDA
cores, int8 four at a time (`dp4a`) and e4m3 as float32. The scales and the bias are applied before
y is written. A row's sums do not depend on its neighbours.

Legend: M rows (tokens), N out features (channels), K in features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowroll.kernels.launch import INTERPRETED, after_others, early_start, jit, tl, triton_supports
from lowroll.kernels.quantize.rows import Rows
from lowroll.kernels.support import YES, Support, no

MOST = {torch.int8: 2, torch.float8_e4m3fn: 1}  # rows up to which this is the fastest product


def supports(codes_MK: Tensor, codes_NK: Tensor) -> Support:
    """Is `multiply` the product for these codes? It reads 16 bytes of a row at once."""
    if not (found := triton_supports(codes_NK)):
        return found
    if not 0 < codes_MK.shape[0] <= MOST[codes_NK.dtype]:
        return no("takes one row, or two of int8")
    if codes_NK.shape[1] % 16:
        return no("takes in features in multiples of 16")
    if not all(t.is_contiguous() and t.data_ptr() % 16 == 0 for t in (codes_MK, codes_NK)):
        return no("takes contiguous codes that begin at multiples of 16 bytes")
    return YES


def multiply(rows: Rows, codes_NK: Tensor, scale_N: Tensor, bias_N: Tensor | None) -> Tensor:
    """y [M, N] in the dtype of `rows`. Both codes are int8 or float8_e4m3fn."""
    x, w, integer = rows.codes_MK, codes_NK, codes_NK.dtype == torch.int8
    channels, step, warps = schedule(len(x), integer)
    y_MN = torch.empty(len(x), len(w), dtype=rows.dtype, device=w.device)
    if integer:
        x, w, step = x.view(torch.int32), w.view(torch.int32), step // 4
    _gemv_kernel[(-(-len(w) // channels),)](
        x,
        w,
        rows.scale_M1,
        scale_N,
        bias_N,
        y_MN,
        w.shape[0],
        w.shape[1],
        ROWS=len(x),
        COLUMNS=channels,
        DEPTH=step,
        EVEN=w.shape[1] % step == 0,
        DP4A=not INTERPRETED,
        num_warps=warps,
        enable_fp_fusion=not integer,
        **early_start(),
    )
    return y_MN


def schedule(num_rows: int, integer: bool) -> tuple[int, int, int]:
    """Channels of a program, weights of a channel that it reads at a time, and its warps: what an
    H200 liked best."""
    if not integer:
        return 2, 1024, 2
    return (4, 2048, 4) if num_rows == 1 else (4, 1024, 2)


# -- Triton ----------------------------------------------------------------------------------------


@jit
def _dot4(w, x, sums, DP4A: tl.constexpr):
    """Four products of the signed bytes of two words, added to the sums."""
    if DP4A:
        sums = tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;",
            "=r,r,r,r",
            [w, x, sums],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        for i in tl.static_range(4):
            sums += ((w << (24 - 8 * i)) >> 24) * ((x << (24 - 8 * i)) >> 24)
    return sums


@jit
def _codes(w_at, at, left, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(w_at, cache_modifier=".cg")
    else:
        return tl.load(w_at, mask=at[None, :] < left, other=0.0, cache_modifier=".cg")


@jit
def _added(
    sums,
    codes,
    x,
    at,
    K,
    left,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    DP4A: tl.constexpr,
):
    """The sums of each row of x, with the products of these codes."""
    after = tl.tuple([])
    for m in tl.static_range(ROWS):
        those = tl.load(x + m * K + at, mask=at < left, other=0.0)
        if codes.dtype == tl.int32:
            after += (
                _dot4(codes, tl.broadcast_to(those[None, :], (COLUMNS, DEPTH)), sums[m], DP4A),
            )
        else:  # the 16 codes that a thread has read at once become one sum
            products = tl.reshape(
                codes.to(tl.float32) * those.to(tl.float32)[None, :], (COLUMNS, DEPTH // 16, 16)
            )
            after += (sums[m] + tl.sum(products, 2),)
    return after


@jit
def _gemv_kernel(
    x,
    w,
    row,
    column,
    bias,
    y,
    N,
    K,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    EVEN: tl.constexpr,
    DP4A: tl.constexpr,
    EARLY: tl.constexpr,
):
    """x and w are int32 words of four codes, K of them a row, or e4m3. The first codes are read
    before the wait."""
    n, at = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, DEPTH)
    w_at = w + tl.where(n < N, n, 0).to(tl.int64)[:, None] * K + at[None, :]
    codes = _codes(w_at, at, K, EVEN)
    after_others(EARLY)
    sums = tl.tuple([])
    for _ in tl.static_range(ROWS):
        if w.dtype.element_ty == tl.int32:
            sums += (tl.zeros((COLUMNS, DEPTH), tl.int32),)
        else:
            sums += (tl.zeros((COLUMNS, DEPTH // 16), tl.float32),)
    sums = _added(sums, codes, x, at, K, K, ROWS, COLUMNS, DEPTH, DP4A)
    for k in range(DEPTH, K, DEPTH):
        codes = _codes(w_at + k, at, K - k, EVEN)
        sums = _added(sums, codes, x + k, at, K, K - k, ROWS, COLUMNS, DEPTH, DP4A)
    scale = tl.load(column + n, mask=n < N, other=0.0)
    for m in tl.static_range(ROWS):
        out = tl.sum(sums[m], 1).to(tl.float32) * scale * tl.load(row + m)
        if bias is not None:
            out = out + tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
        tl.store(y + m * N + n, out.to(y.dtype.element_ty), mask=n < N)
