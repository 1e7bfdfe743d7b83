"""The half of a run that makes batches: prompts, rollouts, scores, evaluations.

    batches.before(1, 0)      evaluation of the initial policy, if configured
    batches.step(n, n - 1)    a batch on the channel, drawn from version n - 1
    batches.after(n, n)       evaluation after step n, when one is due

One process joins it to `runs.learner`; as a role it is `lowroll orchestrate`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Protocol

from lowroll.config import RunConfig
from lowroll.engine.base import replayed
from lowroll.kv.policy.base import CachePolicy
from lowroll.kv.tokens_saved import saving
from lowroll.orchestrator.conversations import Conversations
from lowroll.orchestrator.interfaces import BatchSender, PhaseProgress, WeightsWatch
from lowroll.orchestrator.ledger_file import Journal
from lowroll.orchestrator.loop import Orchestrator
from lowroll.runs.assembly import environments, orchestrator, prompts
from lowroll.runs.evaluations import EvaluationEngine, Evaluations
from lowroll.runs.stages import Stages
from lowroll.types import Batch, Sample

if TYPE_CHECKING:
    from lowroll.engine.base import EngineStats
    from lowroll.model.spec import ModelSpec
    from lowroll.model.tokenizer import ChatTokenizer

log = logging.getLogger(__name__)


class BatchEngine(EvaluationEngine, Protocol):
    @property
    def kv(self) -> CachePolicy: ...

    def stats(self) -> EngineStats: ...


class RunEnvironments:
    def __init__(self, cfg: RunConfig) -> None:
        self.envs = environments.make(cfg.env, cfg.seed)
        self.held_out = self.envs
        if cfg.eval.env:
            self.held_out = environments.make(cfg.eval.env, cfg.seed)


class BatchSource:
    """The producer of a run's batches. cfg: with the cache size. `stack` closes the scoring
    workers. alone: the learner is in this process."""

    def __init__(
        self,
        cfg: RunConfig,
        spec: ModelSpec,
        chat: ChatTokenizer,
        tasks: RunEnvironments,
        rollouts: BatchEngine,
        channel: BatchSender,
        rollout_log: Callable[[Batch], object],
        stack: ExitStack,
        weights: WeightsWatch | None = None,
        journal: Journal | None = None,
        alone: bool = True,
    ) -> None:
        self.alone = alone
        self._previous_stats: EngineStats | None = None
        # Set by the owner for more metrics.
        self.more: Callable[[Batch], Mapping[str, float]] = lambda _: {}
        self.cfg = cfg
        self.spec = spec
        self.rollouts = rollouts
        prompts.check_stages(cfg, spec)
        warnings = prompts.check(cfg, spec, chat, tasks.envs)
        for line in warnings + prompts.check_held_out(cfg, spec, chat, tasks.held_out):
            log.warning("%s", line)
        self.stages = Stages(cfg)
        scorer = stack.enter_context(environments.scorer(cfg, cfg.env))
        eval_scorer = scorer
        if cfg.eval.env and cfg.eval.interval:
            eval_scorer = stack.enter_context(environments.scorer(cfg, cfg.eval.env))
        self.evaluations = Evaluations(cfg, spec, rollouts, tasks.held_out, eval_scorer, chat)
        self._own = orchestrator.estimator(cfg)
        self.orchestrator = Orchestrator(
            orchestrator.settings(cfg, spec, alone, self._own),
            tasks.envs,
            Conversations(rollouts, scorer, chat),
            scorer,
            chat,
            channel,
            rollout_log=rollout_log,
            describe=self.described,
            weights=weights,
            journal=journal,
        )

    def watch(self, phase: PhaseProgress, note: Callable[[str], object]) -> None:
        self.orchestrator.on_phase = self.evaluations.on_phase = phase
        self.evaluations.on_note = note

    def enter(self, step: int) -> None:
        if self.stages.enter(step):
            stage_settings = orchestrator.settings(
                self.stages.now, self.spec, self.alone, self._own
            )
            self.orchestrator.enter(stage_settings)

    def step(self, step: int, version: int) -> Batch:
        self.enter(step)
        return self.orchestrator.step(step, version)

    def before(self, step: int, version: int) -> dict[str, float]:
        self.enter(step)
        if not self.evaluations.due_before(step):
            return {}
        self._clear_engine()
        return self.evaluations.before(step, self.stages.now, version)

    def after(self, step: int, version: int) -> dict[str, float]:
        if not self.evaluations.due(step):
            return {}
        self._clear_engine()
        return self.evaluations.after(step, self.stages.now, version)

    def state(self) -> dict[str, Any]:
        return self.orchestrator.state()

    def _clear_engine(self) -> None:
        """Drop requests in flight if evaluations need the engine alone, as with noise."""
        if self.cfg.eval.cancel_inflight_rollouts_on_eval or self.cfg.noise is not None:
            self.orchestrator.rollout_buffer.recall()

    def restore(self, step: int, state: Mapping[str, Any], resumed: bool = False) -> None:
        """Continue after a step. resumed: by the user, so the settings for resuming apply.
        ValueError for a state of another step or plan."""
        state_step = state.get("step", step)  # missing in the oldest states
        if state_step != step:
            raise ValueError(
                f"orchestrator state: it is of step {state_step}, and not of step {step}"
            )
        self.enter(step)
        ckpt = self.cfg.ckpt
        self.orchestrator.restore(
            state,
            skip_progress=resumed and ckpt.skip_progress,
            skip_buffer=resumed and ckpt.skip_buffer,
        )
        if resumed:
            self.orchestrator.promote()
            self.evaluations.resumed(step + 1)

    def described(self, batch: Batch) -> dict[str, float]:
        """Return metrics of a batch's draw and of a bounded cache."""
        stats, kv = self.rollouts.stats(), self.rollouts.kv
        metrics = {"rollout/weight_bits": stats.weight_bits}
        if self._previous_stats is not None:
            metrics |= replayed(self._previous_stats, stats)
        self._previous_stats = stats
        if self.cfg.noise is not None:
            metrics["rollout/noise_sigma"] = max(
                sample.rollout.behavior.noise_sigma for sample in batch.samples
            )
        if kv.budget is not None:
            turn_lengths = [turn for sample in batch.samples for turn in _lengths_by_turn(sample)]
            metrics |= {f"kv/{name}": value for name, value in saving(kv, turn_lengths).items()}
        generate_seconds = max(batch.stats["time/generate"], 1e-3)
        return metrics | {
            "perf/generate_tokens_per_second": batch.stats["rollout/tokens"] / generate_seconds,
            "perf/kv_pages_peak": float(stats.pages_peak),
            "perf/prefix_hits": float(stats.prefix_hits),
            **self.more(batch),
        }


def _lengths_by_turn(sample: Sample) -> list[tuple[int, int]]:
    prompt_length, rollout = len(sample.prompt_ids), sample.rollout
    if rollout.turns is None:
        return [(prompt_length, len(rollout.token_ids))]
    return [(prompt_length + turn.start, turn.end - turn.start) for turn in rollout.turns]
