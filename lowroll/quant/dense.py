"""Plain floating-point formats.

On CPU a large matrix is multiplied from a copy in oneDNN's blocked layout: 1.4-3 times faster at
4-24 rows than `F.linear`, which reorders the weight in every step (docs/LOG.md). For a small matrix
the call costs more than it saves. On CUDA one or two rows use `kernels.matmul.gemv`.

Legend: `quant`.
"""

from __future__ import annotations

import platform
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from lowroll.kernels.matmul import gemv, ordered
from lowroll.quant.formats import Format, QTensor, get_format
from lowroll.quant.table import FORMATS

X86 = ("x86_64", "AMD64")
PACK_FROM = 1 << 18  # elements from which packing pays
PACK_ROWS = 64  # the batch that oneDNN chooses the layout for


class Dense(Format):
    dtype: torch.dtype
    fallback = ""
    stacked = ("dense", "weight")

    def encode(self, w_NK: Tensor) -> dict[str, Tensor]:
        return {"weight": w_NK.to(self.dtype, copy=True).contiguous()}

    def encode_into(self, w_NK: Tensor, amax_1: Tensor, tensors: dict[str, Tensor]) -> None:
        tensors["weight"].copy_(w_NK)

    def dequantize(self, q: QTensor, dtype: torch.dtype) -> Tensor:
        return q.tensors["weight"].to(dtype)

    def linear(
        self, x_MK: Tensor, q: QTensor, bias_N: Tensor | None, exact: bool = False
    ) -> Tensor:
        x = x_MK.to(self.dtype)
        w_NK = q.tensors["weight"]
        bias_N = None if bias_N is None else bias_N.to(self.dtype)
        if exact:
            return ordered.product(x, w_NK, bias_N).to(x_MK.dtype)
        if gemv.supports(x, w_NK):
            return gemv.linear(x, w_NK, bias_N).to(x_MK.dtype)
        is_large = w_NK.device.type == "cpu" and w_NK.numel() >= PACK_FROM
        if is_large and not x.requires_grad and packs(self.dtype):
            packed = q.derive("onednn", lambda q: _pack_weight(q.tensors["weight"]))
            return _packed_linear(x, packed, bias_N).to(x_MK.dtype)
        return F.linear(x, w_NK, bias_N).to(x_MK.dtype)


class Float32(Dense):
    name = "fp32"
    summary = "float32 weights and arithmetic, the reference"
    bits = 32
    dtype = torch.float32


class BFloat16(Dense):
    name = "bf16"
    summary = "bfloat16 weights and arithmetic"
    bits = 16
    dtype = torch.bfloat16

    def slower_than_float32(self, device: torch.device) -> str:
        if device.type != "cpu" or platform.machine() not in X86:
            return ""
        capabilities = torch.cpu.get_capabilities()
        if capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"):
            return ""
        return "this CPU has no instructions for bfloat16 (AVX512_BF16 or AMX)"


def over(w_NK: Tensor) -> QTensor | None:
    """Wrap a matrix as a QTensor over its own storage, or return None for another dtype. After a
    write to the storage, call `renew`."""
    name = of(w_NK.dtype)
    if name is None:
        return None
    return QTensor(name, (w_NK.shape[0], w_NK.shape[1]), {"weight": w_NK.detach()})


def of(dtype: torch.dtype) -> str | None:
    dense_names = (name for name, row in FORMATS.items() if row.dense)
    return next((name for name in dense_names if get_format(name).dtype == dtype), None)


def _pack_weight(w_NK: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(w_NK, PACK_ROWS)


def _packed_linear(x_MK: Tensor, packed: Tensor, bias_N: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x_MK, packed, bias_N, "none", [], "")


@cache
def packs(dtype: torch.dtype) -> bool:
    """Return whether this torch has a correct oneDNN packed product for the dtype."""
    x_MK, w_NK = (torch.arange(-200, 200).remainder(7).view(-1, 40).to(dtype) for _ in range(2))
    try:
        y_MN = _packed_linear(x_MK, _pack_weight(w_NK), None)
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
    return torch.allclose(y_MN.float(), x_MK.float() @ w_NK.float().t(), rtol=0.01)
