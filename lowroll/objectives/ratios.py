"""Ratios, clip and statistics shared by the policy objectives.

Log-probs of one token under three policies give

    R   = exp(learner - proximal)     the learner's change since the rollouts' parameters
    w   = exp(proximal - behavior)    the sampler's distance from those parameters; detached
    rho = exp(learner - behavior)     = R w

and the clipped surrogate of PPO (arXiv 1707.06347 eq. 7) with separate bounds (clip-higher of DAPO,
arXiv 2503.14476 eq. 10) and the optional dual clip c > 1 for negative advantages (arXiv
1912.09729):

    J_t = min(R A, clip(R, 1 - eps_low, 1 + eps_high) A),   and for A < 0 with dual clip   max(J_t, c A)

    clipped above  A > 0 and R > 1 + eps_high
    clipped below  A < 0 and R < 1 - eps_low
    dual clipped   A < 0 and R > c

The gradient is 0 where a token is clipped; ties are active. Log-ratios are clamped to +-20 before
exp. A NaN in a masked entry reaches neither value nor gradient. A non-finite learner log-prob is
kept, to show.

N: tokens, S: sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lowroll.objectives.reduce import (
    Sequences,
    masked_mean,
    sequence_any,
    sequence_mean,
    sequences_of,
)

LOG_RATIO_LIMIT = 20.0


@dataclass(frozen=True)
class ObjectiveInput:
    """The checked tokens of an objective. Only learner_N, log_ratio_N and ratio_N carry
    gradient."""

    sequences: Sequences
    learner_N: Tensor  # log-probs
    log_ratio_N: Tensor  # learner - proximal, or learner - behavior without proximal
    ratio_N: Tensor  # exp of log_ratio_N
    log_weight_N: Tensor  # proximal - behavior, or 0 without both
    weight_N: Tensor  # w, exp of log_weight_N
    advantages_N: Tensor
    teacher_N: Tensor | None  # log-probs
    has_behavior: bool
    num_dropped: Tensor  # int64 scalar: unmasked tokens without a finite behavior


# each token's value [N], and the statistics
TokenValues = tuple[Tensor, dict[str, Tensor]]


@dataclass(frozen=True)
class Clipped:
    """Token values of the clipped surrogate, and the tokens that each bound clipped (bool)."""

    value_N: Tensor
    above_N: Tensor
    below_N: Tensor
    dual_N: Tensor


def exp_ratio(log_ratio: Tensor) -> Tensor:
    """Return exp of a log-ratio clamped to +-20."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def sequence_ratio(tokens: ObjectiveInput) -> Tensor:
    """Return exp of the mean log-ratio of each token's sequence, [N], with the token's own
    gradient: s_t of `gspo`."""
    log_ratio_N, sequences = tokens.log_ratio_N, tokens.sequences
    ratio_S = exp_ratio(sequence_mean(log_ratio_N, sequences)).to(log_ratio_N.dtype)
    own_gradient_N = (log_ratio_N - log_ratio_N.detach()).exp()  # 1, with each token's gradient
    return ratio_S[sequences.segments_N] * own_gradient_N


def prepare(
    *,
    learner: Tensor,
    advantages: Tensor,
    mask: Tensor,
    segments: Tensor | None,
    proximal: Tensor | None = None,
    behavior: Tensor | None = None,
    teacher: Tensor | None = None,
) -> ObjectiveInput:
    """Check the tensors of an objective, and return them flat, [N], with their ratios.

    All are [B, T], or packed [N] with `segments`. An unmasked token without a finite `behavior` is
    masked and counted, and masked entries become 0. At least one of proximal and behavior must be
    given. ValueError names the tensor whose shape differs.
    """
    sequences = sequences_of(mask, segments)
    tensors = {
        "learner": learner,
        "advantages": advantages,
        "proximal": proximal,
        "behavior": behavior,
        "teacher": teacher,
    }
    flat: dict[str, Tensor] = {}
    for name, x in tensors.items():
        if x is not None:  # only the learner carries gradient
            flat[name] = flatten(name, x if name == "learner" else x.detach(), mask)
    num_dropped = torch.zeros((), dtype=torch.int64, device=mask.device)
    if "behavior" in flat:
        unusable_N = sequences.mask_N & ~flat["behavior"].isfinite()
        sequences = sequences.drop(unusable_N)
        num_dropped = unusable_N.sum()
    clean = {name: torch.where(sequences.mask_N, x_N, 0) for name, x_N in flat.items()}
    anchor_N = clean["proximal"] if "proximal" in clean else clean["behavior"]
    log_ratio_N = clean["learner"] - anchor_N
    if "proximal" in clean and "behavior" in clean:
        log_weight_N = clean["proximal"] - clean["behavior"]
    else:
        log_weight_N = torch.zeros_like(anchor_N)
    return ObjectiveInput(
        sequences=sequences,
        learner_N=clean["learner"],
        log_ratio_N=log_ratio_N,
        ratio_N=exp_ratio(log_ratio_N),
        log_weight_N=log_weight_N,
        weight_N=exp_ratio(log_weight_N),
        advantages_N=clean["advantages"],
        teacher_N=clean.get("teacher"),
        has_behavior="behavior" in clean,
        num_dropped=num_dropped,
    )


def flatten(name: str, x: Tensor, mask: Tensor) -> Tensor:
    """Return x as [N], in float32 or wider. ValueError when its shape is not the mask's."""
    if x.shape != mask.shape:
        raise ValueError(
            f"{name}: shape {list(x.shape)} differs from the mask's {list(mask.shape)}"
        )
    x = x.reshape(-1)
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def clip(
    ratio_N: Tensor,
    advantages_N: Tensor,
    *,
    eps_low: float,
    eps_high: float,
    dual_clip: float | None = None,
    stretch_N: Tensor | None = None,
) -> Clipped:
    """Return the clipped surrogate by token. stretch_N multiplies the bound 1 + eps_high (ACR).
    ValueError for an invalid bound."""
    if not 0 <= eps_low <= 1:
        raise ValueError(f"eps_low: {eps_low} must lie in [0, 1]")
    if not eps_high >= 0:
        raise ValueError(f"eps_high: {eps_high} must be 0 or more")
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"dual_clip: {dual_clip} must be more than 1")
    high_N = torch.full_like(ratio_N, 1 + eps_high, requires_grad=False)
    if stretch_N is not None:
        high_N = high_N * stretch_N
    above_N = (advantages_N > 0) & (ratio_N > high_N)
    below_N = (advantages_N < 0) & (ratio_N < 1 - eps_low)
    dual_N = torch.zeros_like(below_N)
    bound_N = torch.where(below_N, 1 - eps_low, high_N)
    if dual_clip is not None:
        dual_N = (advantages_N < 0) & (ratio_N > dual_clip)
        bound_N = torch.where(dual_N, dual_clip, bound_N)
    # where, not minimum: at a tie minimum would send half of the gradient to the bound.
    is_clipped_N = above_N | below_N | dual_N
    value_N = torch.where(is_clipped_N, bound_N, ratio_N) * advantages_N
    return Clipped(value_N, above_N, below_N, dual_N)


def truncate(weight_N: Tensor, cap: float) -> Tensor:
    """Return min(w, C). ValueError unless C > 0."""
    if not cap > 0:
        raise ValueError(f"cap: {cap} must be positive")
    return weight_N.clamp(max=cap)


def policy_statistics(
    tokens: ObjectiveInput, clipped: Clipped, ratio_N: Tensor | None = None
) -> dict[str, Tensor]:
    """Return the clip fractions and the ratio (by default that of `tokens`)."""
    mask_N = tokens.sequences.mask_N
    ratio_N = tokens.ratio_N if ratio_N is None else ratio_N
    return {
        "policy/clip_fraction_high": masked_mean(clipped.above_N, mask_N),
        "policy/clip_fraction_low": masked_mean(clipped.below_N, mask_N),
        "policy/dual_clip_fraction": masked_mean(clipped.dual_N, mask_N),
        "policy/ratio_mean": masked_mean(ratio_N, mask_N),
        "policy/ratio_max": masked_max(ratio_N, mask_N),
    }


def weight_statistics(tokens: ObjectiveInput, weight_N: Tensor, cap: float) -> dict[str, Tensor]:
    """Return statistics of the applied weight and its cap, and the number of dropped tokens."""
    mask_N = tokens.sequences.mask_N
    return {
        "correction/weight_mean": masked_mean(weight_N, mask_N),
        "correction/weight_max": masked_max(weight_N, mask_N),
        "correction/truncated_fraction": masked_mean(tokens.weight_N > cap, mask_N),
        "correction/dropped_tokens": tokens.num_dropped,
    }


def rejection_statistics(kept_N: Tensor, sequences: Sequences) -> dict[str, Tensor]:
    """Return the fractions of tokens, and of whole sequences, that were rejected."""
    active_S = sequence_any(torch.ones_like(kept_N), sequences)
    return {
        "correction/rejected_fraction": masked_mean(~kept_N, sequences.mask_N),
        "correction/rejected_sequence_fraction": masked_mean(
            ~sequence_any(kept_N, sequences), active_S
        ),
    }


def masked_max(x: Tensor, mask: Tensor) -> Tensor:
    """Return the maximum under the mask; 0 without entries."""
    if not x.numel():
        return x.new_zeros(())
    highest = torch.where(mask, x.detach(), -torch.inf).max()
    return torch.where(mask.any(), highest, 0)


def as_floats(statistics: dict[str, Tensor]) -> dict[str, float]:
    """Return Python floats, with one device transfer."""
    values = torch.stack([value.detach().double() for value in statistics.values()]).tolist()
    return dict(zip(statistics, values, strict=True))
