"""A fast forward pass with the gradient of a plain one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lowroll.kernels.support import needs_gradient

Function = Callable[..., Any]


def with_gradient_of(plain: Function, fast: Function, *inputs: Any) -> Any:
    """Return fast(*inputs) with the gradient of plain(*inputs), which the backward pass runs on the
    kept inputs."""
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
        needed_grads = ctx.needs_input_grad[2:]  # without those of `plain` and `fast`
        saved = iter(ctx.saved_tensors)
        inputs: list[Any] = list(ctx.others)
        for index, is_tensor in enumerate(ctx.are_tensors):
            if is_tensor:
                inputs[index] = next(saved).detach().requires_grad_(needed_grads[index])
        with torch.enable_grad():
            outputs = ctx.plain(*inputs)
        if not isinstance(outputs, tuple):
            outputs = (outputs,)
        used_outputs, used_grads = [], []
        for output, grad in zip(outputs, grads, strict=True):
            if grad is not None and output.requires_grad:
                used_outputs.append(output)
                used_grads.append(grad)
        needed = [index for index, is_needed in enumerate(needed_grads) if is_needed]
        needed_inputs = [inputs[index] for index in needed]
        computed = torch.autograd.grad(used_outputs, needed_inputs, used_grads, allow_unused=True)
        input_grads: list[Tensor | None] = [None] * len(inputs)
        for index, input_grad in zip(needed, computed, strict=True):
            input_grads[index] = input_grad
        return None, None, *input_grads
