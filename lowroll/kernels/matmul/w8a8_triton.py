"""int8 rows times int8 weights with int32 sums, in Triton (`kernels.matmul.w8a8_cuda`).

Sums are exact, so results do not depend on tiles, splits or the batch. Weights are the left
operand: Hopper's matrix instruction takes at least 64 rows of the left and as few as 8 of the
right. Tiles of an incomplete last wave are split along K; the last program to finish one adds its
parts.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowroll.kernels.launch import INTERPRETED, after_others, block, early_start, jit, tl
from lowroll.kernels.quantize.rows import QuantizedRows
from lowroll.kernels.support import YES, Support, cuda_supports

MULTIPROCESSORS = 132  # of an H100 or H200; tiles are chosen for them, whatever the device
MOST_TURNS = 1 << 12  # counters, one a split tile
CAPTURED = -1


def multiply(
    rows: QuantizedRows, codes_NK: Tensor, scale_N: Tensor, bias_N: Tensor | None
) -> Tensor:
    """Return y [M, N] in the dtype of `rows`. RuntimeError if a device's first product is within
    the capture of a CUDA graph."""
    x_MK, w_NK = rows.codes_MK.contiguous(), codes_NK.contiguous()
    (num_rows, num_in), num_out = x_MK.shape, w_NK.shape[0]
    y_MN = torch.empty(num_rows, num_out, dtype=rows.dtype, device=w_NK.device)
    if y_MN.numel() == 0:
        return y_MN
    tile = choose(num_rows, num_out, num_in)
    tiles = -(-num_rows // tile.rows) * -(-num_out // tile.columns)
    whole_tiles, splits = deal(
        tiles, -(-num_in // tile.depth), tile.blocks * MULTIPROCESSORS, tile.depth // 32
    )
    parts = counters = None
    if splits > 1:
        parts = y_MN.new_empty(
            (tiles - whole_tiles) * splits * tile.rows * tile.columns, dtype=torch.int32
        )
        counters = _turns(y_MN.device)
    descriptors = _tile_descriptors(x_MK, w_NK, tile)
    _integers_kernel[(whole_tiles + (tiles - whole_tiles) * splits,)](
        x_MK,
        w_NK,
        *descriptors,
        rows.scale_M1,
        scale_N,
        bias_N,
        y_MN,
        parts,
        counters,
        num_rows,
        num_out,
        num_in,
        whole_tiles,
        splits,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        EVEN=num_in % tile.depth == 0,
        num_warps=tile.warps,
        num_stages=tile.stages,
        maxnreg=registers(tile),
        enable_fp_fusion=False,
        **early_start(),
    )
    return y_MN


def _tile_descriptors(x_MK: Tensor, w_NK: Tensor, tile: Tile) -> tuple[Any, Any]:
    aligned = x_MK.shape[1] % 16 == x_MK.data_ptr() % 16 == w_NK.data_ptr() % 16 == 0
    if not tile.engine or not aligned or not copy_engine_supports(x_MK.device):
        return None, None
    from triton.tools.tensor_descriptor import TensorDescriptor

    return (
        TensorDescriptor.from_tensor(x_MK, [tile.rows, tile.depth]),
        TensorDescriptor.from_tensor(w_NK, [tile.columns, tile.depth]),
    )


@cache
def copy_engine_supports(device: torch.device) -> Support:
    return YES if INTERPRETED else cuda_supports(device, (9, 0))


_TURNS: dict[tuple[torch.device, int], Tensor] = {}


def _turns(device: torch.device) -> Tensor:
    """Return zeroed counters of finished blocks of a tile, which the last block resets.

    Each stream has its own; captured graphs share one set, which cannot be made while capturing.
    """
    stream = 0
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        stream = CAPTURED
    elif device.type == "cuda":
        stream = torch.cuda.current_stream(device).cuda_stream
    if (device, stream) not in _TURNS:
        if stream == CAPTURED:
            raise RuntimeError("int8: multiply once outside a CUDA graph before capturing it")
        for key in (CAPTURED, stream):
            _TURNS.setdefault(
                (device, key), torch.zeros(MOST_TURNS, dtype=torch.int32, device=device)
            )
    return _TURNS[device, stream]


class Tile(NamedTuple):
    """Size of a tile, loads in flight, warps, programs a multiprocessor runs at once, and whether
    the copy engine fetches."""

    rows: int
    columns: int
    depth: int
    stages: int
    warps: int
    blocks: int
    engine: bool


def choose(num_rows: int, num_out: int, num_in: int) -> Tile:
    """Choose the tile by these sizes alone, as measured on an H200 (docs/LOG.md). The copy engine
    fills in missing rows slowly, so a large matrix with a partial last tile goes without."""

    def tiles(rows: int, columns: int) -> int:
        return -(-num_rows // rows) * -(-num_out // columns)

    two_waves, three_waves = 2 * MULTIPROCESSORS, 3 * MULTIPROCESSORS
    if num_rows <= 64:
        rows, engine = max(16, block(num_rows)), num_rows > 16
        if -(-num_out // 64) > three_waves:
            return Tile(rows, 128, 128, 3, 4, 3, engine)
        return Tile(min(rows, 32), 64, 256, 4, 4, 2, engine)
    if num_rows >= 1024:
        return Tile(256, 128, 128, 3, 8, 1, False)
    if num_in <= 8192 and tiles(64, 64) <= three_waves:
        if tiles(64, 64) <= two_waves:
            return Tile(64, 64, 256, 3, 4, 2, True)
        return Tile(64, 64, 128, 4, 4, 3, True)
    wide_tiles = tiles(64, 128)
    if wide_tiles <= two_waves and not (
        num_in > 8192 and MULTIPROCESSORS < wide_tiles <= three_waves // 2
    ):
        return Tile(64, 128, 128, 4, 4, 2, True)
    if wide_tiles <= three_waves or num_rows % 128 == 64 and num_rows < 512:
        return Tile(64, 128, 128, 3, 4, 3, True)
    if num_rows <= 256:
        return Tile(128, 64, 128, 3, 4, 3, num_rows % 128 == 0)
    return Tile(128, 128, 128, 3, 8, 2, num_rows % 128 == 0)


def registers(tile: Tile) -> int:
    """Return the registers of a thread that let the tile's programs fit on a multiprocessor."""
    return min(255, 65536 // (32 * tile.warps * tile.blocks) // 8 * 8)


def deal(tiles: int, steps: int, at_once: int, least: int) -> tuple[int, int]:
    """Return (tiles of one program, parts of each other tile) for `steps` along K. A part has about
    `least` steps or more; none is empty."""
    remainder = tiles % at_once
    splits = min(16, at_once // remainder, steps // least) if remainder else 1
    if splits <= 1:
        return tiles, 1
    return tiles - remainder, -(-steps // -(-steps // splits))


# -- Triton ----------------------------------------------------------------------------------------


@jit
def _integers_kernel(
    x,
    w,
    x_box,
    w_box,
    row,
    column,
    bias,
    y,
    parts,
    turns,
    M,
    N,
    K,
    whole,
    splits,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    EVEN: tl.constexpr,
    EARLY: tl.constexpr,
):
    tile, part, count = tl.program_id(0), 0, 1
    if parts is not None:
        if tile >= whole:
            tile, part, count = whole + (tile - whole) // splits, (tile - whole) % splits, splits
    tiles_m, tiles_n = tl.cdiv(M, ROWS), tl.cdiv(N, COLUMNS)
    band_start = tile // (8 * tiles_n) * 8
    band_height = tl.minimum(tiles_m - band_start, 8)
    m_first = (band_start + tile % (8 * tiles_n) % band_height) * ROWS
    n_first = tile % (8 * tiles_n) // band_height * COLUMNS
    m, n, depth = m_first + tl.arange(0, ROWS), n_first + tl.arange(0, COLUMNS), tl.arange(0, DEPTH)
    # rows beyond the last read the first ones: loads from one place would wait
    x_ptrs = x + (m % M).to(tl.int64)[:, None] * K + depth[None, :]
    w_ptrs = w + (n % N).to(tl.int64)[:, None] * K + depth[None, :]
    steps = tl.cdiv(K, DEPTH)
    steps_per_part = tl.cdiv(steps, count)
    after_others(EARLY)
    sums = tl.zeros((COLUMNS, ROWS), dtype=tl.int32)
    for step in range(
        part * steps_per_part, tl.minimum(part * steps_per_part + steps_per_part, steps)
    ):
        k = step * DEPTH
        if x_box is not None:
            x_tile, w_tile = x_box.load([m_first, k]), w_box.load([n_first, k])
        elif EVEN:
            x_tile, w_tile = tl.load(x_ptrs + k), tl.load(w_ptrs + k)
        else:
            x_tile = tl.load(x_ptrs + k, mask=depth[None, :] < K - k, other=0)
            w_tile = tl.load(w_ptrs + k, mask=depth[None, :] < K - k, other=0)
        sums = tl.dot(w_tile, x_tile.T, sums, out_dtype=tl.int32)
    if parts is not None:
        if count > 1:
            offs = tl.arange(0, COLUMNS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
            part_ptrs = parts + (tile - whole).to(tl.int64) * splits * ROWS * COLUMNS + offs
            tl.store(part_ptrs + part * ROWS * COLUMNS, sums)
            tl.debug_barrier()  # every thread's part is written before it is counted
            if tl.atomic_add(turns + tile - whole, 1, sem="acq_rel") == splits - 1:
                tl.store(turns + tile - whole, 0)
                sums = tl.zeros_like(sums)
                for part_index in range(splits):
                    sums += tl.load(part_ptrs + part_index * ROWS * COLUMNS, cache_modifier=".cg")
                _finish(sums, row, column, bias, y, m, n, M, N)
        else:
            _finish(sums, row, column, bias, y, m, n, M, N)
    else:
        _finish(sums, row, column, bias, y, m, n, M, N)


@jit
def _finish(sums, row, column, bias, y, m, n, M, N):
    out = tl.trans(sums).to(tl.float32) * tl.load(column + n, mask=n < N, other=0.0)[None, :]
    out = out * tl.load(row + m, mask=m < M, other=0.0)[:, None]
    if bias is not None:
        out = out + tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    tl.store(
        y + m.to(tl.int64)[:, None] * N + n[None, :],
        out.to(y.dtype.element_ty),
        mask=(m[:, None] < M) & (n[None, :] < N),
    )
