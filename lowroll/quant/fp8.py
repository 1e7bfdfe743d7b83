"""FP8 W8A8 in e4m3 (3 bits of mantissa, no infinity), per channel and token or in blocks.

    fp8         s_w[n] = amax(|w[n, :]|) / 448                    s_x[m] = max(amax(|x[m, :]|) / 448, 1 / (448 * 512))
    fp8_block   s_w a tile of 128 x 128 weights, amax >= 1e-10    s_x a token and 128 features, the same floor
    codes       q = e4m3(clamp(v / s, -448, 448)), to nearest, ties to even
    product     y[m, n] = (sum_k q_x q_w) s_x s_w + bias[n]

Sums are float32's. Per channel, CUDA multiplies the codes themselves (`kernels.matmul.w8a8_cuda`),
with an error of at most 5e-5 of the product of the norms, 4e-4 with many short rows (H200;
docs/LOG.md). Elsewhere codes are multiplied as float32. The activation floor is vLLM's; weight
scales are those of compressed-tensors' FP8_DYNAMIC and DeepSeek-V3's blocks (arXiv 2412.19437,
section 3.3.2). Tiles cover the fused matrix, so the parts before a part must have a multiple of 128
rows.

Legend: `quant`.
"""

from __future__ import annotations

from fractions import Fraction

import torch
import torch.nn.functional as F
from torch import Tensor

from lowroll.kernels.launch import triton_supports
from lowroll.kernels.matmul import ordered
from lowroll.kernels.matmul.w8a8_cuda import multiply, scaled_mm_supports
from lowroll.kernels.quantize.quantize8 import quantize_columns_into, quantize_rows_into
from lowroll.kernels.quantize.rows import Product, QuantizedRows, quantize_rows
from lowroll.quant.formats import QTensor, divide, float_product, multiplicand, nonzero
from lowroll.quant.grid import Grid, Gridded, Stretch
from lowroll.quant.groups import join, split
from lowroll.quant.scheme import Scheme, arguments

E4M3 = torch.float8_e4m3fn
MAX = 448.0
BLOCK = 128
KIND = "fp8"  # of the codes of activations


def to_e4m3(x: Tensor) -> Tensor:
    """Round to e4m3, saturating at +-448."""
    return x.clamp(-MAX, MAX).to(E4M3)


def nearest_e4m3(x: Tensor) -> Tensor:
    return to_e4m3(x).float()


def _slow_reason(device: torch.device) -> str:
    return f"{device.type} has no product of its codes, which are multiplied as float32 numbers"


class Float8(Gridded):
    name = "fp8"
    floating = True
    summary = "e4m3 W8A8, per-channel weights, per-token activations, float32 accumulation"
    bits = 8
    rows = KIND
    stacked = ("w8a8", "weight", "weight_scale")
    scheme = Scheme(
        "float-quantized",
        arguments(8, "float", "channel"),
        arguments(8, "float", "token", dynamic=True),
    )

    def slower_than_float32(self, device: torch.device) -> str:
        if device.type != "cpu" and scaled_mm_supports(device):
            return ""
        return _slow_reason(device)

    def scales(self, w_NK: Tensor, stretch_NG: Stretch = 1.0) -> dict[str, Tensor]:
        amax_N1 = w_NK.float().abs().amax(dim=-1, keepdim=True) * stretch_NG
        return {"weight_scale": nonzero(divide(amax_N1, MAX))}

    def codes(self, w_NK: Tensor, scales: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"weight": to_e4m3(w_NK.float() / scales["weight_scale"])}

    def grid(self, scales: dict[str, Tensor], shape: tuple[int, int]) -> Grid:
        return Grid(scales["weight_scale"], nearest_e4m3, shape[1])

    def dequantize(self, q: QTensor, dtype: torch.dtype) -> Tensor:
        return (q.tensors["weight"].float() * q.tensors["weight_scale"]).to(dtype)

    def encode_into(self, w_NK: Tensor, amax_1: Tensor, tensors: dict[str, Tensor]) -> None:
        # Triton's interpreter rounds to e4m3 wrongly
        if not (w_NK.is_cuda and triton_supports(w_NK)):
            return super().encode_into(w_NK, amax_1, tensors)
        outputs = tensors["weight"], tensors["weight_scale"]
        if w_NK.is_contiguous() or not w_NK.t().is_contiguous():
            quantize_rows_into(w_NK, *outputs, KIND)
        else:
            quantize_columns_into(w_NK.t(), *outputs, KIND)

    def linear(
        self, x_MK: Tensor, q: QTensor, bias_N: Tensor | None, exact: bool = False
    ) -> Tensor:
        return self.product(quantize_rows(x_MK, KIND), q, bias_N, exact).dense()

    def product(
        self, rows: QuantizedRows, q: QTensor, bias_N: Tensor | None, exact: bool = False
    ) -> Product:
        codes_NK, scale_N1 = q.tensors["weight"], q.tensors["weight_scale"]
        if not rows.codes_MK.is_cuda:
            values_NK = q.derive("codes", lambda q: q.tensors["weight"].float())
            sums_MN = float_product(rows.codes_MK.float(), values_NK, None, exact)
        elif exact:  # bfloat16 holds every code
            operands = rows.codes_MK.bfloat16(), codes_NK.bfloat16()
            sums_MN = ordered.product(*operands, dtype=torch.float32)
        else:
            return multiply(rows, codes_NK, scale_N1, bias_N)
        return Product(sums_MN, rows.scale_M1, scale_N1, bias_N, rows.dtype)


def gradient(grad_MN: Tensor, transposed: QTensor) -> Tensor:
    """Return dX [M, K] = dY W, in the dtype of dY [M, N]. transposed: the codes of W' [K, N].

    Scales of dY have no floor, as a batch's mean makes gradients of 1e-7. Sums are the fast kind,
    as rounding to codes has a larger error (docs/LOG.md).
    """
    rows = quantize_rows(grad_MN, "gradient")
    if grad_MN.device.type == "cpu":
        return Float8().product(rows, transposed, None).dense()
    codes_KN, scale_K1 = transposed.tensors["weight"], transposed.tensors["weight_scale"]
    return multiply(rows, codes_KN, scale_K1, None, fast=True).dense()


class Float8Block(Gridded):
    name = "fp8_block"
    floating = True
    summary = "e4m3 W8A8, weights in 128 x 128 tiles, activations a token and 128 features"
    bits = 8
    group = BLOCK
    rounds = True
    scheme = Scheme(
        "float-quantized",
        arguments(8, "float", "block", block_structure=[BLOCK, BLOCK]),
        arguments(8, "float", "group", group_size=BLOCK, dynamic=True),
    )

    read_experts = False

    def slower_than_float32(self, device: torch.device) -> str:
        return _slow_reason(device)

    def scales(self, w_NK: Tensor, stretch_NG: Stretch = 1.0) -> dict[str, Tensor]:
        amax_NG = split(w_NK.float(), BLOCK).abs().amax(-1) * stretch_NG
        amax = F.pad(amax_NG, (0, 0, 0, -len(amax_NG) % BLOCK)).unflatten(0, (-1, BLOCK)).amax(1)
        return {"weight_scale": divide(amax.clamp_min(1e-10), MAX)}

    def codes(self, w_NK: Tensor, scales: dict[str, Tensor]) -> dict[str, Tensor]:
        step_NG = self._steps(scales, w_NK.shape[0])
        codes_NGS = to_e4m3(split(w_NK.float(), BLOCK) / step_NG[..., None])
        return {"weight": join(codes_NGS, w_NK.shape[1]).contiguous()}

    def grid(self, scales: dict[str, Tensor], shape: tuple[int, int]) -> Grid:
        return Grid(self._steps(scales, shape[0]), nearest_e4m3, BLOCK)

    def _steps(self, scales: dict[str, Tensor], num_out: int) -> Tensor:
        return scales["weight_scale"].repeat_interleave(BLOCK, 0)[:num_out]

    def dequantize(self, q: QTensor, dtype: torch.dtype) -> Tensor:
        num_out, num_in = q.shape
        scale_NK = q.tensors["weight_scale"].repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        return (q.tensors["weight"].float() * scale_NK[:num_out, :num_in]).to(dtype)

    def pitch(self, name: str, num_in: int) -> Fraction:
        return Fraction(1, BLOCK) if name == "weight_scale" else Fraction(1)

    def linear(
        self, x_MK: Tensor, q: QTensor, bias_N: Tensor | None, exact: bool = False
    ) -> Tensor:
        bias_N = None if bias_N is None else bias_N.float()
        dense_NK = multiplicand(q, torch.float32)
        return float_product(self.rounded(x_MK), dense_NK, bias_N, exact).to(x_MK.dtype)

    def rounded(self, x_MK: Tensor) -> Tensor:
        blocks_MGS = split(x_MK, BLOCK)
        rows = quantize_rows(blocks_MGS.flatten(0, 1), KIND)
        return join((rows.codes_MK.float() * rows.scale_M1).view_as(blocks_MGS), x_MK.shape[1])
