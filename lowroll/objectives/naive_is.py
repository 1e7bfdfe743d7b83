"""Naive importance sampling: PPO's clip on the whole ratio (QuRL eq. 3). For comparison: it
collapses.

    J_t = min(rho A, clip(rho, 1 - eps_low, 1 + eps_high) A),   rho = exp(learner - behavior)

The sampler's error is in the ratio that is clipped, so a token may be cut off before the learner
has moved at all. The policy ratio in the statistics is rho.
"""

from __future__ import annotations

from torch import Tensor

from lowroll.objectives.reduce import Counts, aggregate
from lowroll.objectives.surrogate import as_floats, clip, policy_statistics, prepare


def naive_is(
    *,
    learner: Tensor,
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
    """J to maximise and its statistics. Shapes as in `grpo`; no proximal log-probs are needed."""
    tokens = prepare(
        learner=learner, behavior=behavior, advantages=advantages, mask=mask, segments=segments
    )
    clipped = clip(
        tokens.ratio_N, tokens.advantages_N, eps_low=eps_low, eps_high=eps_high, dual_clip=dual_clip
    )
    J = aggregate(clipped.value_N, tokens.layout, mode=reduce, counts=counts, max_length=max_length)
    return J, as_floats(
        policy_statistics(tokens, clipped) | {"correction/dropped_tokens": tokens.num_dropped}
    )
