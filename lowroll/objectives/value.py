"""The critic's loss: squared error to the returns, clipped around the old values (PPO's code, arXiv
2005.12729).

    L = 1/2 mean_t max( (V_t - G_t)^2, (clip(V_t, Vold_t - c, Vold_t + c) - G_t)^2 )

G = A + V are the returns of `advantages.gae`, before whitening, and Vold its values. The gradient
is 0 where the clipped error is larger.

N: tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowroll.objectives.ratios import as_floats, flatten
from lowroll.objectives.reduce import Denominators, aggregate, masked_mean, sequences_of


def value_loss(
    *,
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    segments: Tensor | None = None,
    counts: Denominators | None = None,
    clip: float | None = 0.5,
    reduce: str = "token-mean",
    max_length: float | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """Return the loss to minimise and its statistics, for [B, T] tensors or packed [N] with
    `segments`.

    Only `values` carries gradient. A `clip` of None gives the plain squared error. ValueError for
    an invalid clip or shape.
    """
    if clip is not None and not clip > 0:
        raise ValueError(f"clip: {clip} must be positive")
    sequences = sequences_of(mask, segments)
    tensors = {"values": values, "old_values": old_values.detach(), "returns": returns.detach()}
    values_N, old_N, returns_N = (
        torch.where(sequences.mask_N, flatten(name, x, mask), 0) for name, x in tensors.items()
    )
    error_N = (values_N - returns_N).square()
    clipped_N = torch.zeros_like(sequences.mask_N)
    if clip is not None:
        at_most_N = torch.minimum(values_N.detach(), old_N + clip)
        bounded_N = torch.maximum(at_most_N, old_N - clip)
        bounded_error_N = (bounded_N - returns_N).square()
        clipped_N = bounded_error_N > error_N
        error_N = torch.where(clipped_N, bounded_error_N, error_N)
    loss = aggregate(error_N / 2, sequences, mode=reduce, counts=counts, max_length=max_length)
    statistics = {
        "critic/loss": masked_mean(error_N / 2, sequences.mask_N),
        "critic/clip_fraction": masked_mean(clipped_N, sequences.mask_N),
        "critic/value_mean": masked_mean(values_N, sequences.mask_N),
        "critic/return_mean": masked_mean(returns_N, sequences.mask_N),
    }
    return loss, as_floats(statistics)
