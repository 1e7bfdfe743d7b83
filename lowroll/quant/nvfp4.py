"""NVFP4 W4A16: e2m1 codes, an e4m3 scale for 16 weights of a row, one float32 scale for the matrix.

    g    = 448 * 6 / amax(|w|)                       the matrix, stored as this multiplier
    s_b  = e4m3(min(g * amax(|w_b|) / 6, 448))       a block of 16; 1/8 where that rounds to 0
    q    = e2m1(clamp(w / (s_b / g), -6, 6))         w^ = q (s_b / g)

An amax of 0, or so small that g overflows, gives g = 1. The layout is compressed-tensors'
`nvfp4-pack-quantized` (QeRL, section 2 and Eq. 6). Parts from a file with different g keep one a
row: `weight_global_scale` [N].

Legend: `quant`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowroll.kernels.quantize.quantize4 import quantize4
from lowroll.quant.formats import divide
from lowroll.quant.fp8 import MAX, to_e4m3
from lowroll.quant.grid import Stretch
from lowroll.quant.groups import PackedE2M1, split
from lowroll.quant.scheme import Scheme, arguments

BLOCK = 16


class NVFloat4(PackedE2M1):
    name = "nvfp4"
    summary = "W4A16, e2m1 in blocks of 16 with e4m3 scales, a global scale a matrix"
    bits = 4.5
    group = BLOCK
    once = ("weight_global_scale",)
    kernel = name
    stacked = (kernel, "weight_packed", "weight_scale", "weight_global_scale")
    scheme = Scheme(
        "nvfp4-pack-quantized",
        arguments(4, "float", "tensor_group", group_size=BLOCK),
        scale_dtype="torch.float8_e4m3fn",
    )
    read_experts = False  # it loads them without the global scales: wrong numbers

    def scales(self, w_NK: Tensor, stretch_NG: Stretch = 1.0) -> dict[str, Tensor]:
        amax_NG = split(w_NK, BLOCK).abs().amax(dim=-1)
        global_1 = _global_scale(amax_NG.amax().reshape(1))
        scale_NG = to_e4m3(global_1 * divide(amax_NG * stretch_NG, 6.0))
        scale_NG = torch.where(scale_NG.float() > 0, scale_NG.float(), 0.125).to(scale_NG.dtype)
        return {"weight_scale": scale_NG, "weight_global_scale": global_1}

    def steps(self, scales: dict[str, Tensor]) -> Tensor:
        return scales["weight_scale"].float() / scales["weight_global_scale"][:, None]

    def encode_by_kernel(self, w_NK: Tensor, amax_1: Tensor, tensors: dict[str, Tensor]) -> None:
        global_1 = _global_scale(amax_1)
        quantize4(
            w_NK, self.name, BLOCK, tensors["weight_packed"], tensors["weight_scale"], global_1
        )
        tensors["weight_global_scale"].copy_(global_1)


def _global_scale(amax_1: Tensor) -> Tensor:
    global_1 = 6 * MAX / amax_1
    return torch.where(global_1.isfinite(), global_1, torch.ones_like(global_1))
