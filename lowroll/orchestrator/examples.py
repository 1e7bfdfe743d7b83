"""Held-out examples: responses are drawn, scored, and grouped by answer.

`keep` receives examples as soon as they are drawn or scored, so nothing is lost when the process
ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lowroll.orchestrator.errors import InvalidRollout
from lowroll.orchestrator.eval_statistics import majority
from lowroll.orchestrator.groups import check_group, finite, for_scorer, samples_of
from lowroll.orchestrator.interfaces import EngineClient, Progress, Scorer, Tokenizer
from lowroll.orchestrator.prompt_source import PromptDraw
from lowroll.orchestrator.settings import SOLVED
from lowroll.types import FinishReason, Message, Prompt, Sample, Score, ScoreError

if TYPE_CHECKING:
    from lowroll.envs.base import Environment

TOGETHER = 1024  # responses per call of the scorer


@dataclass
class ExampleResponse:
    """One response, or its side of a conversation.

    `text`: of the last turn. `tokens`: the number of all drawn. `messages`: those after the prompt.
    `failed`: its environment's error.
    """

    text: str
    tokens: int
    finish_reason: FinishReason
    score: Score | ScoreError | None = None
    messages: list[Message] | None = None
    failed: str | None = None
    token_ids: list[int] | None = None

    @property
    def solved(self) -> bool:
        return isinstance(self.score, Score) and self.score.reward >= SOLVED


@dataclass
class Example:
    """One task and its responses, in sample order."""

    id: str
    prompt: Prompt
    responses: list[ExampleResponse] = field(default_factory=list)

    @property
    def rewards(self) -> list[float]:
        return [
            response.score.reward
            for response in self.responses
            if isinstance(response.score, Score)
        ]

    @property
    def solved(self) -> list[bool]:
        return [response.solved for response in self.responses if isinstance(response.score, Score)]


Keep = Callable[[list[Example]], object]


def draw(
    draws: Sequence[PromptDraw],
    engine: EngineClient,
    tokenizer: Tokenizer,
    keep: Keep,
    on_progress: Progress | None = None,
) -> None:
    """Generate all requests; examples go to `keep` as they end."""
    draw_by_handle = {engine.add(planned.request): planned for planned in draws}
    try:
        while draw_by_handle:
            finished = []
            for handle, group in engine.step():
                planned_draw = draw_by_handle.pop(handle, None)
                if planned_draw is None or group.request.id != planned_draw.request.id:
                    raise InvalidRollout(f"request {group.request.id!r}: never asked")
                check_group(planned_draw, group)
                responses = list(map(_build_response, samples_of(planned_draw, group, tokenizer)))
                finished.append(Example(planned_draw.request.id, planned_draw.prompt, responses))
            if finished:
                keep(finished)
            if on_progress is not None:
                on_progress(len(draws) - len(draw_by_handle), len(draws))
    except BaseException:
        for handle in draw_by_handle:
            engine.abort(handle)
        raise


def _build_response(sample: Sample) -> ExampleResponse:
    score, rollout = sample.score, sample.rollout
    failed = None
    if isinstance(score, ScoreError) and sample.ended == "error":
        failed = score.message
    return ExampleResponse(
        sample.text,
        rollout.num_drawn,
        rollout.finish_reason,
        messages=sample.messages,
        failed=failed,
        token_ids=rollout.token_ids if "takes" in sample.prompt.info else None,
    )


def score(
    examples: Sequence[Example],
    scorer: Scorer,
    keep: Keep,
    on_progress: Progress | None = None,
) -> None:
    """Score every response. Aborted ones and those with a failed environment get an error."""
    num_done = 0
    for batch in _scorer_batches(examples):
        to_score: list[tuple[Prompt, ExampleResponse]] = []
        for example in batch:
            for response in example.responses:
                response.score = _unscorable_error(response)
            scorable = [response for response in example.responses if response.score is None]
            token_ids = [response.token_ids or [] for response in scorable]
            prompt = for_scorer(example.prompt, token_ids, step=1, max_steps=0)
            to_score += [(prompt, response) for response in scorable]
        outcomes = scorer.score(
            [(prompt, prompt.answered(one.text, one.messages)) for prompt, one in to_score]
        )
        for (_, response), outcome in zip(to_score, outcomes, strict=True):
            response.score = finite(outcome)
        keep(batch)
        num_done += len(batch)
        if on_progress is not None:
            on_progress(num_done, len(examples))


def _unscorable_error(response: ExampleResponse) -> ScoreError | None:
    if response.failed is not None:
        return ScoreError("exception", response.failed)
    if response.finish_reason == "abort":
        return ScoreError("invalid", f"aborted after {response.tokens} tokens")
    return None


def votes(
    examples: Sequence[Example],
    env: Environment,
    scorer: Scorer,
    on_progress: Progress | None = None,
) -> list[bool] | None:
    """Return whether each example's most frequent answer is right; None where the environment does
    not compare answers. Two answers are the same when the scorer accepts the second for the first.
    """
    if not examples or env.matching(examples[0].prompt, "") is None:
        return None
    is_solved: list[bool] = []
    for batch in _scorer_batches(examples):
        for example, classes in zip(batch, _answer_classes(batch, env, scorer), strict=True):
            winner = majority(classes)
            is_solved.append(winner is not None and example.responses[winner].solved)
        if on_progress is not None:
            on_progress(len(is_solved), len(examples))
    return is_solved


def _scorer_batches(examples: Sequence[Example]) -> Iterator[list[Example]]:
    max_responses = max((len(example.responses) for example in examples), default=1)
    size = max(1, TOGETHER // max(1, max_responses))
    for start in range(0, len(examples), size):
        yield list(examples[start : start + size])


def _answer_classes(
    examples: Sequence[Example], env: Environment, scorer: Scorer
) -> list[list[int | None]]:
    """Return for every response the first response of its example with the same answer, or None
    without an answer. Each round begins one class in every example, with one call of the scorer."""
    classes: list[list[int | None]] = [[None] * len(example.responses) for example in examples]
    unclassified = [
        [i for i, r in enumerate(example.responses) if _has_answer(r)] for example in examples
    ]
    while any(unclassified):
        pairs: list[tuple[int, int, int]] = []
        for number, waiting in enumerate(unclassified):
            if waiting:
                first = waiting.pop(0)
                classes[number][first] = first
                pairs += [(number, first, other) for other in waiting]
        items = [_comparison(env, examples[number], *pair) for number, *pair in pairs]
        for (number, first, other), outcome in zip(pairs, scorer.score(items), strict=True):
            if isinstance(outcome, Score) and outcome.reward >= SOLVED:
                classes[number][other] = first
                unclassified[number].remove(other)
    return classes


def _has_answer(response: ExampleResponse) -> bool:
    score = response.score
    return isinstance(score, Score) and score.metrics.get("has_answer", 1.0) > 0


def _comparison(env: Environment, example: Example, first: int, other: int) -> tuple[Prompt, str]:
    task = env.matching(example.prompt, example.responses[first].text)
    assert task is not None
    return task, example.responses[other].text
