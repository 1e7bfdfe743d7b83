"""Heads that are normed and rotated by `kernels.fused.avx2`, with gradients: `rotate_heads`, as that of
`kernels.fused.rope`, of float32 heads in multiples of `avx2.MULTIPLE`."""

from __future__ import annotations

from functools import partial

from lowroll.kernels.fused import avx2, rope
from lowroll.kernels.invariant.gradient import with_gradient_of

rotate_heads = partial(with_gradient_of, rope.plain_heads, avx2.heads_of)
