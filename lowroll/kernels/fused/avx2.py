"""The heads of an engine on a CPU, normed and rotated: `avx2.cpp` for torch, in float32.

Norms sum in another order than torch's, so a learner (outside inference mode) uses it only for
heads without norms: the ratio over the same weights stays exactly 1.

Legend: `kernels.fused`; N = (H + 2G) d.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowroll.kernels import cxx
from lowroll.kernels.build import fields, pointer
from lowroll.kernels.launch import contiguous_rows
from lowroll.kernels.support import Support, no

SOURCE = Path(__file__).with_suffix(".cpp")
MULTIPLE = 16  # of d
LEAST = 512  # numbers of a row's queries


class CpuFusedArguments(ctypes.Structure):
    _fields_ = [
        *fields(ctypes.c_void_p, "qkv", "cosine", "sine", "q_norm", "k_norm", "q", "k"),
        ("stride", ctypes.c_int64),
        ("eps", ctypes.c_float),
        *fields(ctypes.c_int, "T", "H", "G", "d", "threads"),
    ]


def supports_device(device: torch.device) -> Support:
    return cxx.supports(SOURCE, device, "heads are normed and rotated by torch")


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
    """Compute `rope.rotate_heads`. Differentiable without norms."""
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
    """Return q, k and v as `rotate_heads` does; v is a view only in inference mode, as autograd
    requires."""
    tokens = qkv_TN.shape[0]
    qkv_TN = contiguous_rows(qkv_TN)
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
        return heads_of(qkv_TN, cos, sin, heads, kv_heads, d, None, None, 0.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        q_grad_THd, k_grad_TGd, v_grad_TGd = grads
        unrotated = []
        for grad in (q_grad_THd, k_grad_TGd):
            heads, d = grad.shape[1:]
            unrotated.append(
                heads_of(grad.flatten(1), cos, -sin, heads, 0, d, None, None, 0.0)[0].flatten(1)
            )
        return torch.cat((*unrotated, v_grad_TGd.flatten(1)), dim=1), *(None,) * 5
