"""GRPO's policy objective: PPO's clip on the learner's own ratio (arXiv 2402.03300 eq. 3).

    J = 1/G sum_i 1/|o_i| sum_t min(R A, clip(R, 1 - eps_low, 1 + eps_high) A),   R = exp(learner - proximal)

The mismatch between sampler and learner does not appear. On rollouts of a quantized or sparse
sampler this is therefore the naive "no correction" (the RL baseline of QuRL, eq. 1 on quantized
samples). The advantages say whether it is GRPO with or without the division by the group's std; the
KL term is `kl.penalty`, subtracted by the caller.
"""

from __future__ import annotations

from torch import Tensor

from lowroll.objectives.reduce import Counts, aggregate
from lowroll.objectives.surrogate import as_floats, clip, policy_statistics, prepare


def grpo(
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
    reduce: str = "seq-mean-token-mean",
    max_length: float | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """J to maximise and its statistics, for [B, T] tensors or packed [N] with `segments`; see
    `surrogate`."""
    tokens = prepare(
        learner=learner, proximal=proximal, advantages=advantages, mask=mask, segments=segments
    )
    clipped = clip(
        tokens.ratio_N, tokens.advantages_N, eps_low=eps_low, eps_high=eps_high, dual_clip=dual_clip
    )
    J = aggregate(clipped.value_N, tokens.layout, mode=reduce, counts=counts, max_length=max_length)
    return J, as_floats(policy_statistics(tokens, clipped))
