"""Truncated importance sampling: decoupled PPO whose weight is capped (QuRL eq. 5; FlashRL).

    J_t = min(w, C) min(R A, clip(R, 1 - eps_low, 1 + eps_high) A),   w = exp(proximal - behavior)

Deviation: the paper gives no C; 2 is FlashRL's for GSM8K (8 for its 32B DAPO run).
"""

from __future__ import annotations

from torch import Tensor

from lowroll.objectives.reduce import Counts, aggregate
from lowroll.objectives.surrogate import (
    as_floats,
    clip,
    policy_statistics,
    prepare,
    truncate,
    weight_statistics,
)


def tis(
    *,
    learner: Tensor,
    proximal: Tensor,
    behavior: Tensor,
    advantages: Tensor,
    mask: Tensor,
    segments: Tensor | None = None,
    counts: Counts | None = None,
    cap: float = 2.0,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    dual_clip: float | None = None,
    reduce: str = "seq-mean-token-mean",
    max_length: float | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """J to maximise and its statistics. Shapes as in `grpo`; `cap` is C, infinity gives
    `decoupled`."""
    tokens = prepare(
        learner=learner,
        proximal=proximal,
        behavior=behavior,
        advantages=advantages,
        mask=mask,
        segments=segments,
    )
    weight_N = truncate(tokens.weight_N, cap)
    clipped = clip(
        tokens.ratio_N, tokens.advantages_N, eps_low=eps_low, eps_high=eps_high, dual_clip=dual_clip
    )
    J = aggregate(
        weight_N * clipped.value_N, tokens.layout, mode=reduce, counts=counts, max_length=max_length
    )
    return J, as_floats(
        policy_statistics(tokens, clipped) | weight_statistics(tokens, weight_N, cap)
    )
