"""The correction `reweight`: weights and rejections for the sampler's mismatch (verl's rollout
correction).

With w_t = exp(proximal - behavior), a constant of the gradient, and s_t the clipped surrogate of
PPO, J_t = keep_t v_t s_t:

    weight    v_t = w_t ("token"), the product of w over the sequence ("sequence"), or 1 ("none")
    cap       v_t = min(v_t, cap)                                    truncated importance sampling
    icepop    v_t = 0 outside of (low, high), in the place of cap    arXiv 2510.18855
    normalize v_t divided by its mean over the tokens of the batch, the rejected ones included

    reject    keep_t = 0 where k1, k2 or k3 (`kl`) of d = behavior - proximal leaves its bounds
                token_k1, token_k2, token_k3              rejects the token
                seq_sum_*, seq_mean_*, seq_max_k2/k3      rejects the sequence
              k2 and k3 have an upper bound. k1 has two, on exp(k1), the *inverse* of w: seq_mean_k1
              with a tight band such as (.999, 1.001) is geometric rejection.
    veto      rejects a sequence of which any w_t < veto             Sparse-RL eq. 6 with 1e-4
    repair    "mask": of such a sequence, only the tokens from the first w_t < veto on; for `sparse` alone
    bypass    the sampler is the proximal policy: s_t clips exp(learner - behavior), v_t = 1, and
              rejections use the learner's mismatch

Unlike in verl, rejected tokens contribute 0 and stay in every denominator (`reduce`). For verl's
token-mean, pass `counts` of `CorrectionWeights.kept_N`.

N: tokens, S: sequences.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lowroll.objectives.kl import ESTIMATORS
from lowroll.objectives.ratios import (
    ObjectiveInput,
    TokenValues,
    clip,
    exp_ratio,
    policy_statistics,
    rejection_statistics,
    truncate,
    weight_statistics,
)
from lowroll.objectives.reduce import (
    Denominators,
    Sequences,
    masked_mean,
    sequence_any,
    sequence_from,
    sequence_mean,
    sequence_sum,
)
from lowroll.objectives.table import RULES

WEIGHTS = ("token", "sequence", "none")
REPAIRS = (None, "mask")
Bounds = tuple[float, float]
# rule -> upper bound, or for k1 (low, high) of behavior / proximal
Reject = Mapping[str, float | Bounds]


@dataclass(frozen=True)
class CorrectionWeights:
    """Each token's weight before normalisation, whether bounds changed it, and whether it
    was kept."""

    weight_N: Tensor
    cut_N: Tensor
    kept_N: Tensor
    sequences: Sequences
    repaired_N: Tensor | None = None  # masked by `repair`

    @property
    def weight_sum(self) -> float:
        """The sum of the weights over unmasked tokens."""
        return float(torch.where(self.sequences.mask_N, self.weight_N, 0).double().sum())


def reweight(
    tokens: ObjectiveInput,
    *,
    counts: Denominators | None = None,
    weight: str = "token",
    cap: float,
    icepop: Bounds | None = None,
    normalize: bool = False,
    reject: Reject | None = None,
    veto: float | None = None,
    bypass: bool = False,
    eps_low: float,
    eps_high: float,
    dual_clip: float | None,
) -> TokenValues:
    """Return token values and statistics. With `normalize`, `counts` must have the batch's weight
    sum. ValueError as from `judge`."""
    verdict = judge(
        tokens, weight=weight, cap=cap, icepop=icepop, reject=reject, veto=veto, bypass=bypass
    )
    return correct(
        tokens,
        verdict,
        normalize=normalize,
        counts=counts,
        eps_low=eps_low,
        eps_high=eps_high,
        dual_clip=dual_clip,
    )


def judge(
    tokens: ObjectiveInput,
    *,
    weight: str = "token",
    cap: float,
    icepop: Bounds | None = None,
    reject: Reject | None = None,
    veto: float | None = None,
    bypass: bool = False,
    repair: str | None = None,
) -> CorrectionWeights:
    """Return every token's weight, and whether it is rejected. ValueError for an invalid option, or
    repair without a veto."""
    if repair not in REPAIRS:
        raise ValueError(f"repair: unknown {repair!r}; expected mask or None")
    if repair is not None and veto is None:
        raise ValueError("repair: without a veto there is nothing to repair")
    if weight not in WEIGHTS:
        raise ValueError(f"weight: unknown {weight!r}; expected one of {', '.join(WEIGHTS)}")
    sequences = tokens.sequences
    log_weight_N = tokens.log_weight_N
    if bypass:
        weight = "none"
        log_weight_N = (tokens.log_ratio_N + tokens.log_weight_N).detach()
    weight_N, cut_N = _bounded_weights(log_weight_N, sequences, weight, cap, icepop)
    rejected_N = torch.zeros_like(sequences.mask_N)
    repaired_N: Tensor | None = None
    if veto is not None:
        if not veto > 0:
            raise ValueError(f"veto: {veto} must be positive")
        anomaly_N = log_weight_N < math.log(veto)
        if repair is None:
            rejected_N = sequence_any(anomaly_N, sequences)[sequences.segments_N]
        else:
            rejected_N = repaired_N = sequence_from(anomaly_N, sequences)
    d_N = -log_weight_N
    for rule, bound in (reject or {}).items():
        rejected_N = rejected_N | _rejected_by_rule(rule, bound, d_N, sequences)
    return CorrectionWeights(weight_N, cut_N, ~rejected_N, sequences, repaired_N)


def _bounded_weights(
    log_weight_N: Tensor, sequences: Sequences, weight: str, cap: float, icepop: Bounds | None
) -> tuple[Tensor, Tensor]:
    if weight == "none":
        return torch.ones_like(log_weight_N), torch.zeros_like(log_weight_N, dtype=torch.bool)
    if weight == "sequence":
        product_S = exp_ratio(sequence_sum(log_weight_N, sequences)).to(log_weight_N.dtype)
        uncapped_N = product_S[sequences.segments_N]
    else:
        uncapped_N = exp_ratio(log_weight_N)
    if icepop is None:
        weight_N = truncate(uncapped_N, cap)
    else:
        low, high = checked_bounds("icepop", icepop)
        weight_N = torch.where((uncapped_N < low) | (uncapped_N > high), 0, uncapped_N)
    return weight_N, weight_N != uncapped_N


def correct(
    tokens: ObjectiveInput,
    verdict: CorrectionWeights,
    *,
    normalize: bool,
    counts: Denominators | None,
    eps_low: float,
    eps_high: float,
    dual_clip: float | None,
) -> TokenValues:
    """Return weighted token values, 0 if rejected, and statistics. counts: of the batch, for
    `normalize`."""
    sequences, weight_N = tokens.sequences, verdict.weight_N
    if normalize:
        weight_N = weight_N / _mean_weight(verdict, counts)
    clipped = clip(
        tokens.ratio_N, tokens.advantages_N, eps_low=eps_low, eps_high=eps_high, dual_clip=dual_clip
    )
    value_N = torch.where(verdict.kept_N, weight_N * clipped.value_N, 0)
    statistics = policy_statistics(tokens, clipped) | weight_statistics(tokens, weight_N, math.inf)
    statistics["correction/truncated_fraction"] = masked_mean(verdict.cut_N, sequences.mask_N)
    statistics |= rejection_statistics(verdict.kept_N, sequences)
    if verdict.repaired_N is not None:
        statistics |= repair_statistics(verdict.repaired_N, sequences)
    return value_N, statistics


def _mean_weight(verdict: CorrectionWeights, counts: Denominators | None) -> float:
    mask_N = verdict.sequences.mask_N
    if counts is None:
        num_tokens, weight_sum = int(mask_N.sum()), verdict.weight_sum
    else:
        num_tokens, weight_sum = counts.num_tokens, counts.weight_sum
    has_sum = weight_sum > 0 or not num_tokens
    if not has_sum and bool((verdict.weight_N * mask_N).any()):
        raise ValueError(
            "counts: the weights are normalised over the batch, so counts need their weight_sum"
        )
    return max(weight_sum / max(num_tokens, 1), 1e-8)


def repair_statistics(repaired_N: Tensor, sequences: Sequences) -> dict[str, Tensor]:
    """Return the fraction of tokens that `repair` masks, in responses of which it keeps a
    beginning, and of such responses."""
    has_kept_S = sequence_any(~repaired_N, sequences)
    shortened_S = sequence_any(repaired_N, sequences) & has_kept_S
    has_tokens_S = sequence_any(torch.ones_like(repaired_N), sequences)
    cut_off_N = repaired_N & has_kept_S[sequences.segments_N]
    return {
        "correction/repaired_fraction": masked_mean(cut_off_N, sequences.mask_N),
        "correction/repaired_sequence_fraction": masked_mean(shortened_S, has_tokens_S),
    }


def _rejected_by_rule(
    rule: str, bound: float | Bounds, d_N: Tensor, sequences: Sequences
) -> Tensor:
    """Return the rejected tokens, bool [N]. NaNs are kept, so that they show."""
    if rule not in RULES:
        raise ValueError(f"reject: unknown rule {rule!r}; expected one of {', '.join(RULES)}")
    level, estimator = rule.rsplit("_", 1)
    if estimator == "k1":
        low_ratio, high_ratio = checked_bounds(f"reject.{rule}", bound)
        low = math.log(low_ratio) if low_ratio else -math.inf
        high = math.log(high_ratio)
    elif isinstance(bound, (int, float)) and bound >= 0:
        low, high = 0.0, bound
    else:
        raise ValueError(f"reject.{rule}: {bound} must be one number, an upper bound of 0 or more")
    statistic_N = ESTIMATORS[estimator](d_N)
    if level == "token":
        return (statistic_N < low) | (statistic_N > high)
    if level == "seq_max":
        rejected_S = sequence_any(statistic_N > high, sequences)
    else:
        reduced = sequence_sum if level == "seq_sum" else sequence_mean
        statistic_S = reduced(statistic_N, sequences)
        rejected_S = (statistic_S < low) | (statistic_S > high)
    return rejected_S[sequences.segments_N]


def checked_bounds(name: str, bounds: float | Bounds) -> Bounds:
    """Return (low, high) with 0 <= low <= high. ValueError otherwise."""
    if not isinstance(bounds, (int, float)) and len(bounds) == 2:
        low, high = bounds
        if 0 <= low <= high and high > 0:
            return float(low), float(high)
    raise ValueError(f"{name}: {bounds} must be two numbers (low, high) with 0 <= low <= high")
