"""The heads of an engine on a CPU, normed and rotated: `avx2.cpp` for torch, in float32.

One call replaces some thirty of torch. Norms sum in another order than torch's, so a learner
(outside inference mode) uses it only for heads without norms (`Rotation`), with and without
gradients, to keep a ratio of exactly 1 over the same weights. Small inputs are left to torch, whose
bits small models keep.

Legend: T tokens, H query heads, G key-value heads, d head size, N = (H + 2G) d.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from lowroll.kernels import cxx
from lowroll.kernels.build import pointer
from lowroll.kernels.support import Support, no

SOURCE = Path(__file__).with_suffix(".cpp")
MULTIPLE = 16  # of d
LEAST = 512  # numbers of a row's queries


class CpuFusedArguments(ctypes.Structure):
    _fields_: ClassVar[list[tuple[str, Any]]] = [
        *(
            (name, ctypes.c_void_p)
            for name in ("qkv", "cosine", "sine", "q_norm", "k_norm", "q", "k")
        ),
        ("stride", ctypes.c_int64),
        ("eps", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("T", "H", "G", "d", "threads")),
    ]


def supports_device(device: torch.device) -> Support:
    if device.type != "cpu":
        return cxx.NO_CPU
    return cxx.supports(SOURCE, "heads are normed and rotated by torch")


def supports(
    qkv_TN: Tensor, heads: int, d: int, q_norm_d: Tensor | None, k_norm_d: Tensor | None
) -> Support:
    if not torch.is_inference_mode_enabled() and not (q_norm_d is None and k_norm_d is None):
        return no("norms heads for engines, in inference mode")
    for t in (qkv_TN, q_norm_d, k_norm_d):
        if t is not None and t.dtype != torch.float32:
            return no("takes float32")
    if d % MULTIPLE:
        return no(f"takes heads in multiples of {MULTIPLE}")
    if heads * d < LEAST:
        return no(f"takes rows of {LEAST} numbers or more")
    return supports_device(qkv_TN.device)


def rotate_heads(
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
    """Compute `rope.rotate_heads` of a tensor; v is a view of it. Differentiable without norms; v
    is then a copy."""
    if not torch.is_inference_mode_enabled():
        return Rotation.apply(qkv_TN, cos, sin, heads, kv_heads, d)
    return heads_of(qkv_TN, cos, sin, heads, kv_heads, d, q_norm_d, k_norm_d, eps)


def heads_of(
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
    """Return (q [T, H, d], k [T, G, d], v [T, G, d]) of qkv by the kernel; v is a view in inference
    mode, else a copy, as autograd requires."""
    tokens = qkv_TN.shape[0]
    qkv_TN = qkv_TN if qkv_TN.stride(1) == 1 else qkv_TN.contiguous()
    q_THd, k_TGd = qkv_TN.new_empty(tokens, heads, d), qkv_TN.new_empty(tokens, kv_heads, d)
    cos, sin = cos.contiguous(), sin.contiguous()
    norm_weights = [None if norm is None else norm.contiguous() for norm in (q_norm_d, k_norm_d)]
    arguments = CpuFusedArguments(
        *(pointer(t) for t in (qkv_TN, cos, sin, *norm_weights, q_THd, k_TGd)),
        qkv_TN.stride(0),
        eps,
        tokens,
        heads,
        kv_heads,
        d,
        torch.get_num_threads(),
    )
    cxx.run(SOURCE, "avx2_heads", arguments)
    v_TN = qkv_TN[:, (heads + kv_heads) * d :]
    if not torch.is_inference_mode_enabled():
        v_TN = v_TN.clone(memory_format=torch.contiguous_format)
    return q_THd, k_TGd, v_TN.unflatten(1, (kv_heads, d))


class Rotation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv_TN: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int, d: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        q_TN, k_TN, v_TN = qkv_TN.split((heads * d, kv_heads * d, kv_heads * d), dim=1)
        v_TGd = v_TN.clone(memory_format=torch.contiguous_format).unflatten(1, (kv_heads, d))
        return _rotate(q_TN, cos, sin, d), _rotate(k_TN, cos, sin, d), v_TGd

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        q_TN, k_TN, v_TN = (grad.flatten(1) for grad in grads)
        d = grads[0].shape[-1]
        rotated = [_rotate(x_TN, cos, -sin, d).flatten(1) for x_TN in (q_TN, k_TN)]
        return torch.cat((*rotated, v_TN), dim=1), *(None,) * 5


def _rotate(x_TN: Tensor, cos: Tensor, sin: Tensor, d: int) -> Tensor:
    """Rotate heads without norms by the kernel."""
    x_TN = x_TN if x_TN.stride(1) == 1 else x_TN.contiguous()
    tokens, heads = x_TN.shape[0], x_TN.shape[1] // d
    cos, sin = cos.contiguous(), sin.contiguous()
    out_THd = x_TN.new_empty(tokens, heads, d)
    pointers = [pointer(t) for t in (x_TN, cos, sin)]
    sizes = x_TN.stride(0), 0.0, tokens, heads, 0, d, torch.get_num_threads()
    cxx.run(
        SOURCE,
        "avx2_heads",
        CpuFusedArguments(*pointers, None, None, pointer(out_THd), None, *sizes),
    )
    return out_THd
