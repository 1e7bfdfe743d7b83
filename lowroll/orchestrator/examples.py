"""Held-out examples: responses are drawn, scored, and grouped by answer.

`keep` receives examples as soon as they are drawn or scored, so nothing is lost when the process
ends. The noise of a response depends only on its request (`source.draw_at`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lowroll.orchestrator.errors import InvalidRollout
from lowroll.orchestrator.eval_statistics import majority
from lowroll.orchestrator.groups import check_group, for_scorer, samples_of
from lowroll.orchestrator.interfaces import EngineClient, Progress, Scorer, Tokenizer
from lowroll.orchestrator.prompt_source import Draw
from lowroll.orchestrator.settings import SOLVED
from lowroll.types import FinishReason, Message, Prompt, Sample, Score, ScoreError

if TYPE_CHECKING:
    from lowroll.envs.base import Environment

TOGETHER = 1024  # responses a scorer call


@dataclass
class ExampleResponse:
    """One response, or its side of a conversation; `score` is None until it is scored.

    `text`: of the last turn. `tokens`: all drawn. `messages`: of a conversation, after the prompt.
    `failed`: its environment's error. `token_ids`: where a scorer takes them.
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
        """Whether the response was scored as right."""
        return isinstance(self.score, Score) and self.score.reward >= SOLVED


@dataclass
class Example:
    """One task and its responses, in sample order. `id` is the request's."""

    id: str
    prompt: Prompt
    responses: list[ExampleResponse] = field(default_factory=list)

    @property
    def rewards(self) -> list[float]:
        return [one.score.reward for one in self.responses if isinstance(one.score, Score)]

    @property
    def solved(self) -> list[bool]:
        """Whether each scored response is right."""
        return [one.solved for one in self.responses if isinstance(one.score, Score)]


Keep = Callable[[list[Example]], object]


def draw(
    draws: Sequence[Draw],
    engine: EngineClient,
    tokenizer: Tokenizer,
    keep: Keep,
    on_progress: Progress | None = None,
) -> None:
    """Generate all requests; examples go to `keep` as they end. Raises InvalidRollout."""
    flights = {engine.add(one.request): one for one in draws}
    try:
        while flights:
            ended = []
            for handle, group in engine.step():
                asked = flights.pop(handle, None)
                if asked is None or group.request.id != asked.request.id:
                    raise InvalidRollout(f"request {group.request.id!r}: never asked")
                check_group(asked, group)
                responses = list(map(_response, samples_of(asked, group, tokenizer)))
                ended.append(Example(asked.request.id, asked.prompt, responses))
            if ended:
                keep(ended)
            if on_progress is not None:
                on_progress(len(draws) - len(flights), len(draws))
    except BaseException:
        for handle in flights:
            engine.abort(handle)
        raise


def _response(sample: Sample) -> ExampleResponse:
    score, rollout = sample.score, sample.rollout
    failed = isinstance(score, ScoreError) and sample.ended == "error"
    return ExampleResponse(
        sample.text,
        rollout.num_drawn,
        rollout.finish_reason,
        messages=sample.messages,
        failed=score.message if failed and isinstance(score, ScoreError) else None,
        token_ids=rollout.token_ids if "takes" in sample.prompt.info else None,
    )


def score(
    examples: Sequence[Example],
    scorer: Scorer,
    keep: Keep,
    on_progress: Progress | None = None,
) -> None:
    """Score every response, except aborted ones and those with a failed environment; examples go to
    `keep` as they are done."""
    done = 0
    for part in _parts(examples):
        items = []
        for one in part:
            for response in one.responses:
                response.score = _unscored(response)
            ended = [response for response in one.responses if response.score is None]
            ids = [response.token_ids or [] for response in ended]
            prompt = for_scorer(one.prompt, ids, step=1, max_steps=0)
            items += [(prompt, response) for response in ended]
        found = scorer.score([(p, p.answered(r.text, r.messages)) for p, r in items])
        for (_, response), outcome in zip(items, found, strict=True):
            if isinstance(outcome, Score) and not math.isfinite(outcome.reward):
                outcome = ScoreError("invalid", f"reward {outcome.reward}")
            response.score = outcome
        keep(part)
        done += len(part)
        if on_progress is not None:
            on_progress(done, len(examples))


def _unscored(response: ExampleResponse) -> ScoreError | None:
    """Return the error of a response that must not be scored, or None."""
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
    not compare answers (`Environment.matching`). Two answers are the same when the scorer accepts
    the second for the first. An example without an answer is not solved."""
    if not examples or env.matching(examples[0].prompt, "") is None:
        return None
    found: list[bool] = []
    for part in _parts(examples):
        found += [
            best is not None and one.responses[best].solved
            for one, best in zip(part, map(majority, _classes(part, env, scorer)), strict=True)
        ]
        if on_progress is not None:
            on_progress(len(found), len(examples))
    return found


def _parts(examples: Sequence[Example]) -> Iterator[list[Example]]:
    most = max((len(one.responses) for one in examples), default=1)
    size = max(1, TOGETHER // max(1, most))
    for begin in range(0, len(examples), size):
        yield list(examples[begin : begin + size])


def _classes(
    examples: Sequence[Example], env: Environment, scorer: Scorer
) -> list[list[int | None]]:
    """Return for every response the index of its example's first response with the same answer, or
    None without an answer."""
    classes: list[list[int | None]] = [[None] * len(one.responses) for one in examples]
    left = [[i for i, r in enumerate(one.responses) if _answers(r)] for one in examples]
    while any(left):
        asked = []
        for place, others in enumerate(left):
            if others:
                first = others.pop(0)
                classes[place][first] = first
                asked += [(place, first, other) for other in others]
        found = scorer.score([_compared(env, examples[p], a, b) for p, a, b in asked])
        for (place, first, other), outcome in zip(asked, found, strict=True):
            if isinstance(outcome, Score) and outcome.reward >= SOLVED:
                classes[place][other] = first
                left[place].remove(other)
    return classes


def _answers(response: ExampleResponse) -> bool:
    score = response.score
    return isinstance(score, Score) and score.metrics.get("has_answer", 1.0) > 0


def _compared(env: Environment, example: Example, first: int, other: int) -> tuple[Prompt, str]:
    task = env.matching(example.prompt, example.responses[first].text)
    assert task is not None
    return task, example.responses[other].text
