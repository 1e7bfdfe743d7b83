"""int8 rows times int8 weights on a CPU with AVX-512 VNNI: `w8a8_vnni.cpp` for torch, from float32
to float32 in one call. `quant.int8` chooses among this, `w8a8_onednn` and `w8a8_float32`.

Bits are those of `quantize_rows` and `w8a8_onednn`: sums are exact, and each later operation
rounds. It takes a third to nine tenths of oneDNN's time, whose calls are slow for few rows
(docs/LOG.md).
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lowroll.kernels import cxx
from lowroll.kernels.build import fields, pointer
from lowroll.kernels.launch import triton_supports
from lowroll.kernels.matmul import ordered, w8a8_onednn
from lowroll.kernels.support import Support, no

SOURCE = Path(__file__).with_suffix(".cpp")
TILE = 32  # channels
MULTIPLE = 32  # of K
LEAST = 512  # features of a row, as in `quantize.avx2`
AT_ONCE = 1024  # rows, which bounds the memory of codes
MOST_BESIDE_AMX = 64  # rows; with AMX oneDNN multiplies more


class VnniArguments(ctypes.Structure):
    _fields_ = [
        *fields(ctypes.c_void_p, "x", "w", "scale", "bias", "y", "scratch"),
        *fields(ctypes.c_int, "M", "N", "K", "width", "at_once", "threads"),
    ]


class Packed(NamedTuple):
    codes: Tensor  # uint8 [tiles, K / 4, TILE, 4], plus 128
    scale_N: Tensor


@cache
def supports_device(device: torch.device) -> Support:
    """Return whether the CPU has AVX-512 VNNI, allowed by ATEN_CPU_CAPABILITY, and a compiler
    builds the kernel."""
    if device.type == "cpu" and not (ordered.has_avx512() and _has_vnni()):
        return no("needs a CPU with AVX-512 VNNI")
    return cxx.supports(SOURCE, device, "int8 rows are multiplied by oneDNN")


def _has_vnni() -> bool:
    return bool(torch.cpu.get_capabilities().get("avx512_vnni"))


def supports(x_MK: Tensor) -> bool:
    """Return whether the kernel takes these rows."""
    if x_MK.dtype != torch.float32 or x_MK.device.type != "cpu" or triton_supports(x_MK):
        return False
    num_rows, num_in = x_MK.shape
    if num_rows == 0 or num_rows > MOST_BESIDE_AMX and w8a8_onednn.has_amx():
        return False
    fits = num_in >= LEAST and num_in % MULTIPLE == 0
    if not fits or (x_MK.requires_grad and torch.is_grad_enabled()):
        return False
    return bool(supports_device(x_MK.device))


def pack(codes_NK: Tensor, scale_N: Tensor) -> Packed:
    """Return codes and scales in the kernel's layout, padded to whole tiles."""
    num_out, num_in = codes_NK.shape
    codes_NK = F.pad(codes_NK, (0, 0, 0, -num_out % TILE))
    tiles = codes_NK.view(torch.uint8).bitwise_xor(128)  # codes + 128
    tiles = tiles.view(-1, TILE, num_in // 4, 4).transpose(1, 2).contiguous()
    return Packed(tiles, scale_N.flatten().contiguous())


def linear(x_MK: Tensor, packed: Packed, bias_N: Tensor | None, width: int) -> Tensor:
    """Return y_MN. width: of the rotation's blocks; 1 is no rotation."""
    x_MK = x_MK.contiguous()
    bias_N = None if bias_N is None else bias_N.float().contiguous()
    (num_rows, num_in), num_out = x_MK.shape, len(packed.scale_N)
    y_MN = torch.empty(num_rows, num_out)
    at_once = min(num_rows, AT_ONCE)
    scratch = torch.empty(at_once, num_in + 8, dtype=torch.int8)  # codes, a scale, a sum
    pointers = [pointer(t) for t in (x_MK, packed.codes, packed.scale_N, bias_N, y_MN, scratch)]
    sizes = num_rows, num_out, num_in, width, at_once
    cxx.run(SOURCE, "vnni_linear", VnniArguments(*pointers, *sizes))
    return y_MN
