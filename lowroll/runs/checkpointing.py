"""The checkpoints that a run resumes from and that it writes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from lowroll.checkpoint.store import Checkpoint
from lowroll.parallel.ranks import ALONE, Ranks
from lowroll.runs import identity
from lowroll.runs.folder import RunFolder
from lowroll.trainer import shares

log = logging.getLogger(__name__)

Tensors = dict[str, dict[str, Any]]
State = dict[str, Any]


class Checkpointing:
    """The checkpoints of one run. With `resume`, `found` is the one to continue; ValueError when it
    is another run's."""

    def __init__(self, home: RunFolder, resume: bool) -> None:
        self.home = home
        self.found = home.find() if resume else None
        self.base = ""
        self.inputs: dict[str, str] = {}
        self._newest: int | None = None  # step
        self._seconds: dict[str, float] = {}

    def identify(self, base: str, beside: Mapping[str, str] | None = None) -> None:
        """Set the digest of the initial weights and of other inputs, which a resumed run must
        share."""
        self.base = base
        self.inputs = self.home.inputs | dict(beside or {})

    @property
    def cache_tokens(self) -> int | None:
        """Return the KV cache size that the run began with, or None."""
        return None if self.found is None else self.found.meta["cache_tokens"]

    def take(self) -> Checkpoint | None:
        """Return the checkpoint to continue, once; None when there was none."""
        saved, self.found = self.found, None
        if saved is None:
            log.warning("the run ended before its first checkpoint; it begins again with step 1")
            return None
        self.home.check_base(saved, self.base)
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
        """Save the state of `capture()` after `step` in one atomic folder, unless it is saved
        already. ranks: those that hold shares of it."""
        if self._newest == step:
            return
        began = time.monotonic()
        tensors, state = capture()
        meta |= {"base": self.base, "read": self.inputs}
        if ranks.size == 1:
            self.home.save(step, tensors, state, meta)
        elif ranks.leads:
            keep = partial(self.home.save, step, tensors, state, meta, ranks.size)
            shares.lead(ranks, keep)
        else:
            shares.follow(ranks, tensors)
        self._newest = step
        self._seconds = {"time/checkpoint": time.monotonic() - began}
        log.info("checkpoint of step %d", step)

    def seconds(self) -> dict[str, float]:
        """Return `time/checkpoint` of a save since the last call, else {}."""
        seconds, self._seconds = self._seconds, {}
        return seconds
