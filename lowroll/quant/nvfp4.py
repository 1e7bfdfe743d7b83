"""NVFP4 W4A16: e2m1 codes, an e4m3 scale for 16 weights of a row, one float32 scale for the matrix.

    g    = 448 * 6 / amax(|w|)                       the matrix, stored as this multiplier
    s_b  = e4m3(min(g * amax(|w_b|) / 6, 448))       a block of 16; 1/8 where that rounds to 0
    q    = e2m1(clamp(w / (s_b / g), -6, 6))         w^ = q (s_b / g)

g spreads the block scales over e4m3's range. An amax of 0, or so small that g overflows, gives g =
1. The layout is compressed-tensors' `nvfp4-pack-quantized`, two codes a byte from the low half
(QeRL, section 2 and Eq. 6; algorithms B4).

Kernels need one global scale for a fused matrix. Here q, k and v share theirs, and gate and up too,
because the fused matrix is quantized as one. Parts from a file with different g keep them, one a
row: `weight_global_scale` [N].

Legend: N out features, K in features, G blocks of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowroll.kernels.launch import triton_supports
from lowroll.kernels.matmul import w4a16
from lowroll.kernels.quantize.quantize4 import quantize4
from lowroll.quant.formats import QTensor, WeightOnly, divide
from lowroll.quant.fp8 import MAX, to_e4m3
from lowroll.quant.grid import Grid, Gridded, Stretch
from lowroll.quant.groups import E2M1_LEVELS, encode_e2m1, join, nearest_e2m1, pack, split, unpack
from lowroll.quant.scheme import Scheme, arguments

BLOCK = 16


class NVFloat4(Gridded, WeightOnly):
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

    def codes(self, w_NK: Tensor, scales: dict[str, Tensor]) -> dict[str, Tensor]:
        step_NG1 = _block_steps(scales["weight_scale"], scales["weight_global_scale"])
        codes_NGS = encode_e2m1(split(w_NK, BLOCK) / step_NG1)
        return {"weight_packed": pack(join(codes_NGS, w_NK.shape[1]))}

    def grid(self, scales: dict[str, Tensor], shape: tuple[int, int]) -> Grid:
        step_NG1 = _block_steps(scales["weight_scale"], scales["weight_global_scale"])
        return Grid(step_NG1[..., 0], nearest_e2m1, BLOCK)

    def encode_into(self, w_NK: Tensor, amax_1: Tensor, tensors: dict[str, Tensor]) -> None:
        if not triton_supports(w_NK):
            return super().encode_into(w_NK, amax_1, tensors)
        global_1 = _global_scale(amax_1)
        quantize4(
            w_NK, self.name, BLOCK, tensors["weight_packed"], tensors["weight_scale"], global_1
        )
        tensors["weight_global_scale"].copy_(global_1)

    def dequantize(self, q: QTensor, dtype: torch.dtype) -> Tensor:
        if w4a16.supports_dequantize(self.kernel, q.tensors, q.shape, dtype):
            return w4a16.dequantize(self.kernel, q.tensors, q.shape, dtype)
        values_NGS = split(unpack(q.tensors["weight_packed"], E2M1_LEVELS, q.shape[1]), BLOCK)
        step_NG1 = _block_steps(q.tensors["weight_scale"], q.tensors["weight_global_scale"])
        return join(values_NGS * step_NG1, q.shape[1]).to(dtype)


def _global_scale(amax_1: Tensor) -> Tensor:
    """Return the multiplier of a matrix with this largest magnitude."""
    global_1 = 6 * MAX / amax_1
    return torch.where(global_1.isfinite(), global_1, torch.ones_like(global_1))


def _block_steps(scale_NG: Tensor, global_1: Tensor) -> Tensor:
    """Return the factor of each block's codes: float32 [N, G, 1]."""
    return (scale_NG.float() / global_1[:, None])[..., None]
