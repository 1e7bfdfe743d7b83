"""A fast forward pass with the gradient of a plain one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Function = Callable[..., Any]


def with_gradient_of(plain: Function, fast: Function, *inputs: Any) -> Any:
    """Return fast(*inputs) with the gradient of plain(*inputs), which is the same up to rounding.

    Inputs are kept for the backward pass, which runs `plain`, if a gradient is recorded.
    """
    wanted = any(isinstance(x, Tensor) and x.requires_grad for x in inputs)
    if not (wanted and torch.is_grad_enabled()):
        return fast(*inputs)
    return _FastForward.apply(plain, fast, *inputs)


class _FastForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plain: Function, fast: Function, *inputs: Any) -> Any:
        ctx.plain = plain
        ctx.others = [None if isinstance(x, Tensor) else x for x in inputs]
        ctx.are_tensors = [isinstance(x, Tensor) for x in inputs]
        ctx.save_for_backward(*(x for x in inputs if isinstance(x, Tensor)))
        return fast(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = iter(ctx.saved_tensors)
        needs = ctx.needs_input_grad[2:]
        inputs: list[Any] = []
        for other, is_tensor, needed in zip(ctx.others, ctx.are_tensors, needs, strict=True):
            inputs.append(next(saved).detach().requires_grad_(needed) if is_tensor else other)
        with torch.enable_grad():
            made = ctx.plain(*inputs)
        made = made if isinstance(made, tuple) else (made,)
        pairs = [
            (y, g) for y, g in zip(made, grads, strict=True) if g is not None and y.requires_grad
        ]
        learnt = [x for x, needed in zip(inputs, needs, strict=True) if needed]
        found = iter(
            torch.autograd.grad(
                [y for y, _ in pairs], learnt, [g for _, g in pairs], allow_unused=True
            )
        )
        return None, None, *(next(found) if needed else None for needed in needs)
