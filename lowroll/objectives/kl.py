"""Estimators of KL(learner || reference) from tokens drawn from the learner (Schulman,
"Approximating KL divergence").

With d = log pi - log pi_ref of a sampled token:

    k1    d                      gradient 1              unbiased, may be negative
    k2    d^2 / 2                gradient d              biased, its gradient is the KL's
    k3    exp(-d) + d - 1        gradient 1 - exp(-d)    unbiased, never negative (GRPO, arXiv 2402.03300 eq. 4)
    k3+   the value of k3 with the gradient of k2 (straight-through; verl's name)

The penalty enters as J - beta KL, reduced over tokens like the policy term.

N: tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lowroll.objectives.ratios import LOG_RATIO_LIMIT, as_floats, flatten
from lowroll.objectives.reduce import Denominators, aggregate, masked_mean, sequences_of


def k1(d: Tensor) -> Tensor:
    return d


def k2(d: Tensor) -> Tensor:
    return d.square() / 2


def k3(d: Tensor) -> Tensor:
    """Return exp(-d) + d - 1, d clamped to +-20. expm1 keeps small values."""
    d = d.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return torch.expm1(-d) + d


def k3_plus(d: Tensor) -> Tensor:
    quadratic = k2(d)
    return k3(d).detach() + quadratic - quadratic.detach()


ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3, "k3+": k3_plus}


def penalty(
    *,
    learner: Tensor,
    reference: Tensor,
    mask: Tensor,
    segments: Tensor | None = None,
    counts: Denominators | None = None,
    estimator: str = "k3",
    reduce: str = "seq-mean-token-mean",
    max_length: float | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """Return the KL to subtract (times beta) from J, and {"policy/kl_reference": its mean over
    tokens}. Only `learner` carries gradient. ValueError for an unknown estimator or mode."""
    if estimator not in ESTIMATORS:
        raise ValueError(
            f"estimator: unknown {estimator!r}; expected one of {', '.join(ESTIMATORS)}"
        )
    sequences = sequences_of(mask, segments)
    learner_N = torch.where(sequences.mask_N, flatten("learner", learner, mask), 0)
    reference_N = torch.where(sequences.mask_N, flatten("reference", reference.detach(), mask), 0)
    kl_N = ESTIMATORS[estimator](learner_N - reference_N)
    KL = aggregate(kl_N, sequences, mode=reduce, counts=counts, max_length=max_length)
    return KL, as_floats({"policy/kl_reference": masked_mean(kl_N, sequences.mask_N)})
