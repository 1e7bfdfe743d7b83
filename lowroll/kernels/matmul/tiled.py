"""y = x W^T in Triton by sums of fixed order: `kernels.matmul.ordered` for CUDA.

    parts of PART features each (of a matrix with more than NARROW columns: all of K)
    a part's sum: 16 features after 16, in float32
    y[m, n] = the parts, from the first on, + bias[n] + added[m, n]

Parts depend on the matrix alone, and the tensor cores add 16 products at once whatever the tile, so
the order is the same for any number of rows (checked on an H200; docs/LOG.md).

Legend: `kernels.matmul`; P parts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lowroll.kernels.launch import after_others, block, contiguous_rows, early_start, jit, tl

MULTIPROCESSORS = 132  # of an H100 or H200
NARROW = 256  # columns, such as LoRA's down projection
PART = 1024
JOINED = 1024  # results of a program that joins parts


class Schedule(NamedTuple):
    """Size of a tile, loads in flight and warps."""

    rows: int
    columns: int
    depth: int
    stages: int
    warps: int


def product(
    x_MK: Tensor,
    w_NK: Tensor,
    bias_N: Tensor | None = None,
    dtype: torch.dtype | None = None,
    added_MN: Tensor | None = None,
) -> Tensor:
    """Return x w^T + bias + `added_MN`: [M, N], rounded once to `dtype` (None: x's). ValueError for
    mixed dtypes and mismatched shapes."""
    (M, K), N = x_MK.shape, w_NK.shape[0]
    if x_MK.dtype != w_NK.dtype:
        raise ValueError(f"tiled: expected one dtype, got {x_MK.dtype} and {w_NK.dtype}")
    if w_NK.shape[1] != K or bias_N is not None and bias_N.shape != (N,):
        raise ValueError(f"tiled: {[*x_MK.shape]} and {[*w_NK.shape]} do not fit")
    x_MK, w_NK = contiguous_rows(x_MK), contiguous_rows(w_NK)
    y_MN = torch.empty(M, N, dtype=dtype or x_MK.dtype, device=x_MK.device)
    if y_MN.numel() == 0:
        return y_MN
    tile = choose(M, N, x_MK.element_size())
    tiles = -(-M // tile.rows) * -(-N // tile.columns)
    part_features = PART if N <= NARROW else -(-K // PART) * PART
    parts, sums_PMN = -(-K // part_features), None
    if parts > 1 and tiles < MULTIPROCESSORS:
        sums_PMN = torch.empty(parts, M, N, dtype=torch.float32, device=x_MK.device)
    bias_N, added_MN = (None if t is None else t.contiguous() for t in (bias_N, added_MN))
    _product_kernel[(tiles, 1 if sums_PMN is None else parts)](
        x_MK,
        w_NK,
        bias_N,
        added_MN,
        y_MN,
        sums_PMN,
        M,
        N,
        K,
        part_features,
        x_MK.stride(0),
        w_NK.stride(0),
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        EVEN=K % tile.depth == 0,
        ALONE=parts == 1,
        num_warps=tile.warps,
        num_stages=tile.stages,
        enable_fp_fusion=False,
        **early_start(),
    )
    if sums_PMN is not None:
        _join_kernel[(-(-M * N // JOINED),)](
            sums_PMN,
            bias_N,
            added_MN,
            y_MN,
            M,
            N,
            parts,
            BLOCK=JOINED,
            num_warps=4,
            enable_fp_fusion=False,
            **early_start(),
        )
    return y_MN


def choose(M: int, N: int, size: int) -> Schedule:
    """Choose the schedule by these sizes alone. size: bytes of a number."""
    if size > 2:
        return Schedule(min(32, max(16, block(M))), 64, 64, 2, 4)
    fills_device = -(-N // 128) * -(-M // 128) >= MULTIPROCESSORS
    if N <= NARROW and M > 64:
        return Schedule(64, 64, 64, 4, 4)
    if M > 512:
        return Schedule(256, 128, 64, 3, 8)
    if M > 64:
        return Schedule(128, 128, 64, 3, 8) if fills_device else Schedule(64, 64, 64, 4, 4)
    return Schedule(max(16, block(M)), 64, 128, 5, 4)


# -- Triton ----------------------------------------------------------------------------------------


@jit
def _product_kernel(
    x,
    w,
    bias,
    added,
    y,
    parts,
    M,
    N,
    K,
    part,
    x_stride,
    w_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    EVEN: tl.constexpr,
    ALONE: tl.constexpr,
    EARLY: tl.constexpr,
):
    after_others(EARLY)
    tile = tl.program_id(0)
    tiles_m, tiles_n = tl.cdiv(M, ROWS), tl.cdiv(N, COLUMNS)
    band_start = tile // (8 * tiles_n) * 8
    band_height = tl.minimum(tiles_m - band_start, 8)
    m = (band_start + tile % (8 * tiles_n) % band_height) * ROWS + tl.arange(0, ROWS)
    n = tile % (8 * tiles_n) // band_height * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    # beyond the last, the first ones are read, and never written
    x_ptrs = x + (m % M).to(tl.int64)[:, None] * x_stride + depth[None, :]
    w_ptrs = w + (n % N).to(tl.int64)[:, None] * w_stride + depth[None, :]
    if parts is not None:
        start = tl.program_id(1) * part
        total = _sum_part(
            x_ptrs, w_ptrs, depth, start, tl.minimum(start + part, K), K, ROWS, COLUMNS, DEPTH, EVEN
        )
    elif ALONE:
        total = _sum_part(x_ptrs, w_ptrs, depth, 0, K, K, ROWS, COLUMNS, DEPTH, EVEN)
    else:
        total = tl.zeros((COLUMNS, ROWS), dtype=tl.float32)
        for start in range(0, K, part):
            total += _sum_part(
                x_ptrs,
                w_ptrs,
                depth,
                start,
                tl.minimum(start + part, K),
                K,
                ROWS,
                COLUMNS,
                DEPTH,
                EVEN,
            )
    live = (m[:, None] < M) & (n[None, :] < N)
    offs = m.to(tl.int64)[:, None] * N + n[None, :]
    if parts is not None:
        tl.store(parts + tl.program_id(1).to(tl.int64) * M * N + offs, tl.trans(total), mask=live)
    else:
        _finish(tl.trans(total), bias, added, y, offs, n[None, :], live)


@jit
def _sum_part(
    x_at,
    w_at,
    depth,
    first,
    stop,
    K,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    EVEN: tl.constexpr,
):
    sums = tl.zeros((COLUMNS, ROWS), dtype=tl.float32)
    for k in range(first, stop, DEPTH):
        if EVEN:
            x_tile, w_tile = tl.load(x_at + k), tl.load(w_at + k)
        else:
            x_tile = tl.load(x_at + k, mask=depth[None, :] < K - k, other=0.0)
            w_tile = tl.load(w_at + k, mask=depth[None, :] < K - k, other=0.0)
        sums = tl.dot(w_tile, x_tile.T, sums, input_precision="ieee")
    return sums


@jit
def _finish(sums, bias, added, y, at, n, live):
    if bias is not None:
        sums = sums + tl.load(bias + n, mask=live, other=0.0).to(tl.float32)
    if added is not None:
        sums = sums + tl.load(added + at, mask=live, other=0.0).to(tl.float32)
    tl.store(y + at, sums.to(y.dtype.element_ty), mask=live)


@jit
def _join_kernel(sums, bias, added, y, M, N, parts, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    after_others(EARLY)
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = offs < M * N
    total = tl.zeros((BLOCK,), tl.float32)
    for part in range(0, parts):
        total += tl.load(sums + tl.cast(part, tl.int64) * M * N + offs, mask=live, other=0.0)
    _finish(total, bias, added, y, offs, offs % N, live)
