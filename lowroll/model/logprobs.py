"""The only path from logits to log-probs, for sampler and learner, in float32.

`token_log_probs` works in chunks of rows, so that the [T, V] logits never exist:

    z = h W' / temperature,   logp = z[y] - lse(z),   entropy = lse(z) - sum_v softmax(z)_v z_v
    G = (onehot(y) - softmax(z)) / temperature,       d logp / d h = G W,       d logp / d W = G' h

With a frozen W (LoRA) the forward pass computes d logp / d h. For a trained W it keeps G of the
first chunks, in the dtype of W, and the incoming gradient g scales the other factor, d W = G' (g
h); for other chunks the backward pass recomputes the logits.

On CUDA products of half-precision matrices give unrounded float32 logits. G is kept only there, at
half of their size.

Legend: `model`; C tokens of a chunk.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lowroll.kernels.launch import triton_supports
from lowroll.kernels.matmul import ordered
from lowroll.kernels.sampling import token_logprobs
from lowroll.kernels.training import logprobs as kernels

KEPT = 3  # chunks whose G is kept


def log_probs(logits_TV: Tensor, temperature: float = 1.0) -> Tensor:
    """Return log-probs [T, V] float32 of softmax(logits / temperature)."""
    logits_TV = logits_TV.float()
    if temperature != 1.0:
        logits_TV = logits_TV / temperature
    return torch.log_softmax(logits_TV, dim=-1)


def token_log_probs(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    targets_T: Tensor,
    temperature: float = 1.0,
    chunk: int = 1024,
    exact: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return each target's log-prob and its distribution's entropy, both [T] float32.

    `hidden_TD[t]` predicts `targets_T[t]`; `weight_VD` is the lm_head. Only the log-probs carry
    gradient. exact: a row's logits do not depend on its batch. ValueError for a temperature of 0 or
    less.
    """
    if not temperature > 0:
        raise ValueError(f"temperature: log-probs need a temperature above 0, got {temperature}")
    return _TokenLogProbs.apply(hidden_TD, weight_VD, targets_T, temperature, chunk, exact)


def logits(hidden_TD: Tensor, weight_VD: Tensor) -> Tensor:
    """Return logits [T, V], differentiable, float32 if `_wide`, else in the model's dtype."""
    if not _wide(hidden_TD):
        return F.linear(hidden_TD, weight_VD)
    return _Logits.apply(hidden_TD, weight_VD)


class _Logits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_TD: Tensor, weight_VD: Tensor) -> Tensor:
        ctx.save_for_backward(hidden_TD, weight_VD)
        return float32_product(hidden_TD, weight_VD.t())

    @staticmethod
    def backward(ctx: Any, grad_TV: Tensor) -> tuple[Tensor | None, ...]:
        hidden_TD, weight_VD = ctx.saved_tensors
        grad_TV = grad_TV.to(weight_VD.dtype)
        hidden_grad = grad_TV @ weight_VD if ctx.needs_input_grad[0] else None
        weight_grad = grad_TV.t() @ hidden_TD if ctx.needs_input_grad[1] else None
        return hidden_grad, weight_grad


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        targets_T: Tensor,
        temperature: float,
        chunk: int,
        exact: bool,
    ) -> tuple[Tensor, Tensor]:
        ctx.temperature = temperature
        ctx.chunk = chunk
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        logp_T = torch.empty(hidden_TD.shape[0], dtype=torch.float32, device=hidden_TD.device)
        entropy_T = torch.empty_like(logp_T)
        slope_TD: Tensor | None = None  # d logp / d h
        buffer_CV: Tensor | None = None
        if needs_hidden and not needs_weight:
            slope_TD = torch.empty_like(hidden_TD)
            buffer_CV = weight_VD.new_empty(min(chunk, len(hidden_TD)), len(weight_VD))
        num_kept = _kept(hidden_TD) if needs_weight else 0
        ctx.kept = {}
        for i, rows in enumerate(_chunks(hidden_TD, chunk)):
            if exact:
                logits_CV = ordered.product(hidden_TD[rows], weight_VD, dtype=torch.float32)
            else:
                logits_CV = float32_product(hidden_TD[rows], weight_VD.t())
            grad_CV: Tensor | None = None
            if buffer_CV is not None:
                grad_CV = buffer_CV[: len(logits_CV)]
            elif i < num_kept:
                ctx.kept[i] = grad_CV = torch.empty_like(logits_CV, dtype=weight_VD.dtype)
            logp_T[rows], entropy_T[rows] = _chunk_log_probs(
                logits_CV, targets_T[rows], temperature, grad_CV, exact
            )
            if slope_TD is not None and grad_CV is not None:
                torch.mm(grad_CV, weight_VD, out=slope_TD[rows])
            del logits_CV  # frees them before the next ones
        if slope_TD is not None:
            ctx.save_for_backward(slope_TD)
        else:
            ctx.save_for_backward(hidden_TD, weight_VD, targets_T, logp_T)
        ctx.mark_non_differentiable(entropy_T)
        return logp_T, entropy_T

    @staticmethod
    def backward(ctx: Any, grad_T: Tensor, _entropy_grad: Tensor) -> tuple[Tensor | None, ...]:
        if not ctx.needs_input_grad[1]:
            (slope_TD,) = ctx.saved_tensors
            return (slope_TD * grad_T[:, None]).to(slope_TD.dtype), *(None,) * 5
        hidden_TD, weight_VD, targets_T, logp_T = ctx.saved_tensors
        # kernels do not take the stride 0 of a sum's gradient
        grad_T = grad_T.contiguous()
        hidden_grad = torch.empty_like(hidden_TD) if ctx.needs_input_grad[0] else None
        weight_grad = torch.zeros_like(weight_VD, dtype=torch.float32)
        for i, rows in enumerate(_chunks(hidden_TD, ctx.chunk)):
            hidden_CD = hidden_TD[rows]
            # a kept G lacks the factor g of each row
            scale_C1 = grad_T[rows, None] if i in ctx.kept else None
            if scale_C1 is not None:
                grad_CV = ctx.kept.pop(i)
                hidden_CD = (hidden_CD * scale_C1).to(hidden_TD.dtype)
            else:
                logits_CV = float32_product(hidden_CD, weight_VD.t())
                grad_CV = torch.empty_like(logits_CV, dtype=weight_VD.dtype)
                kernels.logit_gradient(
                    logits_CV, targets_T[rows], logp_T[rows], grad_T[rows], ctx.temperature, grad_CV
                )
                del logits_CV
            if hidden_grad is not None:
                torch.mm(grad_CV, weight_VD, out=hidden_grad[rows])
                if scale_C1 is not None:
                    hidden_grad[rows] *= scale_C1
            _add_float32_product(weight_grad, grad_CV.t(), hidden_CD)
            del grad_CV
        return hidden_grad, weight_grad.to(weight_VD.dtype), *(None,) * 4


def _chunk_log_probs(
    logits_CV: Tensor,
    targets_C: Tensor,
    temperature: float,
    grad_CV: Tensor | None,
    exact: bool,
) -> tuple[Tensor, Tensor]:
    """Return the log-probs and entropies [C], and write G to `grad_CV`. exact: log-probs have the
    bits of the sampler's kernel."""
    sampler_logp_C = None
    if exact and triton_supports(logits_CV):  # elsewhere there is only one log-softmax
        sampler_logp_C = token_logprobs.log_probs(logits_CV, targets_C, temperature)
    logp_C, entropy_C = kernels.token_log_probs(logits_CV, targets_C, temperature, grad_CV)
    return (logp_C if sampler_logp_C is None else sampler_logp_C), entropy_C


def _chunks(hidden_TD: Tensor, chunk: int) -> list[slice]:
    return [slice(start, start + chunk) for start in range(0, hidden_TD.shape[0], chunk)]


def _kept(hidden_TD: Tensor) -> int:
    return KEPT if _wide(hidden_TD) else 0


def _wide(x: Tensor) -> bool:
    """Return whether the device gives float32 sums of half-precision products."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16)


def float32_product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b, in float32 if `_wide`, else in the dtype of a."""
    if _wide(a):
        return torch.mm(a, b, out_dtype=torch.float32)
    return a @ b


def _add_float32_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    if _wide(a):
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total += a @ b
