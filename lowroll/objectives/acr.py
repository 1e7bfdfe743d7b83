"""ACR, adaptive clipping range: TIS with an upper bound that compensates its cap (QuRL eq. 6-9).

    J_t = min(w, C) min(R A, clip(R, 1 - eps_low, (1 + eps_high) / r) A),   r = min(1, C / w)

w = exp(proximal - behavior) and r are constants of the gradient. TIS clips at r (1 + eps_high)
relative to the capped weights, which cuts the sampler's least likely tokens first; dividing by r
restores 1 + eps_high. Only tokens with A > 0 and w > C differ from TIS.

The paper gives no C. Eq. 9's truncated ratio is at most C, so the bound is raised where proximal /
behavior > C.
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
from lowroll.objectives.reduce import masked_mean


def acr(
    tokens: ObjectiveInput, *, cap: float, eps_low: float, eps_high: float, dual_clip: float | None
) -> TokenValues:
    """Return token values and statistics. An infinite `cap` gives `decoupled`."""
    weight_N = truncate(tokens.weight_N, cap)
    stretch_N = (tokens.weight_N / cap).clamp(min=1)
    clipped = clip(
        tokens.ratio_N,
        tokens.advantages_N,
        eps_low=eps_low,
        eps_high=eps_high,
        dual_clip=dual_clip,
        stretch_N=stretch_N,
    )
    # active, although TIS would clip them
    extended_N = (tokens.advantages_N > 0) & (tokens.ratio_N > 1 + eps_high) & ~clipped.above_N
    statistics = policy_statistics(tokens, clipped) | weight_statistics(tokens, weight_N, cap)
    statistics["correction/acr_extended_fraction"] = masked_mean(
        extended_N, tokens.sequences.mask_N
    )
    return weight_N * clipped.value_N, statistics
