"""The distance of the sampler's policy from the learner's, on the sampled tokens.

`metrics.names` defines each statistic mismatch/<name>. l: learner's, b: behavior log-probs of a
token, w = exp(l - b). Means are over unmasked tokens with a finite behavior log-prob, or over
sequences that have any. Log-ratios, and their sums over a sequence, are clamped to +-20 before exp.
All values are float64 and detached.

N: tokens, S: sequences.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lowroll.objectives.ratios import as_floats, exp_ratio, flatten, masked_max
from lowroll.objectives.reduce import (
    Sequences,
    masked_mean,
    sequence_mean,
    sequence_sum,
    sequences_of,
    token_counts,
)

SHORTEST = 2  # responses of up to 2^SHORTEST tokens are one class


def mismatch(
    *, learner: Tensor, behavior: Tensor, mask: Tensor, segments: Tensor | None = None
) -> dict[str, float]:
    """Return {"mismatch/<name>": value} for log-probs [B, T] or packed [N] with `segments`; {}
    without tokens. `pearson` is absent for constant probabilities."""
    sequences, learner_N, behavior_N = _usable_tokens(learner, behavior, mask, segments)
    mask_N = sequences.mask_N
    if not bool(mask_N.any()):
        return {}
    log_ratio_N = learner_N - behavior_N
    weight_N = exp_ratio(log_ratio_N)
    prob_diff_N = (learner_N.exp() - behavior_N.exp()).abs()
    has_tokens_S = sequence_sum(mask_N, sequences) > 0
    mean_log_ratio_S = sequence_mean(log_ratio_N, sequences)
    product_S = exp_ratio(mean_log_ratio_S * token_counts(sequences))
    statistics = {
        "kl_k1": masked_mean(-log_ratio_N, mask_N),
        "kl_k3": masked_mean(weight_N - log_ratio_N - 1, mask_N),
        "weight_max": masked_max(weight_N, mask_N),
        "weight_min": -masked_max(-weight_N, mask_N),
        "logp_diff_mean": masked_mean(log_ratio_N.abs(), mask_N),
        "logp_diff_max": masked_max(log_ratio_N.abs(), mask_N),
        "prob_diff_mean": masked_mean(prob_diff_N, mask_N),
        "prob_diff_max": masked_max(prob_diff_N, mask_N),
        "ess": effective_sample_size(weight_N, mask_N),
        "ess_sequence": effective_sample_size(product_S, has_tokens_S),
        "chi2_token": masked_mean(weight_N.square(), mask_N) - 1,
        "chi2_sequence": masked_mean(product_S.square(), has_tokens_S) - 1,
        "geo_ratio_mean": masked_mean(exp_ratio(mean_log_ratio_S), has_tokens_S),
        "ppl_learner": masked_mean(exp_ratio(-sequence_mean(learner_N, sequences)), has_tokens_S),
        "ppl_sampler": masked_mean(exp_ratio(-sequence_mean(behavior_N, sequences)), has_tokens_S),
        "ppl_ratio": masked_mean(exp_ratio(-mean_log_ratio_S), has_tokens_S),
        "pearson": pearson(learner_N.exp(), behavior_N.exp(), mask_N),
    }
    values = as_floats({f"mismatch/{name}": value for name, value in statistics.items()})
    if math.isnan(values["mismatch/pearson"]):
        del values["mismatch/pearson"]
    return values


def spread(
    *, learner: Tensor, behavior: Tensor, mask: Tensor, segments: Tensor | None = None
) -> dict[str, float]:
    """Return {"spread/<name>": value}: the standard deviation of l - b and the 99th percentile of
    |l - b|, over tokens (token_std, token_p99) and of the sequences' means (sequence_std,
    sequence_p99); {} without tokens."""
    sequences, learner_N, behavior_N = _usable_tokens(learner, behavior, mask, segments)
    if not bool(sequences.mask_N.any()):
        return {}
    log_ratio_N = learner_N - behavior_N
    has_tokens_S = sequence_sum(sequences.mask_N, sequences) > 0
    of_tokens = log_ratio_N[sequences.mask_N]
    of_sequences = sequence_mean(log_ratio_N, sequences)[has_tokens_S]
    return as_floats(
        {
            "spread/token_std": of_tokens.std(correction=0),
            "spread/token_p99": _percentile(of_tokens.abs(), 0.99),
            "spread/sequence_std": of_sequences.std(correction=0),
            "spread/sequence_p99": _percentile(of_sequences.abs(), 0.99),
        }
    )


def _usable_tokens(
    learner: Tensor, behavior: Tensor, mask: Tensor, segments: Tensor | None
) -> tuple[Sequences, Tensor, Tensor]:
    sequences = sequences_of(mask, segments)
    learner_N = flatten("learner", learner.detach(), mask)
    behavior_N = flatten("behavior", behavior.detach(), mask)
    sequences = sequences.drop(~behavior_N.isfinite())
    learner_N = torch.where(sequences.mask_N, learner_N, 0).double()
    behavior_N = torch.where(sequences.mask_N, behavior_N, 0).double()
    return sequences, learner_N, behavior_N


def by_length(
    *, learner: Tensor, behavior: Tensor, mask: Tensor, segments: Tensor | None = None
) -> dict[str, float]:
    """Return {"mismatch/length_<tokens>/<name>": value} for each class of lengths: length_64 has
    the responses of 33 to 64 tokens."""
    sequences, learner_N, behavior_N = _usable_tokens(learner, behavior, mask, segments)
    log_ratio_N = learner_N - behavior_N
    weight_N = exp_ratio(log_ratio_N)
    has_tokens_S = sequence_sum(sequences.mask_N, sequences) > 0
    power_S = token_counts(sequences).double().log2().ceil().long().clamp(min=SHORTEST)
    statistics: dict[str, Tensor] = {}
    for power in power_S[has_tokens_S].unique().tolist():
        in_class_S = power_S == power
        mask_N = sequences.mask_N & in_class_S[sequences.segments_N]
        prefix = f"mismatch/length_{2**power}"
        statistics[f"{prefix}/kl_k1"] = masked_mean(-log_ratio_N, mask_N)
        statistics[f"{prefix}/kl_k3"] = masked_mean(weight_N - log_ratio_N - 1, mask_N)
        statistics[f"{prefix}/logp_diff_max"] = masked_max(log_ratio_N.abs(), mask_N)
        statistics[f"{prefix}/ess"] = effective_sample_size(weight_N, mask_N)
    return as_floats(statistics) if statistics else {}


def by_staleness(
    *,
    learner: Tensor,
    behavior: Tensor,
    mask: Tensor,
    staleness: Tensor,
    segments: Tensor | None = None,
) -> dict[str, float]:
    """Return {"mismatch/staleness_<n>/<name>": value} for each age n in `staleness`, in
    versions."""
    sequences, learner_N, behavior_N = _usable_tokens(learner, behavior, mask, segments)
    log_ratio_N = learner_N - behavior_N
    age_N = flatten("staleness", staleness, mask)
    statistics: dict[str, Tensor] = {}
    for age in age_N[sequences.mask_N].unique().tolist():
        mask_N = sequences.mask_N & (age_N == age)
        name = f"mismatch/staleness_{int(age)}"
        statistics[f"{name}/kl_k1"] = masked_mean(-log_ratio_N, mask_N)
        statistics[f"{name}/logp_diff_mean"] = masked_mean(log_ratio_N.abs(), mask_N)
    return as_floats(statistics) if statistics else {}


def _percentile(x: Tensor, share: float) -> Tensor:
    return x.sort().values[max(0, math.ceil(share * len(x)) - 1)]


def effective_sample_size(weight: Tensor, mask: Tensor) -> Tensor:
    """Return mean(w)^2 / mean(w^2) = 1 / mean((w / mean w)^2), in (0, 1]."""
    return masked_mean(weight, mask).square() / masked_mean(weight.square(), mask)


def pearson(x_N: Tensor, y_N: Tensor, mask_N: Tensor) -> Tensor:
    """Return the correlation under the mask; NaN when either side is constant."""
    x_N = x_N - masked_mean(x_N, mask_N)
    y_N = y_N - masked_mean(y_N, mask_N)
    std_x = masked_mean(x_N.square(), mask_N).sqrt()
    std_y = masked_mean(y_N.square(), mask_N).sqrt()
    is_constant = torch.minimum(std_x, std_y) < 1e-12
    return torch.where(is_constant, torch.nan, masked_mean(x_N * y_N, mask_N) / (std_x * std_y))
