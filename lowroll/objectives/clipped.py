"""The loss of GRPO, Dr. GRPO, RLOO, DAPO and PPO: the clipped surrogate. J is maximised.

    J_t = min(R A, clip(R, 1 - eps_low, 1 + eps_high) A),   R = exp(learner - anchor)

The rows of `table`, with their sources, differ in bounds, average and advantages. Dr. GRPO's
constant `max_length` (the generation limit in tokens) keeps long wrong answers from being punished
less per token. RLOO on policy (R = 1) is REINFORCE. `is`, with the sampler as anchor, clips the
sampler's error together with the learner's change, so it collapses, and serves as a comparison.
"""

from __future__ import annotations

from lowroll.objectives.surrogate import ObjectiveInput, TokenValues, clip, policy_statistics


def clipped(
    tokens: ObjectiveInput, *, eps_low: float, eps_high: float, dual_clip: float | None
) -> TokenValues:
    """Return each token's value and the statistics. The ratio's anchor is the proximal policy, or
    the sampler where that is the only one given."""
    surrogate = clip(
        tokens.ratio_N, tokens.advantages_N, eps_low=eps_low, eps_high=eps_high, dual_clip=dual_clip
    )
    statistics = policy_statistics(tokens, surrogate)
    if tokens.has_behavior:
        statistics["correction/dropped_tokens"] = tokens.num_dropped
    return surrogate.value_N, statistics
