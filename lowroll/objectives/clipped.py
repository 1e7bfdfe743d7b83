"""The loss of GRPO, Dr. GRPO, RLOO, DAPO and PPO: the clipped surrogate.

    J_t = min(R A, clip(R, 1 - eps_low, 1 + eps_high) A),   R = exp(learner - anchor)

J is maximised. The rows of `table`, with their sources, differ in bounds, average and advantages.
Dr. GRPO divides by the constant `max_length` (the generation limit in tokens), so that long wrong
answers are not punished less per token. RLOO on policy (R = 1) is REINFORCE. `is`, a comparison,
has the sampler as anchor, so that it clips the sampler's error together with the learner's change,
and collapses.
"""

from __future__ import annotations

from lowroll.objectives.ratios import ObjectiveInput, TokenValues, clip, policy_statistics


def clipped(
    tokens: ObjectiveInput, *, eps_low: float, eps_high: float, dual_clip: float | None
) -> TokenValues:
    """Return token values and statistics. The anchor is the proximal policy, or the sampler if only
    that is given."""
    surrogate = clip(
        tokens.ratio_N, tokens.advantages_N, eps_low=eps_low, eps_high=eps_high, dual_clip=dual_clip
    )
    statistics = policy_statistics(tokens, surrogate)
    if tokens.has_behavior:
        statistics["correction/dropped_tokens"] = tokens.num_dropped
    return surrogate.value_N, statistics
