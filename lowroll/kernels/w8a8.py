"""Quantised rows times 8-bit weights: int8 with int32 sums, e4m3 with float32 sums.

    y[m, n] = (sum_k x[m, k] w[n, k]) * row[m] * column[n] + bias[n]

int8 is a Triton kernel on CUDA: weights are the left operand of the product when there are few rows, because Hopper's
matrix instruction takes 64 of the left operand's rows at least and as few as 8 of the right one's. K is split among
programs where the tiles of the result do not fill the device. The last program of a tile to arrive adds the parts; sums
of integers are exact in every order, so neither the split nor the tile nor a row's batch-mates show in the result. The
scales and the bias are applied to the sums before they are written.

e4m3 is `torch._scaled_mm` with unit scales on CUDA (with scales of its own it is up to twice slower for few rows,
docs/LOG.md), and the kernel that comes next applies them. Its sums are rounded to the activations' dtype once more.
Accumulation is the slow, exact kind (`use_fast_accum=False`) in the engine and in the learner.

Elsewhere the sums are plain torch's.

Legend: M rows (tokens), N out features, K in features.
"""
from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lowroll.kernels.launch import block, fused, jit, tl
from lowroll.kernels.rows import E4M3, Product, Rows

MULTIPROCESSORS = 132                # of an H100 or H200; tiles are chosen for them and never change with the device
MOST_TILES = 2048                    # of a product that is split along K
CAPTURED = -1


class Tile(NamedTuple):
    """How the kernel is launched: a tile of the result and a step along K, parts of K, loads in flight, warps."""

    rows: int
    columns: int
    depth: int
    splits: int
    stages: int
    warps: int
    swap: bool                       # the weights are the left operand


def multiply(rows: Rows, codes_NK: Tensor, scale_N: Tensor, bias_N: Tensor | None) -> Product:
    """Rows times the transposed codes, both int8 or both float8_e4m3fn. scale_N: float32, [N] or [N, 1].

    Which scales the Product has still to apply depends on kind and device. On one device, two calls must not run at
    the same time in two streams that were captured into graphs.
    """
    if codes_NK.dtype == torch.int8:
        if fused(codes_NK):
            return Product(_integers(rows, codes_NK, scale_N, bias_N), dtype=rows.dtype)
        sums_MN = torch._int_mm(rows.codes_MK, codes_NK.t())
        return Product(sums_MN.float() * scale_N.flatten(), rows.scale_M1, None, bias_N, rows.dtype)
    if codes_NK.is_cuda and has_e4m3(codes_NK.device):
        dtype = torch.bfloat16 if rows.dtype == torch.bfloat16 else torch.float32      # float16 could overflow
        sums_MN = e4m3_sums(rows.codes_MK, codes_NK, dtype)
    else:
        sums_MN = F.linear(rows.codes_MK.float(), codes_NK.float())
    return Product(sums_MN, rows.scale_M1, scale_N, bias_N, rows.dtype)


def e4m3_sums(codes_MK: Tensor, codes_NK: Tensor, dtype: torch.dtype) -> Tensor:
    """sum_k x w by the device's e4m3 product, which wants N and K in multiples of 16."""
    num_out, num_in = codes_NK.shape
    pad_k, pad_n = -num_in % 16, -num_out % 16
    if pad_k or pad_n:
        codes_MK, codes_NK = _pad(codes_MK, pad_k, 0), _pad(codes_NK, pad_k, pad_n)
    one = _one(codes_MK.device)
    sums_MN = torch._scaled_mm(codes_MK, codes_NK.t(), one, one, out_dtype=dtype, use_fast_accum=False)
    return sums_MN[:, :num_out].contiguous() if pad_n else sums_MN


@cache
def has_e4m3(device: torch.device) -> bool:
    """Does this device multiply e4m3 matrices, into float32 sums?"""
    x_MK, w_NK = (torch.arange(-160, 160, device=device).remainder(23).view(-1, 32).to(E4M3) for _ in range(2))
    try:
        got_MN = e4m3_sums(x_MK, w_NK, torch.float32)
    except (RuntimeError, AttributeError, NotImplementedError, ValueError):
        return False
    return torch.allclose(got_MN.double(), x_MK.double() @ w_NK.double().t(), rtol=1e-4)


def _pad(codes: Tensor, columns: int, rows: int) -> Tensor:
    return F.pad(codes.view(torch.uint8), (0, columns, 0, rows)).view(E4M3)      # the byte 0 is the number 0


@cache
def _one(device: torch.device) -> Tensor:
    return torch.ones((), device=device)


# -- int8 -------------------------------------------------------------------------------------------------------------

def choose(num_rows: int, num_out: int, num_in: int) -> Tile:
    """The tile for a product of these sizes, and of nothing else. The numbers are what an H200 liked best."""
    rows, narrow = min(128, max(16, block(num_rows))), -(-num_out // 64)
    if num_rows <= 64:
        wide = narrow > 3 * MULTIPROCESSORS
        tile = Tile(rows, 128, 128, 1, 3, 4, True) if wide else Tile(rows, 64, 256, 1, 4, 4, True)
    elif num_rows >= 1024:
        tile = Tile(256, 128, 128, 1, 3, 8, True)
    else:
        wide = -(-num_rows // 128) * narrow > 2 * MULTIPROCESSORS
        tile = Tile(128, 128, 128, 1, 3, 8, True) if wide else Tile(128, 64, 128, 1, 4, 4, True)
    tiles, steps = -(-num_rows // tile.rows) * -(-num_out // tile.columns), -(-num_in // tile.depth)
    splits = max(1, min(8, 2 * MULTIPROCESSORS // tiles, steps // (8 if num_rows <= 64 else 28)))
    return tile._replace(splits=-(-steps // -(-steps // splits)))        # no part without a step


def _integers(rows: Rows, codes_NK: Tensor, scale_N: Tensor, bias_N: Tensor | None) -> Tensor:
    codes_MK = rows.codes_MK
    (num_rows, num_in), num_out = codes_MK.shape, codes_NK.shape[0]
    y_MN = torch.empty(num_rows, num_out, dtype=rows.dtype, device=codes_NK.device)
    tile = choose(num_rows, num_out, num_in)
    tiles = -(-num_rows // tile.rows) * -(-num_out // tile.columns)
    split = tile.splits > 1
    parts = y_MN.new_empty(tiles * tile.splits * tile.rows * tile.columns, dtype=torch.int32) if split else None
    if y_MN.numel():
        _kernel[(tiles, tile.splits)](
            codes_MK, codes_NK, rows.scale_M1, scale_N, bias_N, y_MN, parts, _turns(codes_NK.device) if split else None,
            num_rows, num_out, num_in, tile.splits, codes_MK.stride(0), codes_NK.stride(0), ROWS=tile.rows,
            COLUMNS=tile.columns, DEPTH=tile.depth, SPLIT=split, SWAP=tile.swap, EVEN=num_in % tile.depth == 0,
            num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False)
    return y_MN


_TURNS: dict[tuple[torch.device, int], Tensor] = {}


def _turns(device: torch.device) -> Tensor:
    """Zeros that count the programs which have finished a tile; the last one puts its zero back.

    Streams have their own, and captured graphs share one set, which cannot be made while capturing.
    """
    stream = 0
    if device.type == "cuda":
        stream = CAPTURED if torch.cuda.is_current_stream_capturing() else torch.cuda.current_stream(device).cuda_stream
    if (device, stream) not in _TURNS:
        if stream == CAPTURED:
            raise RuntimeError("w8a8: multiply once outside a graph before capturing it")
        for key in (CAPTURED, stream):
            _TURNS.setdefault((device, key), torch.zeros(MOST_TILES, dtype=torch.int32, device=device))
    return _TURNS[device, stream]


@jit
def _kernel(x, w, row, column, bias, y, parts, turns, M, N, K, splits, stride_x, stride_w,
            ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, SPLIT: tl.constexpr, SWAP: tl.constexpr,
            EVEN: tl.constexpr):
    """One tile of y, or one part of K of it, a program. Tiles of the same weights are neighbours."""
    tile, part = tl.program_id(0), tl.program_id(1)
    tiles_m, tiles_n = tl.cdiv(M, ROWS), tl.cdiv(N, COLUMNS)
    first = tile // (8 * tiles_n) * 8                            # bands of 8 tiles of rows
    high = tl.minimum(tiles_m - first, 8)
    m = (first + tile % (8 * tiles_n) % high) * ROWS + tl.arange(0, ROWS)
    n = tile % (8 * tiles_n) // high * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    x_at = x + tl.where(m < M, m, 0).to(tl.int64)[:, None] * stride_x + depth[None, :]      # what lies outside is read
    w_at = w + tl.where(n < N, n, 0).to(tl.int64)[:, None] * stride_w + depth[None, :]      # as row 0, never written
    each = tl.cdiv(tl.cdiv(K, DEPTH), splits)
    sums = tl.zeros((COLUMNS, ROWS) if SWAP else (ROWS, COLUMNS), dtype=tl.int32)
    for step in range(part * each, tl.minimum(part * each + each, tl.cdiv(K, DEPTH))):
        k = step * DEPTH
        if EVEN:
            x_tile, w_tile = tl.load(x_at + k), tl.load(w_at + k)
        else:
            x_tile = tl.load(x_at + k, mask=depth[None, :] < K - k, other=0)
            w_tile = tl.load(w_at + k, mask=depth[None, :] < K - k, other=0)
        sums = tl.dot(w_tile, x_tile.T, sums, out_dtype=tl.int32) if SWAP else \
            tl.dot(x_tile, w_tile.T, sums, out_dtype=tl.int32)
    if SPLIT:
        long: tl.constexpr = ROWS if SWAP else COLUMNS
        wide: tl.constexpr = COLUMNS if SWAP else ROWS
        parts += tile.to(tl.int64) * splits * ROWS * COLUMNS + (tl.arange(0, wide)[:, None] * long + tl.arange(0, long))
        tl.store(parts + part * ROWS * COLUMNS, sums)
        tl.debug_barrier()                                       # every thread's part is written before it is counted
        if tl.atomic_add(turns + tile, 1, sem="acq_rel") < splits - 1:
            return
        tl.store(turns + tile, 0)
        sums = tl.zeros_like(sums)
        for other in range(splits):
            sums += tl.load(parts + other * ROWS * COLUMNS, cache_modifier=".cg")
    if SWAP:
        sums = tl.trans(sums)
    out = sums.to(tl.float32) * tl.load(column + n, mask=n < N, other=0.0)[None, :]
    out = out * tl.load(row + m, mask=m < M, other=0.0)[:, None]
    if bias is not None:
        out = out + tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    tl.store(y + m.to(tl.int64)[:, None] * N + n[None, :], out.to(y.dtype.element_ty),
             mask=(m[:, None] < M) & (n[None, :] < N))
