"""y = x W^T on a CPU with W in 4 bits: `w4_avx2.cpp` for torch, over a QTensor's storages.

    x_b^ = s_b round(x_b / s_b),  s_b = amax(|x_b|) / 32767      b: 256 numbers of a row
    y[m, n] = sum_b s_b[m] sum_g scale[n, g] sum_k x^[m, k] code[n, k]

Inner sums are exact. On normal numbers the error of y is 3e-5 of its spread, a fortieth of
bfloat16's. A row gives the same bits in any batch, and NaN with a non-finite number.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from lowroll.kernels import cxx
from lowroll.kernels.build import fields, pointer
from lowroll.kernels.support import NO_GRADIENT, Support, needs_gradient, no

SOURCE = Path(__file__).with_suffix(".cpp")
FORMATS = {"nvfp4": 0, "mxfp4": 1, "int4": 2, "int4_asym": 3}
MULTIPLE = 64  # of K
BLOCK = 256  # of K, with one scale of x
LEAST = 1 << 18  # weights of a matrix


class CpuMatmulArguments(ctypes.Structure):
    _fields_ = [
        *fields(ctypes.c_void_p, "codes", "scale", "zero", "global_", "bias"),
        *fields(ctypes.c_void_p, "x", "y", "words", "steps"),
        *fields(ctypes.c_int, "M", "N", "K", "kind", "global_per_row", "integers", "threads"),
    ]


def supports_device(device: torch.device) -> Support:
    return cxx.supports(SOURCE, device, "4-bit weights are kept as floats")


def supports(kind: str, x_MK: Tensor, shape: tuple[int, int]) -> Support:
    if x_MK.ndim != 2 or x_MK.shape[0] == 0:
        return no("takes one row of activations or more")
    if needs_gradient(x_MK):
        return NO_GRADIENT
    return supports_matrix(kind, shape, x_MK.device)


@cache
def supports_matrix(kind: str, shape: tuple[int, int], device: torch.device) -> Support:
    if kind not in FORMATS:
        return no("knows nvfp4, mxfp4, int4 and int4_asym")
    if shape[1] % MULTIPLE:
        return no(f"takes in features in multiples of {MULTIPLE}")
    if shape[0] * shape[1] < LEAST:
        return no(f"takes matrices of {LEAST} weights or more")
    return supports_device(device)


def linear(
    kind: str,
    tensors: Mapping[str, Tensor],
    x_MK: Tensor,
    num_out: int,
    bias_N: Tensor | None = None,
    integers: bool = False,
) -> Tensor:
    """Return y_MN in the dtype of x. integers: x holds integers up to 32767, multiplied
    unrounded."""
    x = x_MK.float().contiguous()
    bias = None if bias_N is None else bias_N.float().contiguous()
    rows, num_in = x.shape
    y_MN = torch.empty(rows, num_out)
    words = torch.empty(rows * num_in, dtype=torch.int16)
    steps = torch.empty(rows * -(-num_in // BLOCK))
    weight, scale, zero, global_ = (
        tensors.get(f"weight_{name}") for name in ("packed", "scale", "zero_point", "global_scale")
    )
    if not all(t is None or t.is_contiguous() for t in (weight, scale, zero, global_)):
        raise ValueError(f"{kind}: expected contiguous tensors")
    arguments = CpuMatmulArguments(
        *(pointer(t) for t in (weight, scale, zero, global_, bias, x, y_MN, words, steps)),
        rows,
        num_out,
        num_in,
        FORMATS[kind],
        global_ is not None and global_.numel() > 1,
        integers,
    )
    cxx.run(SOURCE, "avx2_linear", arguments)
    return y_MN.to(x_MK.dtype)
