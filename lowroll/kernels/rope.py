"""From the fused qkv product to heads: QK-norm where the model has one, and the half-rotation, in one launch.

    q = rotate(norm(q)),  k = rotate(norm(k)),  v = v
    rotate (a, b) = (a cos - b sin, b cos + a sin),  a and b the halves of a head (Su et al. 2021)

Legend: T tokens, H query heads, G key-value heads, d head size.
"""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lowroll.kernels.rows import Product


def rotate_heads(qkv: Tensor | Product, cos: Tensor, sin: Tensor, heads: int, kv_heads: int, head_dim: int,
                 q_norm_d: Tensor | None, k_norm_d: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """(q [T, H, d], k [T, G, d], v [T, G, d]) of qkv [T, (H + 2G) d]; cos and sin [T, 1, d/2] float32.

    Differentiable in qkv and the norms' weights when qkv is a tensor.
    """
    if isinstance(qkv, Product):
        qkv = qkv.dense()
    q_THd, k_TGd, v_TGd = qkv.view(qkv.shape[0], -1, head_dim).split((heads, kv_heads, kv_heads), dim=1)
    if q_norm_d is not None and k_norm_d is not None:
        q_THd, k_TGd = _norm(q_THd, q_norm_d, eps), _norm(k_TGd, k_norm_d, eps)
    return _rotate(q_THd, cos, sin), _rotate(k_TGd, cos, sin), v_TGd


def _norm(x_THd: Tensor, weight_d: Tensor, eps: float) -> Tensor:
    if x_THd.dtype == weight_d.dtype == torch.float32:
        return F.rms_norm(x_THd, weight_d.shape, weight_d, eps)
    return (F.rms_norm(x_THd.float(), weight_d.shape, None, eps) * weight_d.float()).to(x_THd.dtype)


def _rotate(x_THd: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x_THd.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_THd.dtype)
