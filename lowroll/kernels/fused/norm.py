"""RMSNorm with the residual added before and the next product's codes made after it.

    sum = x + update                                     in the dtype of x
    normed = sum / sqrt(mean(sum^2) + eps) * weight      statistics in float32, rounded once

(Zhang and Sennrich 2019.) Backward, with r = 1 / sqrt(mean(sum^2) + eps), h = sum * r and g the
gradient of normed:

    d sum = r (g w - h mean(g w h)) + gradient of sum
    d w = sum over tokens of g h      in float32 by a fixed number of programs, then over them
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lowroll.kernels.launch import (
    after_others,
    block,
    early_start,
    jit,
    prefetch,
    tl,
    triton_supports,
    warps,
)
from lowroll.kernels.quantize.rotation import rotated
from lowroll.kernels.quantize.rows import (
    Product,
    QuantizedRows,
    empty_rows,
    encoding,
    load_dense,
    parts,
    quantize_rows,
    store_rows,
)
from lowroll.kernels.support import needs_gradient

# the most programs of the backward pass for WIDTH features; shorter rows take more
PROGRAMS = 512
WIDTH = 4096


def add_rms_norm(
    x_TD: Tensor,
    update: Tensor | Product | None,
    weight_D: Tensor,
    eps: float,
    rows: str | None = None,
) -> tuple[Tensor, Tensor | QuantizedRows]:
    """Return x + update in x's dtype (x itself without update), and its norm, dense or as codes of
    a kind in `rows.KINDS`. Differentiable when update is a tensor and rows None."""
    if not triton_supports(x_TD) or x_TD.numel() == 0:
        return _plain(x_TD, update, weight_D, eps, rows)
    if not needs_gradient(x_TD, update, weight_D):
        sum_TD, normed, _ = _forward(x_TD, update, weight_D, eps, rows, keep=False)
        return sum_TD, normed
    if isinstance(update, Product) or rows is not None:
        raise ValueError(
            "add_rms_norm: products and codes have no gradient; pass and take tensors to learn"
        )
    if update is None:
        return x_TD, _Norm.apply(x_TD, weight_D, eps)
    return _AddNorm.apply(x_TD, update, weight_D, eps)


def _plain(
    x_TD: Tensor, update: Tensor | Product | None, weight_D: Tensor, eps: float, rows: str | None
) -> tuple[Tensor, Tensor | QuantizedRows]:
    if isinstance(update, Product):
        update = update.dense(x_TD.dtype)
    if update is not None:
        x_TD = x_TD + update
    normed_TD = rms_norm(x_TD, weight_D, eps)
    return x_TD, normed_TD if rows is None else quantize_rows(normed_TD, rows)


def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Compute RMSNorm in plain torch."""
    if x.dtype == weight_D.dtype == torch.float32:
        return F.rms_norm(x, weight_D.shape, weight_D, eps)
    return (F.rms_norm(x.float(), weight_D.shape, None, eps) * weight_D.float()).to(x.dtype)


def _forward(
    x_TD: Tensor,
    update: Tensor | Product | None,
    weight_D: Tensor,
    eps: float,
    rows: str | None,
    keep: bool,
) -> tuple[Tensor, Any, Tensor | None]:
    num_tokens, size = x_TD.shape
    x_TD = x_TD.contiguous()
    sum_TD = x_TD
    sums = row = column = bias = None
    if update is not None:
        sum_TD = torch.empty_like(x_TD)
        sums, row, column, bias = parts(update)
    inverse_T: Tensor | None = None
    if keep:
        inverse_T = torch.empty(num_tokens, dtype=torch.float32, device=x_TD.device)
    normed: Tensor | QuantizedRows
    scale: Tensor | None = None
    if rows is None:
        normed = out = torch.empty_like(x_TD)
    else:
        normed = empty_rows(x_TD, (num_tokens, size), rows)
        out = normed.codes_MK
        scale = normed.scale_M1
    _norm_kernel[(num_tokens,)](
        x_TD,
        sums,
        row,
        column,
        bias,
        weight_D,
        sum_TD,
        out,
        scale,
        inverse_T,
        0 if sums is None else sums.stride(0),
        size,
        eps,
        **encoding(rows, size),
        BLOCK=block(size),
        num_warps=warps(block(size)),
        enable_fp_fusion=False,
        **early_start(),
    )
    return sum_TD, normed, inverse_T


def _backward(
    sum_TD: Tensor,
    weight_D: Tensor,
    inverse_T: Tensor,
    normed_grad_TD: Tensor,
    sum_grad_TD: Tensor | None,
    weight_learns: bool,
) -> tuple[Tensor, Tensor | None]:
    num_tokens, size = sum_TD.shape
    grad_TD = torch.empty_like(sum_TD)
    programs = min(num_tokens, PROGRAMS * max(1, WIDTH // block(size)))
    sum_grad_TD = None if sum_grad_TD is None else sum_grad_TD.contiguous()
    partial_PD = None
    if weight_learns:
        partial_PD = torch.empty(programs, size, dtype=torch.float32, device=sum_TD.device)
    _norm_backward_kernel[(programs,)](
        sum_TD,
        weight_D,
        inverse_T,
        normed_grad_TD.contiguous(),
        sum_grad_TD,
        grad_TD,
        partial_PD,
        num_tokens,
        size,
        BLOCK=block(size),
        num_warps=warps(block(size)),
    )
    if partial_PD is None:
        return grad_TD, None
    return grad_TD, partial_PD.sum(0).to(weight_D.dtype)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        sum_TD, normed_TD, inverse_T = _forward(x_TD, None, weight_D, eps, None, keep=True)
        ctx.save_for_backward(sum_TD, weight_D, inverse_T)
        return normed_TD

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        sum_TD, weight_D, inverse_T = ctx.saved_tensors
        x_grad_TD, weight_grad_D = _backward(
            sum_TD, weight_D, inverse_T, grad_TD, None, ctx.needs_input_grad[1]
        )
        return x_grad_TD, weight_grad_D, None


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, update_TD: Tensor, weight_D: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        sum_TD, normed_TD, inverse_T = _forward(x_TD, update_TD, weight_D, eps, None, keep=True)
        ctx.save_for_backward(sum_TD, weight_D, inverse_T)
        ctx.update_dtype = update_TD.dtype
        ctx.set_materialize_grads(False)
        return sum_TD, normed_TD

    @staticmethod
    def backward(
        ctx: Any, sum_grad_TD: Tensor | None, normed_grad_TD: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        sum_TD, weight_D, inverse_T = ctx.saved_tensors
        grad_TD = sum_grad_TD
        weight_grad_D: Tensor | None = None
        if normed_grad_TD is not None:
            grad_TD, weight_grad_D = _backward(
                sum_TD, weight_D, inverse_T, normed_grad_TD, sum_grad_TD, ctx.needs_input_grad[2]
            )
        if grad_TD is None:
            return None, None, weight_grad_D, None
        return grad_TD, grad_TD.to(ctx.update_dtype), weight_grad_D, None


# -- Triton ----------------------------------------------------------------------------------------


@jit
def _norm_kernel(
    x,
    update,
    row,
    column,
    bias,
    weight,
    sum_out,
    normed,
    scale,
    inverse_out,
    stride,
    size,
    eps,
    KIND: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    t, n = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    live = n < size
    LINES: tl.constexpr = BLOCK // 32 if BLOCK > 32 else 1
    prefetch(weight + tl.minimum(tl.arange(0, LINES) * 32, size - 1), EARLY)
    after_others(EARLY)
    dtype = x.dtype.element_ty
    y = tl.load(x + t * size + n, mask=live, other=0.0).to(tl.float32)
    w = tl.load(weight + n, mask=live, other=0.0).to(tl.float32)
    if update is not None:
        added = load_dense(update, row, column, bias, t, stride, n, live).to(dtype).to(tl.float32)
        rounded = (y + added).to(dtype)
        tl.store(sum_out + t * size + n, rounded, mask=live)
        y = rounded.to(tl.float32)
    inverse = 1.0 / tl.sqrt_rn(tl.sum(y * y, axis=0) / size + eps)
    if inverse_out is not None:
        tl.store(inverse_out + t, inverse)
    out = (y * inverse * w).to(dtype)
    if KIND == "":
        tl.store(normed + t * size + n, out, mask=live)
    else:
        store_rows(rotated(out.to(tl.float32), WIDTH), normed, scale, t, size, n, live, KIND)


@jit
def _norm_backward_kernel(
    sums,
    weight,
    inverse,
    normed_grad,
    sum_grad,
    grad,
    partial,
    num_tokens,
    size,
    BLOCK: tl.constexpr,
):
    p, n = tl.program_id(0), tl.arange(0, BLOCK)
    live = n < size
    w = tl.load(weight + n, mask=live, other=0.0).to(tl.float32)
    weight_grad = tl.zeros((BLOCK,), tl.float32)
    for token in range(p, num_tokens, tl.num_programs(0)):
        offs = tl.cast(token, tl.int64) * size + n
        r = tl.load(inverse + token)
        h = tl.load(sums + offs, mask=live, other=0.0).to(tl.float32) * r
        g = tl.load(normed_grad + offs, mask=live, other=0.0).to(tl.float32)
        weight_grad += g * h
        g = g * w
        g = r * (g - h * (tl.sum(g * h, axis=0) / size))
        if sum_grad is not None:
            g += tl.load(sum_grad + offs, mask=live, other=0.0).to(tl.float32)
        tl.store(grad + offs, g.to(grad.dtype.element_ty), mask=live)
    if partial is not None:
        tl.store(partial + p.to(tl.int64) * size + n, weight_grad, mask=live)
