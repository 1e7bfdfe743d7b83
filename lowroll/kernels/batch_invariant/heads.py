"""Norm and rotation of heads: `kernels.fused.avx2` on a CPU (float32, multiples of
`avx2.MULTIPLE`), else Triton."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lowroll.kernels.batch_invariant.gradient import with_gradient_of
from lowroll.kernels.fused import avx2, rope
from lowroll.kernels.launch import triton_supports
from lowroll.kernels.quantize.rows import Product


def rotate_heads(qkv: Tensor | Product, *how: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `kernels.fused.rope.rotate_heads`."""
    if isinstance(qkv, Product) or triton_supports(qkv):
        return rope.rotate_heads(qkv, *how)
    outputs = with_gradient_of(rope.plain_heads, avx2.heads_of, qkv, *how)
    assert isinstance(outputs, tuple)
    return outputs
