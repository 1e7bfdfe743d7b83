"""The learner's linear layer: a product with gradients.

    dense       the weight is a Parameter: Y = X W' + b
    low-bit     the weight is a QTensor, the frozen base of LoRA: X times the dequantized matrix,
                which lives for one product only; differentiable in X
    aligned     the engine's arithmetic forward (QaRL), with the QTensor Q(W) of the weight W

An aligned layer's gradient passes the quantizer unchanged (straight-through), scales are constants:

    Y = lowbit(X, Q(W)) + b        dX = dY dequantize(Q(W))        dW = dY^T X        db = sum dY

Legend: T tokens, K in features, N out features.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowroll.kernels.fused.swiglu import silu_mul, silu_mul_backward
from lowroll.kernels.launch import triton_supports
from lowroll.kernels.quantize.rows import Product
from lowroll.model.linear import Linear
from lowroll.model.recompute import remake
from lowroll.quant.formats import QTensor


class LearnerLinear(Linear):
    """What it multiplies with follows from what it holds: an adapter, codes beside the weight, or
    the weight alone."""

    @property
    def codes(self) -> QTensor | None:
        return self.aligned

    def forward(self, x_TK: Tensor) -> Tensor:
        if self.adapter is not None and self.adapter.enabled:
            return self.adapted(self.adapter, x_TK)[0]
        if self.aligned is not None:
            master_NK = None if isinstance(self.weight, QTensor) else self.weight
            return _AlignedLinear.apply(x_TK, self.aligned, master_NK, self.bias)
        if isinstance(self.weight, QTensor):
            return _DequantizedLinear.apply(x_TK, self.weight, self.bias)
        return F.linear(x_TK, self.weight, self.bias)

    def after_swiglu(self, gate_up_TN: Tensor | Product) -> Tensor:
        """The product of silu(gate) * up, which the backward pass makes again."""
        assert isinstance(gate_up_TN, Tensor)
        if self._learns_alone and triton_supports(gate_up_TN):
            return _GatedLinear.apply(gate_up_TN, self.weight, self.bias)
        return self(remake(silu_mul(gate_up_TN), silu_mul, gate_up_TN))

    @property
    def _learns_alone(self) -> bool:
        """Is the weight all that there is, and does it learn?"""
        return (
            isinstance(self.weight, nn.Parameter)
            and self.weight.requires_grad
            and self.adapter is None
            and self.aligned is None
        )


class _GatedLinear(torch.autograd.Function):
    """A learning weight's product of silu(gate) * up. Backward, one pass over gate_up makes its
    gradient and, for that of the weight, silu(gate) * up again."""

    @staticmethod
    def forward(ctx: Any, gate_up_TN: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
        ctx.save_for_backward(gate_up_TN, weight_NK)
        x_TK = silu_mul(gate_up_TN)
        assert isinstance(x_TK, Tensor)
        return F.linear(x_TK, weight_NK, bias_N)

    @staticmethod
    def backward(ctx: Any, grad_TN: Tensor) -> tuple[Tensor | None, ...]:
        gate_up_TN, weight_NK = ctx.saved_tensors
        x_grad_TK = grad_TN @ weight_NK
        x_TK = torch.empty_like(x_grad_TK)
        gate_up_grad_TN = silu_mul_backward(gate_up_TN, x_grad_TK, x_TK)
        weight_grad_NK = grad_TN.t() @ x_TK
        bias_grad_N = None
        if ctx.needs_input_grad[2]:
            bias_grad_N = grad_TN.sum(0)
        return gate_up_grad_TN, weight_grad_NK, bias_grad_N


class _DequantizedLinear(torch.autograd.Function):
    """x times the dequantized matrix, which is made again in the backward pass instead of being
    kept."""

    @staticmethod
    def forward(ctx: Any, x_TK: Tensor, weight: QTensor, bias_N: Tensor | None) -> Tensor:
        ctx.weight = weight
        ctx.bias_dtype = None if bias_N is None else bias_N.dtype
        bias_in_dtype_N = None if bias_N is None else bias_N.to(x_TK.dtype)
        return F.linear(x_TK, weight.dequantize(x_TK.dtype), bias_in_dtype_N)

    @staticmethod
    def backward(ctx: Any, grad_TN: Tensor) -> tuple[Tensor | None, ...]:
        bias_grad_N = None
        if ctx.needs_input_grad[2]:
            bias_grad_N = grad_TN.sum(0).to(ctx.bias_dtype)
        return grad_TN @ ctx.weight.dequantize(grad_TN.dtype), None, bias_grad_N


class _AlignedLinear(torch.autograd.Function):
    """The engine's product forward, straight through the quantizer backward; the gradient reaches
    the master weight."""

    @staticmethod
    def forward(
        ctx: Any, x_TK: Tensor, weight: QTensor, master_NK: Tensor | None, bias_N: Tensor | None
    ) -> Tensor:
        ctx.weight = weight
        ctx.bias_dtype = None if bias_N is None else bias_N.dtype
        ctx.master_dtype = None if master_NK is None else master_NK.dtype
        ctx.save_for_backward(x_TK if ctx.needs_input_grad[2] else None)
        return weight.linear(x_TK.detach(), bias_N)

    @staticmethod
    def backward(ctx: Any, grad_TN: Tensor) -> tuple[Tensor | None, ...]:
        (x_TK,) = ctx.saved_tensors
        x_grad_TK = None
        if ctx.needs_input_grad[0]:
            x_grad_TK = grad_TN @ ctx.weight.dequantize(grad_TN.dtype)
        master_grad_NK = None
        if ctx.needs_input_grad[2]:
            master_grad_NK = (grad_TN.t() @ x_TK).to(ctx.master_dtype)
        bias_grad_N = None
        if ctx.needs_input_grad[3]:
            bias_grad_N = grad_TN.sum(0).to(ctx.bias_dtype)
        return x_grad_TK, None, master_grad_NK, bias_grad_N
