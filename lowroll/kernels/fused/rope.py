"""Heads from the fused qkv product: QK-norm where the model has one, and half-rotation.

    q = rotate(norm(q)),  k = rotate(norm(k)),  v = v
    rotate (a, b) = (a cos - b sin, b cos + a sin),  a and b the halves of a head (Su et al. 2021)

The gradient rotates by the negative angle, then passes the norm as in `kernels.fused.norm`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowroll.kernels.fused import avx2
from lowroll.kernels.fused.norm import PROGRAMS, rms_norm
from lowroll.kernels.launch import after_others, block, early_start, jit, tl, triton_supports
from lowroll.kernels.quantize.rows import Product, load_dense, parts
from lowroll.kernels.support import needs_gradient

HEADS = 8  # of a program: fixed, so that a head's sums do not depend on the batch


def rotate_heads(
    qkv: Tensor | Product,
    cos: Tensor,
    sin: Tensor,
    heads: int,
    kv_heads: int,
    head_dim: int,
    q_norm_d: Tensor | None,
    k_norm_d: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (q [T, H, d], k [T, G, d], v [T, G, d]) of qkv [T, (H + 2G) d]; cos and sin [T, 1,
    d/2] float32. Differentiable when qkv is a tensor."""
    sums = qkv.sums_MN if isinstance(qkv, Product) else qkv
    if not triton_supports(sums) or sums.numel() == 0:
        dense = qkv.dense() if isinstance(qkv, Product) else qkv
        has_cpu_kernel = avx2.supports(dense, heads, head_dim, q_norm_d, k_norm_d)
        rotate = avx2.rotate_heads if has_cpu_kernel else plain_heads
        return rotate(dense, cos, sin, heads, kv_heads, head_dim, q_norm_d, k_norm_d, eps)
    if needs_gradient(qkv, q_norm_d, k_norm_d):
        if isinstance(qkv, Product):
            raise ValueError("rotate_heads: products have no gradient; pass a tensor to learn")
        return _RotateHeads.apply(qkv, cos, sin, heads, kv_heads, head_dim, q_norm_d, k_norm_d, eps)
    return _forward(qkv, cos, sin, heads, kv_heads, head_dim, q_norm_d, k_norm_d, eps)


def plain_heads(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: int,
    kv_heads: int,
    head_dim: int,
    q_norm_d: Tensor | None,
    k_norm_d: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `rotate_heads` in plain torch."""
    split = (heads, kv_heads, kv_heads)
    q_THd, k_TGd, v_TGd = qkv.view(qkv.shape[0], sum(split), head_dim).split(split, dim=1)
    if q_norm_d is not None and k_norm_d is not None:
        q_THd, k_TGd = rms_norm(q_THd, q_norm_d, eps), rms_norm(k_TGd, k_norm_d, eps)
    return _rotate(q_THd, cos, sin), _rotate(k_TGd, cos, sin), v_TGd


def _rotate(x_THd: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x_THd.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(
        x_THd.dtype
    )


def _forward(
    qkv: Tensor | Product,
    cos: Tensor,
    sin: Tensor,
    heads: int,
    kv_heads: int,
    head_dim: int,
    q_norm_d: Tensor | None,
    k_norm_d: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    sums, row, column, bias = parts(qkv)
    num_tokens = sums.shape[0]
    q, k, v = (
        torch.empty(num_tokens, n, head_dim, dtype=qkv.dtype, device=sums.device)
        for n in (heads, kv_heads, kv_heads)
    )
    _rotate_heads_kernel[(num_tokens, -(-(heads + 2 * kv_heads) // HEADS))](
        sums,
        row,
        column,
        bias,
        cos.contiguous(),
        sin.contiguous(),
        q_norm_d,
        k_norm_d,
        q,
        k,
        v,
        sums.stride(0),
        heads,
        kv_heads,
        head_dim,
        eps,
        HEADS=HEADS,
        HALF=block(head_dim // 2),
        num_warps=2,
        enable_fp_fusion=False,
        **early_start(),
    )
    return q, k, v


class _RotateHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        heads: int,
        kv_heads: int,
        head_dim: int,
        q_norm_d: Tensor | None,
        k_norm_d: Tensor | None,
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        normed = q_norm_d is not None and k_norm_d is not None
        ctx.save_for_backward(qkv if normed else None, cos, sin, q_norm_d, k_norm_d)
        ctx.shape, ctx.eps = (heads, kv_heads, head_dim), eps
        return _forward(qkv, cos, sin, heads, kv_heads, head_dim, q_norm_d, k_norm_d, eps)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        qkv, cos, sin, q_norm_d, k_norm_d = ctx.saved_tensors
        heads, kv_heads, head_dim = ctx.shape
        num_tokens, tiles = cos.shape[0], -(-(heads + 2 * kv_heads) // HEADS)
        q_grad, k_grad, v_grad = (grad.contiguous() for grad in grads)
        grad = q_grad.new_empty(num_tokens, (heads + 2 * kv_heads) * head_dim)
        programs, partial = num_tokens, None
        if qkv is not None:
            qkv, programs = parts(qkv)[0], min(num_tokens, PROGRAMS)
            partial = torch.empty(
                programs * tiles, 2, head_dim, dtype=torch.float32, device=grad.device
            )
        _rotate_heads_backward_kernel[(programs, tiles)](
            qkv,
            cos.contiguous(),
            sin.contiguous(),
            q_norm_d,
            k_norm_d,
            q_grad,
            k_grad,
            v_grad,
            grad,
            partial,
            0 if qkv is None else qkv.stride(0),
            num_tokens,
            heads,
            kv_heads,
            head_dim,
            ctx.eps,
            HEADS=HEADS,
            HALF=block(head_dim // 2),
            num_warps=2,
        )
        if partial is None:
            return grad, *(None,) * 8
        q_norm_grad_d, k_norm_grad_d = partial.sum(0)
        return (
            grad,
            *(None,) * 5,
            q_norm_grad_d.to(q_norm_d.dtype),
            k_norm_grad_d.to(k_norm_d.dtype),
            None,
        )


# -- Triton ----------------------------------------------------------------------------------------


@jit
def _rotate_heads_kernel(
    qkv,
    row,
    column,
    bias,
    cos,
    sin,
    q_norm,
    k_norm,
    q,
    k,
    v,
    stride,
    heads,
    kv_heads,
    size,
    eps,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    EARLY: tl.constexpr,
):
    after_others(EARLY)
    t, h, i = (
        tl.program_id(0).to(tl.int64),
        tl.program_id(1) * HEADS + tl.arange(0, HEADS),
        tl.arange(0, HALF),
    )
    half = size // 2
    dtype = q.dtype.element_ty
    mask = i[None, :] < half
    is_q, is_k = (h < heads)[:, None], ((h >= heads) & (h < heads + kv_heads))[:, None]
    is_v = ((h >= heads + kv_heads) & (h < heads + 2 * kv_heads))[:, None]
    live = (is_q | is_k | is_v) & mask
    n = h[:, None] * size + i[None, :]
    a = load_dense(qkv, row, column, bias, t, stride, n, live).to(dtype).to(tl.float32)
    b = load_dense(qkv, row, column, bias, t, stride, n + half, live).to(dtype).to(tl.float32)
    if q_norm is not None:
        inverse = 1.0 / tl.sqrt_rn(tl.sum(a * a + b * b, axis=1) / size + eps)[:, None]
        w_a = tl.where(is_q, _load_row(q_norm, i, half), _load_row(k_norm, i, half))
        w_b = tl.where(is_q, _load_row(q_norm + half, i, half), _load_row(k_norm + half, i, half))
        a = tl.where(is_v, a, (a * inverse * w_a).to(dtype).to(tl.float32))
        b = tl.where(is_v, b, (b * inverse * w_b).to(dtype).to(tl.float32))
    c, s = _load_row(cos + t * half, i, half), _load_row(sin + t * half, i, half)
    rotated_a = tl.where(is_v, a, a * c - b * s).to(dtype)
    rotated_b = tl.where(is_v, b, b * c + a * s).to(dtype)
    offs = (t * heads + h)[:, None] * size + i[None, :]
    tl.store(q + offs, rotated_a, mask=is_q & mask)
    tl.store(q + offs + half, rotated_b, mask=is_q & mask)
    offs = (t * kv_heads + h - heads)[:, None] * size + i[None, :]
    tl.store(k + offs, rotated_a, mask=is_k & mask)
    tl.store(k + offs + half, rotated_b, mask=is_k & mask)
    offs = (t * kv_heads + h - heads - kv_heads)[:, None] * size + i[None, :]
    tl.store(v + offs, rotated_a, mask=is_v & mask)
    tl.store(v + offs + half, rotated_b, mask=is_v & mask)


@jit
def _load_row(start, i, size):
    return tl.load(start + i, mask=i < size, other=0.0).to(tl.float32)[None, :]


@jit
def _load_heads(q, k, v, at_q, at_k, at_v, is_q, is_k, is_v):
    x = tl.load(q + at_q, mask=is_q, other=0.0).to(tl.float32)
    x += tl.load(k + at_k, mask=is_k, other=0.0).to(tl.float32)
    return x + tl.load(v + at_v, mask=is_v, other=0.0).to(tl.float32)


@jit
def _rotate_heads_backward_kernel(
    qkv,
    cos,
    sin,
    q_norm,
    k_norm,
    q_grad,
    k_grad,
    v_grad,
    grad,
    partial,
    stride,
    num_tokens,
    heads,
    kv_heads,
    size,
    eps,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    p, h, i = tl.program_id(0), tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, HALF)
    half = size // 2
    mask = i[None, :] < half
    all_heads = heads + 2 * kv_heads
    is_q, is_k = (
        (h < heads)[:, None] & mask,
        ((h >= heads) & (h < heads + kv_heads))[:, None] & mask,
    )
    is_v = ((h >= heads + kv_heads) & (h < all_heads))[:, None] & mask
    live = is_q | is_k | is_v
    sum_a, sum_b = tl.zeros((HEADS, HALF), tl.float32), tl.zeros((HEADS, HALF), tl.float32)
    for token in range(p, num_tokens, tl.num_programs(0)):
        t = tl.cast(token, tl.int64)
        offs_q = (t * heads + h)[:, None] * size + i[None, :]
        offs_k = (t * kv_heads + h - heads)[:, None] * size + i[None, :]
        offs_v = offs_k - kv_heads * size
        rotated_a = _load_heads(q_grad, k_grad, v_grad, offs_q, offs_k, offs_v, is_q, is_k, is_v)
        rotated_b = _load_heads(
            q_grad, k_grad, v_grad, offs_q + half, offs_k + half, offs_v + half, is_q, is_k, is_v
        )
        c, s = _load_row(cos + t * half, i, half), _load_row(sin + t * half, i, half)
        a = tl.where(is_v, rotated_a, rotated_a * c + rotated_b * s)
        b = tl.where(is_v, rotated_b, rotated_b * c - rotated_a * s)
        n = h[:, None] * size + i[None, :]
        if qkv is not None:
            x_a = tl.load(qkv + t * stride + n, mask=live, other=0.0).to(tl.float32)
            x_b = tl.load(qkv + t * stride + n + half, mask=live, other=0.0).to(tl.float32)
            inverse = 1.0 / tl.sqrt_rn(tl.sum(x_a * x_a + x_b * x_b, axis=1) / size + eps)[:, None]
            x_a, x_b = x_a * inverse, x_b * inverse
            sum_a, sum_b = sum_a + a * x_a, sum_b + b * x_b
            g_a = a * tl.where(is_q, _load_row(q_norm, i, half), _load_row(k_norm, i, half))
            g_b = b * tl.where(
                is_q, _load_row(q_norm + half, i, half), _load_row(k_norm + half, i, half)
            )
            mean = (tl.sum(g_a * x_a + g_b * x_b, axis=1) / size)[:, None]
            a = tl.where(is_v, a, inverse * (g_a - x_a * mean))
            b = tl.where(is_v, b, inverse * (g_b - x_b * mean))
        offs = t * all_heads * size + n
        tl.store(grad + offs, a.to(grad.dtype.element_ty), mask=live)
        tl.store(grad + offs + half, b.to(grad.dtype.element_ty), mask=live)
    if partial is not None:
        out = partial + (p * tl.num_programs(1) + tl.program_id(1)) * 2 * size + i
        tl.store(out, tl.sum(tl.where(is_q, sum_a, 0.0), axis=0), mask=i < half)
        tl.store(out + half, tl.sum(tl.where(is_q, sum_b, 0.0), axis=0), mask=i < half)
        tl.store(out + size, tl.sum(tl.where(is_k, sum_a, 0.0), axis=0), mask=i < half)
        tl.store(out + size + half, tl.sum(tl.where(is_k, sum_b, 0.0), axis=0), mask=i < half)
