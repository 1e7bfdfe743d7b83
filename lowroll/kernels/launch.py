"""Where Triton is, and when its kernels run: the one guard for machines that have none.

Kernels are written as `@jit` functions of module level, with `tl` from here. Without Triton both are placeholders that
are never called. With TRITON_INTERPRET=1 (tests) Triton runs kernels on CPU tensors, in numpy.
"""
from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from torch import Tensor

triton: Any = import_module("triton") if find_spec("triton") else None
tl: Any = import_module("triton.language") if triton else None
jit: Callable[..., Any] = triton.jit if triton else lambda function=None, **options: function or (lambda f: f)

INTERPRETED = triton is not None and os.environ.get("TRITON_INTERPRET") == "1"


def fused(x: Tensor) -> bool:
    """Do Triton's kernels run on this tensor, rather than plain torch?"""
    return triton is not None and (x.is_cuda or INTERPRETED)


def block(size: int) -> int:
    """The power of two that covers `size` elements."""
    return 1 << max(0, size - 1).bit_length()


def warps(elements: int, each: int = 512) -> int:
    """Warps of a program that holds so many elements, about `each` a warp: 1, 2, 4, ... 32."""
    return min(32, block(max(1, elements // each)))
