"""Every metric of a run: name, unit, meaning, expectation and source of its formula.

Only these names can be recorded. `<env>`, `<metric>` and `<filter>` stand for a run's own name,
`<tokens>` for a power of two, `<versions>` and `<turns>` for numbers. Notation: pi the learner,
pi_old the proximal policy, b the behaviour policy, A the advantage; R = pi / pi_old, w = pi_old /
b, C the cap; means are over response tokens unless a sequence is named. Expectations are hints.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

# what may replace a name in brackets
_PLACEHOLDERS = {
    "<tokens>": r"[0-9]+",
    "<versions>": r"[0-9]+",
    "<turns>": r"[0-9]+",
    "<env>": r"[^/].*",
    "<filter>": r"[^/<>]+",
    "<metric>": r".+",
}
_TIMINGS = ("time/", "perf/")
_QURL = "QuRL Eq. 3-9"
_PPO = "PPO, arXiv 1707.06347"
_K = "Schulman 2020"
_PASS_AT_K_SOURCE = "Codex, arXiv 2107.03374"


@dataclass(frozen=True)
class Metric:
    """A row of the table. `expect` is a healthy range or a hint, `source` a paper or the module."""

    name: str
    unit: str
    meaning: str
    expect: str = ""
    source: str = ""

    @property
    def reproducible(self) -> bool:
        """True if runs of one configuration and seed record the same value."""
        return not self.name.startswith(_TIMINGS)

    @property
    def pattern(self) -> re.Pattern[str]:
        return re.compile(
            re.sub(r"<\w+>", lambda place: _PLACEHOLDERS[place[0]], re.escape(self.name))
        )


_M = Metric
METRICS: tuple[Metric, ...] = (
    _M(
        "reward/mean",
        "reward",
        "mean raw score of the step's scored rollouts, before shaping",
        "rises",
    ),
    _M("reward/std", "reward", "standard deviation of those scores"),
    _M("reward/min", "reward", "lowest score"),
    _M("reward/max", "reward", "highest score"),
    _M(
        "reward/zero_std_fraction",
        "fraction",
        "groups whose scores are all equal",
        "near 1: the task is too easy or too hard",
        "DAPO, arXiv 2503.14476",
    ),
    _M("reward/solved_all_fraction", "fraction", "groups in which every rollout is right"),
    _M("reward/solved_none_fraction", "fraction", "groups in which no rollout is right"),
    _M(
        "reward/error_rate",
        "fraction",
        "rollouts whose score could not be computed; they leave their group",
        "0; above the limit the run stops",
    ),
    _M(
        "reward/inapplicable_fraction",
        "fraction",
        "rollouts for which every reward function says None; they leave their group",
        "near 1 nothing is learned",
    ),
    _M(
        "reward/canary_failures",
        "answers",
        "known answers, right and wrong, that the scorer judged wrongly",
        "0",
    ),
    _M(
        "reward/<env>/unjudged",
        "fraction",
        "mathematics: answers that cannot be judged (no formula, too large or too slow to "
        "evaluate); they are wrong",
        "small",
    ),
    _M(
        "reward/<env>/<metric>",
        "reward",
        "the environment's mean raw score (reward/<env>/mean) and the means of its scorer's "
        "own numbers",
    ),
    _M(
        "reward/after_<turns>_turns",
        "reward",
        "mean raw score of the conversations of so many turns",
    ),
    _M("rollout/num_samples", "rollouts", "rollouts in the step's batch"),
    _M("rollout/num_groups", "groups", "groups in the step's batch"),
    _M(
        "rollout/tokens",
        "tokens",
        "response tokens generated for the step, dropped groups included",
    ),
    _M("rollout/length_mean", "tokens", "mean response length"),
    _M("rollout/length_p50", "tokens", "median response length"),
    _M("rollout/length_p95", "tokens", "95th percentile of response length"),
    _M("rollout/length_max", "tokens", "longest response"),
    _M(
        "rollout/truncated_fraction",
        "fraction",
        "responses cut by the token limit",
        "low and not rising",
    ),
    _M("rollout/stop_fraction", "fraction", "responses that ended by themselves"),
    _M("rollout/turns_mean", "turns", "mean turns of the assistant in a conversation"),
    _M("rollout/turns_max", "turns", "most of them"),
    _M(
        "rollout/env_tokens_mean",
        "tokens",
        "a conversation's tokens that are the environment's; no other number counts them",
    ),
    _M("rollout/ended_done_fraction", "fraction", "conversations that the environment ended"),
    _M("rollout/ended_turns_fraction", "fraction", "conversations that had all of their max_turns"),
    _M(
        "rollout/ended_length_fraction",
        "fraction",
        "conversations of which a turn was cut",
        "low and not rising",
    ),
    _M(
        "rollout/ended_tokens_fraction",
        "fraction",
        "conversations that reached max_sequence_tokens",
        "low and not rising",
    ),
    _M("rollout/ended_error_fraction", "fraction", "conversations whose environment failed", "0"),
    _M(
        "rollout/rounds",
        "rounds",
        "rounds of generation that filled the batch",
        "1 without dynamic sampling",
    ),
    _M(
        "rollout/dropped_groups",
        "groups",
        "groups without signal that dynamic sampling replaced",
        "",
        "DAPO, arXiv 2503.14476",
    ),
    _M("rollout/passed_over_prompts", "prompts", "prompts that were too long to be asked", "0"),
    _M(
        "rollout/flagged_<filter>_fraction",
        "fraction",
        "rollouts that a filter (gibberish, repetition) flagged",
        "0",
    ),
    _M("rollout/temperature", "", "sampling temperature"),
    _M("rollout/policy_version", "version", "newest version that drew a token of the batch"),
    _M(
        "rollout/staleness",
        "versions",
        "learner's version minus the oldest that drew a token of the batch",
        "0 in a synchronous run",
    ),
    _M(
        "rollout/staleness_<versions>",
        "fraction",
        "tokens drawn so many versions before the learner's",
        "none beyond max_off_policy_steps",
    ),
    _M("rollout/learner_version", "version", "the learner's, for the ages of tokens"),
    _M(
        "rollout/mixed_fraction",
        "fraction",
        "rollouts whose tokens are of several versions",
    ),
    _M(
        "rollout/kept_prefix_mean",
        "tokens",
        "of those rollouts: tokens drawn before the last change of weights",
    ),
    _M(
        "rollout/open_groups",
        "groups",
        "groups that go on after the batch was made",
        "(oversampling_factor - 1) x the groups of a batch",
    ),
    _M("rollout/in_flight_groups", "groups", "groups at the engines when the batch was full"),
    _M(
        "rollout/open_length_mean",
        "tokens",
        "tokens that their samples had drawn by then",
        "far above rollout/length_mean: short responses are preferred",
    ),
    _M(
        "rollout/carried_groups",
        "groups",
        "groups of the batch that were planned for an earlier one",
    ),
    _M(
        "rollout/carried_length_mean",
        "tokens",
        "mean length of their responses",
        "above rollout/length_mean",
    ),
    _M("rollout/dropped_no_signal", "groups", "dropped: their rewards are all equal"),
    _M("rollout/dropped_too_easy", "groups", "dropped: their mean reward is exactly 1"),
    _M("rollout/dropped_too_hard", "groups", "dropped: their mean reward is exactly 0"),
    _M(
        "rollout/dropped_stale",
        "groups",
        "dropped: their tokens are too old, or they lived through too many updates",
        "0; else the learner is too fast for the longest responses",
    ),
    _M(
        "rollout/dropped_oversampled",
        "groups",
        "given up unfinished because the batch was full",
        "(oversampling_factor - 1) x the groups of a batch at level 0",
    ),
    _M(
        "rollout/duplicate_prompts",
        "prompts",
        "passed over: another prompt has the same buffer.hash_keys",
    ),
    _M("rollout/pooled_prompts", "prompts", "passed over: in the easy or the hard pool"),
    _M("rollout/easy_pool", "prompts", "in the easy pool after the step"),
    _M("rollout/hard_pool", "prompts", "in the hard pool after the step"),
    _M(
        "rollout/weight_bits",
        "bits",
        "bits a linear weight of the rollout format, scales included",
        "constant, unless the guard falls back",
    ),
    _M(
        "rollout/stage",
        "",
        "the run's stage, from 1 on",
        "",
    ),
    _M("rollout/max_tokens", "tokens", "the token limit of the stage"),
    _M(
        "rollout/noise_sigma",
        "",
        "standard deviation of the noise on the engine's norms",
        "",
        "QeRL Eq. 8",
    ),
    _M(
        "rollout/replay_samples",
        "samples",
        "unfinished samples replayed under newer weights",
    ),
    _M(
        "rollout/replay_kept_mean",
        "tokens",
        "of a replayed sample, the tokens before the first that the newer weights draw otherwise",
        "short where an update changes much",
    ),
    _M(
        "rollout/replay_kept_fraction",
        "fraction",
        "share of the replayed samples' tokens that were kept",
        "near 1; below it with unchanged weights by rounding alone",
    ),
    _M(
        "rollout/replay_redrawn_tokens",
        "tokens",
        "tokens of replayed samples that were thrown away",
        "0 with unchanged weights, but for rounding",
    ),
    _M("rollout/entropy_estimate", "nats", "minus the mean log-prob of the drawn tokens"),
    _M(
        "mismatch/kl_k1",
        "nats",
        "mean of ln b - ln pi_old, an unbiased estimate of KL(b || pi_old)",
        "about 1e-4 for bf16 rollouts, 1e-3 for low-bit or sparse ones; QuRL saw .002 climb to "
        ".025 before collapse",
        _K,
    ),
    _M(
        "mismatch/kl_k3",
        "nats",
        "mean of w - ln w - 1: the same KL, never negative, less noisy",
        "as kl_k1",
        _K,
    ),
    _M(
        "mismatch/weight_mean",
        "",
        "mean w of the step, Sparse-RL's xi; where the rollouts' KV cache forgets or rounds",
        "near 1",
        "Sparse-RL",
    ),
    _M("mismatch/weight_max", "", "largest w of the step", "QuRL saw 1e5 before collapse", "QuRL"),
    _M(
        "mismatch/weight_min",
        "",
        "smallest w of the step",
        "Sparse-RL rejects a sequence below 1e-4",
        "Sparse-RL",
    ),
    _M("mismatch/logp_diff_mean", "nats", "mean |ln pi_old - ln b|", "near 0"),
    _M("mismatch/logp_diff_max", "nats", "largest |ln pi_old - ln b|"),
    _M("mismatch/prob_diff_mean", "probability", "mean |pi_old - b|", "near 0"),
    _M("mismatch/prob_diff_max", "probability", "largest |pi_old - b|"),
    _M(
        "mismatch/ess",
        "fraction",
        "effective sample size of the token weights, mean(w)^2 / mean(w^2)",
        "near 1; verl's guide wants it above 0.3",
        "Kish 1965",
    ),
    _M(
        "mismatch/ess_sequence",
        "fraction",
        "effective sample size of the sequence weights",
        "",
        "Kish 1965",
    ),
    _M("mismatch/chi2_token", "", "mean(w^2) - 1: chi-squared divergence over tokens", "near 0"),
    _M("mismatch/chi2_sequence", "", "the same with the product of w over a sequence"),
    _M("mismatch/geo_ratio_mean", "", "mean over sequences of exp(mean ln w)", "near 1"),
    _M(
        "mismatch/ppl_ratio",
        "",
        "mean over sequences of the learner's perplexity over the sampler's",
        "near 1",
    ),
    _M("mismatch/ppl_learner", "", "mean over sequences of exp(-mean ln pi_old)"),
    _M("mismatch/ppl_sampler", "", "mean over sequences of exp(-mean ln b)"),
    _M("mismatch/pearson", "", "correlation of pi_old and b over tokens", "near 1"),
    _M(
        "mismatch/length_<tokens>/kl_k1",
        "nats",
        "kl_k1 of the responses of at most so many tokens and more than half of that (the "
        "first class: at most 4)",
        "the same for all lengths",
        _K,
    ),
    _M(
        "mismatch/length_<tokens>/kl_k3",
        "nats",
        "kl_k3 of these responses",
        "the same for all lengths",
        _K,
    ),
    _M("mismatch/length_<tokens>/logp_diff_max", "nats", "logp_diff_max of these responses"),
    _M("mismatch/length_<tokens>/ess", "fraction", "ess of these responses", "near 1", "Kish 1965"),
    _M(
        "mismatch/staleness_<versions>/kl_k1",
        "nats",
        "kl_k1 of the tokens that were drawn so many versions ago",
        "grows with the age",
        _K,
    ),
    _M(
        "mismatch/staleness_<versions>/logp_diff_mean",
        "nats",
        "mean |ln pi_old - ln b| of these tokens",
        "grows with the age",
    ),
    _M(
        "spread/token_std",
        "nats",
        "before the first update: standard deviation of ln pi_old - ln b over tokens",
    ),
    _M("spread/token_p99", "nats", "before the first update: 99th percentile of its size"),
    _M(
        "spread/sequence_std",
        "nats",
        "before the first update: standard deviation over sequences of its mean",
        "far above a band such as 3e-4 where the band is meant to bound it",
    ),
    _M(
        "spread/sequence_p99",
        "nats",
        "before the first update: 99th percentile of the size of these means",
    ),
    _M(
        "spread/silent_fraction",
        "fraction",
        "tokens that the objective would silence before any update",
        "above one half the run warns, or widens what `auto` chose",
    ),
    _M(
        "spread/silent_sequence_fraction",
        "fraction",
        "sequences that it would silence as a whole",
        "as above",
    ),
    _M("policy/objective", "", "the objective J that the update maximised"),
    _M("policy/ratio_mean", "", "mean R", "near 1; exactly 1 with one update a batch", _PPO),
    _M("policy/ratio_max", "", "largest R", "", _PPO),
    _M(
        "policy/clip_fraction_high",
        "fraction",
        "tokens with A > 0 above the upper bound: no gradient",
        "0 with one update a batch",
        _PPO,
    ),
    _M(
        "policy/clip_fraction_low",
        "fraction",
        "tokens with A < 0 below the lower bound: no gradient",
        "0 with one update a batch",
        _PPO,
    ),
    _M(
        "policy/dual_clip_fraction",
        "fraction",
        "tokens with A < 0 stopped by the dual clip",
        "rare",
        "arXiv 1912.09729",
    ),
    _M(
        "policy/band_masked_fraction",
        "fraction",
        "sequences that TBPO's band left without a gradient",
        "0 with one update a batch",
        "QaRL sec. 3.2",
    ),
    _M(
        "policy/entropy",
        "nats",
        "entropy of the learner's next-token distribution, from the logits",
        "falls slowly; 0 is collapse, a rise is noise",
    ),
    _M(
        "policy/kl_reference",
        "nats",
        "estimated KL to the frozen reference model",
        "grows slowly",
        _K,
    ),
    _M(
        "correction/weight_mean",
        "",
        "mean weight, as it was applied",
        "near 1; verl's guide says 0.5 to 2",
        _QURL,
    ),
    _M("correction/weight_max", "", "largest weight, as it was applied", "", _QURL),
    _M(
        "correction/truncated_fraction",
        "fraction",
        "tokens whose weight the cap, or another bound, changed",
        "rare",
        _QURL,
    ),
    _M(
        "correction/acr_extended_fraction",
        "fraction",
        "tokens that ACR's wider bound let through and TIS would clip",
        "",
        "QuRL Eq. 9",
    ),
    _M(
        "correction/rejected_fraction",
        "fraction",
        "tokens that a mask or rejection left without a gradient",
        "small",
    ),
    _M(
        "correction/rejected_sequence_fraction",
        "fraction",
        "sequences that it left without a gradient as a whole",
        "about .07 with a compressed cache; near 0 with low-bit weights",
        "Sparse-RL",
    ),
    _M(
        "correction/repaired_fraction",
        "fraction",
        "tokens that loss.sparse.repair masks",
        "",
    ),
    _M(
        "correction/repaired_sequence_fraction",
        "fraction",
        "responses that loss.sparse.repair keeps the beginning of",
        "",
    ),
    _M(
        "correction/vetoed_fraction",
        "fraction",
        "tokens whose w is below the veto, each of which rejects its sequence",
        "near 0",
        "Sparse-RL",
    ),
    _M(
        "correction/rejected_length_ratio",
        "",
        "mean length of the sequences rejected as a whole over that of all",
        "far above 1, long responses teach too little",
    ),
    _M(
        "correction/rejected_reward_gap",
        "reward",
        "mean score of these sequences minus that of all",
        "above 0 it throws good responses away",
    ),
    _M(
        "correction/dropped_tokens",
        "tokens",
        "tokens left out because their recorded log-prob was not finite",
        "0",
    ),
    _M("guard/ess", "alarm", "1 where mismatch/ess is below guard.ess_below", "0"),
    _M(
        "guard/kl",
        "alarm",
        "1 where the moving average of mismatch/kl_k3 has outgrown its first steps or "
        "guard.kl_above",
        "0",
        "QuRL Fig. 3",
    ),
    _M("guard/rejected", "alarm", "1 where more than guard.rejected_above is rejected", "0"),
    _M("guard/ratio", "alarm", "1 where mismatch/weight_max is above guard.ratio_above", "0"),
    _M("guard/nonfinite", "alarm", "1 where the mismatch or an update was not finite", "0"),
    _M(
        "guard/tightened",
        "times",
        "how often the guard has tightened the objective's bounds so far",
        "0",
    ),
    _M(
        "guard/fallbacks",
        "times",
        "how often the guard has given the rollouts a wider format so far",
        "0",
    ),
    _M(
        "guard/choices",
        "times",
        "how often other formats have been chosen under a budget so far",
        "0",
    ),
    _M(
        "critic/loss",
        "",
        "the critic's clipped squared error to the returns, halved",
        "falls",
        "arXiv 2005.12729",
    ),
    _M(
        "critic/clip_fraction",
        "fraction",
        "tokens whose clipped error was the larger one: no gradient",
    ),
    _M("critic/value_mean", "reward", "mean value", "follows critic/return_mean"),
    _M("critic/return_mean", "reward", "mean return, advantage plus value, before whitening"),
    _M(
        "critic/explained_variance",
        "",
        "1 - Var(G - V) / Var(G), returns G and values V of before the step",
        "rises towards 1",
    ),
    _M("critic/grad_norm", "", "the critic's gradient norm before clipping", "stable"),
    _M(
        "critic/skipped",
        "updates",
        "the critic's updates skipped because loss or gradient was not finite",
        "0",
    ),
    _M("optim/lr", "", "learning rate of the update"),
    _M("optim/grad_norm", "", "gradient norm before clipping", "stable"),
    _M("optim/update_norm", "", "norm of the change of the weights"),
    _M("optim/skipped", "updates", "updates skipped because loss or gradient was not finite", "0"),
    _M(
        "weights/normalized_update",
        "",
        "squared change of the linear weights in the step over their squared size",
        "QuRL saw it far below the quantization error",
        "QuRL Eq. 13",
    ),
    _M(
        "weights/normalized_quant_error",
        "",
        "squared rounding error of the rollout's weights over their squared size",
        "fixed by the format",
        "QuRL Eq. 14",
    ),
    _M(
        "weights/codes_flipped_fraction",
        "fraction",
        "low-bit codes of the rollout's weights that the step changed",
        "0 means that the rollouts do not see the learning",
    ),
    _M(
        "sft/loss", "nats", "mean negative log-prob of the demonstrations' response tokens", "falls"
    ),
    _M("sft/tokens", "tokens", "response tokens of the update"),
    _M(
        "kv/saving_peak",
        "fraction",
        "tokens that the bounded caches never held: 1 - stored over dense, of each response's "
        "largest cache",
        "the paper reports .35 to .53 against a dense run",
        "Sparse-RL",
    ),
    _M("kv/saving_final", "fraction", "the same when each response ends"),
    _M("kv/saving_mean", "fraction", "the same over all tokens of the responses"),
    _M("kv/evictions", "compactions", "how often a response's cache was compacted, on average"),
    _M("eval/temperature", "", "the temperature that eval/<env>/* is drawn at; 0 is greedy"),
    _M("eval/<env>/reward", "reward", "mean raw score on held-out prompts", "rises"),
    _M("eval/<env>/pass_at_1", "fraction", "share of right responses", "rises", _PASS_AT_K_SOURCE),
    _M(
        "eval/<env>/reward_before",
        "reward",
        "eval/<env>/reward before the first update; in the record of step 1",
    ),
    _M("eval/<env>/pass_at_1_before", "fraction", "eval/<env>/pass_at_1 before the first update"),
    _M(
        "eval/<env>/sampled_reward",
        "reward",
        "eval/<env>/reward of responses that are drawn as the rollouts are; in the last step",
        "rises, also where a lower temperature alone would not have done it",
    ),
    _M(
        "eval/<env>/sampled_pass_at_1",
        "fraction",
        "eval/<env>/pass_at_1 of these responses",
        "rises",
        _PASS_AT_K_SOURCE,
    ),
    _M(
        "eval/<env>/sampled_reward_before",
        "reward",
        "eval/<env>/sampled_reward before the first update",
    ),
    _M(
        "eval/<env>/sampled_pass_at_1_before",
        "fraction",
        "eval/<env>/sampled_pass_at_1 before the first update",
    ),
    _M("eval/<env>/avg_at_k", "fraction", "share of right responses among the first k of a prompt"),
    _M(
        "eval/<env>/pass_at_k",
        "fraction",
        "chance that one of k responses is right (unbiased estimate)",
        "",
        _PASS_AT_K_SOURCE,
    ),
    _M("eval/<env>/length_mean", "tokens", "mean response length on held-out prompts"),
    _M(
        "perf/generate_tokens_per_second",
        "tokens/s",
        "response tokens over the seconds of generation",
    ),
    _M(
        "perf/learn_tokens_per_second",
        "tokens/s",
        "tokens of the batch over the seconds of learning",
    ),
    _M(
        "perf/peak_memory_gb",
        "GB",
        "peak memory of the process (on a GPU, of the device with all of its KV cache)",
    ),
    _M(
        "perf/broadcast_bytes",
        "bytes",
        "of the published weights of the version, where engines are other processes",
    ),
    _M("perf/engines_healthy", "engines", "of a pool that take requests", "all of them"),
    _M("perf/engine_requests", "requests", "that the pool's engines have answered so far"),
    _M("perf/engine_tokens", "tokens", "of those answers"),
    _M(
        "perf/engine_retries",
        "requests",
        "sent again so far: their engine was busy, failed, or lost the connection",
        "0",
    ),
    _M("perf/engine_handed_over", "requests", "taken from evicted engines so far", "0"),
    _M(
        "perf/engine_refused",
        "answers",
        "refused so far: drawn from another version than the engine was told, or damaged",
        "0",
    ),
    _M("perf/engine_late", "answers", "that came when nobody waited any more", "0"),
    _M("perf/engine_fenced", "times", "that an engine was silent, dead, stuck or refused", "0"),
    _M(
        "perf/changed_bytes_fraction",
        "fraction",
        "bytes published of what the step changed, over those that an engine holds",
        "falls with the learning rate",
    ),
    _M("perf/kv_pages_peak", "pages", "most KV-cache pages in use at once"),
    _M(
        "perf/prefix_hits",
        "pages",
        "prompt pages from the prefix cache since the process started",
    ),
    _M("time/step", "s", "the whole step"),
    _M("time/generate", "s", "generation of the rollouts"),
    _M("time/score", "s", "scoring"),
    _M(
        "time/wait_weights",
        "s",
        "the orchestrator's wait for new enough weights",
        "near 0 when the engines are the slower half",
    ),
    _M(
        "time/wait_trainer",
        "s",
        "its wait for room for the batch before",
        "near 0 when the engines are the slower half",
    ),
    _M(
        "time/wait_batch",
        "s",
        "the trainer's wait for its batch",
        "near 0 when the learner is the slower half",
    ),
    _M(
        "perf/trainer_idle_fraction",
        "fraction",
        "of the time since the step before, what the trainer waited for its batch",
        "near 0 when the learner is the slower half",
    ),
    _M(
        "perf/orchestrator_idle_fraction",
        "fraction",
        "time/generate and both waits, of the time since the batch before",
        "near 1",
    ),
    _M("time/learn", "s", "forward, backward and update"),
    _M("time/publish", "s", "handing the new weights to the engine, quantization included"),
    _M("time/checkpoint", "s", "writing and verifying the checkpoint of the step before"),
    _M("time/eval", "s", "evaluation"),
    _M("time/other", "s", "what is left of the step"),
    _M(
        "record/lost",
        "",
        "1 where the record of the step was damaged or missing on disk",
        "absent",
    ),
    _M(
        "record/nonfinite",
        "values",
        "metrics of this record that were not finite: null",
        "0",
    ),
)
_BY_NAME = {metric.name: metric for metric in METRICS}
_PATTERNS = tuple((metric.pattern, metric) for metric in METRICS if "<" in metric.name)


def find(name: str) -> Metric:
    """Return the row of `name`. ValueError names the nearest known name."""
    if name in _BY_NAME and "<" not in name:
        return _BY_NAME[name]
    for pattern, metric in _PATTERNS if name not in _BY_NAME else ():
        if pattern.fullmatch(name):
            return metric
    nearest = difflib.get_close_matches(name, _BY_NAME, n=1, cutoff=0.0)
    raise ValueError(
        f"metric {name!r} is not in lowroll.metrics.names; the nearest name is {nearest[0]!r}"
    )


def table() -> str:
    """Return the table as Markdown."""
    lines: list[str] = []
    group = ""
    for metric in METRICS:
        if (metric_group := metric.name.split("/")[0]) != group:
            group = metric_group
            lines += [
                "",
                f"## {group}",
                "",
                "| name | unit | meaning | expect | source |",
                "|---|---|---|---|---|",
            ]
        cells = (f"`{metric.name}`", metric.unit, metric.meaning, metric.expect, metric.source)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines[1:]) + "\n"
