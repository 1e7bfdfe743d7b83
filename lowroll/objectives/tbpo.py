"""TBPO, trust band policy optimisation: one ratio a sequence, bounded on both sides where A < 0
(QaRL sec. 3.2).

    r = exp( 1/|o| sum_t (learner - proximal) ),   w = exp( 1/|o| sum_t (proximal - behavior) ) clipped to [1/C, C]

    A > 0    J = w min(r A, clip(r, 1 - eps_low, 1 + eps_high) A)        no gradient above 1 + eps_high
    A < 0    J = w clip(r, 1 - eps_low, 1 + eps_negative) A              no gradient on either side of the band

A low-bit sampler's garbled tokens are mostly in negative responses, where PPO has no upper bound. A
response outside of the band has no gradient and stays in the mean. The token form is GSPO's.

Bounds follow the paper's appendix B: .0003 and .0004, for negative responses .0003 and .0007, C =
2. Both lower bounds are one option, as that of a positive response never acts. "Exceeds the bounds"
is read as the ratio r.

N: tokens, S: sequences.
"""

from __future__ import annotations

import torch

from lowroll.objectives.ratios import (
    ObjectiveInput,
    TokenValues,
    clip,
    exp_ratio,
    policy_statistics,
    sequence_ratio,
    weight_statistics,
)
from lowroll.objectives.reduce import masked_mean, sequence_any, sequence_mean


def tbpo(
    tokens: ObjectiveInput,
    *,
    cap: float,
    eps_low: float,
    eps_high: float,
    eps_negative: float = 7e-4,
) -> TokenValues:
    """Return token values and statistics. `cap` is C >= 1, `eps_negative` the upper bound for A <
    0."""
    if not cap >= 1:
        raise ValueError(f"cap: {cap} must be 1 or more; weights are kept in [1/cap, cap]")
    if not eps_negative > 0:
        raise ValueError(f"eps_negative: {eps_negative} must be positive")
    sequences, ratio_N = tokens.sequences, sequence_ratio(tokens)
    mismatch_S = exp_ratio(sequence_mean(tokens.log_weight_N, sequences)).to(ratio_N.dtype)
    weight_N = mismatch_S.clamp(1 / cap, cap)[sequences.segments_N]
    # For A < 0 the dual clip is the upper bound, and the band the lower one.
    clipped = clip(
        ratio_N, tokens.advantages_N, eps_low=eps_low, eps_high=eps_high, dual_clip=1 + eps_negative
    )
    cut_N = ((mismatch_S > cap) | (mismatch_S < 1 / cap))[sequences.segments_N]
    outside_S = sequence_any(clipped.above_N | clipped.below_N | clipped.dual_N, sequences)
    has_tokens_S = sequence_any(torch.ones_like(cut_N), sequences)
    statistics = policy_statistics(tokens, clipped, ratio_N) | weight_statistics(
        tokens, weight_N, cap
    )
    statistics["correction/truncated_fraction"] = masked_mean(cut_N, sequences.mask_N)
    statistics["policy/band_masked_fraction"] = masked_mean(outside_S, has_tokens_S)
    return weight_N * clipped.value_N, statistics
