"""One batch a step: draw prompts, generate, score, shape, filter, credit, hand over.

Produces one Batch a step on the rollout channel. Waits for the engine's answer, the scorer's answer
and room in the channel, each behind a deadline of its own. Unblocked by the engine having weights
to draw from.

A step is a transaction. It plans on a copy of the ledger and takes the copy over after the batch
was sent, so a step that raises leaves nothing behind and, tried again, makes the same requests with
the same noise.

Dynamic sampling (DAPO, Section 3.2) drops groups whose scores are all equal and draws again. Each
round draws exactly the groups that are still missing, so there is never a surplus: at async level 0
a surplus group would be stale after the update, and carrying it over would make the batch off
policy. The price is a few small rounds. After `max_rounds` the step goes on with the groups it has
(`rollout/num_groups` says how many, and a warning). If there is none it raises NoSignal, or takes
the first ones as they are, as without dynamic sampling (`no_signal`).
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from lowroll.orchestrator import groups as grouping
from lowroll.orchestrator import stats as statistics
from lowroll.orchestrator.alarms import alarms
from lowroll.orchestrator.canary import canaries
from lowroll.orchestrator.client import (
    BatchSender,
    EngineClient,
    PhaseProgress,
    Progress,
    Scorer,
    Tokenizer,
)
from lowroll.orchestrator.errors import ErrorWindow, NoSignal, ScoringFailed, describe
from lowroll.orchestrator.groups import ScoredGroup
from lowroll.orchestrator.settings import Settings
from lowroll.orchestrator.source import Draw, Ledger, PromptSource
from lowroll.types import Batch, Sample, ScoreError

if TYPE_CHECKING:
    from lowroll.envs.base import Environment

logger = logging.getLogger(__name__)
STATE_FORMAT = 1


@dataclass
class Harvest:
    """What the rounds of one step brought in."""

    kept: list[ScoredGroup] = field(default_factory=list)
    dropped: list[ScoredGroup] = field(default_factory=list)
    rounds: int = 0
    seconds: dict[str, float] = field(
        default_factory=lambda: {"time/generate": 0.0, "time/score": 0.0}
    )

    @property
    def groups(self) -> list[ScoredGroup]:
        """Every generated group."""
        return self.kept + self.dropped


class Orchestrator:
    """Makes the batches of a run. Holds no weights, no tensors and no global random state."""

    def __init__(
        self,
        settings: Settings,
        envs: Mapping[str, Environment],
        engine: EngineClient,
        scorer: Scorer,
        tokenizer: Tokenizer,
        channel: BatchSender,
        rollout_log: Callable[[Batch], object] | None = None,
        on_phase: PhaseProgress | None = None,
    ) -> None:
        """`rollout_log` is called once a step, before the batch is sent, with every rollout of the
        step: those that dynamic sampling dropped follow the batch's own with group -1 and a loss
        mask of zeros. Times are left out, so a step that is made again logs the same bytes."""
        self.settings = settings
        self.source = PromptSource(settings, envs, tokenizer)
        self.engine = engine
        self.scorer = scorer
        self.tokenizer = tokenizer
        self.channel = channel
        self.rollout_log = rollout_log
        self.on_phase = on_phase
        self.ledger = Ledger(cursors=dict.fromkeys(envs, 0))
        self.errors = ErrorWindow(
            settings.max_error_rate, settings.error_window, settings.batch_size
        )

    def enter(self, settings: Settings) -> None:
        """Go on with other settings from the next step on. What was drawn so far stays drawn."""
        self.settings = self.source.settings = settings

    def step(self, step: int, version: int | None = None) -> Batch:
        """Make the batch of a step and send it. `version`: the learner's, checked against every
        rollout when given.

        Raises ScoringFailed, NoSignal, InvalidRollout or what the engine, scorer or channel raise;
        then the ledger has not moved.
        """
        ledger, errors = self.ledger.copy(), self.errors.copy()
        temperature = self.settings.temperature(step)
        harvest = self._harvest(ledger, errors, temperature, version)
        batch = self._batch(step, temperature, harvest, ledger, version)
        self._watch(batch)
        self._log(batch, harvest.dropped)
        ledger.consumed += len(harvest.kept)
        ledger.dropped += len(harvest.dropped)
        batch.orchestrator = self._state(ledger, errors)
        self.channel.send(batch)
        self.ledger, self.errors = ledger, errors
        return batch

    def state(self) -> dict[str, Any]:
        """JSON data from which `restore` continues with the very same batches."""
        return self._state(self.ledger, self.errors)

    def _state(self, ledger: Ledger, errors: ErrorWindow) -> dict[str, Any]:
        return {
            "format": STATE_FORMAT,
            "plan": self._plan(),
            "ledger": ledger.state(),
            "errors": errors.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state()`. Raises ValueError naming the field that this run's plan
        disagrees with."""
        if set(state) != {"format", "plan", "ledger", "errors"} or state["format"] != STATE_FORMAT:
            raise ValueError(
                f"orchestrator state: expected format {STATE_FORMAT} with plan, ledger and errors"
            )
        saved = state["plan"]
        plan = self._plan()
        if not isinstance(saved, Mapping):
            raise ValueError(f"orchestrator state: plan: expected a mapping, got {saved!r}")
        for name in sorted(saved.keys() | plan.keys()):
            if saved.get(name) != plan.get(name):
                raise ValueError(
                    f"orchestrator state: {name} is {saved.get(name)!r} in the checkpoint and "
                    f"{plan.get(name)!r} in this run"
                )
        ledger = Ledger.of(state["ledger"], set(self.source.envs))
        self.errors.restore(state["errors"])
        self.ledger = ledger

    def _plan(self) -> dict[str, Any]:
        """What decides which prompts are drawn with which noise: it may not change within a run."""
        weights = {
            name: self.settings.env_weights.get(name, 1.0) for name in sorted(self.source.envs)
        }
        return {
            "seed": self.settings.seed,
            "rollouts_per_example": self.settings.rollouts_per_example,
            "env_weights": weights,
        }

    def _harvest(
        self, ledger: Ledger, errors: ErrorWindow, temperature: float, version: int | None
    ) -> Harvest:
        harvest = Harvest()
        wanted = self.settings.num_groups
        max_rounds = self.settings.max_rounds if self.settings.dynamic_sampling else 1
        while harvest.rounds < max_rounds and len(harvest.kept) < wanted:
            draws = self.source.draw(ledger, wanted - len(harvest.kept), temperature)
            for group in self._round(draws, errors, version, harvest.seconds):
                keep = group.has_signal() or not self.settings.dynamic_sampling
                (harvest.kept if keep else harvest.dropped).append(group)
            harvest.rounds += 1
        failed = [
            sample.score
            for group in harvest.groups
            for sample in group.samples
            if isinstance(sample.score, ScoreError)
        ]
        if not any(group.scores() for group in harvest.groups):
            raise ScoringFailed(
                f"all {len(failed)} scores of the step are errors: {describe(failed)}"
            )
        if not harvest.kept:
            self._without_signal(harvest, wanted)
        elif len(harvest.kept) < wanted:
            logger.warning(
                "dynamic sampling: %d of %d groups with signal after %d rounds: the batch is "
                "smaller",
                len(harvest.kept),
                wanted,
                harvest.rounds,
            )
        return harvest

    def _without_signal(self, harvest: Harvest, wanted: int) -> None:
        scores = [score for group in harvest.dropped for score in group.scores()]
        found = (
            f"dynamic sampling: all {len(harvest.dropped)} groups of {harvest.rounds} rounds have "
            f"constant rewards ({sum(scores) / len(scores):.3g} in the mean); the tasks are all "
            "too hard or all too easy for this policy"
        )
        if self.settings.no_signal == "end":
            raise NoSignal(found)
        logger.warning("%s: the step takes the first of them as they are", found)
        harvest.kept, harvest.dropped = harvest.dropped[:wanted], harvest.dropped[wanted:]

    def _round(
        self, draws: list[Draw], errors: ErrorWindow, version: int | None, seconds: dict[str, float]
    ) -> list[ScoredGroup]:
        began = time.monotonic()
        answers = self.engine.generate(
            [draw.request for draw in draws], on_progress=self._progress("generate")
        )
        groups = grouping.in_planned_order(draws, answers)
        if version is not None:
            grouping.check_versions(groups, version, self.settings.max_staleness)
        generated = time.monotonic()
        samples = grouping.score(
            draws, groups, self.scorer, self.tokenizer, self._progress("score")
        )
        errors.check(sample.score for group in samples for sample in group)
        seconds["time/generate"] += generated - began
        seconds["time/score"] += time.monotonic() - generated
        return [grouping.credit(group, self.settings) for group in samples]

    def _batch(
        self, step: int, temperature: float, harvest: Harvest, ledger: Ledger, version: int | None
    ) -> Batch:
        samples: list[Sample] = []
        for index, group in enumerate(harvest.kept):
            for sample in group.samples:
                sample.group = index
                samples.append(sample)
        flags = Counter({rule.name: 0 for rule in self.settings.filters})
        for group in harvest.groups:
            flags.update(group.flags)
        generated = [sample.rollout for group in harvest.groups for sample in group.samples]
        stats = (
            statistics.reward_stats(harvest.groups)
            | statistics.rollout_stats(generated, version)
            | {
                "rollout/num_samples": float(len(samples)),
                "rollout/num_groups": float(len(harvest.kept)),
                "rollout/rounds": float(harvest.rounds),
                "rollout/dropped_groups": float(len(harvest.dropped)),
                "rollout/passed_over_prompts": float(ledger.passed_over - self.ledger.passed_over),
                "rollout/temperature": temperature,
            }
            | {
                f"rollout/flagged_{name}_fraction": count / len(generated)
                for name, count in flags.items()
            }
        )
        return Batch(
            step=step, samples=samples, temperature=temperature, stats=stats | harvest.seconds
        )

    def _watch(self, batch: Batch) -> None:
        """Warn of numbers out of bounds and, every `canary_interval` steps, of known answers scored
        wrongly."""
        warnings = alarms(batch.stats)
        interval = self.settings.canary_interval
        if interval is not None and batch.step % interval == 0:
            failures = canaries(self.source.envs, self.scorer, self.ledger.cursors)
            batch.stats["reward/canary_failures"] = float(len(failures))
            warnings += failures
        for warning in warnings:
            logger.warning("step %d: %s", batch.step, warning)

    def _log(self, batch: Batch, dropped: list[ScoredGroup]) -> None:
        if self.rollout_log is None:
            return
        unused = [
            replace(sample, group=-1, advantage=0.0, loss_mask=[0] * len(sample.loss_mask))
            for group in dropped
            for sample in group.samples
        ]
        stats = {name: value for name, value in batch.stats.items() if not name.startswith("time/")}
        self.rollout_log(replace(batch, samples=batch.samples + unused, stats=stats))

    def _progress(self, phase: str) -> Progress | None:
        return None if self.on_phase is None else partial(self.on_phase, phase)
