"""int8 rows times int8 weights on a CPU, by oneDNN on a packed copy of the weights.

    sums[m, n] = (sum_k x[m, k] w[n, k]) * column[n]

oneDNN takes unsigned activations: codes + 128, with 128 as their zero point.

Legend: M rows (tokens), N out features, K in features.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from lowroll.kernels.support import YES, Support, no

Packed = tuple[Tensor, Tensor, Tensor]  # the weight in oneDNN's layout, its scales, zero points


def pack(codes_NK: Tensor, scale_N: Tensor) -> Packed:
    """What `multiply` reads."""
    return (
        torch.ops.onednn.qlinear_prepack(codes_NK, None),
        scale_N.flatten(),
        torch.zeros(codes_NK.shape[0], dtype=torch.int32),
    )


def multiply(codes_MK: Tensor, packed: Packed) -> Tensor:
    """The sums [M, N] in float32. codes_MK: int8, or uint8 with 128 added already."""
    weight, scale_N, zero_N = packed
    shifted_MK = codes_MK
    if codes_MK.dtype == torch.int8:
        shifted_MK = codes_MK.view(torch.uint8).bitwise_xor(128)  # codes + 128, by the sign bit
    return torch.ops.onednn.qlinear_pointwise(
        shifted_MK, 1.0, 128, weight, scale_N, zero_N, None, 1.0, 0, torch.float32, "none", [], ""
    )


@cache
def supports_device(device: torch.device) -> Support:
    """Is it a CPU whose oneDNN accumulates without saturating? (Chips without VNNI add pairs in
    16 bits.)"""
    if device.type != "cpu":
        return no("runs on a CPU")
    codes_NK = torch.full((64, 256), -128, dtype=torch.int8)
    codes_NK[::2] = 127
    codes_MK = torch.full((2, 256), 127, dtype=torch.int8)
    codes_MK[1] = -127
    try:
        got_MN = multiply(codes_MK, pack(codes_NK, torch.ones(64, 1)))
    except (RuntimeError, AttributeError, NotImplementedError):
        return no("torch has no int8 product of oneDNN here")
    if torch.equal(got_MN.double(), codes_MK.double() @ codes_NK.double().t()):
        return YES
    return no("oneDNN's int8 sums saturate on this CPU, which has no VNNI")
