"""Decoupled PPO: the clip sees the learner's ratio, the weight the sampler's mismatch (QuRL eq. 4;
arXiv 2110.00641).

    J_t = w min(R A, clip(R, 1 - eps_low, 1 + eps_high) A),   w = exp(proximal - behavior)

Unbiased for the proximal policy, and of unbounded variance: w has no cap.
"""

from __future__ import annotations

import math

from torch import Tensor

from lowroll.objectives.reduce import Counts, aggregate
from lowroll.objectives.surrogate import (
    as_floats,
    clip,
    policy_statistics,
    prepare,
    weight_statistics,
)


def decoupled(
    *,
    learner: Tensor,
    proximal: Tensor,
    behavior: Tensor,
    advantages: Tensor,
    mask: Tensor,
    segments: Tensor | None = None,
    counts: Counts | None = None,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    dual_clip: float | None = None,
    reduce: str = "seq-mean-token-mean",
    max_length: float | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """J to maximise and its statistics. Shapes as in `grpo`."""
    tokens = prepare(
        learner=learner,
        proximal=proximal,
        behavior=behavior,
        advantages=advantages,
        mask=mask,
        segments=segments,
    )
    clipped = clip(
        tokens.ratio_N, tokens.advantages_N, eps_low=eps_low, eps_high=eps_high, dual_clip=dual_clip
    )
    J = aggregate(
        tokens.weight_N * clipped.value_N,
        tokens.layout,
        mode=reduce,
        counts=counts,
        max_length=max_length,
    )
    return J, as_floats(
        policy_statistics(tokens, clipped) | weight_statistics(tokens, tokens.weight_N, math.inf)
    )
