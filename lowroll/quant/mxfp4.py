"""MXFP4 W4A16: e2m1 codes with a power of two for 32 weights of a row (OCP Microscaling Formats
1.0).

    s = 2^(E - 127),   q = e2m1(clamp(w / s, -6, 6)),   w^ = q s

    EVEN   E = 127 + e - 2, e = floor(log2 amax), one more from amax = 1.75 * 2^e on   (compressed-tensors; `mxfp4`)
    FLOOR  E = 127 + floor(log2 amax) - 2                                              (OCP's rule; `mxfp4_floor`)

EVEN saturates a block's largest weight no more than rounding would; FLOOR clips above 6 s. E is
read exactly from the bits of amax and clamped to 0..254. `weight_scale` holds E as uint8.

Legend: `quant`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowroll.kernels.quantize.quantize4 import quantize4
from lowroll.quant.grid import Stretch
from lowroll.quant.groups import PackedE2M1, split
from lowroll.quant.scheme import Scheme, arguments

BLOCK = 32
# carries into the exponent of amax from 1.75 on
QUARTER_OCTAVE = 1 << 21


class MXFloat4(PackedE2M1):
    name = "mxfp4"
    summary = "W4A16, e2m1 in blocks of 32 with powers of two as scales, rounded EVEN"
    bits = 4.25
    group = BLOCK
    bump = QUARTER_OCTAVE
    kernel = name
    stacked = (kernel, "weight_packed", "weight_scale")
    scheme = Scheme(
        "mxfp4-pack-quantized",
        arguments(4, "float", "group", group_size=BLOCK),
        scale_dtype="torch.uint8",
    )
    whole_groups = True

    def scales(self, w_NK: Tensor, stretch_NG: Stretch = 1.0) -> dict[str, Tensor]:
        bits_NG = (split(w_NK, BLOCK).abs().amax(dim=-1) * stretch_NG).view(torch.int32)
        exponent_NG = ((bits_NG + self.bump >> 23) - 2).clamp(0, 254).to(torch.uint8)
        return {"weight_scale": exponent_NG}

    def steps(self, scales: dict[str, Tensor]) -> Tensor:
        return power_of_two(scales["weight_scale"])

    def encode_by_kernel(self, w_NK: Tensor, amax_1: Tensor, tensors: dict[str, Tensor]) -> None:
        quantize4(w_NK, self.name, BLOCK, tensors["weight_packed"], tensors["weight_scale"])

    def finite(self, name: str, tensor: Tensor) -> bool:
        if name == "weight_scale":  # e8m0's NaN
            return bool((tensor < 255).all())
        return super().finite(name, tensor)


class MXFloat4Floor(MXFloat4):
    name = "mxfp4_floor"
    summary = "mxfp4 with the FLOOR rule for its scales"
    stored_as = MXFloat4.name
    bump = 0


def power_of_two(exponent: Tensor) -> Tensor:
    """Return 2^(E - 127) of exponents 0..254, exactly: float32."""
    bits = exponent.int() << 23
    return torch.where(bits > 0, bits, 1 << 22).view(torch.float32)  # 2^-127 is subnormal
