"""Signs that a run continues without learning: limits of a step's statistics, and canaries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from lowroll.envs.checked_prompts import prompt_at
from lowroll.orchestrator.errors import describe
from lowroll.orchestrator.interfaces import Scorer
from lowroll.orchestrator.settings import SOLVED
from lowroll.types import Batch, Prompt, ScoreError

if TYPE_CHECKING:
    from lowroll.envs.base import Environment

LIMITS = (  # (metric, alarm threshold, possible meaning)
    (
        "reward/zero_std_fraction",
        0.8,
        "most groups give no signal; look at the scorer and at the difficulty",
    ),
    (
        "rollout/truncated_fraction",
        0.8,
        "most rollouts hit max_tokens; look at the stop tokens and the chat template",
    ),
    ("reward/error_rate", 0.02, "the scorer fails on some rollouts"),
)


def alarms(stats: Mapping[str, float]) -> list[str]:
    """Return one line for each exceeded limit."""
    return [
        f"{name} is {stats[name]:.3g} (alarm above {limit:g}): {meaning}"
        for name, limit, meaning in LIMITS
        if stats.get(name, 0.0) > limit
    ]


def check_masks(batch: Batch) -> list[str]:
    """Return one line when the loss masks leave nothing to learn."""
    if any(any(sample.loss_mask) for sample in batch.samples):
        return []
    scores = [sample.score for sample in batch.samples]
    if all(isinstance(score, ScoreError) and not score.failed for score in scores):
        return []
    return [
        f"nothing is learned: all {len(batch.samples)} rollouts of the batch are flagged by "
        "filters, or cut off and masked (rollout/flagged_*_fraction says by which)"
    ]


def canaries(
    envs: Mapping[str, Environment], scorer: Scorer, positions: Mapping[str, int]
) -> list[str]:
    """Score each environment's gold and perturbed answer to its training task at `positions[name]`.
    Return one line for each wrong score."""
    items: list[tuple[Prompt, str]] = []
    for name, env in envs.items():
        prompt = prompt_at(env, positions[name], "train")
        try:
            items += [(prompt, env.gold(prompt)), (prompt, env.perturbed(prompt))]
        except NotImplementedError:
            continue
    kinds = ["gold", "perturbed"] * (len(items) // 2)
    failures = []
    for kind, (prompt, _), outcome in zip(kinds, items, scorer.score(items), strict=True):
        where = f"environment {prompt.env!r}: the {kind} answer of {prompt.id!r}"
        if isinstance(outcome, ScoreError):
            failures.append(f"{where} could not be scored: {describe([outcome])}")
        elif (outcome.reward >= SOLVED) != (kind == "gold"):
            failures.append(f"{where} scored {outcome.reward}")
    return failures
