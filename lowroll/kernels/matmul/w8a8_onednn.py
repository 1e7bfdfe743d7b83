"""int8 rows times int8 weights on a CPU, by oneDNN on a packed copy of the weights. `quant.int8`
chooses among this, `w8a8_vnni` and `w8a8_float32`.

oneDNN takes unsigned activations: codes + 128, with 128 as their zero point.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from lowroll.kernels.support import NO_CPU, YES, Support, no

Packed = tuple[Tensor, Tensor, Tensor]  # oneDNN's weight, its scales, zero points


def pack(codes_NK: Tensor, scale_N: Tensor) -> Packed:
    """Return codes and scales in oneDNN's layout."""
    return (
        torch.ops.onednn.qlinear_prepack(codes_NK, None),
        scale_N.flatten(),
        torch.zeros(codes_NK.shape[0], dtype=torch.int32),
    )


def multiply(codes_MK: Tensor, packed: Packed) -> Tensor:
    """Return float32 sums [M, N] times the weights' scales."""
    unsigned_MK = codes_MK.view(torch.uint8).bitwise_xor(128)  # codes + 128, by the sign bit
    return _multiply(unsigned_MK, packed, 1.0)


def multiply_digits(digits: Sequence[Tensor], packed: Packed) -> Tensor:
    """Return float32 sums [M, N] of base-256 digits, highest first: signed bytes plus 128."""
    weight, scale_N, zero_N = packed
    places = [float(256**power) for power in reversed(range(len(digits)))]
    sums_MN = _multiply(digits[0], packed, places[0])
    for digit_MK, place in zip(digits[1:], places[1:], strict=True):
        operands = digit_MK, place, 128, weight, scale_N, zero_N, sums_MN, None
        output = 1.0, 0, torch.float32
        sums_MN = torch.ops.onednn.qlinear_pointwise.binary(
            *operands, *output, 1.0, 0, "sum", 1.0, "none", [], ""
        )
    return sums_MN


def _multiply(shifted_MK: Tensor, packed: Packed, scale: float) -> Tensor:
    weight, scale_N, zero_N = packed
    arguments = shifted_MK, scale, 128, weight, scale_N, zero_N, None, 1.0, 0, torch.float32
    return torch.ops.onednn.qlinear_pointwise(*arguments, "none", [], "")


@cache
def has_amx() -> bool:
    """Return whether oneDNN multiplies bytes by AMX."""
    return bool(torch.cpu.get_capabilities().get("amx_int8"))


@cache
def supports_device(device: torch.device) -> Support:
    """Return whether oneDNN does not saturate (without VNNI it adds pairs in 16 bits)."""
    if device.type != "cpu":
        return NO_CPU
    codes_NK = torch.full((64, 256), -128, dtype=torch.int8)
    codes_NK[::2] = 127
    codes_MK = torch.full((2, 256), 127, dtype=torch.int8)
    codes_MK[1] = -127
    try:
        sums_MN = multiply(codes_MK, pack(codes_NK, torch.ones(64, 1)))
    except (RuntimeError, AttributeError, NotImplementedError):
        return no("torch has no int8 product of oneDNN here")
    if torch.equal(sums_MN.double(), codes_MK.double() @ codes_NK.double().t()):
        return YES
    return no("oneDNN's int8 sums saturate on this CPU, which has no VNNI")
