"""IPO and DPPO: AIPO's coefficient with a trust region on probabilities instead of masks on ratios.

With l_t = learner - behavior, rho_t = exp(l_t), d_t = exp(learner) - exp(behavior) and sg stopping
the gradient:

    J_t = keep_t A sg[min(rho_t, ratio_cap)] learner_t - kl_tau l_t^2

    unsigned (IPO, Surogate)    keep_t = 0 where |d_t| > width
    signed (DPPO, prime-rl)     keep_t = 0 where A > 0 and d_t > width, or A <= 0 and d_t < -width

d ignores large ratios of rare tokens, whose probability hardly changes. Masked tokens keep the
quadratic term and stay in the denominators. Published with width 0.2 unsigned and 0.1 signed, a cap
of e^2 and the token mean over the whole batch; the name is Surogate's.

N: tokens.
"""

from __future__ import annotations

import math

import torch

from lowroll.objectives.ratios import (
    ObjectiveInput,
    TokenValues,
    masked_max,
    rejection_statistics,
)
from lowroll.objectives.reduce import masked_mean


def ipo(
    tokens: ObjectiveInput,
    *,
    signed: bool = False,
    width: float = 0.2,
    ratio_cap: float = math.exp(2),
    kl_tau: float = 1e-3,
) -> TokenValues:
    """Return token values and statistics. ValueError for a width below 0, or a cap not above 0."""
    if not width >= 0:
        raise ValueError(f"width: {width} must be 0 or more")
    if not ratio_cap > 0:
        raise ValueError(f"ratio_cap: {ratio_cap} must be positive")
    sequences, ratio_N, A_N = tokens.sequences, tokens.ratio_N.detach(), tokens.advantages_N
    learner_N = tokens.learner_N
    behavior_N = learner_N.detach() - tokens.log_ratio_N.detach()
    prob_change_N = learner_N.detach().exp() - behavior_N.exp()
    if signed:
        outside_N = torch.where(A_N > 0, prob_change_N > width, prob_change_N < -width)
    else:
        outside_N = prob_change_N.abs() > width
    scale_N = ratio_N.clamp(max=ratio_cap)
    policy_N = torch.where(outside_N, 0, A_N * scale_N * learner_N)
    value_N = policy_N - kl_tau * tokens.log_ratio_N.square()
    statistics = {
        "policy/ratio_mean": masked_mean(ratio_N, sequences.mask_N),
        "policy/ratio_max": masked_max(ratio_N, sequences.mask_N),
        "correction/truncated_fraction": masked_mean(
            ~outside_N & (ratio_N > ratio_cap), sequences.mask_N
        ),
        "correction/dropped_tokens": tokens.num_dropped,
    }
    return value_N, statistics | rejection_statistics(~outside_N, sequences)
