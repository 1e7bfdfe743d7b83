"""Heads that are normed and rotated by `kernels.fused.avx2`, with gradients.

Legend: T tokens, H query heads, G key-value heads, d head size.
"""

from __future__ import annotations

from torch import Tensor

from lowroll.kernels.fused import avx2, rope
from lowroll.kernels.invariant.gradient import with_gradient_of


def rotate_heads(
    qkv_TN: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: int,
    kv_heads: int,
    head_dim: int,
    q_norm_d: Tensor | None,
    k_norm_d: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `kernels.fused.rope.rotate_heads`, all float32; heads in multiples of `avx2.MULTIPLE`."""
    given = qkv_TN, cos, sin, heads, kv_heads, head_dim, q_norm_d, k_norm_d, eps
    q_THd, k_TGd, v_TGd = with_gradient_of(rope.plain_heads, _fast, *given)
    return q_THd, k_TGd, v_TGd


def _fast(
    qkv_TN: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: int,
    kv_heads: int,
    d: int,
    q_norm_d: Tensor | None,
    k_norm_d: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    q_THd, k_TGd = avx2.heads_of(qkv_TN, cos, sin, heads, kv_heads, d, q_norm_d, k_norm_d, eps)
    v_TGd = qkv_TN[:, (heads + kv_heads) * d :].contiguous().unflatten(1, (kv_heads, d))
    return q_THd, k_TGd, v_TGd
