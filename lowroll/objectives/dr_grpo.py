"""Dr. GRPO: GRPO without its two biases (arXiv 2503.20783 sec. 3.2).

    J = 1/(G L_max) sum_i sum_t min(R A, clip(R, 1 - eps_low, 1 + eps_high) A),   A = r - mean (no std)

Dividing by a constant length instead of |o_i| stops long wrong answers from being punished less per
token. `max_length` is L_max, the generation limit in tokens.
"""

from __future__ import annotations

from torch import Tensor

from lowroll.objectives.reduce import Counts, aggregate
from lowroll.objectives.surrogate import as_floats, clip, policy_statistics, prepare


def dr_grpo(
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
    reduce: str = "constant",
    max_length: float | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """J to maximise and its statistics; `max_length` is required. Shapes as in `grpo`."""
    tokens = prepare(
        learner=learner, proximal=proximal, advantages=advantages, mask=mask, segments=segments
    )
    clipped = clip(
        tokens.ratio_N, tokens.advantages_N, eps_low=eps_low, eps_high=eps_high, dual_clip=dual_clip
    )
    J = aggregate(clipped.value_N, tokens.layout, mode=reduce, counts=counts, max_length=max_length)
    return J, as_floats(policy_statistics(tokens, clipped))
