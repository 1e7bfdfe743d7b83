"""int8 rows times int8 weights with int32 sums: for many rows wgmma on Hopper (`integers.cu`), else a Triton kernel.

    y[m, n] = (sum_k x[m, k] w[n, k]) * column[n] * row[m] + bias[n]

Sums of integers are exact in every order, so neither tiles nor splits along K nor a row's batch-mates show in the
result, and both kernels give the same bits. Weights are the left operand of the product when there are few rows,
because Hopper's matrix instruction takes 64 of the left operand's rows at least and as few as 8 of the right one's.
The scales and the bias are applied to the sums before they are written.

The CUDA kernel needs nvcc, capability 9.x, K in multiples of 16 and N in multiples of 8. The Triton kernel splits K
among programs where the tiles of the result do not fill the device. Where several blocks share a tile, the last one to
come adds the parts.

Legend: M rows (tokens), N out features, K in features.
"""
from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from lowroll.kernels import nvcc
from lowroll.kernels.launch import block, jit, tl
from lowroll.kernels.rows import Rows

SOURCE = Path(__file__).with_suffix(".cu")
MULTIPROCESSORS = 132                # of an H100 or H200; Triton's tiles are chosen for them, whatever the device
TRITON_ROWS = 64                     # up to which the Triton kernel reads the weights as fast as any
MOST_TURNS = 1 << 20                 # counters: tiles of a product that is split along K
CAPTURED = -1


def multiply(rows: Rows, codes_NK: Tensor, scale_N: Tensor, bias_N: Tensor | None) -> Tensor:
    """y [M, N] in the dtype of `rows`, on CUDA or in Triton's interpreter.

    RuntimeError when the first product of a device is within the capture of a CUDA graph.
    """
    codes_MK, codes_NK = rows.codes_MK.contiguous(), codes_NK.contiguous()
    y_MN = torch.empty(len(codes_MK), len(codes_NK), dtype=rows.dtype, device=codes_NK.device)
    if y_MN.numel() == 0:
        return y_MN
    many = len(y_MN) > TRITON_ROWS and hopper(y_MN.device)
    if not (many and _by_wgmma(codes_MK, codes_NK, rows.scale_M1, scale_N, bias_N, y_MN)):
        _by_triton(codes_MK, codes_NK, rows.scale_M1, scale_N, bias_N, y_MN)
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


# -- CUDA C++ ---------------------------------------------------------------------------------------------------------

class Problem(ctypes.Structure):
    _fields_ = ([(name, ctypes.c_void_p) for name in ("x", "w", "row", "column", "bias", "y", "partial", "arrived")]
                + [(name, ctypes.c_int) for name in ("M", "N", "K", "bias_fp32", "y_fp32")])


@cache
def hopper(device: torch.device) -> bool:
    """Is it a device of capability 9.x, on a machine with nvcc?"""
    return (device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
            and nvcc.compiler() is not None)


def tokens(num_rows: int) -> int:
    """Rows of x in a tile."""
    return min(256, max(16, block(num_rows)))


def _by_wgmma(x_MK: Tensor, w_NK: Tensor, row_M1: Tensor, column_N: Tensor, bias_N: Tensor | None,
              y_MN: Tensor) -> bool:
    """Write y, or return False when the kernel does not take these tensors."""
    (num_rows, num_in), num_out, device = x_MK.shape, w_NK.shape[0], y_MN.device
    if num_in % 16 or num_out % 8 or x_MK.data_ptr() % 16 or w_NK.data_ptr() % 16 or y_MN.dtype == torch.float16:
        return False
    library, processors = _library(), torch.cuda.get_device_properties(device).multi_processor_count
    if bias_N is not None and bias_N.dtype not in (torch.bfloat16, torch.float32):
        bias_N = bias_N.float()
    turns = _turns(device)
    problem = Problem(x_MK.data_ptr(), w_NK.data_ptr(), row_M1.data_ptr(), column_N.data_ptr(),
                      None if bias_N is None else bias_N.data_ptr(), y_MN.data_ptr(), None, turns.data_ptr(), num_rows,
                      num_out, num_in, bias_N is not None and bias_N.dtype == torch.float32,
                      y_MN.dtype == torch.float32)
    needed = (ctypes.c_longlong * 2)()
    library.integers_product(ctypes.byref(problem), tokens(num_rows), processors, needed, None)
    if needed[1] > MOST_TURNS:
        return False
    partial = torch.empty(needed[0], dtype=torch.int32, device=device)
    problem.partial = partial.data_ptr()
    with torch.cuda.device(device):
        stream = ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)
        if error := library.integers_product(ctypes.byref(problem), tokens(num_rows), processors, None, stream):
            raise RuntimeError(f"int8: integers_product failed: {library.integers_error(error).decode()}")
    return True


@cache
def _library() -> ctypes.CDLL:
    library = nvcc.library(SOURCE, (9, 0), {})
    library.integers_product.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
    library.integers_product.restype = ctypes.c_int
    library.integers_error.argtypes, library.integers_error.restype = [ctypes.c_int], ctypes.c_char_p
    return library


# -- Triton -----------------------------------------------------------------------------------------------------------

class Tile(NamedTuple):
    """How the kernel is launched: a tile of the result and a step along K, parts of K, loads in flight, warps."""

    rows: int
    columns: int
    depth: int
    splits: int
    stages: int
    warps: int
    swap: bool                       # the weights are the left operand


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


def _by_triton(x_MK: Tensor, w_NK: Tensor, row_M1: Tensor, column_N: Tensor, bias_N: Tensor | None,
               y_MN: Tensor) -> None:
    (num_rows, num_in), num_out = x_MK.shape, w_NK.shape[0]
    tile = choose(num_rows, num_out, num_in)
    tiles = -(-num_rows // tile.rows) * -(-num_out // tile.columns)
    parts = turns = None
    if tile.splits > 1:
        parts = y_MN.new_empty(tiles * tile.splits * tile.rows * tile.columns, dtype=torch.int32)
        turns = _turns(y_MN.device)
    _kernel[(tiles, tile.splits)](
        x_MK, w_NK, row_M1, column_N, bias_N, y_MN, parts, turns, num_rows, num_out, num_in, tile.splits,
        ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=tile.depth, SPLIT=tile.splits > 1, SWAP=tile.swap,
        EVEN=num_in % tile.depth == 0, num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False)


@jit
def _kernel(x, w, row, column, bias, y, parts, turns, M, N, K, splits,
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
    x_at = x + tl.where(m < M, m, 0).to(tl.int64)[:, None] * K + depth[None, :]      # what lies outside is read
    w_at = w + tl.where(n < N, n, 0).to(tl.int64)[:, None] * K + depth[None, :]      # as row 0, never written
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
