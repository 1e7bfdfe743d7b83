"""SwiGLU's gate on a gate-up product whose adapter is not yet added.

    g = g0 + l B_g',   u = u0 + l B_u'        y, d u, d g: as in `kernels.fused.swiglu`

Adding the update to [T, 2F] would read and write a layer's largest tensor once more. A tile holds
whole rows of l and B, which bounds the rank (`supports`).

Legend: `kernels.fused`; r rank, N = 2F, L columns of the update: r where one of gate and up has an
adapter, 2r where both have (B is block-diagonal, and its zeros are not read).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lowroll.kernels.launch import block, jit, tl, triton_supports
from lowroll.kernels.support import YES, Support, needs_gradient, no

TOKENS, FEATURES = 32, 128  # of a tile: small, for many in flight
ROW_BYTES = 512  # of l and B in a tile; more does not fit into shared memory


def supports(rank: int, dtype: torch.dtype) -> Support:
    """Return whether a tile holds an update of this rank."""
    if max(16, block(rank)) * dtype.itemsize <= ROW_BYTES:
        return YES
    return no("takes ranks up to 256 in half precision, up to 128 in float32")


@dataclass(frozen=True)
class Update:
    """The update low @ b' that gate_up lacks; low's first `rank` columns are the gate's, its last
    are up's."""

    low_TL: Tensor
    b_NL: Tensor
    rank: int

    def gate(self, gate_up_TN: Tensor) -> Tensor:
        return _forward(gate_up_TN, self.low_TL, self.b_NL, self.rank)

    def gate_backward(self, gate_up_TN: Tensor, y_grad_TF: Tensor) -> tuple[Tensor, Tensor]:
        y_TF = torch.empty_like(y_grad_TF)
        grad_TN = _backward(gate_up_TN, self.low_TL, self.b_NL, self.rank, y_grad_TF, y_TF)
        return grad_TN, y_TF


def silu_mul_adapted(gate_up_TN: Tensor, low_TL: Tensor, b_NL: Tensor, rank: int) -> Tensor:
    """Return silu(gate) * up [T, F] of gate_up + low @ b'. Differentiable in gate_up, with the
    sum's gradient."""
    if (
        not triton_supports(gate_up_TN)
        or gate_up_TN.numel() == 0
        or not supports(rank, low_TL.dtype)
    ):
        gate_TF, up_TF = (gate_up_TN + low_TL @ b_NL.t()).chunk(2, dim=-1)
        return F.silu(gate_TF) * up_TF
    if needs_gradient(gate_up_TN):
        return _SiluMulAdapted.apply(gate_up_TN, low_TL, b_NL, rank)
    return _forward(gate_up_TN, low_TL, b_NL, rank)


def _forward(gate_up_TN: Tensor, low_TL: Tensor, b_NL: Tensor, rank: int) -> Tensor:
    num_tokens, size = gate_up_TN.shape[0], gate_up_TN.shape[1] // 2
    y_TF = torch.empty(num_tokens, size, dtype=gate_up_TN.dtype, device=gate_up_TN.device)
    _silu_mul_adapted_kernel[_grid(num_tokens, size)](
        gate_up_TN,
        low_TL,
        b_NL,
        y_TF,
        num_tokens,
        size,
        low_TL.shape[1],
        rank,
        TOKENS=TOKENS,
        FEATURES=FEATURES,
        RANK=max(16, block(rank)),
        num_warps=8,
    )
    return y_TF


def _grid(num_tokens: int, size: int) -> tuple[int, int]:
    return -(-size // FEATURES), -(-num_tokens // TOKENS)


class _SiluMulAdapted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up_TN: Tensor, low_TL: Tensor, b_NL: Tensor, rank: int) -> Tensor:
        ctx.save_for_backward(gate_up_TN, low_TL, b_NL)
        ctx.rank = rank
        return _forward(gate_up_TN, low_TL, b_NL, rank)

    @staticmethod
    def backward(ctx: Any, y_grad_TF: Tensor) -> tuple[Tensor | None, ...]:
        gate_up_TN, low_TL, b_NL = ctx.saved_tensors
        return _backward(gate_up_TN, low_TL, b_NL, ctx.rank, y_grad_TF), None, None, None


def _backward(
    gate_up_TN: Tensor,
    low_TL: Tensor,
    b_NL: Tensor,
    rank: int,
    y_grad_TF: Tensor,
    y_TF: Tensor | None = None,
) -> Tensor:
    """Return the gradient of gate_up + low @ b'; fill `y_TF`, if given, with the result."""
    num_tokens, size = y_grad_TF.shape
    grad_TN = torch.empty_like(gate_up_TN)
    _silu_mul_adapted_backward_kernel[_grid(num_tokens, size)](
        gate_up_TN,
        low_TL,
        b_NL,
        y_grad_TF.contiguous(),
        grad_TN,
        y_TF,
        num_tokens,
        size,
        low_TL.shape[1],
        rank,
        TOKENS=TOKENS,
        FEATURES=FEATURES,
        RANK=max(16, block(rank)),
        num_warps=8,
    )
    return grad_TN


# -- Triton ----------------------------------------------------------------------------------------


@jit
def _gate_and_up(gate_up, low, b, t, n, live, size, columns, rank, num_tokens, RANK: tl.constexpr):
    offs = t[:, None].to(tl.int64) * 2 * size + n[None, :]
    gate = tl.load(gate_up + offs, mask=live, other=0.0).to(tl.float32)
    up = tl.load(gate_up + offs + size, mask=live, other=0.0).to(tl.float32)
    gate += _adapter_update(low, b, t, n, n < size, columns, rank, num_tokens, RANK)
    up += _adapter_update(
        low + columns - rank,
        b + size * columns + columns - rank,
        t,
        n,
        n < size,
        columns,
        rank,
        num_tokens,
        RANK,
    )
    return gate, up


@jit
def _adapter_update(low, b, t, n, inside, columns, rank, num_tokens, RANK: tl.constexpr):
    r = tl.arange(0, RANK)
    low_tr = tl.load(
        low + t[:, None] * columns + r[None, :],
        mask=(t < num_tokens)[:, None] & (r < rank)[None, :],
        other=0.0,
    )
    b_nr = tl.load(
        b + n[:, None] * columns + r[None, :], mask=inside[:, None] & (r < rank)[None, :], other=0.0
    )
    return tl.dot(low_tr, tl.trans(b_nr), input_precision="ieee")


@jit
def _silu_mul_adapted_kernel(
    gate_up,
    low,
    b,
    out,
    num_tokens,
    size,
    columns,
    rank,
    TOKENS: tl.constexpr,
    FEATURES: tl.constexpr,
    RANK: tl.constexpr,
):
    t = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    n = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
    live = (t < num_tokens)[:, None] & (n < size)[None, :]
    gate, up = _gate_and_up(gate_up, low, b, t, n, live, size, columns, rank, num_tokens, RANK)
    y = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(
        out + t[:, None].to(tl.int64) * size + n[None, :], y.to(out.dtype.element_ty), mask=live
    )


@jit
def _silu_mul_adapted_backward_kernel(
    gate_up,
    low,
    b,
    y_grad,
    grad,
    y,
    num_tokens,
    size,
    columns,
    rank,
    TOKENS: tl.constexpr,
    FEATURES: tl.constexpr,
    RANK: tl.constexpr,
):
    t = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    n = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
    live = (t < num_tokens)[:, None] & (n < size)[None, :]
    gate, up = _gate_and_up(gate_up, low, b, t, n, live, size, columns, rank, num_tokens, RANK)
    dy = tl.load(y_grad + t[:, None].to(tl.int64) * size + n[None, :], mask=live, other=0.0).to(
        tl.float32
    )
    s = 1.0 / (1.0 + tl.exp(-gate))
    offs = t[:, None].to(tl.int64) * 2 * size + n[None, :]
    dtype = grad.dtype.element_ty
    tl.store(grad + offs, (dy * up * s * (1.0 + gate * (1.0 - s))).to(dtype), mask=live)
    tl.store(grad + offs + size, (dy * gate * s).to(dtype), mask=live)
    if y is not None:
        y_tile = gate / (1.0 + tl.exp(-gate)) * up
        tl.store(y + t[:, None].to(tl.int64) * size + n[None, :], y_tile.to(dtype), mask=live)
