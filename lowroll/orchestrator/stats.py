"""Statistics of a step: of raw scores and of every rollout, also of dropped groups, since they
measure the policy and not the selection of the batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, pstdev

from lowroll.orchestrator.eval_statistics import percentile
from lowroll.orchestrator.groups import ScoredGroup
from lowroll.orchestrator.ledger import POOLS, Ledger
from lowroll.orchestrator.pending_batch import REASONS, PendingBatch
from lowroll.orchestrator.settings import SOLVED, Settings
from lowroll.types import Rollout, Sample, Score, ScoreError

ENDINGS = ("done", "turns", "length", "tokens", "error")


def batch_stats(batch: PendingBatch, before: Ledger, settings: Settings) -> dict[str, float]:
    """Return the statistics of a step. `before`: the ledger before it."""
    samples = [sample for group in batch.groups for sample in group.samples]
    learned = batch.rollouts()
    flags = Counter({rule.name: 0 for rule in settings.filters})
    for group in batch.groups:
        flags.update(group.flags)
    return (
        reward_stats(batch.groups)
        | rollout_stats([sample.rollout for sample in samples])
        | turn_stats(samples)
        | version_stats(learned, batch.version)
        | {
            "rollout/num_samples": float(len(learned)),
            "rollout/num_groups": float(len(batch.kept)),
            "rollout/rounds": float(batch.rounds),
            "rollout/dropped_groups": float(len(batch.dropped)),
            "rollout/passed_over_prompts": float(batch.ledger.passed_over - before.passed_over),
            "rollout/temperature": batch.temperature,
        }
        | {f"rollout/flagged_{name}_fraction": n / len(samples) for name, n in flags.items()}
        | buffer_stats(before, batch.ledger, settings)
        | (stream_stats(batch) if settings.streams else {})
    )


def stream_stats(batch: PendingBatch) -> dict[str, float]:
    counts = Counter(drop.reason for drop in batch.dropped)
    stats = batch.stats | {f"rollout/dropped_{reason}": float(counts[reason]) for reason in REASONS}
    if batch.version is not None:
        stats["rollout/learner_version"] = float(batch.version)
        stats |= staleness_stats(batch.rollouts(), batch.version)
    return stats


def reward_stats(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """Return raw-score statistics. Fractions count groups with two scored samples or more."""
    samples = [sample for group in groups for sample in group.samples]
    rewards = [reward for group in groups for reward in group.scores()]
    unscored = [sample.score for sample in samples if isinstance(sample.score, ScoreError)]
    failed = sum(error.failed for error in unscored)
    stats = {"reward/error_rate": failed / len(samples)}
    if failed < len(unscored):
        stats["reward/inapplicable_fraction"] = (len(unscored) - failed) / len(samples)
    if rewards:
        stats |= {
            "reward/mean": fmean(rewards),
            "reward/std": pstdev(rewards),
            "reward/min": min(rewards),
            "reward/max": max(rewards),
        }
    scores = [group.scores() for group in groups if len(group.scores()) >= 2]
    if scores:
        stats["reward/zero_std_fraction"] = fmean(min(group) == max(group) for group in scores)
        stats["reward/solved_all_fraction"] = fmean(min(group) >= SOLVED for group in scores)
        stats["reward/solved_none_fraction"] = fmean(max(group) < SOLVED for group in scores)
    return stats | env_stats(samples)


def env_stats(samples: Sequence[Sample]) -> dict[str, float]:
    """Return the mean raw score and the means of the scorer's metrics, per environment."""
    values: dict[str, list[float]] = {}
    for sample in samples:
        metrics = dict(sample.score.metrics or {})
        if isinstance(sample.score, Score):
            metrics["mean"] = sample.score.reward
        for name, value in metrics.items():
            values.setdefault(f"reward/{sample.prompt.env}/{name}", []).append(value)
    return {name: fmean(values[name]) for name in sorted(values)}


def rollout_stats(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return lengths, finish reasons and sampled entropy."""
    lengths = [rollout.num_drawn for rollout in rollouts]
    logprobs = [logprob for rollout in rollouts for logprob in rollout.drawn_logprobs]
    finish_reasons = [rollout.finish_reason for rollout in rollouts]
    return {
        "rollout/tokens": float(sum(lengths)),
        "rollout/length_mean": fmean(lengths),
        "rollout/length_p50": percentile(lengths, 0.50),
        "rollout/length_p95": percentile(lengths, 0.95),
        "rollout/length_max": float(max(lengths)),
        "rollout/truncated_fraction": finish_reasons.count("length") / len(finish_reasons),
        "rollout/stop_fraction": finish_reasons.count("stop") / len(finish_reasons),
        "rollout/entropy_estimate": -fmean(logprobs) if logprobs else 0.0,
    }


def turn_stats(samples: Sequence[Sample]) -> dict[str, float]:
    """Return statistics of conversations; {} without any."""
    talks = [sample for sample in samples if sample.rollout.turns is not None]
    if not talks:
        return {}
    turn_counts = [len(talk.rollout.turns or ()) for talk in talks]
    env_tokens = [len(talk.rollout.token_ids) - talk.rollout.num_drawn for talk in talks]
    end_reasons = Counter(talk.ended for talk in talks)
    stats = {
        "rollout/turns_mean": fmean(turn_counts),
        "rollout/turns_max": float(max(turn_counts)),
        "rollout/env_tokens_mean": fmean(env_tokens),
    }
    for reason in ENDINGS:
        stats[f"rollout/ended_{reason}_fraction"] = end_reasons[reason] / len(talks)
    rewards_by_turns: dict[int, list[float]] = {}
    for talk, num_turns in zip(talks, turn_counts, strict=True):
        if isinstance(talk.score, Score):
            rewards_by_turns.setdefault(num_turns, []).append(talk.score.reward)
    for num_turns, rewards in sorted(rewards_by_turns.items()):
        stats[f"reward/after_{num_turns}_turns"] = fmean(rewards)
    return stats


def version_stats(rollouts: Sequence[Rollout], learner: int | None) -> dict[str, float]:
    """Return a batch's newest policy version, and the lag of its oldest behind `learner` (None:
    behind the newest)."""
    versions = [span.version for rollout in rollouts for span in rollout.behavior.policy]
    newest = max(versions) if learner is None else learner
    return {
        "rollout/policy_version": float(max(versions)),
        "rollout/staleness": float(newest - min(versions)),
    }


def staleness_stats(rollouts: Sequence[Rollout], learner: int) -> dict[str, float]:
    """Return the lag of a batch's drawn tokens behind the learner in versions."""
    tokens_by_lag: Counter[int] = Counter()
    prefix_lengths: list[int] = []
    for rollout in rollouts:
        spans, drawn_mask = rollout.behavior.policy, rollout.drawn
        span_ends = [*(span.start for span in spans[1:]), len(rollout.token_ids)]
        for span, end in zip(spans, span_ends, strict=True):
            tokens_by_lag[learner - span.version] += sum(drawn_mask[span.start : end])
        change_positions = [
            span.start for previous, span in pairwise(spans) if span.version != previous.version
        ]
        if change_positions:
            prefix_lengths.append(sum(drawn_mask[: change_positions[-1]]))
    total = max(1, tokens_by_lag.total())
    stats = {f"rollout/staleness_{lag}": n / total for lag, n in sorted(tokens_by_lag.items())}
    stats["rollout/mixed_fraction"] = len(prefix_lengths) / len(rollouts)
    if prefix_lengths:
        stats["rollout/kept_prefix_mean"] = fmean(prefix_lengths)
    return stats


def buffer_stats(before: Ledger, now: Ledger, settings: Settings) -> dict[str, float]:
    """Return the skipped duplicate and pooled prompts of a step, and the pool sizes."""
    stats = {}
    if settings.hash_keys:
        stats["rollout/duplicate_prompts"] = float(now.duplicates - before.duplicates)
    if settings.uses_pools:
        stats["rollout/pooled_prompts"] = float(now.pooled - before.pooled)
        stats |= {f"rollout/{pool}_pool": float(now.pools.count(pool)) for pool in POOLS}
    return stats
