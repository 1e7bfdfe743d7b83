"""AIPO's token loss as in Surogate: the full ratio to the sampler as a coefficient, and masks.

With l_t = learner - behavior, the ratio rho_t = exp(l_t) and sg stopping the gradient:

    J_t = keep_t c_t learner_t,   c_t = sg[ rho_t (adv_tau A + teacher_tau (teacher - learner) - kl_tau l_t) ]

and keep_t = 0 where

    rho_t < token_mask_low or > token_mask_high                      the token
    exp(mean l) < geo_mask_low or > geo_mask_high                    its whole sequence
    min rho < sequence_mask_low or max rho > sequence_mask_high      its whole sequence

A kept token's gradient is c_t grad log pi; masked tokens stay in the denominators.
`mode="truncate"` is AIPO itself (arXiv 2505.24034): a token above token_mask_high is kept with that
ratio. `ratio_type="sequence"` takes min(exp(sum l), sequence_clip_high) for rho in c_t, and divides
by the sequence's length.

Surogate's formula truncates; its program masks, as does the default here. Published with the token
mean over the whole batch and A without the std. Only the gradient of J is meaningful.

N: tokens, S: sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowroll.objectives.ratios import (
    ObjectiveInput,
    TokenValues,
    exp_ratio,
    masked_max,
    rejection_statistics,
)
from lowroll.objectives.reduce import (
    Sequences,
    masked_mean,
    sequence_any,
    sequence_mean,
    sequence_sum,
    token_counts,
)

RATIO_TYPES = ("token", "sequence")
MODES = ("mask", "truncate")


def aipo(
    tokens: ObjectiveInput,
    *,
    ratio_type: str = "token",
    mode: str = "mask",
    adv_tau: float = 1.0,
    kl_tau: float = 0.0,
    teacher_tau: float = 0.0,
    token_mask_low: float = 0.125,
    token_mask_high: float = 8.0,
    geo_mask_low: float = 0.1,
    geo_mask_high: float = 10.0,
    sequence_mask_low: float = 0.0,
    sequence_mask_high: float = 100.0,
    sequence_clip_high: float = 10.0,
) -> TokenValues:
    """Return token values and statistics. ValueError for an invalid option, or teacher_tau without
    a teacher."""
    for name, value, choices in (("ratio_type", ratio_type, RATIO_TYPES), ("mode", mode, MODES)):
        if value not in choices:
            raise ValueError(f"{name}: unknown {value!r}; expected one of {', '.join(choices)}")
    _check_bounds("token_mask", token_mask_low, token_mask_high)
    _check_bounds("geo_mask", geo_mask_low, geo_mask_high)
    _check_bounds("sequence_mask", sequence_mask_low, sequence_mask_high)
    if not sequence_clip_high > 0:
        raise ValueError(f"sequence_clip_high: {sequence_clip_high} must be positive")
    sequences, ratio_N, learner_N = tokens.sequences, tokens.ratio_N.detach(), tokens.learner_N
    advantages_N = adv_tau * tokens.advantages_N - kl_tau * tokens.log_ratio_N.detach()
    if teacher_tau:
        if tokens.teacher_N is None:
            raise ValueError(f"teacher: teacher_tau {teacher_tau} needs the teacher's log-probs")
        advantages_N = advantages_N + teacher_tau * (tokens.teacher_N - learner_N.detach())
    if ratio_type == "sequence":
        scale_N = _sequence_scale(tokens, sequence_clip_high)
    elif mode == "truncate":
        scale_N = ratio_N.clamp(max=token_mask_high)
    else:
        scale_N = ratio_N
    above_N = ratio_N > token_mask_high
    masked_N = (ratio_N < token_mask_low) | _in_masked_sequence(
        tokens,
        geometric=(geo_mask_low, geo_mask_high),
        extremes=(sequence_mask_low, sequence_mask_high),
    )
    if mode == "mask":
        masked_N = masked_N | above_N
    kept_N = ~masked_N
    value_N = torch.where(kept_N, scale_N * advantages_N * learner_N, 0)
    # only mode "truncate" keeps tokens above, and cuts only a token's own ratio
    truncated_N = above_N & kept_N & (ratio_type == "token")
    statistics = {
        "policy/ratio_mean": masked_mean(ratio_N, sequences.mask_N),
        "policy/ratio_max": masked_max(ratio_N, sequences.mask_N),
        "correction/truncated_fraction": masked_mean(truncated_N, sequences.mask_N),
        "correction/dropped_tokens": tokens.num_dropped,
    }
    return value_N, statistics | rejection_statistics(kept_N, sequences)


def _check_bounds(name: str, low: float, high: float) -> None:
    if not 0 <= low <= high:
        raise ValueError(f"{name}_low: {low} must lie between 0 and {name}_high, which is {high}")


def _sequence_scale(tokens: ObjectiveInput, clip_high: float) -> Tensor:
    sequences = tokens.sequences
    log_ratio_S = sequence_sum(tokens.log_ratio_N, sequences).clamp(max=10)
    ratio_S = exp_ratio(log_ratio_S).clamp(max=clip_high)
    scale_S = (ratio_S / token_counts(sequences)).to(tokens.ratio_N.dtype)
    return scale_S[sequences.segments_N]


def _in_masked_sequence(
    tokens: ObjectiveInput, geometric: tuple[float, float], extremes: tuple[float, float]
) -> Tensor:
    sequences: Sequences = tokens.sequences
    mean_S = exp_ratio(sequence_mean(tokens.log_ratio_N, sequences))
    low, high = geometric
    mean_outside_S = (mean_S < low) | (mean_S > high)
    ratio_N = tokens.ratio_N.detach()
    low, high = extremes
    any_outside_S = sequence_any((ratio_N < low) | (ratio_N > high), sequences)
    return (mean_outside_S | any_outside_S)[sequences.segments_N]
