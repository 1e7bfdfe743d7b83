"""float32 rows times frozen int8 codes on a CPU by three byte products, in half the time with AMX.

    x[m, k] = step[m] (2^16 a + 2^8 b + c),      a, b, c signed bytes
    step[m] = amax(|x[m, :]|) / MOST
    y[m, n] = step[m] (2^16 (a . w) + 2^8 (b . w) + c . w)[m, n]

Inner sums are exact; the loss is 2^-23 of a row's largest number, about that of float32 sums. A row
with a non-finite number gives NaN.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from lowroll.kernels import cxx
from lowroll.kernels.build import fields, pointer
from lowroll.kernels.launch import contiguous_rows
from lowroll.kernels.matmul import w8a8_onednn
from lowroll.kernels.support import NO_CPU, NO_GRADIENT, Support, needs_gradient, no

SOURCE = Path(__file__).with_suffix(".cpp")
MOST = 127.0 * 65536  # largest number over its step, so that a, b and c are bytes
LEAST = 1 << 18  # weights of a matrix
AT_ONCE = 1024  # rows, which bounds the memory


class LimbsArguments(ctypes.Structure):
    _fields_ = [
        *fields(ctypes.c_void_p, "x", "scale", "bytes", "step", "sums", "y"),
        *fields(ctypes.c_int64, "stride", "y_stride"),
        ("most", ctypes.c_float),
        *fields(ctypes.c_int, "M", "K", "N", "threads"),
    ]


@cache
def supports_device(device: torch.device) -> Support:
    """Return whether the CPU has AMX and a compiler can build the kernel."""
    if device.type != "cpu":
        return NO_CPU
    if not w8a8_onednn.has_amx():
        return no("three products of bytes are slower than one of floats on a CPU without AMX")
    if not (support := w8a8_onednn.supports_device(device)):
        return support
    return cxx.supports(SOURCE, device, "frozen int8 codes are multiplied as floats")


def supports(x_MK: Tensor, codes_NK: Tensor) -> Support:
    if needs_gradient(x_MK):
        return NO_GRADIENT
    if x_MK.dtype != torch.float32 or codes_NK.dtype != torch.int8:
        return no("takes float32 rows and int8 codes")
    if codes_NK.numel() < LEAST:
        return no("small matrices are torch's")
    return supports_device(x_MK.device)


def add_product(
    y_MN: Tensor, x_MK: Tensor, packed: w8a8_onednn.Packed, scale_K: Tensor | None = None
) -> Tensor:
    """Add (x * scale) w^T to y and return y, all float32. `packed` scales w."""
    assert y_MN.stride(1) == 1, "sums are added to rows whose numbers lie side by side"
    x_MK = contiguous_rows(x_MK)
    for x, y in zip(x_MK.split(AT_ONCE), y_MN.split(AT_ONCE), strict=True):
        _add(y, x, packed, scale_K)
    return y_MN


def _add(y_MN: Tensor, x_MK: Tensor, packed: w8a8_onednn.Packed, scale_K: Tensor | None) -> None:
    (M, K), N = x_MK.shape, y_MN.shape[1]
    bytes_LK = torch.empty(3 * M, K, dtype=torch.uint8)
    step_M = torch.empty(M)
    pointers = [pointer(t) for t in (x_MK, scale_K, bytes_LK, step_M, None, y_MN)]
    arguments = LimbsArguments(*pointers, x_MK.stride(0), y_MN.stride(0), MOST, M, K, N)
    cxx.run(SOURCE, "limbs_split", arguments)
    sums_MN = w8a8_onednn.multiply_digits(bytes_LK.split(M), packed)
    arguments.sums = pointer(sums_MN)
    cxx.run(SOURCE, "limbs_join", arguments)
