"""Evaluation of the policy on held-out tasks (`orchestrator.eval_statistics`)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING

from lowroll.orchestrator import groups as grouping
from lowroll.orchestrator.errors import ErrorWindow, check_any
from lowroll.orchestrator.eval_statistics import pass_at_k
from lowroll.orchestrator.interfaces import EngineClient, PhaseProgress, Scorer, Tokenizer
from lowroll.orchestrator.prompt_source import PromptDraw, draw_at
from lowroll.orchestrator.settings import SOLVED, SamplingSettings
from lowroll.types import Sample, Score, ScoreError

if TYPE_CHECKING:
    from lowroll.envs.base import Environment

logger = logging.getLogger(__name__)


def evaluate(
    env: Environment,
    engine: EngineClient,
    scorer: Scorer,
    tokenizer: Tokenizer,
    *,
    num_examples: int,
    rollouts_per_example: int = 1,
    sampling: SamplingSettings,
    seed: int = 0,
    max_prompt_tokens: int | None = None,
    max_sequence_tokens: int | None = None,
    max_error_rate: float = 0.05,
    step: int = 1,
    max_steps: int = 0,
    on_phase: PhaseProgress | None = None,
) -> dict[str, float]:
    """Return the metrics `eval/<env>/{reward,pass_at_1,avg_at_k,pass_at_k,length_mean}` over the
    first examples of the test split, at most `num_examples`; k is rollouts_per_example.

    pass@k leaves out examples with fewer than k scored rollouts. The same seed gives the same noise
    for any weights. ScoringFailed as `check_errors`, ValueError without a usable example.
    """
    draws = plan(
        env,
        tokenizer,
        num_examples=num_examples,
        rollouts_per_example=rollouts_per_example,
        sampling=sampling,
        seed=seed,
        max_prompt_tokens=max_prompt_tokens,
        max_sequence_tokens=max_sequence_tokens,
    )
    on_drawn = on_phase and partial(on_phase, "generate")
    answers = engine.generate([draw.request for draw in draws], on_progress=on_drawn)
    groups = grouping.in_planned_order(draws, answers)
    examples = grouping.score(
        draws,
        groups,
        scorer,
        tokenizer,
        on_progress=on_phase and partial(on_phase, "score"),
        step=step,
        max_steps=max_steps,
    )
    check_errors([sample.score for group in examples for sample in group], max_error_rate)
    return {
        f"eval/{env.name}/{name}": value
        for name, value in summarise(examples, rollouts_per_example).items()
    }


def plan(
    env: Environment,
    tokenizer: Tokenizer,
    *,
    num_examples: int,
    rollouts_per_example: int,
    sampling: SamplingSettings,
    seed: int,
    max_prompt_tokens: int | None,
    max_sequence_tokens: int | None = None,
) -> list[PromptDraw]:
    """Return the draws of the first examples of the test split, without too long prompts.
    ValueError when none is left."""
    size = env.size("test")
    positions = range(num_examples if size is None else min(num_examples, size))
    draws = [
        draw_at(
            env,
            env.name,
            position,
            "test",
            tokenizer,
            sampling=sampling,
            n=rollouts_per_example,
            run_seed=seed,
            max_sequence_tokens=max_sequence_tokens,
        )
        for position in positions
    ]
    draws = [draw for draw in draws if not draw.is_longer(max_prompt_tokens)]
    if not draws:
        raise ValueError(
            f"evaluate: environment {env.name!r} has no usable example in its test split"
        )
    return draws


def summarise(examples: list[list[Sample]], k: int) -> dict[str, float]:
    """Return the metrics of examples, each a list of one prompt's samples."""
    rewards = [
        [sample.score.reward for sample in example if isinstance(sample.score, Score)]
        for example in examples
    ]
    solved = [[reward >= SOLVED for reward in example] for example in rewards if example]
    lengths = [sample.rollout.num_drawn for example in examples for sample in example]
    metrics = {"length_mean": fmean(lengths)}
    if not solved:
        return metrics
    metrics |= {
        "reward": fmean(fmean(example) for example in rewards if example),
        "pass_at_1": fmean(fmean(example) for example in solved),
        "avg_at_k": fmean(fmean(example[:k]) for example in solved),
    }
    scored_k_times = [example for example in solved if len(example) >= k]
    if scored_k_times:
        metrics["pass_at_k"] = fmean(
            pass_at_k(len(example), sum(example), k) for example in scored_k_times
        )
    return metrics


def check_errors(scores: Sequence[Score | ScoreError], max_error_rate: float = 0.05) -> None:
    """Raise ScoringFailed by the training loop's rule, and when all scores are errors."""
    check_any(scores, "evaluation")
    window = ErrorWindow(max_error_rate, min_scores=50, size=len(scores))
    window.check(scores)
    if unjudged := window.unjudged():
        logger.warning("evaluation: %s", unjudged)
