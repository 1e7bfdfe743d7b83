"""The formats that are plain floating point: the baseline that every other format is measured against."""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lowroll.quant.formats import Format, QTensor


class Dense(Format):
    dtype: torch.dtype
    dense = True

    def encode(self, w_NK: Tensor) -> dict[str, Tensor]:
        return {"weight": w_NK.to(self.dtype, copy=True).contiguous()}

    def dequantize(self, q: QTensor, dtype: torch.dtype) -> Tensor:
        return q.tensors["weight"].to(dtype)

    def linear(self, x_MK: Tensor, q: QTensor, bias_N: Tensor | None) -> Tensor:
        y_MN = F.linear(x_MK.to(self.dtype), q.tensors["weight"], None if bias_N is None else bias_N.to(self.dtype))
        return y_MN.to(x_MK.dtype)


class Float32(Dense):
    name, bits, dtype, summary = "fp32", 32, torch.float32, "float32 weights and arithmetic, the reference"


class BFloat16(Dense):
    name, bits, dtype, summary = "bf16", 16, torch.bfloat16, "bfloat16 weights and arithmetic"
