"""What kernels hand each other instead of dense activations: quantised rows going in, unscaled sums coming out.

    Rows       x[m, k] = codes[m, k] * scale[m]                    before a low-bit product, one scale a token
    Product    y[m, n] = sums[m, n] * row[m] * column[n] + bias[n]      after it, scales and bias not yet applied

A matrix product with unit scales is faster than one that scales (on Hopper, `torch._scaled_mm` row-wise against
tensor-wise, docs/LOG.md), and the kernel after it reads its result anyway: so it applies the scales. `dtype` is the
dtype of the activations that they stand for, to which y is rounded once.

The codes are those of `quant.int8` and `quant.fp8`, bit for bit:

    int8    scale = amax / 127,                           codes = round(x * (127 / max(amax, 1e-30))), half to even
    fp8     scale = max(amax / 448, 1 / (448 * 512)),     codes = e4m3(clamp(x / scale, -448, 448))

Legend: M rows (tokens), K in features, N out features.
"""
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
SMALLEST_E4M3_SCALE = 1 / (E4M3_MAX * 512)
KINDS = {"int8": torch.int8, "fp8": E4M3}      # of quantised rows, and the dtype of their codes


@dataclass(frozen=True)
class Rows:
    """Activations quantised a token. Pass `dtype` on to the Product that is made of them."""

    codes_MK: Tensor                        # int8 or float8_e4m3fn
    scale_M1: Tensor                        # float32
    dtype: torch.dtype = torch.bfloat16     # of the activations


@dataclass(frozen=True)
class Product:
    """y = sums * row * column + bias, in float32 and in this order, not yet applied."""

    sums_MN: Tensor                         # bfloat16, float32 or int32
    row_M1: Tensor | None = None            # float32
    column_N: Tensor | None = None          # float32, [N] or [N, 1]
    bias_N: Tensor | None = None            # float32 or the dtype of the model
    dtype: torch.dtype = torch.bfloat16     # of y

    def dense(self, dtype: torch.dtype | None = None) -> Tensor:
        """y [M, N] in `dtype` (its own unless given)."""
        y_MN = self.sums_MN.float()
        if self.row_M1 is not None:
            y_MN = y_MN * self.row_M1
        if self.column_N is not None:
            y_MN = y_MN * self.column_N.flatten()
        if self.bias_N is not None:
            y_MN = y_MN + self.bias_N
        return y_MN.to(dtype or self.dtype)


def quantize_rows(x_MK: Tensor, kind: str) -> Rows:
    """Dynamic codes of activations, one scale a row. `kind` is "int8" or "fp8"; ValueError for another."""
    if kind not in KINDS:
        raise ValueError(f"kind: {kind!r} is none of {', '.join(KINDS)}")
    return _plain(x_MK, kind)


def _plain(x_MK: Tensor, kind: str) -> Rows:
    dtype, x_MK = x_MK.dtype, x_MK.float()
    amax_M1 = x_MK.abs().amax(dim=-1, keepdim=True)
    if kind == "int8":
        codes_MK = (x_MK * (127.0 / amax_M1.clamp_min(1e-30))).round_().to(torch.int8)
        return Rows(codes_MK, amax_M1 / torch.full_like(amax_M1, 127.0), dtype)
    scale_M1 = (amax_M1 / torch.full_like(amax_M1, E4M3_MAX)).clamp_min(SMALLEST_E4M3_SCALE)
    return Rows((x_MK / scale_M1).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3), scale_M1, dtype)
