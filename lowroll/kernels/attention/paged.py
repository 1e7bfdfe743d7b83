"""Decode attention for many rows: `paged.cu` for torch. A launch depends on rows, heads and the
device alone."""

from __future__ import annotations

import ctypes
import math
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from lowroll.kernels import nvcc
from lowroll.kernels.attention.quantized_cache import Codes
from lowroll.kernels.build import fields
from lowroll.kernels.launch import early
from lowroll.kernels.support import NO_CUDA, Support, cuda_supports, no

SOURCE = Path(__file__).with_name("paged.cu")
FEWEST = 16  # rows; with fewer, Triton is as fast
ROWS = 8  # of a block
TILE = 16  # tokens
HEADS = 8  # query heads of a key-value head, at most
CAPABILITY = (9, 0)  # exactly


class PagedAttentionArguments(ctypes.Structure):
    _fields_ = [
        *fields(ctypes.c_void_p, "q", "k", "v", "keys", "values", "table", "lengths", "out"),
        *fields(ctypes.c_void_p, "fine", "scales", "channels"),
        *fields(ctypes.c_int, "rows", "heads", "kv_heads", "page", "pages"),
        *fields(ctypes.c_int, "q_stride", "k_stride", "v_stride"),
        ("scale", ctypes.c_float),
        ("early", ctypes.c_int),
    ]


def supports(q_BHd: Tensor, k_BGd: Tensor, v_BGd: Tensor, keys_pPGd: Tensor) -> Support:
    """Return whether the kernel takes these operands. It reads q in pieces of 4 bytes, k and v in
    pieces of 16."""
    rows, heads, d = q_BHd.shape
    page, kv_heads = keys_pPGd.shape[1:3]
    if not q_BHd.is_cuda:
        return NO_CUDA
    if rows < FEWEST:
        return no("takes 16 rows or more")
    if q_BHd.dtype not in (torch.bfloat16, torch.float16):
        return no("takes queries in bfloat16 or float16")
    if keys_pPGd.dtype not in (q_BHd.dtype, torch.uint8):
        return no("takes a cache of the queries' type, or of 8-bit codes")
    if d not in (64, 128):
        return no("takes heads of 64 or 128")
    if heads > HEADS * kv_heads:
        return no("takes at most 8 query heads a key-value head")
    if page % TILE:
        return no("takes pages of multiples of 16 tokens")
    if not all(_starts_aligned(x, size) for x, size in ((q_BHd, 4), (k_BGd, 16), (v_BGd, 16))):
        return no("takes queries, keys and values whose rows begin at multiples of 16 bytes")
    return supports_device(d, q_BHd.dtype, q_BHd.device, keys_pPGd.dtype == torch.uint8)


def _starts_aligned(x_THd: Tensor, size: int) -> bool:
    return x_THd.data_ptr() % size == 0 and x_THd.stride(0) * x_THd.element_size() % size == 0


@cache
def supports_device(
    d: int, dtype: torch.dtype, device: torch.device, codes: bool = False
) -> Support:
    return cuda_supports(device, CAPABILITY, only=True) and nvcc.supports(
        lambda: _library(d, dtype, codes),
        "rows of decode attention read a shared prompt one by one",
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
    """Compute `decode.paged_decode`. RuntimeError when the launch fails."""
    return _decode(q_BHd, k_BGd, v_BGd, keys_pPGd, values_pPGd, table_BN, lengths_B, scale)


def decode8(
    q_BHd: Tensor,
    k_BGd: Tensor,
    v_BGd: Tensor,
    cache_pP: Codes,
    channels_GF: Tensor,
    table_BN: Tensor,
    lengths_B: Tensor,
    scale: float,
) -> Tensor:
    """Compute `decode8.paged_decode8`."""
    keys, values, fine, scales = cache_pP
    return _decode(
        q_BHd, k_BGd, v_BGd, keys, values, table_BN, lengths_B, scale, (fine, scales, channels_GF)
    )


def _decode(
    q_BHd: Tensor,
    k_BGd: Tensor,
    v_BGd: Tensor,
    keys_pPGd: Tensor,
    values_pPGd: Tensor,
    table_BN: Tensor,
    lengths_B: Tensor,
    scale: float,
    finer: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Tensor:
    (rows, heads, d), (page, kv_heads) = q_BHd.shape, keys_pPGd.shape[1:3]
    library_key = (d, q_BHd.dtype, finer is not None)
    library, device = _library(*library_key), q_BHd.device
    out_BHd = torch.empty((rows, heads, d), dtype=q_BHd.dtype, device=device)
    tensors = (q_BHd, k_BGd, v_BGd, keys_pPGd, values_pPGd, table_BN, lengths_B, out_BHd)
    arguments = PagedAttentionArguments(
        *(x.data_ptr() for x in tensors),
        *((x.data_ptr() for x in finer) if finer else (None, None, None)),
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
            (s for s in range(8, 1, -1) if blocks <= _active_clusters(*library_key, device, s)), 1
        )
        stream = torch.cuda.current_stream(device).cuda_stream
        _check(
            library,
            library.paged_decode(ctypes.byref(arguments), splits, None, ctypes.c_void_p(stream)),
        )
    return out_BHd


@cache
def _active_clusters(
    d: int, dtype: torch.dtype, codes: bool, device: torch.device, splits: int
) -> int:
    library, active = _library(d, dtype, codes), ctypes.c_int()
    arguments = PagedAttentionArguments(rows=ROWS, kv_heads=1)
    error = library.paged_decode(ctypes.byref(arguments), splits, ctypes.byref(active), None)
    return 0 if error else active.value


def _check(library: ctypes.CDLL, error: int) -> None:
    if error:
        raise RuntimeError(
            f"decode attention: paged_decode failed: {library.paged_error(error).decode()}"
        )


@cache
def _library(d: int, dtype: torch.dtype, codes: bool) -> ctypes.CDLL:
    library = nvcc.library(
        SOURCE,
        CAPABILITY,
        {
            "HEAD": str(d),
            "HALF": str(int(dtype == torch.float16)),
            "CODES": str(int(codes)),
        },
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
