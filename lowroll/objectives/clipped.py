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

Notes:
1. Dr. GRPO divides by the constant `max_length` (the generation limit in tokens), so that long
   wrong answers are not punished less per token.
2. RLOO on policy (R = 1) is REINFORCE, 1/G sum_i A_i grad log pi(o_i). The paper takes one step a
   batch; R and the clip allow more steps.
3. DAPO's wider upper bound lets unlikely tokens grow; its mean weighs all tokens of the batch
   equally. Dynamic sampling belongs to the orchestrator and the overlong penalty to
   `advantages.shaping`.
4. PPO's A is the whitened generalised advantage (`advantages.gae`); average and bounds are verl's,
   which QuRL uses.
5. `is` clips the sampler's error together with the learner's change, so a token may be clipped
   before any update: it collapses, and serves as a comparison.
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
