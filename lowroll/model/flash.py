"""Attention by torch's kernels that give log-sum-exps: over packed sequences on CUDA, and with
sinks.

A sink scales the output of a query head:

    lse' = log(exp(lse) + exp(sink)),    o' = o exp(lse - lse')

torch's backward pass, given o' and lse', has the probabilities exp(s - lse') and row sums of do *
o' of attention with the sink, so the gradients of q, k and v are exact. The sink's value is zero:

    dsink = -sum over queries of exp(sink - lse') sum(do * o')

Legend: `model`; C query tokens, T key tokens, X any leading axes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

WIDEST = 256  # numbers of a head, on CUDA
Gradients = tuple[Tensor, Tensor, Tensor]


class AttentionKernel(Protocol):
    """Plain attention of q [X, H, d] over k and v [X, G, d]."""

    def forward(self, q_XHd: Tensor, k_XGd: Tensor, v_XGd: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output, and log-sum-exps [X, H] in float32."""
        ...

    def backward(
        self,
        grad_XHd: Tensor,
        q_XHd: Tensor,
        k_XGd: Tensor,
        v_XGd: Tensor,
        o_XHd: Tensor,
        lse_XH: Tensor,
    ) -> Gradients:
        """Return the gradients of q, k and v."""
        ...


@dataclass(frozen=True)
class Packed:
    """Causal attention of packed sequences on CUDA, the last query aligned with the last key; or
    of all queries to all keys. q_bounds, k_bounds: int32 [S + 1] on the device. window: as in
    `LayerSpec`, of causal attention."""

    q_bounds: Tensor
    q_longest: int
    k_bounds: Tensor
    k_longest: int
    window: int = 0
    is_causal: bool = True

    def forward(self, q_CHd: Tensor, k_TGd: Tensor, v_TGd: Tensor) -> tuple[Tensor, Tensor]:
        # a window that ends at the query is causal
        o_CHd, lse_HC, *_ = torch.ops.aten._flash_attention_forward(
            q_CHd, k_TGd, v_TGd, *self._places, 0.0, self._is_plain, False, **self._window
        )
        return o_CHd, lse_HC.t()

    def backward(
        self,
        grad_CHd: Tensor,
        q_CHd: Tensor,
        k_TGd: Tensor,
        v_TGd: Tensor,
        o_CHd: Tensor,
        lse_CH: Tensor,
    ) -> Gradients:
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=q_CHd.device)
        grads: Gradients = torch.ops.aten._flash_attention_backward(
            grad_CHd.contiguous(),
            q_CHd,
            k_TGd,
            v_TGd,
            o_CHd,
            lse_CH.t().contiguous(),
            *self._places,
            0.0,
            self._is_plain,
            no_dropout,
            torch.empty(0, device=q_CHd.device),
            **self._window,
        )
        return grads

    @property
    def _places(self) -> tuple[Tensor, Tensor, int, int]:
        return self.q_bounds, self.k_bounds, self.q_longest, self.k_longest

    @property
    def _is_plain(self) -> bool:
        return self.is_causal and self.window == 0

    @property
    def _window(self) -> dict[str, int]:
        right = 0 if self.is_causal else -1
        return {"window_size_left": self.window - 1, "window_size_right": right}


@dataclass(frozen=True)
class Masked:
    """Attention of sequences of one length on a CPU, [S, C, H, d]. added_CT: added to scores; None:
    causal, or of all queries to all keys."""

    added_CT: Tensor | None = None
    is_causal: bool = True

    def forward(self, q_SCHd: Tensor, k_STGd: Tensor, v_STGd: Tensor) -> tuple[Tensor, Tensor]:
        o_SHCd, lse_SHC = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *_by_head(q_SCHd, k_STGd, v_STGd), 0.0, self._is_plain, attn_mask=self.added_CT
        )
        return o_SHCd.transpose(1, 2), lse_SHC.transpose(1, 2)

    def backward(
        self,
        grad_SCHd: Tensor,
        q_SCHd: Tensor,
        k_STGd: Tensor,
        v_STGd: Tensor,
        o_SCHd: Tensor,
        lse_SCH: Tensor,
    ) -> Gradients:
        q, k, v = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *_by_head(grad_SCHd, q_SCHd, k_STGd, v_STGd, o_SCHd),
            lse_SCH.transpose(1, 2),
            0.0,
            self._is_plain,
            attn_mask=self.added_CT,
        )
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    @property
    def _is_plain(self) -> bool:
        return self.is_causal and self.added_CT is None


def _by_head(*x_SCHd: Tensor) -> list[Tensor]:
    return [x.transpose(1, 2) for x in x_SCHd]


def flashes(dtype: torch.dtype, head_dim: int) -> bool:
    """Return whether torch's flash attention on CUDA takes such heads."""
    return dtype in (torch.bfloat16, torch.float16) and head_dim % 8 == 0 and head_dim <= WIDEST


def attend_packed(
    q_CHd: Tensor, k_TGd: Tensor, v_TGd: Tensor, sinks_H: Tensor | None, kernel: AttentionKernel
) -> Tensor:
    return attend(q_CHd.contiguous(), k_TGd.contiguous(), v_TGd.contiguous(), sinks_H, kernel)


def attend(
    q_XHd: Tensor, k_XGd: Tensor, v_XGd: Tensor, sinks_H: Tensor | None, kernel: AttentionKernel
) -> Tensor:
    """Compute attention, with sinks if any."""
    o_XHd = _Attention.apply(q_XHd, k_XGd, v_XGd, sinks_H, kernel)
    assert isinstance(o_XHd, Tensor)
    return o_XHd


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_XHd: Tensor,
        k_XGd: Tensor,
        v_XGd: Tensor,
        sinks_H: Tensor | None,
        kernel: AttentionKernel,
    ) -> Tensor:
        o_XHd, lse_XH = kernel.forward(q_XHd, k_XGd, v_XGd)
        if sinks_H is not None:
            with_sink_XH = torch.logaddexp(lse_XH, sinks_H.float())
            share_XH1 = (lse_XH - with_sink_XH).exp()[..., None]
            o_XHd, lse_XH = (o_XHd.float() * share_XH1).to(o_XHd.dtype), with_sink_XH
        ctx.save_for_backward(q_XHd, k_XGd, v_XGd, sinks_H, o_XHd, lse_XH)
        ctx.kernel = kernel
        return o_XHd

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_XHd: Tensor) -> tuple[Tensor | None, ...]:
        q_XHd, k_XGd, v_XGd, sinks_H, o_XHd, lse_XH = ctx.saved_tensors
        grads = ctx.kernel.backward(grad_XHd, q_XHd, k_XGd, v_XGd, o_XHd, lse_XH)
        sinks_grad_H = None
        if ctx.needs_input_grad[3]:
            sums_XH = (grad_XHd.float() * o_XHd.float()).sum(-1)
            share_XH = (sinks_H.float() - lse_XH).exp()
            sinks_grad_H = -(share_XH * sums_XH).flatten(0, -2).sum(0).to(sinks_H.dtype)
        return *grads, sinks_grad_H, None
