"""int8 rows times int8 weights with int32 sums, in Triton.

    y[m, n] = (sum_k x[m, k] w[n, k]) * column[n] * row[m] + bias[n]

Sums of integers are exact in every order, so neither tiles nor splits along K nor a row's batch-mates show in the
result. Weights are the left operand of the product, because Hopper's matrix instruction takes 64 of the left operand's
rows at least and as few as 8 of the right one's. K is split among programs where the tiles of the result do not fill
the device; the last program of a tile to come adds the parts. The scales and the bias are applied before y is written.

Legend: M rows (tokens), N out features, K in features.
"""
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lowroll.kernels.launch import after_others, block, early_start, jit, prefetch, tl
from lowroll.kernels.rows import Rows

MULTIPROCESSORS = 132                # of an H100 or H200; tiles are chosen for them, whatever the device
MOST_TURNS = 1 << 20                 # counters: tiles of a product that is split along K
CAPTURED = -1


def multiply(rows: Rows, codes_NK: Tensor, scale_N: Tensor, bias_N: Tensor | None) -> Tensor:
    """y [M, N] in the dtype of `rows`, on CUDA or in Triton's interpreter.

    RuntimeError when the first product of a device is within the capture of a CUDA graph.
    """
    x_MK, w_NK = rows.codes_MK.contiguous(), codes_NK.contiguous()
    (num_rows, num_in), num_out = x_MK.shape, w_NK.shape[0]
    y_MN = torch.empty(num_rows, num_out, dtype=rows.dtype, device=w_NK.device)
    if y_MN.numel() == 0:
        return y_MN
    tile = choose(num_rows, num_out, num_in)
    tiles = -(-num_rows // tile.rows) * -(-num_out // tile.columns)
    parts = turns = None
    if tile.splits > 1:
        parts = y_MN.new_empty(tiles * tile.splits * tile.rows * tile.columns, dtype=torch.int32)
        turns = _turns(y_MN.device)
    _kernel[(tiles, tile.splits)](
        x_MK, w_NK, rows.scale_M1, scale_N, bias_N, y_MN, parts, turns, num_rows, num_out, num_in, tile.splits,
        ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=tile.depth, SPLIT=tile.splits > 1,
        EVEN=num_in % tile.depth == 0, num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False,
        **early_start())
    return y_MN


_TURNS: dict[tuple[torch.device, int], Tensor] = {}


def _turns(device: torch.device) -> Tensor:
    """Zeros that count the blocks which have finished a tile; the last one puts its zero back.

    Streams have their own, and captured graphs share one set, which cannot be made while capturing.
    """
    stream = 0
    if device.type == "cuda":
        stream = CAPTURED if torch.cuda.is_current_stream_capturing() else torch.cuda.current_stream(device).cuda_stream
    if (device, stream) not in _TURNS:
        if stream == CAPTURED:
            raise RuntimeError("int8: multiply once outside a CUDA graph before capturing it")
        for key in (CAPTURED, stream):
            _TURNS.setdefault((device, key), torch.zeros(MOST_TURNS, dtype=torch.int32, device=device))
    return _TURNS[device, stream]


class Tile(NamedTuple):
    """How the kernel is launched: a tile of the result and a step along K, parts of K, loads in flight, warps."""

    rows: int
    columns: int
    depth: int
    splits: int
    stages: int
    warps: int


def choose(num_rows: int, num_out: int, num_in: int) -> Tile:
    """The tile for a product of these sizes, and of nothing else. The numbers are what an H200 liked best."""
    rows, narrow = min(128, max(16, block(num_rows))), -(-num_out // 64)
    if num_rows <= 64:
        wide = narrow > 3 * MULTIPROCESSORS
        tile = Tile(rows, 128, 128, 1, 3, 4) if wide else Tile(rows, 64, 256, 1, 4, 4)
    elif num_rows >= 1024:
        tile = Tile(256, 128, 128, 1, 3, 8)
    else:
        wide = -(-num_rows // 128) * narrow > 2 * MULTIPROCESSORS
        tile = Tile(128, 128, 128, 1, 3, 8) if wide else Tile(128, 64, 128, 1, 4, 4)
    tiles, steps = -(-num_rows // tile.rows) * -(-num_out // tile.columns), -(-num_in // tile.depth)
    splits = max(1, min(8, 2 * MULTIPROCESSORS // tiles, steps // (8 if num_rows <= 64 else 28)))
    return tile._replace(splits=-(-steps // -(-steps // splits)))        # no part without a step


@jit(do_not_specialize=["M"])         # numbers of rows come and go, and only masks read them
def _kernel(x, w, row, column, bias, y, parts, turns, M, N, K, splits,
            ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, SPLIT: tl.constexpr, EVEN: tl.constexpr,
            EARLY: tl.constexpr):
    """One tile of y, or one part of K of it, a program. Tiles of the same weights are neighbours."""
    tile, part = tl.program_id(0), tl.program_id(1)
    tiles_m, tiles_n = tl.cdiv(M, ROWS), tl.cdiv(N, COLUMNS)
    first = tile // (8 * tiles_n) * 8                            # bands of 8 tiles of rows
    high = tl.minimum(tiles_m - first, 8)
    m = (first + tile % (8 * tiles_n) % high) * ROWS + tl.arange(0, ROWS)
    n = tile % (8 * tiles_n) // high * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    x_at = x + tl.where(m < M, m, 0).to(tl.int64)[:, None] * K + depth[None, :]      # what lies outside is read
    w_at = w + tl.where(n < N, n, 0).to(tl.int64)[:, None] * K + depth[None, :]      # as row 0, never written
    each = tl.cdiv(tl.cdiv(K, DEPTH), splits)
    ahead = tl.minimum(part * each * DEPTH + tl.arange(0, 4) * 128, K - 1)           # the first 512 codes of each row
    prefetch(w + tl.where(n < N, n, 0).to(tl.int64)[:, None] * K + ahead[None, :], EARLY)
    after_others(EARLY)
    sums = tl.zeros((COLUMNS, ROWS), dtype=tl.int32)
    for step in range(part * each, tl.minimum(part * each + each, tl.cdiv(K, DEPTH))):
        k = step * DEPTH
        if EVEN:
            x_tile, w_tile = tl.load(x_at + k), tl.load(w_at + k)
        else:
            x_tile = tl.load(x_at + k, mask=depth[None, :] < K - k, other=0)
            w_tile = tl.load(w_at + k, mask=depth[None, :] < K - k, other=0)
        sums = tl.dot(w_tile, x_tile.T, sums, out_dtype=tl.int32)
    if SPLIT:
        inside = tl.arange(0, COLUMNS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
        parts += tile.to(tl.int64) * splits * ROWS * COLUMNS + inside
        tl.store(parts + part * ROWS * COLUMNS, sums)
        tl.debug_barrier()                                       # every thread's part is written before it is counted
        if tl.atomic_add(turns + tile, 1, sem="acq_rel") < splits - 1:
            return
        tl.store(turns + tile, 0)
        sums = tl.zeros_like(sums)
        for other in range(splits):
            sums += tl.load(parts + other * ROWS * COLUMNS, cache_modifier=".cg")
    out = tl.trans(sums).to(tl.float32) * tl.load(column + n, mask=n < N, other=0.0)[None, :]
    out = out * tl.load(row + m, mask=m < M, other=0.0)[:, None]
    if bias is not None:
        out = out + tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    tl.store(y + m.to(tl.int64)[:, None] * N + n[None, :], out.to(y.dtype.element_ty),
             mask=(m[:, None] < M) & (n[None, :] < N))
