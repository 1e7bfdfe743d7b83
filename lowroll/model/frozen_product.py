"""Products with a frozen low-bit matrix, forward and backward.

The matrix is dequantized for each product, but a CPU with AMX multiplies int8 codes, rotated or
not, directly with float32's precision (`kernels.matmul.float32_by_int8`), packed once a direction.

Legend: `model`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lowroll.kernels.matmul import float32_by_int8, w8a8_onednn
from lowroll.kernels.quantize.rotation import rotate
from lowroll.kernels.quantize.rows import ROTATED
from lowroll.quant import int8
from lowroll.quant.formats import QTensor


def multiply(x_TK: Tensor, weight: QTensor, bias_N: Tensor | None) -> Tensor:
    """Return x W' + b."""
    if not _in_bytes(x_TK, weight):
        return F.linear(x_TK, weight.dequantize(x_TK.dtype), bias_N)
    y_TN = x_TK.new_zeros(x_TK.shape[0], weight.shape[0])
    return add_product(y_TN if bias_N is None else y_TN.add_(bias_N), x_TK, weight)


def add_product(y_TN: Tensor, x_TK: Tensor, weight: QTensor) -> Tensor:
    """Add x W' to y in place; return y."""
    if not _in_bytes(x_TK, weight):
        return y_TN.addmm_(x_TK, weight.dequantize(x_TK.dtype).t())
    if weight.format == ROTATED:
        x_TK = rotate(x_TK)
    return float32_by_int8.add_product(y_TN, x_TK, weight.derive("onednn", int8.pack))


def input_gradient(grad_TN: Tensor, weight: QTensor) -> Tensor:
    """Return dY W."""
    if not _in_bytes(grad_TN, weight):
        return grad_TN @ weight.dequantize(grad_TN.dtype)
    return add_input_gradient(grad_TN.new_zeros(len(grad_TN), weight.shape[1]), grad_TN, weight)


def add_input_gradient(x_grad_TK: Tensor, grad_TN: Tensor, weight: QTensor) -> Tensor:
    """Add dY W to the gradient of x in place; return it."""
    if not _in_bytes(grad_TN, weight):
        return x_grad_TK.addmm_(grad_TN, weight.dequantize(grad_TN.dtype))
    packed, scale_N = weight.derive("onednn of the transpose", _pack_transpose)
    if weight.format == ROTATED:  # the rotation is its own transpose
        rotated_TK = float32_by_int8.add_product(
            torch.zeros_like(x_grad_TK), grad_TN, packed, scale_N
        )
        return x_grad_TK.add_(rotate(rotated_TK))
    return float32_by_int8.add_product(x_grad_TK, grad_TN, packed, scale_N)


def _in_bytes(x: Tensor, weight: QTensor) -> bool:
    # by name: other formats' codes may mean more than codes times scales
    has_int8_codes = weight.format in (int8.Int8.name, ROTATED)
    return has_int8_codes and bool(float32_by_int8.supports(x, weight.tensors["codes"]))


def _pack_transpose(q: QTensor) -> tuple[w8a8_onednn.Packed, Tensor]:
    codes_KN = q.tensors["codes"].t().contiguous()
    return w8a8_onednn.pack(codes_KN, torch.ones(len(codes_KN))), q.tensors["scale"].flatten()
