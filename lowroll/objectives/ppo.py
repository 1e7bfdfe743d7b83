"""PPO's policy objective: the clipped surrogate over tokens whose advantages come from a critic
(arXiv 1707.06347).

    J = 1/(sum_i |o_i|) sum_i sum_t min(R A, clip(R, 1 - eps_low, 1 + eps_high) A),   R = exp(learner - proximal)

A_t is the whitened generalised advantage (`advantages.gae`) and differs from token to token;
nothing else sets this apart from `grpo`. The mean over all tokens and the bounds .2 are verl's,
which QuRL's PPO runs use.
"""

from __future__ import annotations

from torch import Tensor

from lowroll.objectives.reduce import Counts, aggregate
from lowroll.objectives.surrogate import as_floats, clip, policy_statistics, prepare


def ppo(
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
