"""Rows rotated and rounded on a CPU: `avx2.cpp` for torch, in float32, with torch's bits."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from lowroll.kernels import cxx
from lowroll.kernels.build import fields, pointer
from lowroll.kernels.support import NO_GRADIENT, Support, needs_gradient, no

SOURCE = Path(__file__).with_suffix(".cpp")
LEAST = 512  # features of a row; shorter ones are faster in torch


class CpuQuantizeArguments(ctypes.Structure):
    _fields_ = [
        *fields(ctypes.c_void_p, "x", "rotated", "codes", "scale"),
        *fields(ctypes.c_int, "M", "K", "width", "threads"),
    ]


def supports(x: Tensor) -> Support:
    if x.dtype != torch.float32:
        return no("takes float32")
    if x.shape[-1] < LEAST:
        return no(f"takes rows of {LEAST} features or more")
    if needs_gradient(x):
        return NO_GRADIENT
    return cxx.supports(SOURCE, x.device, "rows are rotated and rounded by torch")


def rotate(x: Tensor, width: int) -> Tensor:
    """Return x [..., K] rotated in blocks of 4, 16, 64 or 256 features."""
    x = x.contiguous()
    rotated = torch.empty_like(x)
    _run(x, rotated, None, None, width)
    return rotated


def quantize(x_MK: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return int8 codes [M, K] and scales [M, 1], rotated first unless `width` is 1."""
    x_MK = x_MK.contiguous()
    codes_MK = torch.empty(x_MK.shape, dtype=torch.int8)
    scale_M1 = torch.empty(x_MK.shape[0], 1)
    _run(x_MK, None, codes_MK, scale_M1, width)
    return codes_MK, scale_M1


def _run(
    x: Tensor, rotated: Tensor | None, codes: Tensor | None, scale: Tensor | None, width: int
) -> None:
    num_in = x.shape[-1]
    pointers = [pointer(t) for t in (x, rotated, codes, scale)]
    arguments = CpuQuantizeArguments(*pointers, x.numel() // num_in, num_in, width)
    cxx.run(SOURCE, "avx2_rows", arguments)
