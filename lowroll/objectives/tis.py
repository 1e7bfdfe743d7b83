"""TIS, truncated importance sampling: the clipped surrogate, weighted for the sampler's mismatch.

    J_t = min(w, C) min(R A, clip(R, 1 - eps_low, 1 + eps_high) A),   R = exp(learner - proximal)

w = exp(proximal - behavior) is a constant of the gradient. `tis` has C = 2, FlashRL's for GSM8K (8
for its 32B DAPO run); `decoupled` has no C: unbiased for the proximal policy, of unbounded
variance.
"""

from __future__ import annotations

from lowroll.objectives.ratios import (
    ObjectiveInput,
    TokenValues,
    clip,
    policy_statistics,
    truncate,
    weight_statistics,
)


def tis(
    tokens: ObjectiveInput, *, cap: float, eps_low: float, eps_high: float, dual_clip: float | None
) -> TokenValues:
    """Return token values and statistics. An infinite `cap` gives `decoupled`."""
    weight_N = truncate(tokens.weight_N, cap)
    surrogate = clip(
        tokens.ratio_N, tokens.advantages_N, eps_low=eps_low, eps_high=eps_high, dual_clip=dual_clip
    )
    statistics = policy_statistics(tokens, surrogate) | weight_statistics(tokens, weight_N, cap)
    return weight_N * surrogate.value_N, statistics
