"""A whole run in one process: orchestrator, engine and trainer, joined by the in-memory channel at
async level 0.

    for step in 1..max_steps:
        orchestrator.step(step)      rollouts of policy version step - 1, scored, on the channel
        trainer.step()               learns from them, and publishes version `step` into the engine

The run folder holds config.yaml, metrics.jsonl (a record a step), rollouts/ (every token, log-prob
and reward), checkpoints/, logs/, report material, and final/ (the trained model or adapter). A
checkpoint holds both halves, the learner's and the orchestrator's, in one commit, so a resumed run
repeats the uninterrupted one bit for bit.
"""

from __future__ import annotations

import gc
import logging
import resource
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lowroll.checkpoint.store import check_pieces
from lowroll.config import RunConfig
from lowroll.engine.base import Engine
from lowroll.kv.capacity import NoRoom, Workload
from lowroll.metrics.live import LiveView
from lowroll.metrics.record import Record, Recorder, read
from lowroll.model import hf
from lowroll.orchestrator.client import PhaseProgress
from lowroll.orchestrator.errors import NoSignal
from lowroll.orchestrator.loop import Orchestrator
from lowroll.runs import build, identity
from lowroll.runs.attempt import RunResult, attempt, drive
from lowroll.runs.evaluate import around, held_out
from lowroll.runs.export import newest_batch, publish_adapter
from lowroll.runs.folder import RunFolder
from lowroll.runs.stop import Stop, polite_stop
from lowroll.trainer.guard import rescale
from lowroll.trainer.loop import Trainer
from lowroll.trainer.muon import hidden_matrices
from lowroll.trainer.optim import Optimizer
from lowroll.trainer.probe import probe
from lowroll.transport.memory import MemoryRolloutChannel
from lowroll.transport.rollout_log import write_rollouts
from lowroll.types import Batch
from lowroll.weights.aligned import realign
from lowroll.weights.noise import share
from lowroll.weights.publish import digest
from lowroll.weights.update import WeightUpdate
from lowroll.weights.watch import AdapterWatch, WeightWatch

log = logging.getLogger(__name__)

# share of tokens, or of sequences, that an objective may silence before any update
MOST_SILENT = 0.5
MAX_WIDENED = 4
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
    cfg, texts = build.configuration(config, overrides or {})
    cfg = cfg.resolved()
    last = cfg.train.max_steps
    with ExitStack() as stack:
        home = stack.enter_context(attempt(cfg, "grpo", resume, overwrite))
        home.keep(texts)
        folder = home.path
        session = Session(cfg, stack, resume)
        first = session.resume() if resume else session.begin()
        view = stack.enter_context(LiveView(last, f"{folder}: {cfg.algorithm}, {cfg.correction}"))
        stop = stack.enter_context(polite_stop())
        session.watch(view, stop)

        def show(record: Record) -> str:
            view.step(record)
            return view.line()

        try:
            signal = drive(session, first, last, cfg.ckpt.interval, show, stop)
        except NoSignal as reason:
            session.end(reason)
            return RunResult(folder, read(folder), ended=str(reason))
    return RunResult(folder, read(folder), signal=signal)


class Session:
    """The parts of one run, joined. With `resume`, ValueError when the newest checkpoint is another
    run's."""

    def __init__(self, cfg: RunConfig, stack: ExitStack, resume: bool = False) -> None:
        self.given, self.home, self.folder = cfg, RunFolder(cfg, "grpo"), Path(cfg.output_dir)
        self.saved = self.home.find() if resume else None
        self.where = build.place(cfg)
        self.model = build.learner(cfg, self.where)
        self.base_digest = digest(self.model)
        build.check_stages(cfg, self.model)
        self.chat = build.tokenizer(cfg.model)
        self.envs = build.environments(cfg.env, cfg.seed)
        self.eval_envs = build.environments(cfg.eval.env, cfg.seed) if cfg.eval.env else self.envs
        self.engine = self._first_engine()
        self.cfg = cfg = build.with_cache(cfg, self.engine.stats().cache_tokens)
        build.check_stages(cfg, self.model)
        build.check_prompts(cfg, self.model, self.chat, self.envs)
        self.stage = cfg  # the settings of the current step
        self.scorer = stack.enter_context(build.scorer(cfg, cfg.env))
        self.eval_scorer = (
            stack.enter_context(build.scorer(cfg, cfg.eval.env))
            if cfg.eval.env and cfg.eval.interval
            else self.scorer
        )
        channel = MemoryRolloutChannel()
        self.orchestrator = Orchestrator(
            build.orchestrator_settings(cfg, self.model),
            self.envs,
            self.engine,
            self.scorer,
            self.chat,
            channel,
            rollout_log=self._log_rollouts,
        )
        self.noise = build.noise_schedule(cfg)
        optimizer = Optimizer(
            self.model.trainable_parameters(),
            build.optim_settings(cfg),
            hidden_matrices(self.model),
        )
        self.trainer = Trainer(
            self.model,
            optimizer,
            build.learn_settings(cfg),
            channel,
            self._publish,
            reference=build.reference(cfg, self.where),
            critic=build.critic(cfg, self.where, self.chat),
            teacher=build.teacher(cfg, self.where, self.chat),
            save_offending=self._save_offending,
            before_first=self._first_look,
            deadline_s=60.0,
        )
        self.inputs = dict(self.home.inputs)
        if self.trainer.teacher is not None:
            self.inputs[identity.TEACHER] = digest(self.trainer.teacher)
        self.recorder: Recorder
        self.watch_weights = self._weight_watch()
        self.guard = build.guard(cfg)
        self.widened = 0  # doublings of the exponent of what `correction: auto` chose
        self.on_note: Callable[[str], object] = log.info
        self.on_phase: PhaseProgress | None = None
        self.stop = Stop()
        self.made = 0  # the last step
        self._before: dict[
            str, Any
        ] = {}  # the orchestrator's state, before the step that is being made
        self._saved_at: int | None = None
        self._saving_s: dict[str, float] = {}  # time/checkpoint, for the next record

    def watch(self, view: LiveView, stop: Stop) -> None:
        """Report progress within a step to a live view, and heed the wish to stop."""

        def phase(name: str, done: int, total: int) -> None:
            view.phase(name, done, total)
            stop.check()

        def note(text: str) -> None:
            view.note(text)
            log.info("%s", text)

        self.orchestrator.on_phase = self.trainer.on_phase = self.on_phase = phase
        self.on_note, self.stop, view.asked_to_stop = note, stop, stop

    def begin(self) -> int:
        """Start a new run: write what describes it. Returns the first step."""
        self.recorder = self.home.begin(build.about(self.cfg, self.where, self.model))
        return 1

    def resume(self) -> int:
        """Continue from the newest undamaged checkpoint. Returns the next step; ValueError when it
        is another run's.

        A run that ended before its first checkpoint begins again.
        """
        saved, self.saved = self.saved, None
        if saved is None:
            log.warning("the run ended before its first checkpoint; it begins again with step 1")
            return self.begin()
        self.home.check_base(saved, self.base_digest)
        identity.refuse_other_files(saved.meta["read"], self.inputs)
        check_pieces("checkpoint", saved.state, STATE)
        if (saved.state["trainer"].get("last_step") or 0) != saved.step:
            raise ValueError(f"{saved.path}: trainer state: last_step is not {saved.step}")
        self.trainer.restore(saved.tensors, saved.state["trainer"])
        self._enter(saved.step)
        self.orchestrator.restore(saved.state["orchestrator"])
        self.widened = saved.state["widened"]
        self._restore_guard(saved.state["guard"])
        self._publish(self.trainer.version)
        self.recorder = self.home.resume(saved.step, build.about(self.cfg, self.where, self.model))
        self.made = self._saved_at = saved.step
        log.info("resumed after step %d", saved.step)
        return saved.step + 1

    def _first_engine(self) -> Engine:
        """The engine, with a cache for what the run will ask of it; a resumed run's has the size
        that it began with."""
        if self.saved is None:
            return build.engine(
                self.given, self.where, self.model, self.chat, workloads=self._workloads()
            )
        cfg = build.with_cache(self.given, self.saved.meta["cache_tokens"])
        try:
            return build.engine(cfg, self.where, self.model, self.chat)
        except NoRoom as error:
            raise ValueError(
                f"resume: a run keeps the KV cache that it began with: rollout.{error}"
            ) from None

    def _workloads(self) -> list[Workload]:
        return build.workloads(self.given, self.model, self.chat, self.envs, self.eval_envs)

    def step(self, step: int) -> Record:
        """One training step, its record and, when due, its evaluation."""
        began = time.monotonic()
        self._before = self.orchestrator.state()
        stage = self._enter(step)
        with self.stop.droppable():
            first = self._evaluate_before(step)
            batch = self.orchestrator.step(step, self.trainer.version)
        if self.cfg.rollout.release_cache:
            self.engine.release()
        price = {"rollout/weight_bits": self.engine.stats().weight_bits}
        sigma = (
            {}
            if self.noise is None
            else {"rollout/noise_sigma": self.noise.sigma(self.trainer.version)}
        )
        metrics = batch.stats | stage | price | sigma | self.trainer.step()
        metrics |= self._watch_over(metrics)
        last = step == self.cfg.train.max_steps
        due = self.cfg.eval.interval and (last or step % self.cfg.eval.interval == 0)
        metrics |= around(first, self.evaluate(sampled=last) if due else {})
        metrics |= self._performance(batch, metrics) | self._saving_s
        metrics["time/step"] = time.monotonic() - began + sum(self._saving_s.values())
        self._saving_s = {}
        record = self.home.space.write(
            self.recorder.path, lambda: self.recorder.write(step, metrics)
        )
        self.made = step
        return record

    def _evaluate_before(self, step: int) -> dict[str, float]:
        """`eval/*` of the policy that the run begins with; nothing before later steps."""
        if not self.cfg.eval.interval or step > 1:
            return {}
        self.on_note(
            "evaluating the policy before step 1 (eval.interval: null leaves evaluations out)"
        )
        return self.evaluate(sampled=True)

    def evaluate(self, sampled: bool) -> dict[str, float]:
        """`eval/*` of the current policy in the rollout precision, without noise, on the test
        splits; with `sampled`, drawn as the rollouts too."""
        began = time.monotonic()
        noisy = self.engine.behavior.noise_sigma > 0
        if noisy:
            self.engine.update_weights(WeightUpdate.local(self.model, self.trainer.version))
        metrics = held_out(
            self.stage,
            self.eval_envs,
            self.engine,
            self.eval_scorer,
            self.chat,
            sampled=sampled,
            max_prompt_tokens=self.orchestrator.settings.max_prompt_tokens,
            on_phase=self.on_phase,
        )
        self.engine.reset_prefix_cache()  # a resumed run has none of their pages
        if noisy:
            self._update_weights(self.trainer.version)
        return metrics | {"time/eval": time.monotonic() - began}

    def checkpoint(self, step: int) -> None:
        """Both halves of the run after `step`, in one atomic folder."""
        if self._saved_at == step:
            return
        began = time.monotonic()
        tensors, trainer = self.trainer.state()
        state = {
            "trainer": trainer,
            "orchestrator": self.orchestrator.state(),
            "guard": self.guard and self.guard.state(),
            "widened": self.widened,
        }
        self.home.save(
            step,
            tensors,
            state,
            {
                "base": self.base_digest,
                "read": self.inputs,
                "cache_tokens": self.engine.stats().cache_tokens,
            },
        )
        self._saved_at, self._saving_s = step, {"time/checkpoint": time.monotonic() - began}
        log.info("checkpoint of step %d", step)

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
            "with more "
            "dapo.max_rounds or without dapo.dynamic_sampling",
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
            self.engine.release()
            publish_adapter(self.cfg, self.model, target, newest_batch(self.folder, step), step)
        else:
            hf.save(self.model, target, hf.resolve(self.cfg.model), step)

    def _enter(self, step: int) -> dict[str, float]:
        """Go over to the settings of the step's stage; returns its metrics, none in a run without
        stages."""
        if not self.cfg.stages:
            return {}
        self.stage = self.cfg.at(step)
        self.orchestrator.enter(build.orchestrator_settings(self.stage, self.model))
        length = self.stage.objective_options["max_length"]
        self.trainer.settings = replace(
            self.trainer.settings, options={**self.trainer.settings.options, "max_length": length}
        )
        return {
            "rollout/stage": 1.0 + sum(stage.step <= step for stage in self.cfg.stages),
            "rollout/max_tokens": float(self.stage.rollout.max_tokens),
        }

    def _publish(self, version: int) -> dict[str, float]:
        self._update_weights(version)
        return {} if self.watch_weights is None else self.watch_weights.measure()

    def _update_weights(self, version: int) -> None:
        """Weights and noise of `version` for the engine; the noise for the learner too, when they
        share it."""
        noise = None if self.noise is None else self.noise.at(version)
        self.engine.update_weights(WeightUpdate.local(self.model, version, noise))
        if self.cfg.noise is not None and self.cfg.noise.learner == "shared":
            share(self.model, noise)

    def _first_look(self, batch: Batch) -> dict[str, float]:
        """The mismatch before the first update, against the objective's thresholds; those of `auto`
        are widened."""
        first = probe(self.model, batch, self.trainer.settings)
        if first is None:
            return {}
        silent = first.silent(self.trainer.settings.options)
        for line in first.findings(self.trainer.settings.options):
            self.on_note(line)
        while (
            max(silent.values()) > MOST_SILENT
            and self.cfg.chosen_options
            and self.widened < MAX_WIDENED
        ):
            self.widened += 1
            self._set_options()
            silent = first.silent(self.trainer.settings.options)
        if self.widened:
            chosen = ", ".join(
                f"{name} {self.trainer.settings.options[name]:.3g}"
                for name in self.cfg.chosen_options
            )
            log.warning(
                "the mismatch silences over half of the batch: %s in the place of what auto chose",
                chosen,
            )
        if max(silent.values()) > MOST_SILENT:
            log.warning(
                "correction %s silences %.0f %% of the tokens and %.0f %% of the sequences before "
                "the first "
                "update: its thresholds are narrower than the mismatch of the rollouts",
                self.cfg.correction,
                *(100 * share for share in silent.values()),
            )
        return first.spread | silent

    def _restore_guard(self, state: Mapping[str, Any] | None) -> None:
        """Go on with the bounds and the format of a checkpoint. ValueError when there is no guard
        to hold them."""
        if self.guard is None and state and (state["fallbacks"] or state["tightened"]):
            raise ValueError(
                f"guard: the run went on with {state['weights']} rollouts and bounds tightened "
                f"{state['tightened']} times; keep a guard section (action: warn leaves it so)"
            )
        if self.guard is not None and state:
            self.guard.restore(state)
            if self.guard.fallbacks:
                self._change_format(self.guard.weights)
        self._set_options()

    def _watch_over(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """The guard's look at a step; what it decides holds from the next one on."""
        if self.guard is None:
            return {}
        before = (self.guard.tightened, self.guard.weights)
        values, told = self.guard.look(metrics)
        for line in told:
            log.warning("guard: step %d: %s", self.trainer.last_step, line)
        if before[0] != self.guard.tightened:
            self._set_options()
        if before[1] != self.guard.weights:
            self._change_format(self.guard.weights)
            self._update_weights(self.trainer.version)
        return values

    def _set_options(self) -> None:
        """The objective's options as the configuration, the first look and the guard want them."""
        options = self.stage.objective_options
        if self.widened:
            options = rescale(options, 2.0**self.widened, self.cfg.chosen_options)
        if self.guard is not None and self.guard.tightened:
            options = rescale(options, self.guard.settings.factor**self.guard.tightened)
        self.trainer.settings = replace(self.trainer.settings, options=options)

    def _change_format(self, weights: str) -> None:
        """Another engine in the place of the old one, which is gone before the new one takes its
        memory."""
        if self.cfg.train.forward == "aligned":
            realign(self.model, build.rollout_format(self.cfg, self.where, weights))
        del self.engine, self.orchestrator.engine, self.watch_weights
        gc.collect()  # the engine and its scheduler hold each other
        try:
            self.engine = build.engine(self.cfg, self.where, self.model, self.chat, weights)
        except NoRoom as error:
            smaller = build.with_cache(self.cfg, None)
            self.engine = build.engine(
                smaller, self.where, self.model, self.chat, weights, self._workloads()
            )
            log.warning(
                "beside %s weights the KV cache is smaller than before, of %d tokens: %s",
                weights,
                self.engine.stats().cache_tokens,
                error,
            )
        self.orchestrator.engine = self.engine
        self.watch_weights = self._weight_watch()

    def _weight_watch(self) -> WeightWatch | AdapterWatch | None:
        if not self.cfg.train.weight_metrics:
            return None
        if self.cfg.train.lora:
            return AdapterWatch(self.model)
        held = self.engine.linear_weights()
        return WeightWatch(self.model, held) if held else None

    def _log_rollouts(self, batch: Batch) -> None:
        folder = self.folder / "rollouts"
        self.home.space.write(folder, lambda: write_rollouts(folder, batch))

    def _save_offending(self, batch: Batch) -> None:
        folder = self.folder / "offending"
        path = self.home.space.write(folder, lambda: write_rollouts(folder, batch))
        log.error(
            "step %d: the update was not finite and was skipped; its batch is in %s",
            batch.step,
            path,
        )

    def _performance(self, batch: Batch, metrics: Mapping[str, float]) -> dict[str, float]:
        cuda, stats = self.where.device.type == "cuda", self.engine.stats()
        peak = (
            torch.cuda.max_memory_allocated() + stats.virtual_memory_bytes
            if cuda
            else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        )
        return {
            "perf/generate_tokens_per_second": metrics["rollout/tokens"]
            / max(metrics["time/generate"], 1e-9),
            "perf/peak_memory_gb": peak / 1e9,
            "perf/kv_pages_peak": float(stats.pages_peak),
            "perf/prefix_hits": float(stats.prefix_hits),
        }
