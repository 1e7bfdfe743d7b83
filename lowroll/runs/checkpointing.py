"""The checkpoints that a run resumes from and writes.

How a run resumes: `Checkpointing` finds the newest undamaged checkpoint and checks that it is this
run's; `learner.Learner.restore` loads it into `trainer.loop.Trainer` (weights, optimizer moments:
`trainer.state`), and `batches.BatchSource.restore` sets the orchestrator's ledger, so that the next
step draws what it would have drawn.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Any

import yaml

from lowroll.checkpoint.publish import read_meta
from lowroll.checkpoint.store import Checkpoint, check_pieces
from lowroll.parallel.ranks import ALONE, Ranks
from lowroll.runs import identity
from lowroll.runs.folder import CONFIG, RunFolder
from lowroll.trainer import sharded_checkpoint

log = logging.getLogger(__name__)

Tensors = dict[str, dict[str, Any]]
State = dict[str, Any]
META = (
    "command",
    "config",
    "base",
    "read",
    "step",
    "tensors",
)  # keys of a checkpoint other than its state


class Checkpointing:
    """The checkpoints of one run. With `resume`, `found` is the one to continue; ValueError when it
    is another run's."""

    def __init__(self, home: RunFolder, resume: bool) -> None:
        self.home = home
        self.found = self._find() if resume else None
        self.base = ""
        self.inputs: dict[str, str] = {}
        self._newest: int | None = None  # step
        self._seconds: dict[str, float] = {}

    @cached_property
    def _own_inputs(self) -> dict[str, str]:
        return identity.run_inputs(self.home.cfg, self.home.command)

    def _find(self) -> Checkpoint | None:
        """Return the checkpoint to continue; None when the run begins again."""
        home = self.home
        if home.command == "sft":
            steps_key, num_steps, required_keys = "sft.steps", home.cfg.sft.steps, {*META}
        else:
            steps_key, num_steps = "train.max_steps", home.cfg.train.max_steps
            required_keys = {*META, "cache_tokens"}
        try:
            checkpoint = home.store.load(home.asked_step, verified=home.verified)
        except FileNotFoundError as error:
            if home.asked_step is not None:
                raise ValueError(f"ckpt.resume_step: {error}") from None
            if home.has_steps():
                identity.refuse_other_settings(self._written(), home.cfg, of="the run")
            return None
        check_pieces(
            "checkpoint",
            {"read": None, "cache_tokens": None, **checkpoint.meta},
            {*META, "cache_tokens"},
        )
        saved_settings = yaml.safe_load(checkpoint.meta["config"])
        identity.refuse_other_settings(
            saved_settings, home.cfg, self._may_change(checkpoint, saved_settings)
        )
        saved_inputs = checkpoint.meta.get("read")
        identity.refuse_other_files(
            saved_inputs
            and {name: saved_inputs[name] for name in saved_inputs if name != identity.TEACHER},
            self._own_inputs,
        )
        check_pieces("checkpoint", checkpoint.meta, required_keys)
        if num_steps < checkpoint.step:
            raise ValueError(
                f"{steps_key}: {num_steps}, and the run has made {checkpoint.step} steps"
            )
        return checkpoint

    def _written(self) -> dict[str, Any]:
        """Return the settings in config.yaml. ValueError when it is damaged."""
        path = self.home.path / CONFIG
        try:
            settings = yaml.safe_load(path.read_bytes())
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise ValueError(
                f"{path}: damaged, and there is no checkpoint to go on with: --overwrite begins "
                f"again ({' '.join(str(error).split())})"
            ) from error
        if not isinstance(settings, dict):
            raise ValueError(
                f"{path}: damaged, and there is no checkpoint to go on with: --overwrite begins "
                f"again"
            )
        return settings

    def _may_change(self, saved: Checkpoint, before: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the settings that may change too, after a run that ended for lack of a signal."""
        final_step = (read_meta(self.home.final) or {}).get("step")
        ended_early = final_step == saved.step < before["train"]["max_steps"]
        return identity.FOR_SIGNAL if ended_early else ()

    def identify(self, base: str, beside: Mapping[str, str] | None = None) -> None:
        """Set the digests of the initial weights and other inputs, which a resumed run must share."""
        self.base = base
        self.inputs = self._own_inputs | dict(beside or {})

    @property
    def cache_tokens(self) -> int | None:
        """Return the run's original KV cache size, or None."""
        return None if self.found is None else self.found.meta["cache_tokens"]

    def take(self) -> Checkpoint | None:
        """Return the checkpoint to continue, once."""
        checkpoint, self.found = self.found, None
        if checkpoint is None:
            log.warning("the run ended before its first checkpoint; it begins again with step 1")
            return None
        if checkpoint.meta["base"] != self.base:
            raise ValueError(
                f"model: the weights of {self.home.cfg.model} are not those that the run began with"
            )
        identity.refuse_other_files(checkpoint.meta["read"], self.inputs)
        self._newest = checkpoint.step
        return checkpoint

    def save(
        self,
        step: int,
        capture: Callable[[], tuple[Tensors, State]],
        ranks: Ranks = ALONE,
        **meta: object,
    ) -> None:
        """Save `capture()` after `step` in one atomic folder, unless it is saved already. ranks:
        hold shares of it."""
        if self._newest == step:
            return
        began = time.monotonic()
        tensors, state = capture()
        meta |= {"base": self.base, "read": self.inputs}
        if ranks.size == 1:
            self.home.save(step, tensors, state, meta)
        elif ranks.leads:
            save_checkpoint = partial(self.home.save, step, tensors, state, meta, ranks.size)
            sharded_checkpoint.lead(ranks, save_checkpoint)
        else:
            sharded_checkpoint.follow(ranks, tensors)
        self._newest = step
        self._seconds = {"time/checkpoint": time.monotonic() - began}
        log.info("checkpoint of step %d", step)

    def seconds(self) -> dict[str, float]:
        """Return `time/checkpoint` of a save since the last call, else {}."""
        seconds, self._seconds = self._seconds, {}
        return seconds
