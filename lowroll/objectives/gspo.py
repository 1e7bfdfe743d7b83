"""GSPO: one ratio a sequence (arXiv 2507.18071), in its token form.

    s_i = exp( 1/|o_i| sum_t (learner - proximal) ),   s_t = sg[s_i] exp(learner - sg[learner])
    J = 1/G sum_i 1/|o_i| sum_t min(s_t A, clip(s_t, 1 - eps_low, 1 + eps_high) A),   eps_low 3e-4, eps_high 4e-4

sg stops the gradient, so that s_t has the value of s_i and the gradient of its own token. The mean
log-ratio is taken in float64 because the band is narrow: log-probs must be float32. A sequence is
clipped as a whole.

With `behavior` each token is weighted by min(w, cap), w = exp(proximal - behavior): the GSPO + TIS
baseline of QaRL.
"""

from __future__ import annotations

from lowroll.objectives.ratios import (
    ObjectiveInput,
    TokenValues,
    clip,
    policy_statistics,
    sequence_ratio,
    truncate,
    weight_statistics,
)
from lowroll.objectives.table import CAP


def gspo(
    tokens: ObjectiveInput, *, cap: float = CAP, eps_low: float, eps_high: float
) -> TokenValues:
    """Return token values and statistics. `cap` needs the sampler's log-probs."""
    ratio_N = sequence_ratio(tokens)
    weight_N = truncate(tokens.weight_N, cap) if tokens.has_behavior else tokens.weight_N
    clipped = clip(ratio_N, tokens.advantages_N, eps_low=eps_low, eps_high=eps_high)
    statistics = policy_statistics(tokens, clipped, ratio_N)
    if tokens.has_behavior:
        statistics |= weight_statistics(tokens, weight_N, cap)
    return weight_N * clipped.value_N, statistics
