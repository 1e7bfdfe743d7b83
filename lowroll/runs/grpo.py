"""A whole run in one process: orchestrator, engine and trainer, joined by the in-memory channel at
async level 0.

    for step in 1..max_steps:
        orchestrator.step(step)      rollouts of policy version step - 1, scored, on the channel
        trainer.step()               learns from them, and publishes version `step` into the engine

The run folder holds config.yaml, metrics.jsonl (a record a step), rollouts/ (every token, log-prob
and reward), checkpoints/, logs/, report material, and final/ (the trained model or adapter). A
checkpoint holds both halves, the learner's and the orchestrator's, in one commit, so a resumed run
repeats the uninterrupted one bit for bit; with rollouts of vLLM it goes on from the same state, and
draws other tokens (docs/usage.md).
"""

from __future__ import annotations

import logging
import resource
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from lowroll.checkpoint.store import check_pieces
from lowroll.config import RunConfig
from lowroll.engine.base import EngineStats
from lowroll.envs import Environment
from lowroll.metrics.live import LiveView
from lowroll.metrics.record import Record, read
from lowroll.model import hf
from lowroll.model.tokenizer import ChatTokenizer
from lowroll.model.transformer import Transformer
from lowroll.orchestrator.errors import NoSignal
from lowroll.orchestrator.loop import Orchestrator
from lowroll.runs import identity
from lowroll.runs.attempt import RunResult, attempt, drive
from lowroll.runs.build import (
    configuration,
    engines,
    environments,
    models,
    orchestrator,
    prompts,
    trainer,
)
from lowroll.runs.build.about import about
from lowroll.runs.build.compute import Compute
from lowroll.runs.checkpointing import Checkpointing, State, Tensors
from lowroll.runs.evaluate import Evaluations, around
from lowroll.runs.export import newest_batch, publish_adapter
from lowroll.runs.folder import RunFolder
from lowroll.runs.memory import fit
from lowroll.runs.memory.plan import Planner
from lowroll.runs.monitor import Monitor
from lowroll.runs.rollouts import RolloutEngine
from lowroll.runs.stages import Stages
from lowroll.runs.stop import Stop, polite_stop
from lowroll.runs.terminal import tell
from lowroll.trainer.loop import Trainer
from lowroll.trainer.muon import hidden_matrices
from lowroll.trainer.optim import Optimizer
from lowroll.trainer.probe import probe
from lowroll.transport.base import RolloutChannel
from lowroll.transport.memory import MemoryRolloutChannel
from lowroll.types import Batch
from lowroll.weights.publish import digest

log = logging.getLogger(__name__)

STATE = ("trainer", "orchestrator", "guard", "widened")  # of a checkpoint


def run(
    config: str | Path | RunConfig | Mapping[str, object],
    overrides: Mapping[str, object] | None = None,
    *,
    resume: bool = False,
    overwrite: bool = False,
) -> RunResult:
    """Train as a YAML file, a nested mapping of the same keys or a RunConfig says; returns the run
    folder and its records. overrides: dotted keys, {"train.max_steps": 20}.

    In Python the `id` of an environment may be a class, also one of a notebook's cell: see
    `lowroll.envs.cells`.

    ValueError names what is wrong with the configuration, the model, the data or the run folder,
    before training starts. A folder that holds a run with steps is refused; with `resume`, its
    newest undamaged checkpoint is continued; with `overwrite`, what it made is replaced, and
    nothing else. SIGINT, SIGTERM and SIGHUP finish the step, write a checkpoint and return. A run
    for which dynamic sampling finds nothing to learn from any more finishes early.
    """
    cfg, texts = configuration.read(config, overrides or {})
    cfg = cfg.resolved()
    last = cfg.train.max_steps
    with ExitStack() as stack:
        home = stack.enter_context(attempt(cfg, "grpo", resume, overwrite))
        home.keep(texts)
        steps = Run(home, stack, resume)
        first = steps.resume() if resume else steps.begin()
        title = f"{home.path}: {cfg.algorithm}, {cfg.correction}"
        view = stack.enter_context(LiveView(last, title, every=cfg.logging_steps))
        stop = stack.enter_context(polite_stop())
        steps.watch(view, stop)

        def show(record: Record) -> str:
            view.step(record)
            return view.line()

        try:
            signal = drive(steps, first, last, cfg.ckpt.interval, show, stop)
        except NoSignal as reason:
            steps.end(reason)
            return RunResult(home.path, read(home.path), ended=str(reason))
    return RunResult(home.path, read(home.path), signal=signal)


class Run:
    """The parts of one run in one process, joined. With `resume`, ValueError when the newest
    checkpoint is another run's."""

    def __init__(self, home: RunFolder, stack: ExitStack, resume: bool = False) -> None:
        given = home.cfg
        self.home = home
        self.checkpoints = Checkpointing(home, resume)
        self.compute = Compute.of(given)
        engines.check(given)
        outline = models.outline("model", given.model, self.compute)
        spec = outline.spec
        prompts.check_stages(given, spec)
        chat = models.tokenizer(given.model)
        envs = environments.make(given.env, given.seed)
        eval_envs = envs
        if given.eval.env:
            eval_envs = environments.make(given.eval.env, given.seed)
        planner = self._planner(given, outline, chat, envs, eval_envs)
        cached = self.checkpoints.cache_tokens
        self.memory = fit.check(planner, given, cached)
        tell(*self.memory.lines())
        self.model = models.learner(given, self.compute)
        base = digest(self.model)
        self.rollouts = RolloutEngine(given, self.compute, self.model, chat, planner, cached)
        stack.callback(self.rollouts.close)
        self.cfg = cfg = self.rollouts.cfg
        prompts.check_stages(cfg, spec)
        prompts.check(cfg, spec, chat, envs)
        self.stages = Stages(cfg)
        self.monitor = Monitor(cfg)
        scorer = stack.enter_context(environments.scorer(cfg, cfg.env))
        eval_scorer = scorer
        if cfg.eval.env and cfg.eval.interval:
            eval_scorer = stack.enter_context(environments.scorer(cfg, cfg.eval.env))
        self.evaluations = Evaluations(cfg, self.rollouts, eval_envs, eval_scorer, chat)
        channel = MemoryRolloutChannel()
        self.orchestrator = Orchestrator(
            orchestrator.settings(cfg, spec),
            envs,
            self.rollouts,
            scorer,
            chat,
            channel,
            rollout_log=partial(home.keep_batch, "rollouts"),
        )
        self.trainer = self._trainer(chat, channel)
        teacher = self.trainer.teacher
        others = {} if teacher is None else {identity.TEACHER: digest(teacher)}
        self.checkpoints.identify(base, others)
        self.stop = Stop()
        self.made = 0  # the last step
        self._before: State = {}  # the orchestrator's, before the step that is being made

    def _planner(
        self,
        cfg: RunConfig,
        outline: Transformer,
        chat: ChatTokenizer,
        envs: Mapping[str, Environment],
        eval_envs: Mapping[str, Environment],
    ) -> Planner:
        """What plans the memory of the run, before there is anything of it."""
        uncached = engines.with_cache(cfg, None)
        works = engines.workloads(uncached, outline.spec, chat, envs, eval_envs)
        beside = {
            name: models.outline(key, source, self.compute)
            for name, (key, source) in models.beside(cfg).items()
        }
        return Planner.now(self.compute, outline, works, beside)

    def _trainer(self, chat: ChatTokenizer, channel: RolloutChannel) -> Trainer:
        cfg, model = self.cfg, self.model
        matrices = hidden_matrices(model)
        return Trainer(
            model,
            Optimizer(model.trainable_parameters(), trainer.optim(cfg), matrices),
            trainer.learn(cfg),
            channel,
            self.rollouts.publish,
            reference=models.reference(cfg, self.compute),
            critic=models.critic(cfg, self.compute, chat),
            teacher=models.teacher(cfg, self.compute, chat),
            save_offending=self._save_offending,
            before_first=self._first_look,
            deadline_s=60.0,
        )

    def watch(self, view: LiveView, stop: Stop) -> None:
        """Report progress within a step to a live view, and heed the wish to stop."""

        def phase(name: str, done: int, total: int) -> None:
            view.phase(name, done, total)
            stop.check()

        def note(text: str) -> None:
            view.note(text)
            log.info("%s", text)

        self.orchestrator.on_phase = self.trainer.on_phase = self.evaluations.on_phase = phase
        self.monitor.on_note = self.evaluations.on_note = note
        self.stop, view.asked_to_stop = stop, stop

    def begin(self) -> int:
        """Start a new run: write what describes it. Returns the first step."""
        self.home.begin(about(self.cfg, self.compute, self.model.spec))
        return 1

    def resume(self) -> int:
        """Continue from the newest undamaged checkpoint. Returns the next step; ValueError when it
        is another run's.

        A run that ended before its first checkpoint begins again.
        """
        saved = self.checkpoints.take()
        if saved is None:
            return self.begin()
        check_pieces("checkpoint", saved.state, STATE)
        if (saved.state["trainer"].get("last_step") or 0) != saved.step:
            raise ValueError(f"{saved.path}: trainer state: last_step is not {saved.step}")
        self.trainer.restore(saved.tensors, saved.state["trainer"])
        self._enter(saved.step)
        self.orchestrator.restore(saved.state["orchestrator"])
        self.monitor.restore(saved.state)
        self._heed_monitor()
        self.rollouts.publish(self.trainer.version)
        self.home.resume(saved.step, about(self.cfg, self.compute, self.model.spec))
        self.made = saved.step
        log.info("resumed after step %d", saved.step)
        return saved.step + 1

    def step(self, step: int) -> Record:
        """One training step, its record and, when due, its evaluation."""
        began = time.monotonic()
        self._before = self.orchestrator.state()
        stage = self._enter(step)
        with self.stop.droppable():
            first = self.evaluations.before(step, self.stages.now, self.trainer.version)
            batch = self.orchestrator.step(step, self.trainer.version)
        if self.cfg.rollout.release_cache:
            self.rollouts.engine.release()
        drawn = self.rollouts.metrics(self.trainer.version, batch)
        metrics = batch.stats | stage | drawn | self.trainer.step()
        metrics |= self.monitor.look(step, metrics)
        self._heed_monitor()
        then = self.evaluations.after(step, self.stages.now, self.trainer.version)
        metrics |= around(first, then)
        saving = self.checkpoints.seconds()
        stats = self.rollouts.engine.stats()
        metrics |= _performance(self.compute.device, stats, metrics) | saving
        metrics["time/step"] = time.monotonic() - began + sum(saving.values())
        record = self.home.record(step, metrics)
        self.made = step
        return record

    def checkpoint(self, step: int) -> None:
        """Both halves of the run after `step`, in one atomic folder."""
        self.checkpoints.save(step, self._state, cache_tokens=self.rollouts.cache_tokens)

    def _state(self) -> tuple[Tensors, State]:
        tensors, state = self.trainer.state()
        halves = {"trainer": state, "orchestrator": self.orchestrator.state()}
        return tensors, halves | self.monitor.state()

    def drop(self, step: int) -> None:
        """A checkpoint of the step before one that was begun and not finished."""
        self._enter(step - 1)
        self.orchestrator.restore(self._before)
        self.checkpoint(step - 1)

    def end(self, reason: NoSignal) -> None:
        """Finish before the last step."""
        step = self.made
        self._enter(step)  # the step that could not be made may have begun a stage
        self.finish(step)
        log.warning(
            "the run ends after step %d of %d: %s. Resumed, it goes on with dapo.no_signal go_on, "
            "with more dapo.max_rounds or without dapo.dynamic_sampling",
            step,
            self.cfg.train.max_steps,
            reason,
        )

    def finish(self, step: int) -> None:
        """The last checkpoint, that of `step`, and the trained model (or adapter) as a Hugging Face
        folder."""
        self.checkpoint(step)
        self.home.publish(partial(self._save_final, step))

    def _save_final(self, step: int, target: Path) -> None:
        if self.cfg.train.lora:
            self.rollouts.engine.release()
            batch = newest_batch(self.home.path, step)
            publish_adapter(self.cfg, self.model, target, batch, step)
        else:
            hf.save(self.model, target, hf.resolve(self.cfg.model), step)

    def _enter(self, step: int) -> dict[str, float]:
        """Go over to the settings of the step's stage; returns its metrics, none in a run without
        stages."""
        if self.stages.enter(step):
            self.orchestrator.enter(orchestrator.settings(self.stages.now, self.model.spec))
            self._set_options()
        return self.stages.metrics(step)

    def _first_look(self, batch: Batch) -> dict[str, float]:
        """The mismatch before the first update, which may widen the objective's thresholds."""
        first = probe(self.model, batch, self.trainer.settings)
        metrics = self.monitor.first_look(first, self.stages.now)
        self._set_options()
        return metrics

    def _heed_monitor(self) -> None:
        """The next step is done with the bounds and the format that the monitor wants."""
        self._set_options()
        if self.monitor.weights != self.rollouts.weights:
            self.rollouts.change_format(self.monitor.weights)
            self.rollouts.update(self.trainer.version)

    def _set_options(self) -> None:
        options = self.monitor.options(self.stages.now)
        self.trainer.settings = replace(self.trainer.settings, options=options)

    def _save_offending(self, batch: Batch) -> None:
        path = self.home.keep_batch("offending", batch)
        log.error(
            "step %d: the update was not finite and was skipped; its batch is in %s",
            batch.step,
            path,
        )


def _performance(
    device: torch.device, stats: EngineStats, metrics: Mapping[str, float]
) -> dict[str, float]:
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated() + stats.virtual_memory_bytes
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "perf/generate_tokens_per_second": metrics["rollout/tokens"]
        / max(metrics["time/generate"], 1e-9),
        "perf/peak_memory_gb": peak / 1e9,
        "perf/kv_pages_peak": float(stats.pages_peak),
        "perf/prefix_hits": float(stats.prefix_hits),
    }
