"""The only way from logits to log-probs, for the sampler and for the learner; float32 always.

`log_probs` is it. `token_log_probs` applies it to the tokens that were drawn, in chunks of rows, so that the [T, V]
logits never exist, forward or backward: the forward pass keeps one number a token (the log of the normaliser), and
the backward pass makes each chunk's logits again,

    z = h W' / temperature,   logp = z[y] - lse(z),   entropy = lse(z) - sum_v softmax(z)_v z_v
    d logp / d z = onehot(y) - softmax(z).

Legend: T tokens, D hidden size, V vocabulary.
"""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def log_probs(logits_TV: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probs [T, V] float32 of softmax(logits / temperature)."""
    logits_TV = logits_TV.float()
    return torch.log_softmax(logits_TV if temperature == 1.0 else logits_TV / temperature, dim=-1)


def token_log_probs(hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, temperature: float = 1.0,
                    chunk: int = 1024) -> tuple[Tensor, Tensor]:
    """Log-prob of each target and entropy of its distribution, both [T] float32.

    `hidden_TD[t]` predicts `targets_T[t]`; `weight_VD` is the lm_head. The log-probs carry gradient to both, the
    entropy carries none. `chunk` rows of logits exist at a time. ValueError for a temperature that is not above 0.
    """
    if not temperature > 0:
        raise ValueError(f"temperature: log-probs need a temperature above 0, got {temperature}")
    return _TokenLogProbs.apply(hidden_TD, weight_VD, targets_T, temperature, chunk)


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, temperature: float,
                chunk: int) -> tuple[Tensor, Tensor]:
        num_tokens = hidden_TD.shape[0]
        logp_T = torch.empty(num_tokens, dtype=torch.float32, device=hidden_TD.device)
        entropy_T = torch.empty_like(logp_T)
        for start in range(0, num_tokens, chunk):
            rows = slice(start, start + chunk)
            logp_CV = log_probs(hidden_TD[rows] @ weight_VD.t(), temperature)
            logp_T[rows] = logp_CV.gather(1, targets_T[rows, None])[:, 0]
            entropy_T[rows] = -(logp_CV.exp().mul_(logp_CV.clamp_(min=torch.finfo(torch.float32).min))).sum(-1)
        ctx.save_for_backward(hidden_TD, weight_VD, targets_T)
        ctx.temperature, ctx.chunk = temperature, chunk
        ctx.mark_non_differentiable(entropy_T)
        return logp_T, entropy_T

    @staticmethod
    def backward(ctx: Any, grad_T: Tensor, _entropy_grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden_TD, weight_VD, targets_T = ctx.saved_tensors
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        hidden_grad = torch.empty_like(hidden_TD) if needs_hidden else None
        weight_grad = torch.zeros_like(weight_VD, dtype=torch.float32) if needs_weight else None
        for start in range(0, hidden_TD.shape[0], ctx.chunk):
            rows = slice(start, start + ctx.chunk)
            grad_C1 = (grad_T[rows] / ctx.temperature)[:, None]
            grad_CV = log_probs(hidden_TD[rows] @ weight_VD.t(), ctx.temperature).exp_().mul_(-grad_C1)
            grad_CV.scatter_add_(1, targets_T[rows, None], grad_C1)
            grad_CV = grad_CV.to(weight_VD.dtype)
            if hidden_grad is not None:
                hidden_grad[rows] = grad_CV @ weight_VD
            if weight_grad is not None:
                weight_grad += (grad_CV.t() @ hidden_TD[rows])
        if weight_grad is not None:
            weight_grad = weight_grad.to(weight_VD.dtype)
        return hidden_grad, weight_grad, None, None, None
