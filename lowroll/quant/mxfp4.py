"""MXFP4 W4A16: e2m1 codes with a power of two for 32 weights of a row (OCP Microscaling Formats
1.0).

    s = 2^(E - 127),   q = e2m1(clamp(w / s, -6, 6)),   w^ = q s

    EVEN   E = 127 + e - 2, e = floor(log2 amax), one more from amax = 1.75 * 2^e on   (compressed-tensors; `mxfp4`)
    FLOOR  E = 127 + floor(log2 amax) - 2                                              (OCP's rule; `mxfp4_floor`)

EVEN saturates a block's largest weight no more than rounding would; FLOOR clips above 6 s. E is
read exactly from the bits of amax and clamped to 0..254; a block of zeros has E = 0 and codes 0
(algorithms B5). Codes are packed as NVFP4's; `weight_scale` holds E as uint8.

Legend: N out features, K in features, G blocks of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowroll.kernels.launch import triton_supports
from lowroll.kernels.matmul import w4a16
from lowroll.kernels.quantize.quantize4 import quantize4
from lowroll.quant.formats import QTensor, WeightOnly
from lowroll.quant.grid import Grid, Gridded, Stretch
from lowroll.quant.groups import E2M1_LEVELS, encode_e2m1, join, nearest_e2m1, pack, split, unpack
from lowroll.quant.scheme import Scheme, arguments

BLOCK = 32
# added to the bits of amax, it carries into float32's exponent from 1.75 on
QUARTER_OCTAVE = 1 << 21


class MXFloat4(Gridded, WeightOnly):
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

    def codes(self, w_NK: Tensor, scales: dict[str, Tensor]) -> dict[str, Tensor]:
        step_NG1 = power_of_two(scales["weight_scale"])[..., None]
        codes_NGS = encode_e2m1(split(w_NK, BLOCK) / step_NG1)
        return {"weight_packed": pack(join(codes_NGS, w_NK.shape[1]))}

    def grid(self, scales: dict[str, Tensor], shape: tuple[int, int]) -> Grid:
        return Grid(power_of_two(scales["weight_scale"]), nearest_e2m1, BLOCK)

    def encode_into(self, w_NK: Tensor, amax_1: Tensor, tensors: dict[str, Tensor]) -> None:
        if not triton_supports(w_NK):
            return super().encode_into(w_NK, amax_1, tensors)
        quantize4(w_NK, self.name, BLOCK, tensors["weight_packed"], tensors["weight_scale"])

    def dequantize(self, q: QTensor, dtype: torch.dtype) -> Tensor:
        if w4a16.supports_dequantize(self.kernel, q.tensors, q.shape, dtype):
            return w4a16.dequantize(self.kernel, q.tensors, q.shape, dtype)
        values_NGS = split(unpack(q.tensors["weight_packed"], E2M1_LEVELS, q.shape[1]), BLOCK)
        return join(values_NGS * power_of_two(q.tensors["weight_scale"])[..., None], q.shape[1]).to(
            dtype
        )

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
    """Return 2^(E - 127) of e8m0 exponents 0..254, exactly: float32."""
    bits = exponent.int() << 23
    return torch.where(bits > 0, bits, 1 << 22).view(torch.float32)  # 2^-127 is subnormal
