"""The trainer's loop: learn from a batch, publish a policy version.

It waits for a batch on the rollout channel, at most `deadline_s` seconds. The step after version n
makes version n + 1.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from lowroll.checkpoint.store import check_pieces
from lowroll.model.transformer import Transformer
from lowroll.trainer import state as states
from lowroll.trainer.critic import Critic
from lowroll.trainer.optim import Optimizer
from lowroll.trainer.packing import num_fed
from lowroll.trainer.step import LearnSettings, TrainingDiverged, learn
from lowroll.transport.base import RolloutReceiver
from lowroll.types import Batch


class Trainer:
    """A learner from the batches of a channel.

    `publish(version)` gives the weights to the engine; it may return metrics.
    `save_offending(batch)` keeps a batch with a non-finite update. `before_first(batch)` runs
    before the run's first update and returns metrics.
    """

    def __init__(
        self,
        model: Transformer,
        optimizer: Optimizer,
        settings: LearnSettings,
        channel: RolloutReceiver,
        publish: Callable[[int], Mapping[str, float] | None],
        *,
        reference: Transformer | None = None,
        critic: Critic | None = None,
        teacher: Transformer | None = None,
        save_offending: Callable[[Batch], object] = lambda batch: None,
        before_first: Callable[[Batch], Mapping[str, float]] | None = None,
        deadline_s: float = 3600.0,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.settings = settings
        self.channel = channel
        self.publish = publish
        self.reference = reference
        self.critic = critic
        self.teacher = teacher
        self.save_offending = save_offending
        self.before_first = before_first
        self.deadline_s = deadline_s
        self.on_phase: Callable[[str, int, int], object] = lambda phase, done, total: None
        self.version = 0
        self.last_step: int | None = None

    def receive(self) -> Batch:
        batch = self.channel.receive(self.deadline_s)
        if self.last_step is not None and batch.step <= self.last_step:
            raise ValueError(
                f"batch of step {batch.step}: step {self.last_step} was already learned from; a "
                "batch is consumed once and in order"
            )
        return batch

    def step(self, batch: Batch) -> dict[str, float]:
        """Learn from a batch, publish the next version, and return metrics."""
        started = time.monotonic()
        self.on_phase("learn", 0, self.settings.minibatches)
        metrics: dict[str, float] = {}
        if self.before_first is not None and self.last_step is None:
            metrics |= self.before_first(batch)
        metrics |= self._learn(batch)
        learned = time.monotonic()
        self.on_phase("publish", 0, 0)
        self.last_step = batch.step
        self.version += 1
        metrics |= self.publish(self.version) or {}
        published = time.monotonic()
        tokens = sum(num_fed(sample) for sample in batch.samples)
        return metrics | {
            "time/learn": learned - started,
            "time/publish": published - learned,
            "perf/learn_tokens_per_second": tokens / max(learned - started, 1e-9),
        }

    @property
    def in_parts(self) -> bool:
        """True if ranks hold shards, so that `state` is this rank's share."""
        critic = set() if self.critic is None else self.critic.optimizer.parts
        return bool(self.optimizer.parts | critic)

    def state(self) -> tuple[states.Tensors, dict[str, Any]]:
        """Return the state for a bitwise `restore`: tensors by file and name, and JSON data."""
        tensors, state = states.capture(self.model, self.optimizer, self.critic)
        return tensors, state | {"version": self.version, "last_step": self.last_step}

    def restore(
        self, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]
    ) -> None:
        """Restore `state`. The caller then publishes `version`."""
        state_pieces = ["optimizer", "uaq_scale", "version", "last_step"]
        tensor_pieces = ["model", "optimizer"]
        if "critic" in state or "critic" in tensors:
            state_pieces.append("critic")
            tensor_pieces.append("critic_optimizer")
        if "critic" in tensors:
            tensor_pieces.append("critic")
        check_pieces("trainer state", state, state_pieces)
        check_pieces("trainer tensors", tensors, tensor_pieces)
        states.restore(self.model, self.optimizer, tensors, state, self.critic)
        self.version, self.last_step = state["version"], state["last_step"]

    def _learn(self, batch: Batch) -> dict[str, float]:
        try:
            metrics = learn(
                self.model,
                batch,
                self.optimizer,
                self.settings,
                self.reference,
                self.critic,
                self.teacher,
                on_update=lambda done, total: self.on_phase("learn", done, total),
            )
        except TrainingDiverged:
            self.save_offending(batch)
            raise
        if metrics["optim/skipped"] or metrics.get("critic/skipped"):
            self.save_offending(batch)
        return metrics
