"""A whole run in one process: orchestrator, engine and trainer in turns.

    for step in 1..max_steps:
        orchestrator.step(step)      draws and scores rollouts of policy version step - 1
        trainer.step()               learns from them, and publishes version `step` into the engine

A resumed run repeats the uninterrupted one bit for bit, except with vLLM (docs/usage.md).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from lowroll.config import RunConfig
from lowroll.config.process_checks import one_process_notes, one_process_problems
from lowroll.metrics.live import LiveView
from lowroll.metrics.record import Record, read
from lowroll.model.tokenizer import ChatTokenizer
from lowroll.model.transformer import Transformer
from lowroll.orchestrator.errors import NoSignal
from lowroll.runs import chosen_formats
from lowroll.runs.assembly import configuration, engines, models, prompts
from lowroll.runs.assembly.compute import Compute
from lowroll.runs.batches import BatchSource, RunEnvironments
from lowroll.runs.checkpointing import Checkpointing
from lowroll.runs.evaluations import around
from lowroll.runs.folder import RunFolder, resumes_by_config
from lowroll.runs.learner import Learner, Policy
from lowroll.runs.memory import fit, sizes
from lowroll.runs.memory.plan import Planner
from lowroll.runs.rollouts import RolloutEngine
from lowroll.runs.session import RunResult, attempt, run_steps, tell
from lowroll.runs.stop import Stop, polite_stop
from lowroll.transport.memory import MemoryRolloutChannel

log = logging.getLogger(__name__)


def run(
    config: str | Path | RunConfig | Mapping[str, object],
    overrides: Mapping[str, object] | None = None,
    *,
    resume: bool = False,
    overwrite: bool = False,
) -> RunResult:
    """Train by a YAML file, a nested mapping or a RunConfig; return the run folder and its records.
    overrides: dotted keys, {"train.max_steps": 20}.

    In Python an environment's `id` may be a class, `reward_funcs` functions, and `data` rows
    (`lowroll.envs.notebook_files`).

    ValueError, before training, names the invalid setting, model, data or folder. A folder with a
    begun run is refused; `resume` continues its newest undamaged checkpoint; `overwrite` replaces
    only the run's files. SIGINT, SIGTERM and SIGHUP finish the step, write a checkpoint and return
    (`runs.stop`). A run whose dynamic sampling finds no learning signal ends early.
    """
    cfg, environment_files = configuration.read(config, overrides or {})
    resume = resume or resumes_by_config(cfg)
    if cfg.launcher != "none":
        from lowroll.runs.roles.supervisor import launch

        return launch(cfg, environment_files, resume=resume, overwrite=overwrite)
    if problems := one_process_problems(cfg):
        raise ValueError("\n".join(problems))
    with ExitStack() as stack:
        home = stack.enter_context(attempt(cfg.resolved(), "grpo", resume, overwrite))
        tell(*one_process_notes(home.cfg))
        home.keep(environment_files)
        training_run = Run(home, stack, resume)
        first_step = training_run.resume() if resume else training_run.begin()
        return _train(training_run, first_step, stack)


def _train(training_run: Run, first_step: int, stack: ExitStack) -> RunResult:
    home = training_run.home
    cfg, last_step = home.cfg, home.cfg.train.max_steps
    title = f"{home.path}: {cfg.algorithm}, {cfg.correction}"
    view = stack.enter_context(LiveView(last_step, title, every=cfg.logging_steps))
    stop = stack.enter_context(polite_stop())
    training_run.watch(view, stop)

    try:
        signal = run_steps(training_run, first_step, last_step, cfg.ckpt.interval, view.show, stop)
    except NoSignal as reason:
        training_run.end(reason)
        return RunResult(home.path, read(home.path), ended=str(reason))
    return RunResult(home.path, read(home.path), signal=signal)


class Run:
    """A run with both halves in one process. `stack` closes its engine and workers."""

    def __init__(self, home: RunFolder, stack: ExitStack, resume: bool = False) -> None:
        self.home = home
        self.checkpoints = Checkpointing(home, resume)
        self.compute = Compute.of(home.cfg)
        outline = self._checked_outline()
        chat = models.chat_of(home.cfg)
        cfg = chosen_formats.settle(home, self.compute, chat, resume)
        tasks = RunEnvironments(cfg)
        planner = self._planner(cfg, outline, chat, tasks)
        cfg = sizes.chosen(planner, cfg)
        tell(*(note for note in cfg.notes if note not in home.cfg.notes))
        cache_tokens = self.checkpoints.cache_tokens  # a resumed run keeps its cache
        self.memory = fit.check(planner, cfg, cache_tokens)
        tell(*self.memory.lines())

        policy = Policy.load(cfg, chat, self.compute)
        self.rollouts = RolloutEngine(cfg, self.compute, policy.model, chat, planner, cache_tokens)
        stack.callback(self.rollouts.close)
        self.rollouts.engine.warm_up()
        self.cfg = cfg = self.rollouts.cfg

        channel = MemoryRolloutChannel()
        rollout_log = partial(home.keep_batch, "rollouts")
        self.batches = BatchSource(
            cfg, outline.spec, chat, tasks, self.rollouts, channel, rollout_log, stack
        )
        rollout_buffer = self.batches.orchestrator.rollout_buffer
        self.rollouts.before_end = partial(rollout_buffer.recall, for_good=True)
        self.learner = Learner(
            cfg, policy, self.checkpoints, channel, self.rollouts, deadline_s=60.0
        )
        self.stop = Stop()

    def _checked_outline(self) -> Transformer:
        cfg = self.home.cfg
        engines.check(cfg)
        outline = models.outline("model", cfg.model, self.compute)
        engines.refuse(cfg, outline.spec)
        prompts.check_stages(cfg, outline.spec)
        return outline

    def _planner(
        self, cfg: RunConfig, outline: Transformer, chat: ChatTokenizer, tasks: RunEnvironments
    ) -> Planner:
        uncached_cfg = engines.with_rollout(cfg, cache_tokens=None)
        workloads = engines.workloads(uncached_cfg, outline.spec, chat, tasks.envs, tasks.held_out)
        other_models = {
            name: models.outline(key, source, self.compute)
            for name, (key, source) in models.beside(cfg).items()
        }
        return Planner.now(self.compute, outline, workloads, other_models)

    def watch(self, view: LiveView, stop: Stop) -> None:
        def phase(name: str, done: int, total: int) -> None:
            view.phase(name, done, total)
            stop.check()

        def note(text: str) -> None:
            view.note(text)
            log.info("%s", text)

        self.batches.watch(phase, note)
        self.learner.watch(phase, note)
        self.stop, view.asked_to_stop = stop, stop

    def begin(self) -> int:
        self.learner.drawn = self.batches.state()
        self.home.begin(self.learner.about())
        return 1

    def resume(self) -> int:
        """Continue from the newest undamaged checkpoint, or begin; return the next step."""
        checkpoint = self.learner.restore()
        if checkpoint is None:
            return self.begin()
        self.batches.restore(checkpoint.step, self.learner.drawn, resumed=True)
        return self.learner.go_on(checkpoint)

    def step(self, step: int) -> Record:
        """Make one training step; return its record with any due evaluation."""
        began = time.monotonic()
        with self.stop.droppable():
            metrics_before = self.batches.before(step, self.learner.version)
            self.batches.step(step, self.learner.version)
        if self.cfg.rollout.release_cache:
            self.rollouts.release()
        metrics = self.learner.step(step)
        metrics |= around(metrics_before, self.batches.after(step, self.learner.version))
        return self.learner.record(step, metrics, began)

    def checkpoint(self, step: int) -> None:
        self.learner.checkpoint(step)

    def drop(self, step: int) -> None:
        self.learner.enter(step - 1)
        self.checkpoint(step - 1)

    def end(self, reason: NoSignal) -> None:
        step = self.learner.made
        self.learner.enter(step)  # the failed step may have begun a stage
        self.finish(step)
        log.warning(
            "the run ends after step %d of %d: %s. Resumed, it goes on with dapo.no_signal go_on, "
            "with more dapo.max_rounds or without dapo.dynamic_sampling",
            step,
            self.cfg.train.max_steps,
            reason,
        )

    def finish(self, step: int) -> None:
        self.batches.orchestrator.rollout_buffer.recall()
        if unjudged := self.batches.orchestrator.errors.unjudged():
            log.warning(unjudged)
        self.learner.finish(step)
