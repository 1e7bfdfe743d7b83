"""The learner's linear layer.

    dense       the weight is a Parameter: Y = X W' + b
    low-bit     the weight is a QTensor, LoRA's frozen base, dequantized for each product; differentiable in X
    aligned     the engine's arithmetic forward (QaRL), with the QTensor Q(W) of the weight W

An aligned layer's gradient is straight-through, with constant scales:

    Y = lowbit(X, Q(W)) + b        dX = dY dequantize(Q(W))        dW = dY^T X        db = sum dY

With codes of the transpose (`weights.aligned_forward.transpose`), dX is a product of fp8 codes.

Legend: `model`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowroll.kernels.batch_invariant import product
from lowroll.kernels.fused.swiglu import silu_mul, silu_mul_backward
from lowroll.kernels.launch import triton_supports
from lowroll.kernels.quantize.rows import Product, QuantizedRows
from lowroll.kernels.training.swiglu_lora import Update
from lowroll.model import frozen_product
from lowroll.model.linear import Linear
from lowroll.model.recompute import remake
from lowroll.quant import fp8
from lowroll.quant.formats import QTensor, float_product, get_format, multiplicand


class LearnerLinear(Linear):
    """A linear layer with gradients."""

    @property
    def codes(self) -> QTensor | None:
        return self.aligned

    def forward(self, x_TK: Tensor) -> Tensor:
        if self.adapter is not None and self.adapter.enabled:
            return self.adapted(self.adapter, x_TK)[0]
        if isinstance(self.weight, QTensor):
            return _FrozenProduct.apply(
                x_TK, self.bias, self.weight, self.aligned, self.transposed, self.exact
            )
        if self.aligned is None and self.transposed is None:
            multiply = product.linear if self.exact else F.linear
            return multiply(x_TK, self.weight, self.bias)
        return _LearningProduct.apply(
            x_TK, self.weight, self.bias, self.aligned, self.transposed, self.exact
        )

    def after_swiglu(self, gate_up_TN: Tensor | Product) -> Tensor:
        """Multiply silu(gate) * up, which the backward pass recomputes."""
        assert isinstance(gate_up_TN, Tensor)
        is_trained = isinstance(self.weight, nn.Parameter) and self.weight.requires_grad
        learns_alone = is_trained and self.adapter is None
        if learns_alone and not self.exact and triton_supports(gate_up_TN):
            return _GatedProduct.apply(
                gate_up_TN, self.weight, self.bias, self.aligned, self.transposed
            )
        gated = self.gate(gate_up_TN)
        assert isinstance(gated, Tensor)
        return self(remake(gated, self.gate, gate_up_TN))

    def after_update(self, gate_up_TN: Tensor, update: Update) -> Tensor | Product:
        """Compute `after_swiglu` of a product without its update."""
        if self.adapter is None or not self.adapter.enabled:
            return super().after_update(gate_up_TN, update)
        return self.adapted(self.adapter, gate_up_TN, update=update)[0]


def _multiply(
    x_TK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None,
    codes: QTensor | None,
    exact: bool = False,
) -> Tensor:
    if codes is None:
        return float_product(x_TK, weight_NK, bias_N, exact)
    return codes.linear(x_TK.detach(), bias_N, exact)


def _input_gradient(
    grad_TN: Tensor, weight: Tensor | QTensor | None, transposed: QTensor | None
) -> Tensor:
    if transposed is not None:
        return fp8.gradient(grad_TN, transposed)
    assert weight is not None
    if isinstance(weight, QTensor):
        return frozen_product.input_gradient(grad_TN, weight)
    return grad_TN @ weight


class _LearningProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TK: Tensor,
        weight_NK: Tensor,
        bias_N: Tensor | None,
        codes: QTensor | None,
        transposed: QTensor | None,
        exact: bool,
    ) -> Tensor:
        ctx.stands_for, ctx.transposed = codes, transposed
        saved_weight_NK = weight_NK if codes is None and transposed is None else None
        ctx.save_for_backward(x_TK if ctx.needs_input_grad[1] else None, saved_weight_NK)
        ctx.dtypes = [None if t is None else t.dtype for t in (weight_NK, bias_N)]
        return _multiply(x_TK, weight_NK, bias_N, codes, exact)

    @staticmethod
    def backward(ctx: Any, grad_TN: Tensor) -> tuple[Tensor | None, ...]:
        x_TK, weight_NK = ctx.saved_tensors
        x_grad_TK = weight_grad_NK = bias_grad_N = None
        if ctx.needs_input_grad[0]:
            effective_weight = weight_NK if ctx.stands_for is None else ctx.stands_for
            x_grad_TK = _input_gradient(grad_TN, effective_weight, ctx.transposed)
        if ctx.needs_input_grad[1]:
            weight_grad_NK = (grad_TN.t() @ x_TK).to(ctx.dtypes[0])
        if ctx.needs_input_grad[2]:
            bias_grad_N = grad_TN.sum(0).to(ctx.dtypes[1])
        return x_grad_TK, weight_grad_NK, bias_grad_N, None, None, None


class _GatedProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        gate_up_TN: Tensor,
        weight_NK: Tensor,
        bias_N: Tensor | None,
        codes: QTensor | None,
        transposed: QTensor | None,
    ) -> Tensor:
        ctx.stands_for, ctx.transposed = codes, transposed
        saved_weight_NK = weight_NK if codes is None and transposed is None else None
        ctx.save_for_backward(gate_up_TN, saved_weight_NK)
        row_kind = (
            None if codes is None or not gate_up_TN.is_cuda else get_format(codes.format).rows
        )
        x = silu_mul(gate_up_TN, row_kind)
        if isinstance(x, QuantizedRows):
            assert codes is not None
            return get_format(codes.format).product(x, codes, bias_N).dense()
        return _multiply(x, weight_NK, bias_N, codes)

    @staticmethod
    def backward(ctx: Any, grad_TN: Tensor) -> tuple[Tensor | None, ...]:
        gate_up_TN, weight_NK = ctx.saved_tensors
        effective_weight = weight_NK if ctx.stands_for is None else ctx.stands_for
        x_grad_TK = _input_gradient(grad_TN, effective_weight, ctx.transposed)
        x_TK = torch.empty_like(x_grad_TK)
        gate_up_grad_TN = silu_mul_backward(gate_up_TN, x_grad_TK, x_TK)
        weight_grad_NK = grad_TN.t() @ x_TK
        bias_grad_N = grad_TN.sum(0) if ctx.needs_input_grad[2] else None
        return gate_up_grad_TN, weight_grad_NK, bias_grad_N, None, None


class _FrozenProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TK: Tensor,
        bias_N: Tensor | None,
        weight: QTensor,
        codes: QTensor | None,
        transposed: QTensor | None,
        exact: bool,
    ) -> Tensor:
        ctx.weight = weight if codes is None else codes
        ctx.transposed = transposed
        ctx.bias_dtype = None if bias_N is None else bias_N.dtype
        if codes is not None:
            return codes.linear(x_TK.detach(), bias_N, exact)
        if exact:
            return float_product(x_TK, multiplicand(weight, x_TK.dtype), bias_N, exact)
        bias_in_dtype_N = None if bias_N is None else bias_N.to(x_TK.dtype)
        return frozen_product.multiply(x_TK, weight, bias_in_dtype_N)

    @staticmethod
    def backward(ctx: Any, grad_TN: Tensor) -> tuple[Tensor | None, ...]:
        x_grad_TK = bias_grad_N = None
        if ctx.needs_input_grad[0]:
            x_grad_TK = _input_gradient(grad_TN, ctx.weight, ctx.transposed)
        if ctx.needs_input_grad[1]:
            bias_grad_N = grad_TN.sum(0).to(ctx.bias_dtype)
        return x_grad_TK, bias_grad_N, None, None, None, None
