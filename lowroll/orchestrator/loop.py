"""One batch a step: draw prompts, generate, score, shape, filter, credit, hand over.

Produces one Batch a step on the rollout channel, with the orchestrator's state after it. Waits for
the engine's answer, the scorer's answer, weights that are new enough and room in the channel, each
behind a deadline of its own. Unblocked by the engine having weights to draw from.

Batch n is learnt from by a learner of version n - 1. At level 0 all its requests go out together and
all their answers are waited for, by rounds. Otherwise groups are taken as they end, see
`orchestrator.rollout_buffer`: at level k, as soon as weights of version n - 1 - k are there.

A step is a transaction. It plans on a copy of the ledger and takes the copy over after the batch
was sent, so a step that raises leaves nothing behind and, tried again, makes the same requests with
the same noise.

Dynamic sampling (DAPO, Section 3.2) drops groups whose scores are all equal and draws again. Each
round draws exactly the groups that are still missing, so there is never a surplus: at async level 0
a surplus group would be stale after the update, and carrying it over would make the batch off
policy. The price is a few small rounds. After `max_rounds` the step goes on with the groups it has
(`rollout/num_groups` says how many, and a warning). If there is none it raises NoSignal, or takes
the first ones as they are, as without dynamic sampling (`no_signal`). Groups that are dropped for
their mean reward (`online_difficulty_filtering`) are replaced by the same rule.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean
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
    WeightsWatch,
)
from lowroll.orchestrator.errors import (
    ErrorWindow,
    InvalidRollout,
    NoSignal,
    applies_nowhere,
    check_any,
)
from lowroll.orchestrator.groups import ScoredGroup
from lowroll.orchestrator.journal import Journal
from lowroll.orchestrator.ledger import POOLS, STATE_FORMAT, Ledger, upgraded
from lowroll.orchestrator.rollout_buffer import Open, RolloutBuffer
from lowroll.orchestrator.selection import REASONS, Drop, GroupSelection, useless
from lowroll.orchestrator.settings import Settings
from lowroll.orchestrator.source import Draw, PromptSource, seed_of
from lowroll.types import Batch, Group, Rollout, Sample

if TYPE_CHECKING:
    from lowroll.envs.base import Environment

logger = logging.getLogger(__name__)


class Orchestrator:
    """The maker of a run's batches. It holds no weights, no tensors and no global random state."""

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
        """`rollout_log` is called once a step with every rollout of the step: those that were
        dropped follow the batch's own with group -1 and a loss mask of zeros. Times and the
        orchestrator's state are left out, so a step that is made again logs the same bytes. Where
        none was dropped the batch is sent first: a learner elsewhere goes on with it meanwhile, and
        what is sent can be logged later (`logged`). `describe`: more numbers of a batch. `weights`:
        where the learner is another process. `journal`: the ledger's file."""
        self.settings = settings
        self.source = PromptSource(settings, envs, tokenizer)
        self.engine = engine
        self.scorer = scorer
        self.tokenizer = tokenizer
        self.channel = channel
        self.rollout_log = rollout_log
        self.describe = describe
        self.on_phase = on_phase
        self.weights = weights
        self.journal = journal
        self.rollout_buffer = RolloutBuffer(settings, self.source, engine, journal)
        self.ledger = Ledger(cursors=dict.fromkeys(envs, 0))
        self.errors = ErrorWindow(
            settings.max_error_rate, settings.error_window, settings.batch_size
        )
        self.last = 0  # the step of the last batch
        self._settled = False  # the journal goes on from `last`
        self._anew = False  # and counts nothing of before
        self._waits = {"time/wait_weights": 0.0, "time/wait_trainer": 0.0}
        self._made = time.monotonic()  # when the last batch was
        if settings.skip_verification:
            logger.warning(
                "skip_verification: NOTHING IS SCORED, every reward is 0, and no group has a signal"
            )
            self.scorer = grouping.Unverified()

    def enter(self, settings: Settings) -> None:
        """Go on with other settings from the next step on. What was drawn so far stays drawn."""
        self.settings = self.source.settings = self.rollout_buffer.settings = settings

    def step(self, step: int, version: int | None = None) -> Batch:
        """Make the batch of a step and send it. `version`: the learner's, checked against every
        rollout; where weights are watched it is step - 1.

        Raises ScoringFailed, NoSignal, InvalidRollout or what the engine, scorer, channel or the
        wait for weights raise; then the ledger has not moved.
        """
        if version is None and self.weights is not None:
            version = step - 1
        back = {one.planned for one in self.rollout_buffer.ready(self.ledger)}
        try:
            self._settle()
            ledger, errors = self.ledger.copy(), self.errors.copy()
            batch, lost = self._make(step, version, ledger, errors)
            if lost:
                self._log(batch, lost)
            began = time.monotonic()
            self.channel.send(batch)
        except BaseException:
            self._settled = False
            self.rollout_buffer.rewind(self.ledger, back)
            raise
        self._waits = {
            "time/wait_weights": 0.0,
            "time/wait_trainer": time.monotonic() - began,
        }
        self.ledger, self.errors, self.last = ledger, errors, step
        if not lost:
            self._log(batch, lost)
        return batch

    # -- what surrounds the steps ------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return JSON data from which `restore` continues; at level 0, with the very same
        batches."""
        return self._state(self.last, self.ledger, self.errors)

    def restore(
        self, state: Mapping[str, Any], *, skip_progress: bool = False, skip_buffer: bool = False
    ) -> None:
        """Continue from `state()`. Raises ValueError naming the field that this run's plan
        disagrees with. `skip_progress`: with prompts from the beginning. `skip_buffer`: with empty
        pools."""
        state = upgraded(state)
        saved, plan = state["plan"], self._plan()
        for name in sorted(saved.keys() | plan.keys()):
            if saved.get(name) != plan.get(name):
                raise ValueError(
                    f"orchestrator state: {name} is {saved.get(name)!r} in the checkpoint and "
                    f"{plan.get(name)!r} in this run"
                )
        ledger = Ledger.of(state["ledger"], set(self.source.envs))
        if skip_buffer:
            ledger.pools = Ledger().pools
        if skip_progress:
            ledger = Ledger(cursors=dict.fromkeys(self.source.envs, 0), pools=ledger.pools)
        self.errors.restore(state["errors"])
        self.ledger, self.last = ledger, state["step"]
        self._settled, self._anew = False, skip_progress
        self.rollout_buffer.rewind(ledger, set())

    def promote(self) -> dict[str, int]:
        """Let the configured shares of the easy and the hard pool be drawn again, as at the start
        of an attempt that goes on. Returns the number of prompts of each."""
        shares = (self.settings.easy_fraction, self.settings.hard_fraction)
        draws = self.ledger.draws
        return {
            pool: self.ledger.pools.take_back(
                pool, share, lambda env, one: seed_of(self.source.seed, "pool", draws, env, one)
            )
            for pool, share in zip(POOLS, shares, strict=True)
        }

    def recall(self, for_good: bool = False) -> int:
        """Give up what is in flight, for an evaluation or another engine: it stays open, and the
        next step asks for it again. `for_good`: the engine ends and returns nothing more. Returns
        the number of groups."""
        return self.rollout_buffer.recall(for_good)

    def retract(self, version: int) -> int:
        """Draw again what is open and has tokens of weights after `version`, which their learner
        has taken back; called by the watcher of the weights (`WeightsWatch`). Returns the number of
        groups."""
        return self.rollout_buffer.retract(version)

    def committed(self, step: int) -> None:
        """Record that the learner's checkpoint holds everything up to this step."""
        if self.journal is not None:
            self._settle()  # of one that was started again when all was sent, or whose step failed
            self.journal.write("consumed", step=step)
            self.journal.sync()

    def _settle(self) -> None:
        """Have the ledger's file go on from the last batch."""
        if self.journal is not None and not self._settled:
            ids = [one.id for one in self.rollout_buffer.opened(self.ledger)]
            self.journal.go_on(self.last, ids, again=self._anew)
        self._settled, self._anew = True, False

    def _state(self, step: int, ledger: Ledger, errors: ErrorWindow) -> dict[str, Any]:
        return {
            "format": STATE_FORMAT,
            "step": step,
            "plan": self._plan(),
            "ledger": ledger.state(),
            "errors": errors.state(),
        }

    def _plan(self) -> dict[str, Any]:
        """Return the settings that decide which prompts are drawn with which noise; they must not
        change within a run."""
        weights = {
            name: self.settings.env_weights.get(name, 1.0) for name in sorted(self.source.envs)
        }
        return {
            "seed": self.settings.seed,
            "buffer_seed": self.source.seed,
            "rollouts_per_example": self.settings.rollouts_per_example,
            "env_weights": weights,
            "hash_keys": list(self.settings.hash_keys),
        }

    # -- a step ------------------------------------------------------------------------------------

    def _make(
        self, step: int, version: int | None, ledger: Ledger, errors: ErrorWindow
    ) -> tuple[Batch, list[ScoredGroup]]:
        """Make the batch of a step, in the ledger, without sending it. Returns it and the groups
        that came back and are not in it."""
        temperature = self.settings.temperature(step)
        stale = self._take_weights(step, version)
        selection = GroupSelection()
        if self.settings.streams:
            self._drop(ledger, selection, stale, "stale")
            self._stream(step, version, ledger, errors, temperature, selection)
        else:
            self._rounds(step, version, ledger, errors, temperature, selection)
        for group in selection.groups:
            prompt, scores = group.samples[0].prompt, group.scores()
            if scores and self.source.is_finite(prompt.env):
                ledger.pools.place(prompt.env, prompt.id, scores, self.settings)
        scored = [(group.samples[0].prompt, group.scores()) for group in selection.groups]
        self.source.learn(ledger, scored)
        batch = self._batch(step, temperature, selection, ledger, version)
        self._watch(batch)
        self._close(step, version, ledger, selection)
        batch.orchestrator = self._state(step, ledger, errors)
        batch.stats |= self.describe(batch)
        return batch, selection.lost

    def _take_weights(self, step: int, version: int | None) -> list[Open]:
        """Wait until the step's weights are there. Returns the groups in flight that are too old
        for them."""
        if self.weights is None:
            return [] if version is None else self.rollout_buffer.swap(version)
        began = time.monotonic()
        oldest = max(0, step - 1 - self.settings.max_async_level)
        if self.settings.strict_async_level:
            taken = self.weights.exactly(oldest)
        else:
            taken = self.weights.at_least(oldest, step - 1)
        self._waits["time/wait_weights"] += time.monotonic() - began
        return self.rollout_buffer.swap(taken)

    def _rounds(
        self,
        step: int,
        version: int | None,
        ledger: Ledger,
        errors: ErrorWindow,
        temperature: float,
        selection: GroupSelection,
    ) -> None:
        """Draw groups, send them and wait for all, in rounds, until there are enough."""
        wanted = self.settings.num_groups
        max_rounds = self.settings.max_rounds if self.settings.filters_groups else 1
        while selection.rounds < max_rounds and len(selection.kept) < wanted:
            draws = self.source.draw(ledger, wanted - len(selection.kept), temperature)
            for group in self._round(step, draws, errors, version, selection.seconds):
                selection.take(group, self.settings)
            selection.rounds += 1
        self._judge(selection)

    def _stream(
        self,
        step: int,
        version: int | None,
        ledger: Ledger,
        errors: ErrorWindow,
        temperature: float,
        selection: GroupSelection,
    ) -> None:
        """Keep groups open and take those that end, until there are enough."""
        rollout_buffer, settings = self.rollout_buffer, self.settings
        wanted, landed = settings.num_groups, 0
        while True:
            self._sift(ledger, selection, version)
            ready = rollout_buffer.ready(ledger)
            self._tell("generate", min(len(ready), wanted), wanted)
            full = len(ready) >= wanted
            spent = settings.filters_groups and landed >= settings.max_rounds * wanted
            began = time.monotonic()
            if settings.carries or not (full or spent):
                missing = settings.num_open - len(ledger.open)
                if missing > 0 and not spent:
                    rollout_buffer.plan(ledger, missing, step, temperature)
                    selection.rounds += 1
                rollout_buffer.send(ledger)  # the engines go on while a full batch is made
            if full or spent:
                break
            answers = rollout_buffer.turn()
            selection.seconds["time/generate"] += time.monotonic() - began
            landed += len(answers)
            self._land(answers, ledger, errors, selection.seconds)
            self._drop(ledger, selection, self._take_newer(step), "stale")
        chosen = ready[:wanted]
        selection.kept = [one.scored for one in chosen if one.scored is not None]
        selection.stats = rollout_buffer.stats(step, chosen)
        rollout_buffer.close(ledger, chosen)
        if not settings.carries:
            rest = rollout_buffer.opened(ledger)
            self._drop(ledger, selection, rest, "oversampled")
        selection.stats["rollout/open_groups"] = float(len(ledger.open))
        self._judge(selection)

    def _land(
        self,
        answers: list[tuple[Open, Group]],
        ledger: Ledger,
        errors: ErrorWindow,
        seconds: dict[str, float],
    ) -> None:
        """Score the groups that came back, in planned order, while the others go on."""
        if not answers:
            return
        began = time.monotonic()
        place = {planned: index for index, planned in enumerate(ledger.open)}
        answers.sort(key=lambda answer: place[answer[0].planned])
        scored = self._score(
            [one.draw for one, _ in answers], [group for _, group in answers], errors
        )
        for (one, _), group in zip(answers, scored, strict=True):
            one.scored = group
        seconds["time/score"] += time.monotonic() - began

    def _sift(self, ledger: Ledger, selection: GroupSelection, version: int | None) -> None:
        """Drop what is back and too old, or of no use."""
        for one in self.rollout_buffer.ready(ledger):
            group = one.scored
            assert group is not None
            if version is not None and group.versions[1] > version:
                raise InvalidRollout(
                    f"request {one.id!r}: drawn under policy version {group.versions[1]} while the "
                    f"learner is at {version}"
                )
            reason = useless(group, self.settings)
            most = self.settings.max_off_policy_steps
            if version is not None and version - group.versions[0] > most:
                reason = "stale"
            if reason is not None:
                self._drop(ledger, selection, [one], reason)

    def _drop(
        self, ledger: Ledger, selection: GroupSelection, groups: Sequence[Open], reason: str
    ) -> None:
        """Take open groups away, with a reason."""
        for one in groups:
            self.rollout_buffer.give_up(one)
            selection.dropped.append(Drop(one.id, reason, one.scored))
        self.rollout_buffer.close(ledger, groups)

    def _take_newer(self, step: int) -> list[Open]:
        """Have the engines load weights that arrived in the meantime. Returns the groups that are
        too old for them."""
        settings = self.settings
        if self.weights is None or settings.strict_async_level or not settings.max_async_level:
            return []
        newer = self.weights.newer(step - 1)
        return [] if newer is None else self.rollout_buffer.swap(newer)

    def _judge(self, selection: GroupSelection) -> None:
        """Check that there is something to learn from. Raises ScoringFailed or NoSignal."""
        wanted = self.settings.num_groups
        samples = [sample for group in selection.groups for sample in group.samples]
        check_any([sample.score for sample in samples], "step")
        if not selection.kept:
            self._without_signal(selection, wanted)
        elif len(selection.kept) < wanted:
            logger.warning(
                "%s: %d of %d groups with signal after %d rounds: the batch is smaller",
                self._filter_name,
                len(selection.kept),
                wanted,
                selection.rounds,
            )

    @property
    def _filter_name(self) -> str:
        if self.settings.dynamic_sampling:
            return "dynamic sampling"
        return "online difficulty filtering"

    def _without_signal(self, selection: GroupSelection, wanted: int) -> None:
        scores = [score for group in selection.useless for score in group.scores()]
        mean = fmean(scores) if scores else 0.0
        found = (
            f"{self._filter_name}: all {len(selection.useless)} groups of {selection.rounds} rounds "
            f"have constant rewards ({mean:.3g} in the mean); the tasks are all "
            "too hard or all too easy for this policy"
        )
        if self.settings.no_signal == "end":
            raise NoSignal(found)
        logger.warning("%s: the step takes the first of them as they are", found)
        selection.fall_back(wanted)

    def _round(
        self,
        step: int,
        draws: list[Draw],
        errors: ErrorWindow,
        version: int | None,
        seconds: dict[str, float],
    ) -> list[ScoredGroup]:
        ids = [draw.request.id for draw in draws]
        self._note("planned", step=step, ids=ids)
        self._note("dispatched", version=self.rollout_buffer.version, ids=ids)
        began = time.monotonic()
        answers = self.engine.generate(
            [draw.request for draw in draws], on_progress=self._progress("generate")
        )
        groups = grouping.in_planned_order(draws, answers)
        generated = time.monotonic()
        self._note("done", ids=ids)
        scored = self._score(draws, groups, errors)
        if version is not None:
            for group in scored:
                grouping.check_versions(group, version, 0)
        seconds["time/generate"] += generated - began
        seconds["time/score"] += time.monotonic() - generated
        return scored

    def _score(
        self, draws: list[Draw], groups: list[Group], errors: ErrorWindow
    ) -> list[ScoredGroup]:
        samples = grouping.score(
            draws,
            groups,
            self.scorer,
            self.tokenizer,
            self._progress("score"),
            self.last + 1,
            self.settings.max_steps,
        )
        errors.check(sample.score for group in samples for sample in group)
        return [
            grouping.credit(group, self.settings, draw.request)
            for draw, group in zip(draws, samples, strict=True)
        ]

    def _batch(
        self,
        step: int,
        temperature: float,
        selection: GroupSelection,
        ledger: Ledger,
        version: int | None,
    ) -> Batch:
        samples: list[Sample] = []
        for index, group in enumerate(selection.kept):
            other = None if group.temperature == temperature else group.temperature
            for sample in group.samples:
                sample.group, sample.temperature = index, other
                samples.append(sample)
        flags = Counter({rule.name: 0 for rule in self.settings.filters})
        for group in selection.groups:
            flags.update(group.flags)
        generated = [sample.rollout for group in selection.groups for sample in group.samples]
        learned = [sample.rollout for sample in samples]
        stats = (
            statistics.reward_stats(selection.groups)
            | statistics.rollout_stats(generated)
            | statistics.turn_stats([s for group in selection.groups for s in group.samples])
            | statistics.version_stats(learned, version)
            | {
                "rollout/num_samples": float(len(samples)),
                "rollout/num_groups": float(len(selection.kept)),
                "rollout/rounds": float(selection.rounds),
                "rollout/dropped_groups": float(len(selection.dropped)),
                "rollout/passed_over_prompts": float(ledger.passed_over - self.ledger.passed_over),
                "rollout/temperature": temperature,
            }
            | {
                f"rollout/flagged_{name}_fraction": count / len(generated)
                for name, count in flags.items()
            }
            | statistics.buffer_stats(self.ledger, ledger, self.settings)
            | self._asynchrony_stats(selection, learned, version)
        )
        return Batch(
            step=step, samples=samples, temperature=temperature, stats=stats | selection.seconds
        )

    def _asynchrony_stats(
        self, selection: GroupSelection, rollouts: list[Rollout], version: int | None
    ) -> dict[str, float]:
        """Return the statistics of a step that takes groups as they end, or that follows a learner
        in another process; {} for other steps."""
        if not self.settings.streams and self.weights is None:
            return {}
        stats = dict(selection.stats)
        if self.settings.streams:
            counts = selection.counts()
            stats |= {f"rollout/dropped_{reason}": float(counts[reason]) for reason in REASONS}
            if version is not None:
                stats["rollout/learner_version"] = float(version)
                stats |= statistics.staleness_stats(rollouts, version)
        before, self._made = self._made, time.monotonic()
        idle = selection.seconds["time/generate"] + sum(self._waits.values())
        wall = max(self._made - before, 1e-9)
        return stats | self._waits | {"perf/orchestrator_idle_fraction": min(1.0, idle / wall)}

    def _close(
        self, step: int, version: int | None, ledger: Ledger, selection: GroupSelection
    ) -> None:
        """Count the groups that the step has finished with, in the ledger and in its file."""
        ledger.consumed += len(selection.kept)
        ledger.dropped += len(selection.dropped)
        if self.journal is None:
            return
        for reason, ids in selection.reasons.items():
            self._note("dropped", step=step, reason=reason, ids=ids)
        most = self.settings.max_off_policy_steps if self.settings.streams else 0
        self._note(
            "batched",
            step=step,
            ids=[group.id for group in selection.kept],
            oldest=[list(group.versions) for group in selection.kept],
            learner=version,
            most=most,
        )
        self.journal.sync()

    def _note(self, event: str, **fields: Any) -> None:
        if self.journal is not None:
            self.journal.write(event, **fields)

    def _watch(self, batch: Batch) -> None:
        """Warn of numbers out of bounds and, every `canary_interval` steps, of known answers scored
        wrongly."""
        warnings = alarms(batch.stats)
        told = all(
            applies_nowhere(sample.score) for sample in batch.samples
        )  # `check_any` has said it
        if not told and not any(any(sample.loss_mask) for sample in batch.samples):
            warnings.append(
                f"nothing is learned: all {len(batch.samples)} rollouts of the batch are flagged by "
                "filters, or cut off and masked (rollout/flagged_*_fraction says by which)"
            )
        interval = self.settings.canary_interval
        if self.settings.skip_verification:
            interval = None
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
        self.rollout_log(logged(replace(batch, samples=batch.samples + unused)))

    def _progress(self, phase: str) -> Progress | None:
        return None if self.on_phase is None else partial(self.on_phase, phase)

    def _tell(self, phase: str, done: int, total: int) -> None:
        if self.on_phase is not None:
            self.on_phase(phase, done, total)


def logged(batch: Batch) -> Batch:
    """Return a batch without what would differ if it were made again: times, and the orchestrator's
    state."""
    stats = {
        name: value
        for name, value in batch.stats.items()
        if not name.startswith(("time/", "perf/"))
    }
    return replace(batch, stats=stats, orchestrator=None)
