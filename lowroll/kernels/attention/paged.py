"""Decode attention for many rows: `paged.cu` for torch.

A launch depends on the rows, the heads and the device alone, so a captured graph is right for every
length and every sharing of pages, and a batch size always gives the same bits.

Legend: B rows, H query heads, G key-value heads, d head size, p pages of the cache, P tokens of a
page, N pages of a table row.
"""

from __future__ import annotations

import ctypes
import math
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from lowroll.kernels import nvcc
from lowroll.kernels.launch import early

SOURCE = Path(__file__).with_name("paged.cu")
FEWEST = 16  # rows; below, Triton's programs of a row each are as fast
ROWS, TILE, HEADS = 8, 16, 8  # of a block; tokens of a tile; most query heads of a key-value head


class Problem(ctypes.Structure):
    _fields_: ClassVar[list[tuple[str, Any]]] = [
        *(
            (name, ctypes.c_void_p)
            for name in ("q", "k", "v", "keys", "values", "table", "lengths", "out")
        ),
        *(
            (name, ctypes.c_int)
            for name in (
                "rows",
                "heads",
                "kv_heads",
                "page",
                "pages",
                "q_stride",
                "k_stride",
                "v_stride",
            )
        ),
        ("scale", ctypes.c_float),
        ("early", ctypes.c_int),
    ]


def takes(q_BHd: Tensor, k_BGd: Tensor, v_BGd: Tensor, keys_pPGd: Tensor) -> bool:
    """Is this the kernel for these rows and this cache? Hopper, 16-bit numbers, heads of 64 or 128,
    pages of tiles.

    Rows are read in pieces: of 4 bytes of q, of 16 bytes of k and v.
    """
    (rows, heads, d), (page, kv_heads) = q_BHd.shape, keys_pPGd.shape[1:3]
    return (
        q_BHd.is_cuda
        and rows >= FEWEST
        and q_BHd.dtype == keys_pPGd.dtype
        and q_BHd.dtype in (torch.bfloat16, torch.float16)
        and d in (64, 128)
        and heads <= HEADS * kv_heads
        and page % TILE == 0
        and all(_aligned(x, size) for x, size in ((q_BHd, 4), (k_BGd, 16), (v_BGd, 16)))
        and available(d, q_BHd.dtype, q_BHd.device)
    )


def _aligned(x_THd: Tensor, size: int) -> bool:
    return x_THd.data_ptr() % size == 0 and x_THd.stride(0) * x_THd.element_size() % size == 0


@cache
def available(d: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Is it a CUDA device of capability 9.0, on a machine with an nvcc that builds the kernel?"""
    return torch.cuda.get_device_capability(device) == (9, 0) and nvcc.builds(
        lambda: _library(d, dtype), "rows of decode attention read a shared prompt one by one"
    )


def decode(
    q_BHd: Tensor,
    k_BGd: Tensor,
    v_BGd: Tensor,
    keys_pPGd: Tensor,
    values_pPGd: Tensor,
    table_BN: Tensor,
    lengths_B: Tensor,
    scale: float,
) -> Tensor:
    """`kernels.attention.decode.paged_decode` for what `takes` says yes to. RuntimeError when it
    cannot be launched."""
    (rows, heads, d), (page, kv_heads) = q_BHd.shape, keys_pPGd.shape[1:3]
    library, device = _library(d, q_BHd.dtype), q_BHd.device
    out_BHd = torch.empty((rows, heads, d), dtype=q_BHd.dtype, device=device)
    tensors = (q_BHd, k_BGd, v_BGd, keys_pPGd, values_pPGd, table_BN, lengths_B, out_BHd)
    problem = Problem(
        *(x.data_ptr() for x in tensors),
        rows,
        heads,
        kv_heads,
        page,
        *(x.stride(0) for x in (table_BN, q_BHd, k_BGd, v_BGd)),
        scale * math.log2(math.e),
        early(),
    )
    with torch.cuda.device(device):
        blocks = -(-rows // ROWS) * kv_heads
        splits = next(
            (s for s in range(8, 1, -1) if blocks <= _clusters(d, q_BHd.dtype, device, s)), 1
        )
        stream = torch.cuda.current_stream(device).cuda_stream
        _check(
            library,
            library.paged_decode(ctypes.byref(problem), splits, None, ctypes.c_void_p(stream)),
        )
    return out_BHd


@cache
def _clusters(d: int, dtype: torch.dtype, device: torch.device, splits: int) -> int:
    """Clusters of so many blocks that the device runs at once; 0 where it knows no such
    clusters."""
    library, active = _library(d, dtype), ctypes.c_int()
    problem = Problem(rows=ROWS, kv_heads=1)
    error = library.paged_decode(ctypes.byref(problem), splits, ctypes.byref(active), None)
    return 0 if error else active.value


def _check(library: ctypes.CDLL, error: int) -> None:
    if error:
        raise RuntimeError(
            f"decode attention: paged_decode failed: {library.paged_error(error).decode()}"
        )


@cache
def _library(d: int, dtype: torch.dtype) -> ctypes.CDLL:
    library = nvcc.library(
        SOURCE, (9, 0), {"HEAD": str(d), "HALF": str(int(dtype == torch.float16))}
    )
    library.paged_decode.argtypes = [
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_void_p,
    ]
    library.paged_decode.restype = ctypes.c_int
    library.paged_error.argtypes, library.paged_error.restype = [ctypes.c_int], ctypes.c_char_p
    return library
