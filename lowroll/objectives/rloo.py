"""RLOO: REINFORCE with the leave-one-out baseline (arXiv 2402.14740).

    J = 1/G sum_i sum_t min(R A_i, clip(R, 1 - eps_low, 1 + eps_high) A_i),   A_i = r_i - mean of the other rewards

On policy (R = 1) the gradient is REINFORCE's, 1/G sum_i A_i grad log pi(o_i), the log-prob of the
whole response being the sum of its tokens'.

Deviation from the paper: it takes a single step a batch and needs no ratio; here R and the clip
keep further mini-batches of the same rollouts valid.
"""

from __future__ import annotations

from torch import Tensor

from lowroll.objectives.reduce import Counts, aggregate
from lowroll.objectives.surrogate import as_floats, clip, policy_statistics, prepare


def rloo(
    *,
    learner: Tensor,
    proximal: Tensor,
    advantages: Tensor,
    mask: Tensor,
    segments: Tensor | None = None,
    counts: Counts | None = None,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    dual_clip: float | None = None,
    reduce: str = "seq-mean-token-sum",
    max_length: float | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """J to maximise and its statistics. Shapes as in `grpo`."""
    tokens = prepare(
        learner=learner, proximal=proximal, advantages=advantages, mask=mask, segments=segments
    )
    clipped = clip(
        tokens.ratio_N, tokens.advantages_N, eps_low=eps_low, eps_high=eps_high, dual_clip=dual_clip
    )
    J = aggregate(clipped.value_N, tokens.layout, mode=reduce, counts=counts, max_length=max_length)
    return J, as_floats(policy_statistics(tokens, clipped))
