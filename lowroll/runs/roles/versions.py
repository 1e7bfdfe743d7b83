"""The engines of a run with roles, and their weight versions."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from lowroll.checkpoint.fault_injection import faultpoint
from lowroll.engine.base import EngineStats
from lowroll.engine.remote.pool import EnginePool
from lowroll.engine.remote.versions import Superseded
from lowroll.kv.policy.base import CachePolicy
from lowroll.weights.sync.base import Broadcast, Broadcasts

log = logging.getLogger(__name__)

MOST = 16  # remembered versions: open groups have tokens of fewer


class Versions:
    """The weight versions of the engines (`orchestrator.interfaces.WeightsWatch`). alive: called in
    waits for the trainer. deadline_s: for a version. retract: called with the last valid version
    when the trainer has gone back, before the engines load another."""

    def __init__(
        self,
        broadcasts: Broadcasts,
        pool: EnginePool,
        alive: Callable[[], None],
        deadline_s: float,
    ) -> None:
        self.broadcasts = broadcasts
        self.pool = pool
        self.alive = alive
        self.deadline_s = deadline_s
        self.retract: Callable[[int], object] = lambda version: None
        self.held: Broadcast | None = None  # None: the initial weights, version 0
        self._taken: dict[int, Broadcast] = {}

    @property
    def version(self) -> int:
        return 0 if self.held is None else self.held.version

    def at_least(self, version: int, most: int) -> int:
        """Load and return the newest version up to `most`; wait for `version`."""
        return self._await(version, lambda: self.broadcasts.newest(most))

    def exactly(self, version: int) -> int:
        """Load and return this version; wait for it."""
        return self._await(version, lambda: self.broadcasts.at(version))

    def _await(self, version: int, allowed: Callable[[], Broadcast | None]) -> int:
        broadcast = allowed()
        if broadcast is None or broadcast.version < version:
            if version == 0:
                return self.version
            broadcast = self.broadcasts.wait(version, self.deadline_s, self.alive)
        return self._take(broadcast, allowed)

    def newer(self, most: int) -> int | None:
        """Load and return a newer version up to `most`, or replaced weights of the same one, or
        None."""
        newest = self.broadcasts.newest(most)
        if newest is None or newest.version < self.version:
            return None
        if newest.version == self.version and not _is_replaced(self.held, newest):
            return None
        return self._take(newest, lambda: self.broadcasts.newest(most))

    def _take(self, broadcast: Broadcast, allowed: Callable[[], Broadcast | None]) -> int:
        """Have the engines load a broadcast. If it is superseded meanwhile, because a trainer may
        serve only its newest, load what `allowed` finds then. Return the version."""
        while self.held != broadcast:
            self._go_back(broadcast.version)
            try:
                self.pool.update(broadcast, partial(self._is_superseded, broadcast, allowed))
            except Superseded:
                broadcast = allowed() or broadcast
                continue
            self.held = broadcast
            self._taken[broadcast.version] = broadcast
            for old_version in sorted(self._taken)[:-MOST]:
                del self._taken[old_version]
            faultpoint(f"orchestrate.took/{broadcast.version}")
        return broadcast.version

    def _is_superseded(self, broadcast: Broadcast, allowed: Callable[[], Broadcast | None]) -> bool:
        newest = allowed()
        return newest is not None and newest != broadcast and newest.version >= broadcast.version

    def _go_back(self, version: int) -> None:
        """Forget all versions from the oldest undone one on, and retract what was drawn from
        them."""
        undone = [old for old, taken in self._taken.items() if self._is_gone(taken, version)]
        if not undone:
            return
        oldest = min(undone)
        log.warning(
            "the trainer has gone back: what was drawn from its version %d on is drawn again",
            oldest,
        )
        self._taken = {old: taken for old, taken in self._taken.items() if old < oldest}
        self.retract(oldest - 1)

    def _is_gone(self, taken: Broadcast, version: int) -> bool:
        current = self.broadcasts.at(taken.version)
        return taken.version > version if current is None else _is_replaced(taken, current)


def _is_replaced(taken: Broadcast | None, found: Broadcast) -> bool:
    """Return whether another attempt has replaced a version's weights. The same attempt rewrites
    equal ones."""
    if taken is None:
        return False
    return found.digest != taken.digest and found.attempt != taken.attempt


class RolloutPool(EnginePool):
    """The engines of a run with roles, for `runs.batches`."""

    @contextmanager
    def without_noise(self, version: int) -> Iterator[None]:
        """Do nothing: engines with noise are refused earlier (`orchestrate`)."""
        yield

    @property
    def kv(self) -> CachePolicy:
        return self.capabilities.kv

    def stats(self) -> EngineStats:
        """Return what batches record. Engines are asked only for their replays."""
        stats = EngineStats(
            self.server.behavior.weights,
            self.server.weight_bits,
            self.server.cache_tokens,
            tokens=sum(engine.tokens for engine in self.report().engines),
        )
        if self.options.in_flight != "replay":
            return stats
        counted = super().stats()
        return replace(
            stats,
            replays=counted.replays,
            replayed_tokens=counted.replayed_tokens,
            kept_tokens=counted.kept_tokens,
        )
