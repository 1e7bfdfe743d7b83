"""DAPO's policy objective: clip-higher and the token mean (arXiv 2503.14476 eq. 8).

    J = 1/(sum_i |o_i|) sum_i sum_t min(R A, clip(R, 1 - eps_low, 1 + eps_high) A),   eps_low .2, eps_high .28

The wider upper bound leaves unlikely tokens room to grow; the token mean gives every token of the
batch the same say. Dynamic sampling belongs to the orchestrator and the overlong penalty to
`advantages.shaping`.
"""

from __future__ import annotations

from torch import Tensor

from lowroll.objectives.reduce import Counts, aggregate
from lowroll.objectives.surrogate import as_floats, clip, policy_statistics, prepare


def dapo(
    *,
    learner: Tensor,
    proximal: Tensor,
    advantages: Tensor,
    mask: Tensor,
    segments: Tensor | None = None,
    counts: Counts | None = None,
    eps_low: float = 0.2,
    eps_high: float = 0.28,
    dual_clip: float | None = None,
    reduce: str = "token-mean",
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
