"""Statistics of rejections, when the sampler's cache drops or rounds what the learner sees.

`metrics.names` defines mismatch/weight_mean and correction/{vetoed_fraction, rejected_length_ratio,
rejected_reward_gap}. w = exp(l - b) of learner and behavior log-probs is Sparse-RL's xi. A cache
drops more of a long response, so rejections bias training to shorter ones. Length ratio and reward
gap are absent without rejections. Lengths count unmasked tokens. All values are float64 and
detached.

N: tokens, S: sequences.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lowroll.objectives.ratios import as_floats, exp_ratio, flatten
from lowroll.objectives.reduce import masked_mean, sequence_any, sequences_of, token_counts


def rejection(
    *,
    learner: Tensor,
    behavior: Tensor,
    mask: Tensor,
    segments: Tensor,
    rewards: Tensor,
    kept: Tensor | None = None,
    veto: float | None = None,
) -> dict[str, float]:
    """Return the statistics of packed tokens [N]. rewards: [S], NaN where there is none; kept: bool
    [N], or None for an objective that never rejects."""
    sequences = sequences_of(mask, segments)
    log_weight_N = flatten("learner", learner, mask) - flatten("behavior", behavior, mask)
    log_weight_N = log_weight_N.detach().double()
    sequences = sequences.drop(~log_weight_N.isfinite())
    statistics = {"mismatch/weight_mean": masked_mean(exp_ratio(log_weight_N), sequences.mask_N)}
    if veto is not None:
        low_N = log_weight_N < math.log(veto)
        statistics["correction/vetoed_fraction"] = masked_mean(low_N, sequences.mask_N)
    if kept is None:
        return as_floats(statistics)
    has_tokens_S = sequence_any(torch.ones_like(kept), sequences)
    rejected_S = has_tokens_S & ~sequence_any(kept, sequences)
    if bool(rejected_S.any()):
        length_S = token_counts(sequences).double()
        length_ratio = masked_mean(length_S, rejected_S) / masked_mean(length_S, has_tokens_S)
        statistics["correction/rejected_length_ratio"] = length_ratio
    scored_S = has_tokens_S & rewards.isfinite()
    rejected_scored_S = rejected_S & scored_S
    if bool(rejected_scored_S.any()):
        reward_gap = masked_mean(rewards, rejected_scored_S) - masked_mean(rewards, scored_S)
        statistics["correction/rejected_reward_gap"] = reward_gap
    return as_floats(statistics)
