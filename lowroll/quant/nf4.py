"""NF4 W4A16: 16 levels at the quantiles of a normal distribution, one absmax for 64 weights; with
double quantization.

    c = absmax of 64 consecutive weights of the flattened matrix,   q = nearest level to w / c,   w^ = level[q] c

Levels and layout are bitsandbytes' (QLoRA, arXiv 2305.14314, section 3 and appendix E; algorithms
B6): blocks run over the row-major matrix, the last may be short; two codes a byte, the first in the
HIGH half; a midpoint belongs to the lower level. A block of zeros has absmax 0 and code 7.

`nf4_dq` keeps the absmax in 8 bits: their mean is taken off, and blocks of 256 are scaled to [-1,
1] and rounded to the nearest of 256 levels of dynamic precision (arXiv 1511.04561): +-0.1 ... 1 in
2^i steps, times 10^(i - 6), i = 0..6, with 0 and 1.

    absmax^ = level[code] * nested_absmax[block // 256] + nested_offset

The mean is summed in float64, so that it does not depend on device or threads. Parts that a file
holds with different means keep them, one for 256 blocks: `nested_offset` has one entry or as many
as `nested_absmax`.

Legend: L weights of the matrix, B blocks, P bytes.
"""

from __future__ import annotations

from fractions import Fraction
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from lowroll.quant.formats import QTensor, WeightOnly
from lowroll.quant.groups import pack, unpack

BLOCK = 64
NESTED_BLOCK = 256
LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


class NormalFloat4(WeightOnly):
    name, bits, summary = "nf4", 4.5, "W4A16, QLoRA's normal levels in blocks of 64"
    group = BLOCK

    def encode(self, w_NK: Tensor) -> dict[str, Tensor]:
        scaled_BS, absmax_B = _scale(w_NK.float().reshape(-1), BLOCK)
        codes_L = encode_normal(scaled_BS).flatten()[: w_NK.numel() + w_NK.numel() % 2]
        return {
            "weight": pack(codes_L[None], first_high=True).t().contiguous(),
            **self.encode_absmax(absmax_B),
        }

    def encode_absmax(self, absmax_B: Tensor) -> dict[str, Tensor]:
        return {"absmax": absmax_B}

    def dequantize(self, q: QTensor, dtype: torch.dtype) -> Tensor:
        absmax_B = self.decode_absmax(q.tensors)
        values_L = unpack(q.tensors["weight"].t(), LEVELS, q.shape[0] * q.shape[1], first_high=True)
        blocks_BS = F.pad(values_L, (0, -values_L.shape[1] % BLOCK)).view(-1, BLOCK)
        return (
            (blocks_BS * absmax_B[:, None]).flatten()[: values_L.shape[1]].view(q.shape).to(dtype)
        )

    def decode_absmax(self, tensors: dict[str, Tensor]) -> Tensor:
        return tensors["absmax"]

    def pitch(self, name: str, num_in: int) -> Fraction:
        return Fraction(num_in, {"weight": 2, "absmax": BLOCK}.get(name, BLOCK * NESTED_BLOCK))


class NormalFloat4Double(NormalFloat4):
    name, bits, summary = "nf4_dq", 4.127, "nf4 with its absmax in 8 bits (double quantization)"
    once = ("nested_offset",)

    def encode_absmax(self, absmax_B: Tensor) -> dict[str, Tensor]:
        offset = absmax_B.double().mean().float()
        scaled, nested_absmax = _scale(absmax_B - offset, NESTED_BLOCK)
        codes_B = torch.bucketize(
            scaled, midpoints(dynamic_levels()).to(scaled.device), out_int32=True
        ).flatten()
        return {
            "absmax": codes_B[: len(absmax_B)].to(torch.uint8),
            "nested_absmax": nested_absmax,
            "nested_offset": offset.reshape(1),
        }

    def decode_absmax(self, tensors: dict[str, Tensor]) -> Tensor:
        codes_B = tensors["absmax"]
        scale_B, offset = (
            tensors["nested_absmax"].repeat_interleave(NESTED_BLOCK),
            tensors["nested_offset"],
        )
        offset = (
            offset if len(offset) == 1 else offset.repeat_interleave(NESTED_BLOCK)[: len(codes_B)]
        )
        return _dynamic_table(codes_B.device)[codes_B.int()] * scale_B[: len(codes_B)] + offset


def encode_normal(x: Tensor) -> Tensor:
    """Codes (uint8) of the nearest levels. Counting the midpoints below is several times faster
    than a search."""
    codes = torch.zeros_like(x, dtype=torch.uint8)
    for middle in midpoints(LEVELS).tolist():
        codes += (x > middle).view(torch.uint8)
    return codes


def midpoints(levels: tuple[float, ...]) -> Tensor:
    """Between neighbouring levels, in float32."""
    table = torch.tensor(levels)
    return (table[:-1] + table[1:]) / 2


@cache
def dynamic_levels() -> tuple[float, ...]:
    """The 256 levels of a quantized absmax, ascending. Level 127 is 0."""
    magnitudes: list[float] = []
    for i in range(7):
        edges = torch.linspace(0.1, 1, 2**i + 1)
        magnitudes += (10.0 ** (i - 6) * ((edges[:-1] + edges[1:]) / 2)).tolist()
    return tuple(sorted([*magnitudes, *(-m for m in magnitudes), 0.0, 1.0]))


@cache
def _dynamic_table(device: torch.device) -> Tensor:
    return torch.tensor(dynamic_levels(), device=device)


def _scale(x_L: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Blocks in [-1, 1] and their absmax: float32 [B, S], [B]."""
    x_BS = F.pad(x_L, (0, -len(x_L) % size)).view(-1, size)
    absmax_B = x_BS.abs().amax(dim=-1)
    return x_BS * (1 / absmax_B.clamp_min(1e-38))[:, None], absmax_B
