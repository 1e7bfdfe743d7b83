"""The checkpoints that a run resumes from and writes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Any

import yaml

from lowroll.checkpoint.atomic_folders import read_meta
from lowroll.checkpoint.store import Checkpoint, check_pieces
from lowroll.parallel.ranks import ALONE, Ranks
from lowroll.runs import identity
from lowroll.runs.folder import CONFIG, RunFolder

log = logging.getLogger(__name__)

Tensors = dict[str, dict[str, Any]]
State = dict[str, Any]
META = {"command", "config", "base", "read", "step", "tensors", "cache_tokens"}
SFT_META = META - {"cache_tokens"}


class Checkpointing:
    """The checkpoints of one run. `found` is the one to continue; ValueError when it is another
    run's."""

    def __init__(self, home: RunFolder, resume: bool) -> None:
        self.home = home
        self.found = self._find() if resume else None
        self.base = ""
        self.inputs: dict[str, str] = {}
        self._newest: int | None = None
        self._seconds: dict[str, float] = {}

    @cached_property
    def _own_inputs(self) -> dict[str, str]:
        return identity.run_inputs(self.home.cfg, self.home.command)

    def _find(self) -> Checkpoint | None:
        home = self.home
        try:
            checkpoint = home.store.load(home.asked_step, verified=home.verified)
        except FileNotFoundError as error:
            if home.asked_step is not None:
                raise ValueError(f"ckpt.resume_step: {error}") from None
            if home.has_steps():
                identity.refuse_other_settings(self._written(), home.cfg, of="the run")
            return None
        self._refuse_other_run(checkpoint)
        self._refuse_fewer_steps(checkpoint)
        return checkpoint

    def _refuse_other_run(self, checkpoint: Checkpoint) -> None:
        meta, cfg = checkpoint.meta, self.home.cfg
        # Pieces that older checkpoints lack are refused last, as the other reasons say more.
        later_pieces = {"read": None, "cache_tokens": None}
        check_pieces("checkpoint", {**later_pieces, **meta}, META)
        saved_settings = yaml.safe_load(meta["config"])
        may_change = self._may_change(checkpoint, saved_settings)
        identity.refuse_other_settings(saved_settings, cfg, may_change)
        saved_inputs = meta.get("read")
        if saved_inputs is not None:
            # `take` compares the teacher, which is loaded later
            saved_inputs = {k: v for k, v in saved_inputs.items() if k != identity.TEACHER}
        identity.refuse_other_files(saved_inputs, self._own_inputs)
        check_pieces("checkpoint", meta, SFT_META if self.home.command == "sft" else META)

    def _refuse_fewer_steps(self, checkpoint: Checkpoint) -> None:
        cfg = self.home.cfg
        if self.home.command == "sft":
            key, num_steps = "sft.steps", cfg.sft.steps
        else:
            key, num_steps = "train.max_steps", cfg.train.max_steps
        if num_steps < checkpoint.step:
            raise ValueError(f"{key}: {num_steps}, and the run has made {checkpoint.step} steps")

    def _written(self) -> dict[str, Any]:
        path = self.home.path / CONFIG
        damage = (
            f"{path}: damaged, and there is no checkpoint to go on with: --overwrite begins again"
        )
        try:
            settings = yaml.safe_load(path.read_bytes())
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise ValueError(f"{damage} ({' '.join(str(error).split())})") from error
        if not isinstance(settings, dict):
            raise ValueError(damage)
        return settings

    def _may_change(self, saved: Checkpoint, before: Mapping[str, Any]) -> tuple[str, ...]:
        """Return more settings that may change after a run that ended without a learning signal."""
        final_step = (read_meta(self.home.final) or {}).get("step")
        ended_early = final_step == saved.step < before["train"]["max_steps"]
        return identity.FOR_SIGNAL if ended_early else ()

    def identify(self, base: str, beside: Mapping[str, str] | None = None) -> None:
        """Set the digests of the initial weights and other inputs."""
        self.base = base
        self.inputs = self._own_inputs | dict(beside or {})

    @property
    def cache_tokens(self) -> int | None:
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
        """Save `capture()` after `step`, unless it is saved. ranks: hold shares of it."""
        if self._newest == step:
            return
        began = time.monotonic()
        tensors, state = capture()
        meta |= {"base": self.base, "read": self.inputs}
        if ranks.size == 1:
            self.home.save(step, tensors, state, meta)
        else:
            from lowroll.trainer import sharded_checkpoint

            if ranks.leads:
                save_checkpoint = partial(self.home.save, step, tensors, state, meta, ranks.size)
                sharded_checkpoint.lead(ranks, save_checkpoint)
            else:
                sharded_checkpoint.follow(ranks, tensors)
        self._newest = step
        self._seconds = {"time/checkpoint": time.monotonic() - began}
        log.info("checkpoint of step %d", step)

    def seconds(self) -> dict[str, float]:
        seconds, self._seconds = self._seconds, {}
        return seconds
