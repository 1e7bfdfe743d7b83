"""Log-prob of a target, entropy, and the gradient of the log-prob, from a block of logits.

With z = logits / temperature and y the target of a row,

    logp = z_y - lse(z)        entropy = lse(z) - sum_v softmax(z)_v z_v
    d logp / d logits = (onehot(y) - softmax(z)) / temperature

On CUDA one kernel makes the first two in one pass over the logits (a running maximum, Milakov & Gimelshein 2018), and
the gradient, where it is wanted, in a second one, rounded once to the dtype of the product that reads it. The
difference onehot - softmax is taken before the rounding: of a token with p = 0.999 the gradient is 0.001, not 0.

Shapes: C rows, V vocabulary.
"""
from __future__ import annotations

import os

import torch
from torch import Tensor

TILE = 4096


def token_log_probs(logits_CV: Tensor, targets_C: Tensor, temperature: float = 1.0, gradient_CV: Tensor | None = None,
                    scale_C: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Log-prob of each target and entropy of each row, both [C] float32.

    logits_CV: any float dtype, rows contiguous. gradient_CV, any float dtype, is filled with scale * d logp / d logits
    where it is given; scale_C (float32) is 1 where it is not. The logits may be overwritten. Nothing waits for the
    device.
    """
    if not (logits_CV.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"):
        return _reference(logits_CV, targets_C, temperature, gradient_CV, scale_C)
    from lowroll.kernels import triton_logprobs as kernels

    rows, vocab = logits_CV.shape
    logp_C = torch.empty(rows, dtype=torch.float32, device=logits_CV.device)
    entropy_C = torch.empty_like(logp_C)
    if rows:
        kernels.token_log_probs[(rows,)](
            logits_CV, targets_C, scale_C, logp_C, entropy_C, gradient_CV, vocab, logits_CV.stride(0),
            0 if gradient_CV is None else gradient_CV.stride(0), 1 / temperature, BLOCK=TILE, num_warps=8)
    return logp_C, entropy_C


def _reference(logits_CV: Tensor, targets_C: Tensor, temperature: float, gradient_CV: Tensor | None,
               scale_C: Tensor | None) -> tuple[Tensor, Tensor]:
    logits_CV = logits_CV.float()
    logp_CV = torch.log_softmax(logits_CV if temperature == 1.0 else logits_CV / temperature, dim=-1)
    logp_C = logp_CV.gather(1, targets_C[:, None])[:, 0]
    p_CV = logp_CV.exp()
    if gradient_CV is not None:
        scale_C1 = (torch.ones_like(logp_C) if scale_C is None else scale_C)[:, None] / temperature
        gradient_CV.copy_((p_CV * -scale_C1).scatter_add_(1, targets_C[:, None], scale_C1))
    entropy_C = -(p_CV.mul_(logp_CV.clamp_(min=torch.finfo(torch.float32).min))).sum(-1)
    return logp_C, entropy_C
