"""One batch a step: draw prompts, generate, score, filter, credit, send.

Batch n is for the learner of version n - 1. At level 0 a step sends the requests of a round
together and waits for all answers. Otherwise groups are taken as they end
(`orchestrator.rollout_buffer`).

A step works on a copy of the ledger, which replaces the ledger once the batch was sent. A step that
raises changes nothing, and its retry makes the same requests with the same noise.

Dynamic sampling (DAPO, Section 3.2) replaces groups whose scores are all equal,
`online_difficulty_filtering` those of mean reward 0 or 1. After `max_rounds` the step continues
with the groups that it has.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any

from lowroll.orchestrator import groups as grouping
from lowroll.orchestrator.alarms import alarms, canaries, check_masks
from lowroll.orchestrator.errors import ErrorWindow, NoSignal, check_any
from lowroll.orchestrator.groups import ScoredGroup
from lowroll.orchestrator.interfaces import (
    BatchSender,
    EngineClient,
    PhaseProgress,
    Scorer,
    Tokenizer,
    WeightsWatch,
)
from lowroll.orchestrator.ledger import POOLS, Ledger, check_state, state_of
from lowroll.orchestrator.ledger_file import Journal
from lowroll.orchestrator.pending_batch import PendingBatch, reason_without_signal
from lowroll.orchestrator.prompt_source import PromptDraw, PromptSource, seed_of
from lowroll.orchestrator.rollout_buffer import OpenGroup, RolloutBuffer
from lowroll.orchestrator.settings import Settings
from lowroll.orchestrator.staleness import drop_stale_in_flight, reason_if_stale, require_fresh
from lowroll.orchestrator.stats import batch_stats
from lowroll.types import Batch, Group

if TYPE_CHECKING:
    from lowroll.envs.base import Environment

logger = logging.getLogger(__name__)


class Orchestrator:
    """The maker of a run's batches. It holds no weights, tensors or global random state."""

    def __init__(
        self,
        settings: Settings,
        envs: Mapping[str, Environment],
        engine: EngineClient,
        scorer: Scorer,
        tokenizer: Tokenizer,
        channel: BatchSender,
        rollout_log: Callable[[Batch], object] | None = None,
        describe: Callable[[Batch], Mapping[str, float]] = lambda batch: {},
        on_phase: PhaseProgress | None = None,
        weights: WeightsWatch | None = None,
        journal: Journal | None = None,
    ) -> None:
        """Set up the loop. `rollout_log` receives every rollout of a step once. `describe` returns
        more metrics of a batch."""
        self.source = PromptSource(settings, envs, tokenizer)
        self.engine = engine
        self.scorer = scorer
        self.tokenizer = tokenizer
        self.channel = channel
        self.rollout_log = rollout_log or (lambda batch: None)
        self.describe = describe
        self.on_phase = on_phase
        self.weights = weights
        self.journal = journal
        self.rollout_buffer = RolloutBuffer(self.source, engine, journal)
        self.ledger = Ledger(cursors=dict.fromkeys(envs, 0))
        self.errors = ErrorWindow(
            settings.max_error_rate, settings.error_window, settings.batch_size
        )
        self.last_step = 0
        self._journal_in_sync = False
        self._restart_journal = False
        self._waits = {"time/wait_weights": 0.0, "time/wait_trainer": 0.0}
        self._last_batch_at = time.monotonic()
        if settings.skip_verification:
            logger.warning(
                "skip_verification: NOTHING IS SCORED, every reward is 0, and no group has a signal"
            )
            self.scorer = grouping.Unverified()

    @property
    def settings(self) -> Settings:
        return self.source.settings

    def step(self, step: int, version: int | None = None) -> Batch:
        """Make the batch of a step and send it. `version`, the learner's, bounds every rollout's
        versions; with watched weights it is step - 1.

        Raises ScoringFailed, NoSignal, InvalidRollout or the errors of the engine, scorer, channel
        or weights; the ledger is unchanged then.
        """
        if version is None and self.weights is not None:
            version = step - 1
        # these keep their rollouts if the step fails; what returns during it is drawn again
        returned_before = {group.planned for group in self.rollout_buffer.ready(self.ledger)}
        temperature = self.settings.temperature(step)
        pending = PendingBatch(
            step, version, temperature, self.ledger.copy(), deepcopy(self.errors)
        )
        try:
            self._sync_journal()
            self._load_weights(pending)
            if self.settings.streams:
                self._collect_as_they_end(pending)
            else:
                self._collect_in_rounds(pending)
            self._require_signal(pending)
            batch = self._assemble(pending)
            if pending.lost:
                # Only this process has them. A sent batch can also be logged from its frame.
                self.rollout_log(logged(batch, pending.lost))
            began_to_send = time.monotonic()
            self.channel.send(batch)
        except BaseException:
            self._journal_in_sync = False
            self.rollout_buffer.rewind(self.ledger, returned_before)
            raise
        self._waits = {
            "time/wait_weights": 0.0,
            "time/wait_trainer": time.monotonic() - began_to_send,
        }
        self.ledger, self.errors, self.last_step = pending.ledger, pending.errors, step
        if not pending.lost:
            self.rollout_log(logged(batch))
        return batch

    # -- collecting groups -------------------------------------------------------------------------

    def _collect_in_rounds(self, pending: PendingBatch) -> None:
        settings, buffer = self.settings, self.rollout_buffer
        max_rounds = settings.max_rounds if settings.filters_groups else 1
        while pending.rounds < max_rounds and len(pending.kept) < settings.num_groups:
            num_missing = settings.num_groups - len(pending.kept)
            draws = self.source.draw(pending.ledger, num_missing, pending.temperature)
            request_ids = [draw.request.id for draw in draws]
            buffer.note("planned", step=pending.step, ids=request_ids)
            buffer.note("dispatched", version=buffer.version, ids=request_ids)
            started = time.monotonic()
            answers = self.engine.generate(
                [draw.request for draw in draws],
                on_progress=self.on_phase and partial(self.on_phase, "generate"),
            )
            groups = grouping.in_planned_order(draws, answers)
            pending.seconds["time/generate"] += time.monotonic() - started
            buffer.note("done", ids=request_ids)
            scored_groups = self._score(pending, draws, groups)
            if pending.version is not None:
                for group in scored_groups:
                    require_fresh(group, pending.version)
            pending.take(scored_groups, settings)
            pending.rounds += 1

    def _collect_as_they_end(self, pending: PendingBatch) -> None:
        settings, buffer, ledger = self.settings, self.rollout_buffer, pending.ledger
        num_groups, num_returned = settings.num_groups, 0
        while True:
            self._drop_stale_and_without_signal(pending)
            ready = buffer.ready(ledger)
            if self.on_phase is not None:
                self.on_phase("generate", min(len(ready), num_groups), num_groups)
            max_returned = settings.max_rounds * num_groups
            rounds_are_spent = settings.filters_groups and num_returned >= max_returned
            batch_is_done = len(ready) >= num_groups or rounds_are_spent
            started = time.monotonic()
            engines_go_on = settings.carries or not batch_is_done  # also while the batch is made
            if engines_go_on:
                if not rounds_are_spent:
                    self._open_missing_groups(pending)
                buffer.send(ledger)
            if batch_is_done:
                break
            answers = buffer.collect(ledger)
            pending.seconds["time/generate"] += time.monotonic() - started
            num_returned += len(answers)
            self._score_answers(pending, answers)
            self._load_newer_weights(pending)
        self._take_ready(pending, ready[:num_groups])

    def _open_missing_groups(self, pending: PendingBatch) -> None:
        num_missing = self.settings.num_open - len(pending.ledger.open)
        if num_missing > 0:
            self.rollout_buffer.plan(pending.ledger, num_missing, pending.step, pending.temperature)
            pending.rounds += 1

    def _score_answers(
        self, pending: PendingBatch, answers: Sequence[tuple[OpenGroup, Group]]
    ) -> None:
        if not answers:
            return
        draws = [open_group.draw for open_group, _ in answers]
        scored_groups = self._score(pending, draws, [group for _, group in answers])
        for (open_group, _), scored_group in zip(answers, scored_groups, strict=True):
            open_group.scored = scored_group

    def _take_ready(self, pending: PendingBatch, chosen: Sequence[OpenGroup]) -> None:
        """Keep the chosen groups. Drop the others, unless they continue into the next batch."""
        buffer, ledger = self.rollout_buffer, pending.ledger
        pending.kept = [open_group.scored for open_group in chosen if open_group.scored is not None]
        pending.stats = buffer.stats(pending.step, chosen)
        buffer.close(ledger, chosen)
        if not self.settings.carries:
            buffer.drop(pending, buffer.opened(ledger), "oversampled")
        pending.stats["rollout/open_groups"] = float(len(ledger.open))

    def _score(
        self, pending: PendingBatch, draws: list[PromptDraw], groups: list[Group]
    ) -> list[ScoredGroup]:
        """Score the samples of each group, and give them their advantages. Raises ScoringFailed for
        too many failed scores."""
        started = time.monotonic()
        samples_by_group = grouping.score(
            draws,
            groups,
            self.scorer,
            self.tokenizer,
            on_progress=self.on_phase and partial(self.on_phase, "score"),
            step=self.last_step + 1,
            max_steps=self.settings.max_steps,
        )
        pending.errors.check(sample.score for samples in samples_by_group for sample in samples)
        scored_groups = [
            grouping.credit(samples, self.settings, draw.request)
            for draw, samples in zip(draws, samples_by_group, strict=True)
        ]
        pending.seconds["time/score"] += time.monotonic() - started
        return scored_groups

    # -- dropping groups ---------------------------------------------------------------------------

    def _drop_stale_and_without_signal(self, pending: PendingBatch) -> None:
        for open_group in self.rollout_buffer.ready(pending.ledger):
            group = open_group.scored
            assert group is not None
            reason = reason_if_stale(group, pending.version, self.settings)
            if reason := reason or reason_without_signal(group, self.settings):
                self.rollout_buffer.drop(pending, [open_group], reason)

    def _require_signal(self, pending: PendingBatch) -> None:
        """Raise NoSignal, or fall back on constant groups, when no group was kept."""
        settings = self.settings
        check_any([sample.score for group in pending.groups for sample in group.samples], "step")
        if len(pending.kept) >= settings.num_groups:
            return
        rule = "dynamic sampling" if settings.dynamic_sampling else "online difficulty filtering"
        if pending.kept:
            logger.warning(
                "%s: %d of %d groups with signal after %d rounds: the batch is smaller",
                rule,
                len(pending.kept),
                settings.num_groups,
                pending.rounds,
            )
            return
        groups = pending.without_signal
        scores = [score for group in groups for score in group.scores()]
        message = (
            f"{rule}: all {len(groups)} groups of {pending.rounds} rounds have constant rewards "
            f"({fmean(scores) if scores else 0.0:.3g} in the mean); the tasks are all too hard or "
            "all too easy for this policy"
        )
        if settings.no_signal == "end":
            raise NoSignal(message)
        logger.warning("%s: the step takes the first of them as they are", message)
        pending.fall_back(settings.num_groups)

    # -- weights -----------------------------------------------------------------------------------

    def _load_weights(self, pending: PendingBatch) -> None:
        if self.weights is None:
            if pending.version is not None:
                drop_stale_in_flight(self.rollout_buffer, pending, pending.version)
            return
        started = time.monotonic()
        oldest_version = max(0, pending.step - 1 - self.settings.max_async_level)
        if self.settings.strict_async_level:
            loaded = self.weights.exactly(oldest_version)
        else:
            loaded = self.weights.at_least(oldest_version, pending.step - 1)
        self._waits["time/wait_weights"] += time.monotonic() - started
        drop_stale_in_flight(self.rollout_buffer, pending, loaded)

    def _load_newer_weights(self, pending: PendingBatch) -> None:
        settings = self.settings
        if self.weights is None or settings.strict_async_level or not settings.max_async_level:
            return
        newer = self.weights.newer(pending.step - 1)
        if newer is not None:
            drop_stale_in_flight(self.rollout_buffer, pending, newer)

    # -- the batch ---------------------------------------------------------------------------------

    def _assemble(self, pending: PendingBatch) -> Batch:
        """Make the batch of the kept groups, with its statistics and the state to resume from. The
        prompt source learns from the rewards first, as the state has what it learnt."""
        rewards_by_prompt = [(group.samples[0].prompt, group.scores()) for group in pending.groups]
        self.source.learn(pending.ledger, rewards_by_prompt)
        batch = Batch(pending.step, pending.samples(), pending.temperature)
        batch.stats = batch_stats(pending, self.ledger, self.settings)
        if self.settings.streams or self.weights is not None:
            batch.stats |= self._idle_stats(pending)
        batch.stats |= pending.seconds
        self._warn(batch)
        self._record_outcome(pending)
        batch.orchestrator = state_of(
            pending.step, self.source.plan(), pending.ledger, pending.errors
        )
        batch.stats |= self.describe(batch)
        return batch

    def _warn(self, batch: Batch) -> None:
        warnings = alarms(batch.stats) + check_masks(batch)
        interval = self.settings.canary_interval
        if interval and not self.settings.skip_verification and batch.step % interval == 0:
            failures = canaries(self.source.envs, self.scorer, self.ledger.cursors)
            batch.stats["reward/canary_failures"] = float(len(failures))
            warnings += failures
        for warning in warnings:
            logger.warning("step %d: %s", batch.step, warning)

    def _record_outcome(self, pending: PendingBatch) -> None:
        pending.ledger.consumed += len(pending.kept)
        pending.ledger.dropped += len(pending.dropped)
        if self.journal is None:
            return
        reasons: dict[str, list[str]] = {}
        for drop in pending.dropped:
            reasons.setdefault(drop.reason, []).append(drop.id)
        for reason, ids in reasons.items():
            self.journal.write("dropped", step=pending.step, reason=reason, ids=ids)
        self.journal.write(
            "batched",
            step=pending.step,
            ids=[group.id for group in pending.kept],
            oldest=[list(group.versions) for group in pending.kept],
            learner=pending.version,
            most=self.settings.max_off_policy_steps if self.settings.streams else 0,
        )
        self.journal.sync()

    def _idle_stats(self, pending: PendingBatch) -> dict[str, float]:
        last_batch_at, self._last_batch_at = self._last_batch_at, time.monotonic()
        idle_seconds = pending.seconds["time/generate"] + sum(self._waits.values())
        wall_seconds = max(self._last_batch_at - last_batch_at, 1e-9)
        return self._waits | {
            "perf/orchestrator_idle_fraction": min(1.0, idle_seconds / wall_seconds)
        }

    # -- state -------------------------------------------------------------------------------------

    def enter(self, settings: Settings) -> None:
        """Use other settings from the next step on. Earlier draws stay."""
        self.source.settings = settings

    def state(self) -> dict[str, Any]:
        """Return JSON data for `restore`."""
        return state_of(self.last_step, self.source.plan(), self.ledger, self.errors)

    def restore(
        self, state: Mapping[str, Any], *, skip_progress: bool = False, skip_buffer: bool = False
    ) -> None:
        """Continue from `state()`. ValueError names a setting that differs. `skip_progress`:
        restart the prompts, with the same pools. `skip_buffer`: empty the pools."""
        check_state(state)
        _check_plan(state["plan"], self.source.plan())
        ledger = Ledger.of(state["ledger"], set(self.source.envs))
        if skip_buffer:
            ledger.pools = Ledger().pools
        if skip_progress:
            ledger = Ledger(cursors=dict.fromkeys(self.source.envs, 0), pools=ledger.pools)
        self.errors.restore(state["errors"])
        self.ledger, self.last_step = ledger, state["step"]
        self._journal_in_sync, self._restart_journal = False, skip_progress
        self.rollout_buffer.rewind(ledger, set())

    def promote(self) -> dict[str, int]:
        """Release the configured shares of the pools when a run resumes, chosen by a hash. Return
        the number of prompts by pool."""
        num_draws = self.ledger.draws

        def order(env: str, prompt_id: str) -> int:
            return seed_of(self.source.seed, "pool", num_draws, env, prompt_id)

        shares = (self.settings.easy_fraction, self.settings.hard_fraction)
        return {
            pool: self.ledger.pools.take_back(pool, share, order)
            for pool, share in zip(POOLS, shares, strict=True)
        }

    def committed(self, step: int) -> None:
        """Record that the learner's checkpoint covers all steps up to `step`."""
        if self.journal is not None:
            self._sync_journal()
            self.journal.write("consumed", step=step)
            self.journal.sync()

    def _sync_journal(self) -> None:
        if self.journal is not None and not self._journal_in_sync:
            open_ids = [open_group.id for open_group in self.rollout_buffer.opened(self.ledger)]
            self.journal.go_on(self.last_step, open_ids, again=self._restart_journal)
        self._journal_in_sync, self._restart_journal = True, False


def _check_plan(saved_plan: Mapping[str, Any], plan: Mapping[str, Any]) -> None:
    for name in sorted(saved_plan.keys() | plan.keys()):
        if saved_plan.get(name) != plan.get(name):
            raise ValueError(
                f"orchestrator state: {name} is {saved_plan.get(name)!r} in the checkpoint and "
                f"{plan.get(name)!r} in this run"
            )


def logged(batch: Batch, dropped: Sequence[ScoredGroup] = ()) -> Batch:
    """Return a batch for the log: dropped rollouts follow with group -1 and an all-zero loss mask;
    timings are left out."""
    dropped_samples = [
        replace(sample, group=-1, advantage=0.0, loss_mask=[0] * len(sample.loss_mask))
        for group in dropped
        for sample in group.samples
    ]
    stats = {
        name: value
        for name, value in batch.stats.items()
        if not name.startswith(("time/", "perf/"))
    }
    return replace(batch, samples=batch.samples + dropped_samples, stats=stats, orchestrator=None)
