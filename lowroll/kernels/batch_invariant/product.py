"""The product of `kernels.matmul.ordered`, with gradients.

Legend: `kernels.matmul`; T tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowroll.kernels.matmul import ordered


def linear(
    x_TK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return x w^T + bias. Differentiable."""
    y_TN = _Product.apply(x_TK, weight_NK, bias_N, dtype)
    assert isinstance(y_TN, Tensor)
    return y_TN


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TK: Tensor,
        weight_NK: Tensor,
        bias_N: Tensor | None,
        dtype: torch.dtype | None,
    ) -> Tensor:
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        ctx.dtype = x_TK.dtype
        ctx.save_for_backward(x_TK if needs_weight else None, weight_NK if needs_x else None)
        return ordered.product(x_TK, weight_NK, bias_N, dtype)

    @staticmethod
    def backward(ctx: Any, grad_TN: Tensor) -> tuple[Tensor | None, ...]:
        x_TK, weight_NK = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_TN = grad_TN.to(ctx.dtype)
        return (
            grad_TN @ weight_NK if needs_x else None,
            grad_TN.t() @ x_TK if needs_weight else None,
            grad_TN.sum(0) if needs_bias else None,
            None,
        )
