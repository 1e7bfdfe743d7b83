"""Decode attention on a CPU: `avx2.cpp` for torch, float32, over the cache as it is.

Torch copies the pages of every row and attends to the copies under a mask. This reads each key and
value once where it lies, for four query heads at a time. A row's bits depend on the row alone:
neither on the rows beside it nor on threads.

Few numbers are left to torch, whose bits small models keep.

Legend: B rows, H query heads, G key-value heads, d head size, p pages of the cache, P tokens of a
page, N pages of a table row.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from lowroll.kernels import cxx
from lowroll.kernels.support import NO_GRADIENT, Support, no

SOURCE = Path(__file__).with_suffix(".cpp")
MULTIPLE = 8  # of d
WIDEST = 256  # d
LEAST = 512  # numbers of a row's queries


class Problem(ctypes.Structure):
    """The struct of `avx2.cpp`."""

    _fields_: ClassVar[list[tuple[str, Any]]] = [
        *(
            (name, ctypes.c_void_p)
            for name in ("q", "k", "v", "keys", "values", "table", "lengths", "out")
        ),
        *((name, ctypes.c_int64) for name in ("k_stride", "v_stride", "table_stride")),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("B", "H", "G", "d", "P", "threads")),
    ]


def supports_device(device: torch.device) -> Support:
    """Is it a CPU with AVX2, on a machine with a compiler that builds the kernel?"""
    if device.type != "cpu":
        return cxx.NO_CPU
    return cxx.supports(SOURCE, "torch attends over copies of the cache")


def supports(q_BHd: Tensor, keys_pPGd: Tensor) -> Support:
    """Does `decode` take these queries and this cache?"""
    heads, d = q_BHd.shape[1:]
    if q_BHd.dtype != torch.float32 or keys_pPGd.dtype != torch.float32:
        return no("takes float32")
    if d % MULTIPLE or d > WIDEST:
        return no(f"takes heads of up to {WIDEST} numbers, in multiples of {MULTIPLE}")
    if heads * d < LEAST:
        return no(f"takes rows of {LEAST} numbers or more")
    if torch.is_grad_enabled() and q_BHd.requires_grad:
        return NO_GRADIENT
    return supports_device(q_BHd.device)


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
    """As `decode.paged_decode`. Heads of k and v lie contiguous within a row; rows may be strided."""
    rows, heads, d = q_BHd.shape
    page, kv_heads = keys_pPGd.shape[1:3]
    q_BHd = q_BHd.contiguous()
    out_BHd = torch.empty_like(q_BHd)
    tensors = (q_BHd, k_BGd, v_BGd, keys_pPGd, values_pPGd, table_BN, lengths_B, out_BHd)
    problem = Problem(
        *(tensor.data_ptr() for tensor in tensors),
        *(tensor.stride(0) for tensor in (k_BGd, v_BGd, table_BN)),
        scale,
        rows,
        heads,
        kv_heads,
        d,
        page,
        torch.get_num_threads(),
    )
    cxx.run(SOURCE, "avx2_decode", problem)
    return out_BHd
