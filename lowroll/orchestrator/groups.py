"""From an engine's answer to samples with advantages: check, decode, score, shape, credit.

Unscored and aborted samples are left out of their group's statistics, with advantage 0 and an
all-zero loss mask.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lowroll.advantages import TABLE, overlong
from lowroll.orchestrator.errors import InvalidRollout
from lowroll.orchestrator.filters import flag
from lowroll.orchestrator.interfaces import Progress, Scorer, Tokenizer
from lowroll.orchestrator.prompt_source import PromptDraw
from lowroll.orchestrator.settings import Settings
from lowroll.types import (
    Conversation,
    Group,
    Message,
    Prompt,
    Request,
    Rollout,
    Sample,
    Score,
    ScoreError,
)

LOGPROB_SLACK = 1e-4  # nats above 0, by rounding


class Unverified:
    """A scorer whose every reward is 0."""

    def score(
        self,
        items: Sequence[tuple[Prompt, str | list[Message]]],
        on_progress: Progress | None = None,
    ) -> list[Score | ScoreError]:
        return [Score(0.0) for _ in items]


@dataclass
class ScoredGroup:
    """The samples of one draw in order, and the number that each filter flagged."""

    samples: list[Sample]
    flags: dict[str, int]
    id: str
    temperature: float

    @property
    def versions(self) -> tuple[int, int]:
        """The oldest and newest policy version of its tokens."""
        versions = [
            span.version for sample in self.samples for span in sample.rollout.behavior.policy
        ]
        return min(versions), max(versions)

    def scores(self) -> list[float]:
        """Return the raw rewards of scored samples."""
        return [sample.score.reward for sample in self.samples if isinstance(sample.score, Score)]

    def has_signal(self) -> bool:
        """Return whether two scored samples differ in their raw reward."""
        return len(set(self.scores())) >= 2


def in_planned_order(draws: list[PromptDraw], groups: list[Group]) -> list[Group]:
    """Return the groups in the order of the draws. InvalidRollout unless they match one to one."""
    planned_ids = {draw.request.id for draw in draws}
    group_by_id: dict[str, Group] = {}
    for group in groups:
        request_id = group.request.id
        if request_id not in planned_ids:
            raise InvalidRollout(f"request {request_id!r}: never asked")
        if request_id in group_by_id:
            raise InvalidRollout(f"request {request_id!r}: answered twice")
        group_by_id[request_id] = group
    for draw in draws:
        if draw.request.id not in group_by_id:
            raise InvalidRollout(f"request {draw.request.id!r}: no answer")
        check_group(draw, group_by_id[draw.request.id])
    return [group_by_id[draw.request.id] for draw in draws]


def check_group(draw: PromptDraw, group: Group) -> None:
    """Raise InvalidRollout unless the group is complete and every token has a usable log-prob."""
    request = draw.request
    if len(group.rollouts) != request.n:
        raise InvalidRollout(
            f"request {request.id!r}: {len(group.rollouts)} rollouts, expected {request.n}"
        )
    for index, rollout in enumerate(group.rollouts):
        where = f"request {request.id!r} sample {index}"
        if len(rollout.token_ids) != len(rollout.logprobs):
            raise InvalidRollout(
                f"{where}: {len(rollout.token_ids)} tokens but {len(rollout.logprobs)} log-probs"
            )
        if rollout.turns is not None:
            _check_turns(rollout, where)
        if (longest := max(rollout.turn_lengths)) > request.max_tokens:
            raise InvalidRollout(
                f"{where}: {longest} tokens, more than max_tokens={request.max_tokens}"
            )
        if not rollout.token_ids and rollout.finish_reason != "abort":
            raise InvalidRollout(f"{where}: no tokens but finish reason {rollout.finish_reason!r}")
        if not rollout.behavior.policy:
            raise InvalidRollout(f"{where}: its behaviour tag names no policy version")
        for position, logprob in enumerate(rollout.logprobs):
            if not (math.isfinite(logprob) and logprob <= LOGPROB_SLACK):
                raise InvalidRollout(f"{where} token {position}: log-prob {logprob}")


def _check_turns(rollout: Rollout, where: str) -> None:
    """Raise InvalidRollout unless the turns cover the rollout in order, with tokens of the
    environment, without log-probs, between two."""
    assert rollout.turns is not None
    previous_end = 0
    for number, turn in enumerate(rollout.turns):
        starts_in_order = turn.start == 0 if number == 0 else turn.start > previous_end
        if not (starts_in_order and turn.start <= turn.end):
            raise InvalidRollout(f"{where}: turn {number} is [{turn.start}, {turn.end})")
        if any(rollout.logprobs[previous_end : turn.start]):
            raise InvalidRollout(
                f"{where}: the environment's tokens before turn {number} have log-probs"
            )
        previous_end = turn.end
    num_tokens = len(rollout.token_ids)
    if not rollout.turns or previous_end != num_tokens:
        raise InvalidRollout(f"{where}: its turns end at {previous_end} of {num_tokens} tokens")


def score(
    draws: list[PromptDraw],
    groups: list[Group],
    scorer: Scorer,
    tokenizer: Tokenizer,
    on_progress: Progress | None = None,
    step: int = 1,
    max_steps: int = 0,
) -> list[list[Sample]]:
    """Decode and score every rollout; return one list of samples per draw. Aborted rollouts and
    failed environments are not scored."""
    samples_by_group = [
        samples_of(draw, group, tokenizer) for draw, group in zip(draws, groups, strict=True)
    ]
    finished: list[Sample] = []
    items: list[tuple[Prompt, str | list[Message]]] = []
    for samples in samples_by_group:
        group_finished = [sample for sample in samples if _is_finished(sample)]
        if not group_finished:
            continue
        # one prompt for all, by which the scorer knows that they belong together
        prompt = for_scorer(
            group_finished[0].prompt,
            [sample.rollout.token_ids for sample in group_finished],
            step,
            max_steps,
        )
        finished += group_finished
        items += [(prompt, prompt.answered(one.text, one.messages)) for one in group_finished]
    outcomes = scorer.score(items, on_progress=on_progress)
    if len(outcomes) != len(finished):
        raise ValueError(f"scorer: {len(outcomes)} outcomes for {len(finished)} items")
    for sample, outcome in zip(finished, outcomes, strict=True):
        sample.score = finite(outcome)
    return samples_by_group


def _is_finished(sample: Sample) -> bool:
    return sample.rollout.finish_reason != "abort" and sample.ended != "error"


def finite(outcome: Score | ScoreError) -> Score | ScoreError:
    """Return the outcome, or an error for a reward that is not finite."""
    if isinstance(outcome, Score) and not math.isfinite(outcome.reward):
        return ScoreError("invalid", f"reward {outcome.reward}")
    return outcome


def for_scorer(prompt: Prompt, token_ids: Sequence[list[int]], step: int, max_steps: int) -> Prompt:
    """Return a group's prompt with what its `info["takes"]` lists: the responses' token ids, the
    run's finished steps and their total (0: unknown). `step` is the current one, from 1."""
    available = {
        "completion_ids": list(token_ids),
        "trainer_state": {"global_step": step - 1, "max_steps": max_steps},
    }
    taken = {name: available[name] for name in prompt.info.get("takes", ())}
    if not taken:
        return prompt
    return replace(prompt, info=prompt.info | taken)


def credit(samples: list[Sample], settings: Settings, request: Request) -> ScoredGroup:
    """Shape a group's rewards, flag its rollouts, and set advantages and loss masks in place. A
    rollout that an enforcing filter flags still counts in its group."""
    flags: Counter[str] = Counter()
    for sample in samples:
        sample.reward = _shaped_reward(sample, settings)
        is_learned = isinstance(sample.score, Score)
        matched_filter = flag(sample.rollout, settings.filters)
        if matched_filter is not None:
            flags[matched_filter.name] += 1
            is_learned = is_learned and not matched_filter.enforce
        drawn_mask = sample.rollout.drawn
        sample.loss_mask = drawn_mask if is_learned else [0] * len(drawn_mask)
    rewards = [sample.reward for sample in samples]
    lengths = [sample.rollout.num_drawn for sample in samples]
    estimate = settings.estimator or TABLE[settings.advantage]
    for sample, advantage in zip(samples, estimate(rewards, lengths), strict=True):
        sample.advantage = advantage
    return ScoredGroup(samples, flags, request.id, request.temperature)


def samples_of(draw: PromptDraw, group: Group, tokenizer: Tokenizer) -> list[Sample]:
    """Return a group's samples, unscored or with their environment's error."""
    conversations: Sequence[Conversation | None] = group.conversations or [None] * len(
        group.rollouts
    )
    return [
        _build_sample(draw, rollout, conversation, tokenizer)
        for rollout, conversation in zip(group.rollouts, conversations, strict=True)
    ]


def _build_sample(
    draw: PromptDraw, rollout: Rollout, conversation: Conversation | None, tokenizer: Tokenizer
) -> Sample:
    unscored = ScoreError("invalid", f"rollout aborted after {rollout.num_drawn} tokens")
    sample = Sample(
        prompt=draw.prompt,
        prompt_ids=draw.request.prompt_ids,
        rollout=rollout,
        text=tokenizer.decode(_last_turn_ids(rollout)),
        score=unscored,
    )
    if conversation is not None:
        sample.messages, sample.ended = conversation.messages, conversation.ended
        sample.score = conversation.error or unscored
    return sample


def _last_turn_ids(rollout: Rollout) -> list[int]:
    if not rollout.turns:
        return rollout.token_ids
    return rollout.token_ids[rollout.turns[-1].start : rollout.turns[-1].end]


def _shaped_reward(sample: Sample, settings: Settings) -> float | None:
    if not isinstance(sample.score, Score):
        return None
    if settings.overlong_max is None or settings.overlong_cache is None:
        return sample.score.reward
    length = max(sample.rollout.turn_lengths)  # max_tokens bounds a turn
    return sample.score.reward + overlong(
        length, max_length=settings.overlong_max, cache=settings.overlong_cache
    )
