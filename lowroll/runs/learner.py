"""The learning half of a run: model, trainer, mismatch monitor, checkpoints and records.

One process joins it to `runs.batches`; as a role it is `lowroll train`.
"""

from __future__ import annotations

import json
import logging
import resource
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from lowroll.checkpoint.store import Checkpoint, check_pieces
from lowroll.config import RunConfig
from lowroll.metrics.record import Record
from lowroll.model import hf
from lowroll.model.folder import resolve
from lowroll.model.tokenizer import ChatTokenizer
from lowroll.model.transformer import Transformer
from lowroll.orchestrator.interfaces import PhaseProgress
from lowroll.parallel.ranks import ALONE, Ranks
from lowroll.quant.format_budget import is_budget
from lowroll.runs import chosen_formats, identity
from lowroll.runs.assembly import models, trainer
from lowroll.runs.assembly.compute import Compute
from lowroll.runs.assembly.description import about
from lowroll.runs.checkpointing import Checkpointing, State, Tensors
from lowroll.runs.monitor import Monitor
from lowroll.runs.policy_gap import excerpt, newest_batch, publish_adapter
from lowroll.runs.setup_faults import suspects
from lowroll.runs.stages import Stages
from lowroll.trainer.guard import Guard
from lowroll.trainer.loop import Trainer
from lowroll.trainer.mismatch_probe import probe
from lowroll.trainer.muon import hidden_matrices
from lowroll.trainer.optim import Optimizer
from lowroll.transport.base import RolloutReceiver
from lowroll.types import Batch
from lowroll.weights.publish import digest

log = logging.getLogger(__name__)

STATE = ("trainer", "orchestrator", "guard", "widened")  # of a checkpoint


class Publisher(Protocol):
    weights: str  # the format of the rollouts

    @property
    def cache_tokens(self) -> int | None: ...

    @property
    def hidden_bytes(self) -> int:
        """Return the engine's device memory that torch does not count."""
        ...

    def publish(self, version: int) -> Mapping[str, float]:
        """Publish the learner's weights; return `weights/*` of the changes."""
        ...

    def update(self, version: int) -> None: ...

    def change_format(self, weights: str) -> None: ...

    def release(self) -> None: ...


@dataclass(frozen=True)
class Policy:
    """The model that learns and its tokenizer. base: the digest of the initial weights."""

    model: Transformer
    base: str
    chat: ChatTokenizer
    compute: Compute
    ranks: Ranks = ALONE

    @classmethod
    def load(
        cls, cfg: RunConfig, chat: ChatTokenizer, compute: Compute, ranks: Ranks = ALONE
    ) -> Policy:
        """Load the model. ValueError as in `refuse_others`."""
        model = models.learner(cfg, compute)
        base_digest = digest(model)
        refuse_others(ranks, base_digest, cfg)
        return cls(ranks.shard(model), base_digest, chat, compute, ranks)


def refuse_others(ranks: Ranks, base: str, cfg: RunConfig) -> None:
    """Raise ValueError on a rank whose initial weights are not rank 0's."""
    if ranks.size > 1 and ranks.tell(base.encode()).decode() != base:
        raise ValueError(f"model: the weights of {cfg.model} here are not those of rank 0")


class Learner:
    """The learner of a run. All ranks make the same calls and follow rank 0's monitor. deadline_s:
    for a batch. whole: the model to be saved, if ranks hold parts; the publisher updates it."""

    def __init__(
        self,
        cfg: RunConfig,
        policy: Policy,
        checkpoints: Checkpointing,
        channel: RolloutReceiver,
        publisher: Publisher,
        deadline_s: float,
        whole: Transformer | None = None,
    ) -> None:
        self.cfg = cfg
        self.model = model = policy.model
        self.compute = compute = policy.compute
        self.ranks = ranks = policy.ranks
        self.chat = policy.chat
        self.checkpoints = checkpoints
        self.home = checkpoints.home
        self.whole = whole or model
        self.publisher = publisher
        self.stages = Stages(cfg)
        requested_weights = self.home.cfg.rollout.weights
        self.budget = requested_weights if is_budget(requested_weights) else ""
        self.monitor = Monitor(cfg, self.budget)
        teacher = models.teacher(cfg, compute, policy.chat)
        teacher_digest = {} if teacher is None else {identity.TEACHER: digest(teacher)}
        checkpoints.identify(policy.base, teacher_digest)
        reference = models.reference(cfg, compute)
        parameters = model.trainable_parameters()
        optimizer = Optimizer(parameters, trainer.optim(cfg), hidden_matrices(model), ranks=ranks)
        self.trainer = Trainer(
            model,
            optimizer,
            trainer.learn(cfg),
            channel,
            publisher.publish,
            reference=reference and ranks.shard(reference),
            critic=models.critic(cfg, compute, policy.chat, ranks),
            teacher=teacher and ranks.shard(teacher),
            save_offending=self._save_offending,
            before_first=self._first_look,
            deadline_s=deadline_s,
        )
        self.made = 0
        self._batch: Batch | None = None
        self.drawn: State = {}

    @property
    def version(self) -> int:
        return self.trainer.version

    def watch(self, phase: PhaseProgress, note: Callable[[str], object]) -> None:
        self.trainer.on_phase = phase
        self.monitor.on_note = note

    def about(self) -> Mapping[str, str]:
        return about(self.cfg, self.compute, self.model.spec)

    def restore(self) -> Checkpoint | None:
        """Restore the newest undamaged checkpoint, before `go_on`, or return None. ValueError for
        another run's."""
        checkpoint = self.checkpoints.take()
        if checkpoint is None:
            return None
        check_pieces("checkpoint", checkpoint.state, STATE)
        if (checkpoint.state["trainer"].get("last_step") or 0) != checkpoint.step:
            raise ValueError(
                f"{checkpoint.path}: trainer state: last_step is not {checkpoint.step}"
            )
        self.trainer.restore(checkpoint.tensors, checkpoint.state["trainer"])
        self.drawn = checkpoint.state["orchestrator"]
        self.enter(checkpoint.step)
        self.monitor.restore(checkpoint.state)
        return checkpoint

    def go_on(self, saved: Checkpoint) -> int:
        """Publish a restored checkpoint's weights, truncate the run folder, and return the next
        step."""
        self.heed_monitor()
        self.publisher.publish(self.version)
        self.home.resume(saved.step, self.about())
        chosen_formats.cut(self.home, saved.step)
        self.made = saved.step
        log.info("resumed after step %d", saved.step)
        return saved.step + 1

    def step(self, step: int) -> dict[str, float]:
        """Learn from the next batch; return the step's metrics."""
        batch = self.trainer.receive()
        stage = self.enter(step)
        metrics = batch.stats | stage | self.trainer.step(batch)
        self._batch = batch
        metrics |= self.monitor.look(step, metrics)
        self._agree()
        if batch.orchestrator is not None:
            self.drawn = batch.orchestrator
        self.heed_monitor()
        return metrics

    def record(self, step: int, metrics: dict[str, float], began: float) -> Record:
        """Write the record of a step. began: on the monotonic clock."""
        save_seconds = self.checkpoints.seconds()
        metrics |= {"perf/peak_memory_gb": self._peak_memory() / 1e9} | save_seconds
        metrics["time/step"] = time.monotonic() - began + sum(save_seconds.values())
        record = self.home.record(step, metrics)
        self.made = step
        return record

    def checkpoint(self, step: int) -> None:
        ranks = self.ranks if self.trainer.in_parts else ALONE
        self.checkpoints.save(step, self._state, ranks, cache_tokens=self.publisher.cache_tokens)

    def _state(self) -> tuple[Tensors, State]:
        tensors, state = self.trainer.state()
        return tensors, {"trainer": state, "orchestrator": self.drawn} | self.monitor.state()

    def finish(self, step: int) -> None:
        self.checkpoint(step)
        self.home.publish(partial(self._save_final, step))

    def _save_final(self, step: int, target: Path) -> None:
        if self.cfg.train.lora:
            self.publisher.release()
            batch = None if self._batch is None else excerpt(self._batch)
            batch = batch or newest_batch(self.home.path, step)
            publish_adapter(self.cfg, self.whole, target, batch, step)
        else:
            hf.save(self.whole, target, resolve(self.cfg.model), step)

    def enter(self, step: int) -> dict[str, float]:
        """Apply the settings of the step's stage; return its metrics."""
        if self.stages.enter(step):
            self._set_options()
        return self.stages.metrics(step)

    def _first_look(self, batch: Batch) -> dict[str, float]:
        initial_mismatch = probe(self.model, batch, self.trainer.settings, self.ranks)
        metrics = self.monitor.first_look(initial_mismatch, self.stages.now)
        if initial_mismatch is not None and self.ranks.size == 1:
            weights = self.compute.format(self.cfg.rollout.weights)
            for line in suspects(self.cfg, self.model, batch, initial_mismatch, self.chat, weights):
                log.warning("first batch: %s", line)
        self._agree()
        self._set_options()
        return metrics

    def _agree(self) -> None:
        if self.ranks.size > 1:
            leader_state = self.ranks.tell(json.dumps(self.monitor.state()).encode())
            self.monitor.restore(json.loads(leader_state))

    def heed_monitor(self) -> None:
        """Apply the monitor's bounds and format to the next step."""
        self._set_options()
        guard = self.monitor.guard
        if guard is not None and guard.wants_choice:
            self._choose_formats(guard)
        if self.monitor.weights != self.publisher.weights:
            self.publisher.change_format(self.monitor.weights)
            self.publisher.update(self.version)

    def _choose_formats(self, guard: Guard) -> None:
        samples = [] if self._batch is None else self._batch.samples
        choice = chosen_formats.again(self.home, self.budget, self.model, samples, self.version)
        if choice is None:
            guard.without_choice()
        else:
            guard.chosen(*choice)

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

    def _peak_memory(self) -> int:
        if self.compute.device.type == "cuda":
            return torch.cuda.max_memory_allocated() + self.publisher.hidden_bytes
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
