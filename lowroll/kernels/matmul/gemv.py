"""Products of few rows: every program streams some channels past all rows.

Reading the weights bounds a small decode step, so a program reads whole rows of them, 16 bytes a
thread, and multiplies on CUDA cores: int8 by `dp4a`, others as float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowroll.kernels.launch import INTERPRETED, after_others, early_start, jit, tl, triton_supports
from lowroll.kernels.quantize.rows import QuantizedRows
from lowroll.kernels.support import NO_GRADIENT, YES, Support, needs_gradient, no

MOST = {  # rows up to which this is the fastest product
    torch.int8: 2,
    torch.float8_e4m3fn: 1,
    torch.bfloat16: 2,
}
MANY = 1 << 14  # channels from which small programs are faster


def supports(x_MK: Tensor, w_NK: Tensor) -> Support:
    if not (support := triton_supports(w_NK)):
        return support
    if w_NK.dtype not in MOST:
        return no("takes int8, e4m3 and bfloat16")
    if not 0 < x_MK.shape[0] <= MOST[w_NK.dtype]:
        return no(f"takes up to {MOST[w_NK.dtype]} rows")
    if w_NK.shape[1] * w_NK.element_size() % 16:
        return no("takes rows of multiples of 16 bytes")
    if not all(t.is_contiguous() and t.data_ptr() % 16 == 0 for t in (x_MK, w_NK)):
        return no("takes contiguous tensors that begin at multiples of 16 bytes")
    return NO_GRADIENT if needs_gradient(x_MK) else YES


def linear(x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    """Return y [M, N] in bfloat16, as x and w, with float32 sums."""
    return _launch(x_MK, w_NK, None, None, bias_N, x_MK.dtype)


def multiply(
    rows: QuantizedRows, codes_NK: Tensor, scale_N: Tensor, bias_N: Tensor | None
) -> Tensor:
    """Return y [M, N] in the dtype of `rows`. Both codes are int8 or float8_e4m3fn."""
    return _launch(rows.codes_MK, codes_NK, rows.scale_M1, scale_N, bias_N, rows.dtype)


def _launch(
    x: Tensor,
    w: Tensor,
    scale_M1: Tensor | None,
    scale_N: Tensor | None,
    bias_N: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    is_integer, numbers_per_load = w.dtype == torch.int8, 16 // w.element_size()
    channels, depth, warps = schedule(len(x), len(w), w.dtype)
    y_MN = torch.empty(len(x), len(w), dtype=dtype, device=w.device)
    if is_integer:
        x, w, depth = x.view(torch.int32), w.view(torch.int32), depth // 4
    _gemv_kernel[(-(-len(w) // channels),)](
        x,
        w,
        scale_M1,
        scale_N,
        bias_N,
        y_MN,
        w.shape[0],
        w.shape[1],
        ROWS=len(x),
        COLUMNS=channels,
        DEPTH=depth,
        EACH=numbers_per_load,
        EVEN=w.shape[1] % depth == 0,
        DP4A=not INTERPRETED,
        num_warps=warps,
        enable_fp_fusion=not is_integer,
        **early_start(),
    )
    return y_MN


def schedule(num_rows: int, num_out: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """Return channels of a program, weights of a channel in a step, and warps (H200)."""
    if dtype == torch.int8:
        return (4, 2048, 4) if num_rows == 1 else (4, 1024, 2)
    if dtype == torch.float8_e4m3fn:
        return 2, 1024, 2
    return (4, 512, 2) if num_out >= MANY else (4, 1024, 4)


# -- Triton ----------------------------------------------------------------------------------------


@jit
def _dot4(w, x, sums, DP4A: tl.constexpr):
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
def _load_codes(w_at, at, left, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(w_at, cache_modifier=".cg")
    else:
        return tl.load(w_at, mask=at[None, :] < left, other=0.0, cache_modifier=".cg")


@jit
def _accumulate(
    sums,
    codes,
    x,
    at,
    K,
    left,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    EACH: tl.constexpr,
    DP4A: tl.constexpr,
):
    new_sums = tl.tuple([])
    for m in tl.static_range(ROWS):
        x_m = tl.load(x + m * K + at, mask=at < left, other=0.0)
        if codes.dtype == tl.int32:
            new_sums += (
                _dot4(codes, tl.broadcast_to(x_m[None, :], (COLUMNS, DEPTH)), sums[m], DP4A),
            )
        else:  # a thread's numbers become one sum
            products = tl.reshape(
                codes.to(tl.float32) * x_m.to(tl.float32)[None, :], (COLUMNS, DEPTH // EACH, EACH)
            )
            new_sums += (sums[m] + tl.sum(products, 2),)
    return new_sums


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
    EACH: tl.constexpr,
    EVEN: tl.constexpr,
    DP4A: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Multiply for one program. x, w: K int32 words of four codes a row, or e4m3 or bfloat16, EACH
    in 16 bytes. The first weights are read before the wait."""
    n, offs_k = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, DEPTH)
    w_ptrs = w + tl.where(n < N, n, 0).to(tl.int64)[:, None] * K + offs_k[None, :]
    codes = _load_codes(w_ptrs, offs_k, K, EVEN)
    after_others(EARLY)
    sums = tl.tuple([])
    for _ in tl.static_range(ROWS):
        if w.dtype.element_ty == tl.int32:
            sums += (tl.zeros((COLUMNS, DEPTH), tl.int32),)
        else:
            sums += (tl.zeros((COLUMNS, DEPTH // EACH), tl.float32),)
    sums = _accumulate(sums, codes, x, offs_k, K, K, ROWS, COLUMNS, DEPTH, EACH, DP4A)
    for k in range(DEPTH, K, DEPTH):
        codes = _load_codes(w_ptrs + k, offs_k, K - k, EVEN)
        sums = _accumulate(sums, codes, x + k, offs_k, K, K - k, ROWS, COLUMNS, DEPTH, EACH, DP4A)
    if column is not None:
        scale = tl.load(column + n, mask=n < N, other=0.0)
    for m in tl.static_range(ROWS):
        out = tl.sum(sums[m], 1).to(tl.float32)
        if column is not None:
            out = out * scale * tl.load(row + m)
        if bias is not None:
            out = out + tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
        tl.store(y + m * N + n, out.to(y.dtype.element_ty), mask=n < N)
