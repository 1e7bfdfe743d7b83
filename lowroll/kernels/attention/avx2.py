"""Attention on a CPU: `avx2.cpp` for torch, float32. A query's bits depend on the query and its
keys alone."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from lowroll.kernels import cxx
from lowroll.kernels.build import fields, pointer
from lowroll.kernels.support import NO_GRADIENT, Support, needs_gradient, no

SOURCE = Path(__file__).with_suffix(".cpp")
MULTIPLE = 8  # of d
WIDEST = 256  # d
LEAST = 512  # numbers in a row's queries


class CpuAttentionArguments(ctypes.Structure):
    _fields_ = [
        *fields(ctypes.c_void_p, "q", "k", "v", "keys", "values", "table", "rows", "lengths"),
        *fields(ctypes.c_void_p, "sinks", "out"),
        *fields(ctypes.c_int64, "k_stride", "v_stride", "table_stride"),
        ("scale", ctypes.c_float),
        *fields(ctypes.c_int, "B", "H", "G", "d", "P", "window", "threads"),
    ]


def supports_device(device: torch.device) -> Support:
    return cxx.supports(SOURCE, device, "torch attends over copies of the cache")


def supports(q_BHd: Tensor, keys_pPGd: Tensor) -> Support:
    heads, d = q_BHd.shape[1:]
    if q_BHd.dtype != torch.float32 or keys_pPGd.dtype != torch.float32:
        return no("takes float32")
    if d % MULTIPLE or d > WIDEST:
        return no(f"takes heads of up to {WIDEST} numbers, in multiples of {MULTIPLE}")
    if heads * d < LEAST:
        return no(f"takes rows of {LEAST} numbers or more")
    if needs_gradient(q_BHd):
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
    window: int = 0,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Compute `decode.paged_decode`. Heads are contiguous within a row; rows may be strided."""
    cache = (keys_pPGd, values_pPGd)
    sinks_H = None if sinks_H is None else sinks_H.detach().float().contiguous()
    return _run(q_BHd, (k_BGd, v_BGd), cache, table_BN, None, lengths_B, scale, window, sinks_H)


def attend(
    q_THd: Tensor,
    keys_pPGd: Tensor,
    values_pPGd: Tensor,
    table_SN: Tensor,
    sequences_T: Tensor,
    lengths_T: Tensor,
    scale: float,
) -> Tensor:
    """Return attention [T, H, d] of each query over the first `lengths_T` cached keys of its
    sequence, with the bits of `decode`. Indices are int32."""
    return _run(q_THd, None, (keys_pPGd, values_pPGd), table_SN, sequences_T, lengths_T, scale)


def _run(
    q_BHd: Tensor,
    fresh: tuple[Tensor, Tensor] | None,
    cache: tuple[Tensor, Tensor],
    table_BN: Tensor,
    rows_B: Tensor | None,
    lengths_B: Tensor,
    scale: float,
    window: int = 0,
    sinks_H: Tensor | None = None,
) -> Tensor:
    rows, heads, d = q_BHd.shape
    page, kv_heads = cache[0].shape[1:3]
    q_BHd = q_BHd.contiguous()
    out_BHd = torch.empty_like(q_BHd)
    rows_and_sinks = (table_BN, rows_B, lengths_B, sinks_H)
    tensors = (q_BHd, *(fresh or (None, None)), *cache, *rows_and_sinks, out_BHd)
    arguments = CpuAttentionArguments(
        *(pointer(tensor) for tensor in tensors),
        *(0 if tensor is None else tensor.stride(0) for tensor in (*tensors[1:3], table_BN)),
        scale,
        rows,
        heads,
        kv_heads,
        d,
        page,
        window,
    )
    cxx.run(SOURCE, "avx2_decode", arguments)
    return out_BHd
