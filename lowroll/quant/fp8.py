"""FP8 W8A8 in e4m3: 3 bits of mantissa, largest value 448, no infinity. Per channel and token, or in blocks.

    fp8         s_w[n] = amax(|w[n, :]|) / 448                    s_x[m] = max(amax(|x[m, :]|) / 448, 1 / (448 * 512))
    fp8_block   s_w a tile of 128 x 128 weights, amax >= 1e-10    s_x a token and 128 features, the same floor
    codes       q = e4m3(clamp(v / s, -448, 448)), to nearest, ties to even
    product     y[m, n] = (sum_k q_x q_w) s_x s_w + bias[n]

The product of two codes is exact in float32; sums are float32's. Per channel, CUDA multiplies the codes themselves:
`torch._scaled_mm` with unit scales and float32 output, scales applied after it. Its sums differ from the CPU's by their
order and by the bits that tensor cores keep (on an H200 at most 5e-5 of the product of the norms; docs/LOG.md).
Elsewhere, and for blocks, the codes are multiplied as float32 values. Values are clamped before the cast, because e4m3
has no infinity to saturate to. The floor of the activation scale is that of
vLLM's dynamic kernel, the weight scales are those of compressed-tensors' FP8_DYNAMIC and DeepSeek-V3's blocks
(arXiv 2412.19437, section 3.3.2; algorithms B2). Tiles run over a fused matrix as a whole: one part of it is in whole
tiles only when the parts before it have a multiple of 128 rows.

Legend: N out features, K in features, M rows of activations, G groups of a row, S features of a group.
"""
from __future__ import annotations

from fractions import Fraction
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from lowroll.quant.formats import Format, QTensor, divide, multiplicand, nonzero
from lowroll.quant.groups import join, split

E4M3 = torch.float8_e4m3fn
MAX = 448.0
BLOCK = 128
SMALLEST_SCALE = 1 / (MAX * 512)


def to_e4m3(x: Tensor) -> Tensor:
    """The nearest e4m3 numbers, saturating at +-448."""
    return x.clamp(-MAX, MAX).to(E4M3)


def quantize_rows(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    """Dynamic codes of activations along the last dimension: (e4m3 [..., K], float32 scale [..., 1])."""
    x_MK = x_MK.float()
    scale_M1 = divide(x_MK.abs().amax(dim=-1, keepdim=True), MAX).clamp_min(SMALLEST_SCALE)
    return to_e4m3(x_MK / scale_M1), scale_M1


class Float8(Format):
    name, bits, summary = "fp8", 8, "e4m3 W8A8, per-channel weights, per-token activations, float32 accumulation"

    def encode(self, w_NK: Tensor) -> dict[str, Tensor]:
        w_NK = w_NK.float()
        scale_N1 = nonzero(divide(w_NK.abs().amax(dim=-1, keepdim=True), MAX))
        return {"weight": to_e4m3(w_NK / scale_N1), "weight_scale": scale_N1}

    def dequantize(self, q: QTensor, dtype: torch.dtype) -> Tensor:
        return (q.tensors["weight"].float() * q.tensors["weight_scale"]).to(dtype)

    def linear(self, x_MK: Tensor, q: QTensor, bias_N: Tensor | None) -> Tensor:
        codes_MK, scale_M1 = quantize_rows(x_MK)
        on_device = x_MK.is_cuda and _scaled_mm_is_right(x_MK.device)
        sums_MN = _device_sums(codes_MK, q.tensors["weight"]) if on_device else _float_sums(codes_MK, q)
        y_MN = sums_MN.mul_(scale_M1).mul_(q.tensors["weight_scale"].flatten())
        if bias_N is not None:
            y_MN += bias_N
        return y_MN.to(x_MK.dtype)


class Float8Block(Format):
    name, bits, summary = "fp8_block", 8, "e4m3 W8A8, weights in 128 x 128 tiles, activations a token and 128 features"
    group = BLOCK

    def encode(self, w_NK: Tensor) -> dict[str, Tensor]:
        num_out, num_in = w_NK.shape
        tiles = F.pad(w_NK.float(), (0, -num_in % BLOCK, 0, -num_out % BLOCK))
        tiles = tiles.view(tiles.shape[0] // BLOCK, BLOCK, tiles.shape[1] // BLOCK, BLOCK)
        scale = divide(tiles.abs().amax(dim=(1, 3)).clamp_min(1e-10), MAX)
        codes = to_e4m3(tiles / scale[:, None, :, None]).flatten(2).flatten(0, 1)
        return {"weight": codes[:num_out, :num_in].contiguous(), "weight_scale": scale}

    def dequantize(self, q: QTensor, dtype: torch.dtype) -> Tensor:
        num_out, num_in = q.shape
        scale_NK = q.tensors["weight_scale"].repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        return (q.tensors["weight"].float() * scale_NK[:num_out, :num_in]).to(dtype)

    def pitch(self, name: str, num_in: int) -> Fraction:
        return Fraction(1, BLOCK) if name == "weight_scale" else Fraction(1)

    def linear(self, x_MK: Tensor, q: QTensor, bias_N: Tensor | None) -> Tensor:
        codes_MGS, scale_MG1 = quantize_rows(split(x_MK, BLOCK))
        rounded_MK = join(codes_MGS.float() * scale_MG1, x_MK.shape[1])
        bias_N = None if bias_N is None else bias_N.float()
        return F.linear(rounded_MK, multiplicand(q, torch.float32), bias_N).to(x_MK.dtype)


def _float_sums(codes_MK: Tensor, q: QTensor) -> Tensor:
    """sum_k q_x q_w in float32, by the float32 values of the codes."""
    on_cpu = q.device.type == "cpu"
    values_NK = q.derive("codes", _values) if on_cpu else _values(q)
    return F.linear(codes_MK.float(), values_NK)


def _values(q: QTensor) -> Tensor:
    return q.tensors["weight"].float()


def _device_sums(codes_MK: Tensor, codes_NK: Tensor) -> Tensor:
    """sum_k q_x q_w in float32, by the device's e4m3 product, which wants N and K in multiples of 16."""
    num_out, num_in = codes_NK.shape
    pad_k, pad_n = -num_in % 16, -num_out % 16
    if pad_k or pad_n:
        codes_MK, codes_NK = _pad(codes_MK, pad_k, 0), _pad(codes_NK, pad_k, pad_n)
    one = torch.ones((), device=codes_MK.device)
    sums_MN = torch._scaled_mm(codes_MK, codes_NK.t(), one, one, out_dtype=torch.float32, use_fast_accum=False)
    return sums_MN[:, :num_out].contiguous() if pad_n else sums_MN


def _pad(codes: Tensor, columns: int, rows: int) -> Tensor:
    return F.pad(codes.view(torch.uint8), (0, columns, 0, rows)).view(E4M3)      # the byte 0 is the number 0


@cache
def _scaled_mm_is_right(device: torch.device) -> bool:
    """Does this device multiply e4m3 matrices, into float32 sums?"""
    x_MK, w_NK = (torch.arange(-160, 160, device=device).remainder(23).view(-1, 32).to(E4M3) for _ in range(2))
    try:
        got_MN = _device_sums(x_MK, w_NK)
    except (RuntimeError, AttributeError, NotImplementedError, ValueError):
        return False
    return torch.allclose(got_MN.double(), x_MK.double() @ w_NK.double().t(), rtol=1e-4)
