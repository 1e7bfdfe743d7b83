"""A fast forward pass with the gradient of a plain one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lowroll.kernels.support import needs_gradient

Function = Callable[..., Any]


def with_gradient_of(plain: Function, fast: Function, *inputs: Any) -> Any:
    """Return fast(*inputs) with the gradient of plain(*inputs), which is the same up to rounding.
    Inputs are kept for the backward pass, which runs `plain`."""
    if needs_gradient(*inputs):
        return _FastForward.apply(plain, fast, *inputs)
    return fast(*inputs)


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
        needed_grads = ctx.needs_input_grad[2:]
        inputs: list[Any] = []
        for value, is_tensor, needed in zip(ctx.others, ctx.are_tensors, needed_grads, strict=True):
            inputs.append(next(saved).detach().requires_grad_(needed) if is_tensor else value)
        with torch.enable_grad():
            outputs = ctx.plain(*inputs)
        if not isinstance(outputs, tuple):
            outputs = (outputs,)
        used_outputs, used_grads = [], []
        for output, grad in zip(outputs, grads, strict=True):
            if grad is not None and output.requires_grad:
                used_outputs.append(output)
                used_grads.append(grad)
        differentiable = [x for x, needed in zip(inputs, needed_grads, strict=True) if needed]
        input_grads = iter(
            torch.autograd.grad(used_outputs, differentiable, used_grads, allow_unused=True)
        )
        return None, None, *(next(input_grads) if needed else None for needed in needed_grads)
