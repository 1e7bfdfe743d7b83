"""The loss of GRPO, Dr. GRPO, RLOO, DAPO and PPO: the clipped surrogate. J is maximised.

    J_t = min(R A, clip(R, 1 - eps_low, 1 + eps_high) A),   R = exp(learner - anchor)

Rows of `table` differ in bounds, average and advantages:

    grpo         1/G sum_i 1/|o_i| sum_t, bounds .2             arXiv 2402.03300 eq. 3
    grpo_no_std  the same, A = r - mean                         the same
    dr_grpo      1/(G max_length) sum_i sum_t, A = r - mean     arXiv 2503.20783 sec. 3.2
    rloo         1/G sum_i sum_t, A the leave-one-out one       arXiv 2402.14740
    dapo         1/(sum_i |o_i|) sum_i sum_t, eps_high .28      arXiv 2503.14476 eq. 8
    ppo          the same, bounds .2, A a token's own           arXiv 1707.06347 eq. 7
    none         grpo on the sampler's tokens, the mismatch ignored: QuRL's RL baseline, eq. 1
    is           R = exp(learner - behavior)                    QuRL eq. 3

Dr. GRPO's constant `max_length` (the generation limit in tokens) keeps long wrong answers from
being punished less per token. RLOO on policy (R = 1) is REINFORCE; R and the clip allow more than
its one step a batch. PPO's average and bounds are verl's. `is` clips the sampler's error together
with the learner's change, so it collapses, and serves as a comparison.
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
