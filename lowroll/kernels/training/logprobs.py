"""Log-prob of a target, its gradient, and the entropy, from a block of logits.

With z = logits / temperature and y the target of a row,

    logp = z_y - lse(z)        entropy = lse(z) - sum_v softmax(z)_v z_v
    d logp / d logits = (onehot(y) - softmax(z)) / temperature

On CUDA one pass computes the first two (online softmax, Milakov & Gimelshein 2018), a second the
gradient. onehot - softmax is rounded last: at p = 0.999 the gradient is 0.001, not 0.

Shapes: C rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowroll.kernels.launch import jit, tl, triton_supports

TILE = 4096  # logits of a gradient's program
LANES = 1024  # running maxima of a row
AT_ONCE = 1 << 20  # logits of a pass in plain torch, which stay in the cache


def token_log_probs(
    logits_CV: Tensor,
    targets_C: Tensor,
    temperature: float = 1.0,
    gradient_CV: Tensor | None = None,
    scale_C: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return log-prob of each target and entropy of each row, float32 [C], without a wait.

    logits_CV: rows contiguous; may be overwritten. gradient_CV: filled with scale * d logp / d
    logits. scale_C: float32; None is 1.
    """
    if not triton_supports(logits_CV):
        return _reference(logits_CV, targets_C, temperature, gradient_CV, scale_C)
    rows, vocab = logits_CV.shape
    logp_C = torch.empty(rows, dtype=torch.float32, device=logits_CV.device)
    entropy_C = torch.empty_like(logp_C)
    if rows:
        _token_log_probs_kernel[(rows,)](
            logits_CV,
            targets_C,
            scale_C,
            logp_C,
            entropy_C,
            gradient_CV,
            vocab,
            logits_CV.stride(0),
            0 if gradient_CV is None else gradient_CV.stride(0),
            1 / temperature,
            BLOCK=LANES,
            num_warps=8,
        )
    return logp_C, entropy_C


def logit_gradient(
    logits_CV: Tensor,
    targets_C: Tensor,
    logp_C: Tensor,
    scale_C: Tensor,
    temperature: float,
    gradient_CV: Tensor,
) -> None:
    """Compute only the gradient of `token_log_probs`, for known log-probs."""
    if not triton_supports(logits_CV):
        _reference(logits_CV, targets_C, temperature, gradient_CV, scale_C)
    elif len(logits_CV):
        _logit_gradient_kernel[(len(logits_CV), -(-logits_CV.shape[1] // TILE))](
            logits_CV,
            targets_C,
            logp_C,
            scale_C,
            gradient_CV,
            logits_CV.shape[1],
            logits_CV.stride(0),
            gradient_CV.stride(0),
            1 / temperature,
            BLOCK=TILE,
            num_warps=8,
        )


def _reference(
    logits_CV: Tensor,
    targets_C: Tensor,
    temperature: float,
    gradient_CV: Tensor | None,
    scale_C: Tensor | None,
) -> tuple[Tensor, Tensor]:
    logp_C = torch.empty(len(logits_CV), dtype=torch.float32, device=logits_CV.device)
    entropy_C = torch.empty_like(logp_C)
    rows = max(1, AT_ONCE // max(1, logits_CV.shape[1]))
    for start in range(0, len(logits_CV), rows):
        chunk = slice(start, start + rows)
        logp_C[chunk], entropy_C[chunk] = _reference_rows(
            logits_CV[chunk],
            targets_C[chunk],
            temperature,
            None if gradient_CV is None else gradient_CV[chunk],
            None if scale_C is None else scale_C[chunk],
        )
    return logp_C, entropy_C


def _reference_rows(
    logits_CV: Tensor,
    targets_C: Tensor,
    temperature: float,
    gradient_CV: Tensor | None,
    scale_C: Tensor | None,
) -> tuple[Tensor, Tensor]:
    logits_CV = logits_CV.float()
    logp_CV = torch.log_softmax(
        logits_CV if temperature == 1.0 else logits_CV / temperature, dim=-1
    )
    logp_C = logp_CV.gather(1, targets_C[:, None])[:, 0]
    in_place = gradient_CV is not None and gradient_CV.dtype == torch.float32
    p_CV = torch.exp(logp_CV, out=gradient_CV) if in_place else logp_CV.exp()
    terms_CV = logp_CV.clamp_(min=torch.finfo(torch.float32).min).mul_(p_CV)
    entropy_C = -terms_CV.sum(-1)
    if gradient_CV is not None:
        scale_C1 = (torch.ones_like(logp_C) if scale_C is None else scale_C)[:, None] / temperature
        p_CV.mul_(-scale_C1).scatter_add_(1, targets_C[:, None], scale_C1)
        if not in_place:
            gradient_CV.copy_(p_CV)
    return logp_C, entropy_C


# -- Triton ----------------------------------------------------------------------------------------


@jit
def _token_log_probs_kernel(
    logits_ptr,
    targets_ptr,
    scale_ptr,
    logp_ptr,
    entropy_ptr,
    gradient_ptr,
    vocab,
    logits_stride,
    gradient_stride,
    inverse_temperature,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * logits_stride
    offs_n = tl.arange(0, BLOCK)
    largest_n = tl.full((BLOCK,), -1e30, tl.float32)  # finite: no difference of infinities
    mass_n = tl.zeros((BLOCK,), tl.float32)  # sum exp(z - largest)
    moment_n = tl.zeros((BLOCK,), tl.float32)  # sum exp(z - largest) (z - largest)
    for start in range(0, vocab, BLOCK):
        z_n = tl.load(
            row_ptr + start + offs_n, mask=start + offs_n < vocab, other=float("-inf")
        ).to(tl.float32)
        z_n = z_n * inverse_temperature
        new_n = tl.maximum(largest_n, z_n)
        decrease_n = largest_n - new_n
        rescale_n = tl.exp(decrease_n)
        gap_n = z_n - new_n
        e_n = tl.exp(gap_n)
        moment_n = rescale_n * (moment_n + decrease_n * mass_n) + tl.where(
            z_n == float("-inf"), 0.0, e_n * gap_n
        )
        mass_n = rescale_n * mass_n + e_n
        largest_n = new_n
    largest = tl.max(largest_n, 0)
    decrease_n = largest_n - largest
    rescale_n = tl.exp(decrease_n)
    mass = tl.sum(rescale_n * mass_n, 0)
    moment = tl.sum(rescale_n * (moment_n + decrease_n * mass_n), 0)
    target = tl.load(targets_ptr + row)
    lse = largest + tl.log(mass)
    tl.store(logp_ptr + row, tl.load(row_ptr + target).to(tl.float32) * inverse_temperature - lse)
    tl.store(entropy_ptr + row, tl.log(mass) - moment / mass)
    if gradient_ptr is not None:
        scale = inverse_temperature
        if scale_ptr is not None:
            scale *= tl.load(scale_ptr + row)
        for start in range(0, vocab, BLOCK):
            mask_n = start + offs_n < vocab
            z_n = tl.load(row_ptr + start + offs_n, mask=mask_n, other=float("-inf")).to(tl.float32)
            onehot_n = tl.where(start + offs_n == target, 1.0, 0.0)
            g_n = scale * (onehot_n - tl.exp(z_n * inverse_temperature - lse))
            tl.store(
                gradient_ptr + row * gradient_stride + start + offs_n,
                g_n.to(gradient_ptr.dtype.element_ty),
                mask=mask_n,
            )


@jit
def _logit_gradient_kernel(
    logits_ptr,
    targets_ptr,
    logp_ptr,
    scale_ptr,
    gradient_ptr,
    vocab,
    logits_stride,
    gradient_stride,
    inverse_temperature,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    offs_n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask_n = offs_n < vocab
    target = tl.load(targets_ptr + row)
    target_logit = (
        tl.load(logits_ptr + row * logits_stride + target).to(tl.float32) * inverse_temperature
    )
    lse = target_logit - tl.load(logp_ptr + row)
    z_n = tl.load(logits_ptr + row * logits_stride + offs_n, mask=mask_n, other=float("-inf")).to(
        tl.float32
    )
    onehot_n = tl.where(offs_n == target, 1.0, 0.0)
    g_n = (
        tl.load(scale_ptr + row)
        * inverse_temperature
        * (onehot_n - tl.exp(z_n * inverse_temperature - lse))
    )
    tl.store(
        gradient_ptr + row * gradient_stride + offs_n,
        g_n.to(gradient_ptr.dtype.element_ty),
        mask=mask_n,
    )
