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
META = ("command", "config", "base", "read", "step", "tensors")  # beside a checkpoint's state


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
        return identity.read_by(self.home.cfg, self.home.command)

    def _find(self) -> Checkpoint | None:
        """Return the checkpoint to continue; None when the run begins again.

        ValueError when the run or its inputs differ from the configuration.
        """
        home = self.home
        if home.command == "sft":
            key, steps, needed = "sft.steps", home.cfg.sft.steps, {*META}
        else:
            key, steps = "train.max_steps", home.cfg.train.max_steps
            needed = {*META, "cache_tokens"}
        try:
            saved = home.store.load(home.asked_step, verified=home.verified)
        except FileNotFoundError as error:
            if home.asked_step is not None:
                raise ValueError(f"ckpt.resume_step: {error}") from None
            if home.has_steps():
                identity.refuse_other_settings(self._written(), home.cfg, of="the run")
            return None
        check_pieces(
            "checkpoint",
            {"read": None, "cache_tokens": None, **saved.meta},
            {*META, "cache_tokens"},
        )
        before = yaml.safe_load(saved.meta["config"])
        identity.refuse_other_settings(before, home.cfg, self._may_change(saved, before))
        read = saved.meta.get("read")
        identity.refuse_other_files(
            read and {name: read[name] for name in read if name != identity.TEACHER},
            self._own_inputs,
        )
        check_pieces("checkpoint", saved.meta, needed)
        if steps < saved.step:
            raise ValueError(f"{key}: {steps}, and the run has made {saved.step} steps")
        return saved

    def _written(self) -> dict[str, Any]:
        path = self.home.path / CONFIG
        try:
            written = yaml.safe_load(path.read_bytes())
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise ValueError(
                f"{path}: damaged, and there is no checkpoint to go on with: --overwrite begins "
                f"again ({' '.join(str(error).split())})"
            ) from error
        if not isinstance(written, dict):
            raise ValueError(
                f"{path}: damaged, and there is no checkpoint to go on with: --overwrite begins "
                f"again"
            )
        return written

    def _may_change(self, saved: Checkpoint, before: Mapping[str, Any]) -> tuple[str, ...]:
        last = (read_meta(self.home.final) or {}).get("step")
        ended = last == saved.step < before["train"]["max_steps"]
        return identity.FOR_SIGNAL if ended else ()

    def identify(self, base: str, beside: Mapping[str, str] | None = None) -> None:
        """Set the digests of the initial weights and other inputs, which a resumed run must share."""
        self.base = base
        self.inputs = self._own_inputs | dict(beside or {})

    @property
    def cache_tokens(self) -> int | None:
        """Return the run's original KV cache size, or None."""
        return None if self.found is None else self.found.meta["cache_tokens"]

    def take(self) -> Checkpoint | None:
        """Return the checkpoint to continue, once, or None."""
        saved, self.found = self.found, None
        if saved is None:
            log.warning("the run ended before its first checkpoint; it begins again with step 1")
            return None
        if saved.meta["base"] != self.base:
            raise ValueError(
                f"model: the weights of {self.home.cfg.model} are not those that the run began with"
            )
        identity.refuse_other_files(saved.meta["read"], self.inputs)
        self._newest = saved.step
        return saved

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
            keep = partial(self.home.save, step, tensors, state, meta, ranks.size)
            sharded_checkpoint.lead(ranks, keep)
        else:
            sharded_checkpoint.follow(ranks, tensors)
        self._newest = step
        self._seconds = {"time/checkpoint": time.monotonic() - began}
        log.info("checkpoint of step %d", step)

    def seconds(self) -> dict[str, float]:
        """Return `time/checkpoint` of a save since the last call, else {}."""
        seconds, self._seconds = self._seconds, {}
        return seconds
