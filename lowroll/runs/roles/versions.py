"""The weights that the engines draw from: versions that the trainer broadcasts, as the orchestrator
asks for them (`orchestrator.client.WeightsWatch`), and the engines as `runs.batches` draws from
them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lowroll.checkpoint.faults import faultpoint
from lowroll.engine.base import Drawn, EngineStats
from lowroll.engine.remote.pool import EnginePool
from lowroll.kv.policy.base import CachePolicy
from lowroll.orchestrator.client import Progress
from lowroll.transport.broadcasts import Broadcast, Broadcasts
from lowroll.types import Group, Request

log = logging.getLogger(__name__)


class Versions:
    """alive: called while waiting for the trainer. deadline_s: for a version."""

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
        self.held: Broadcast | None = None  # None: what the engines began with, version 0

    @property
    def version(self) -> int:
        """That the engines draw from."""
        return 0 if self.held is None else self.held.version

    def at_least(self, version: int) -> int:
        """The newest version that there is, once it is this one or a later one; the engines draw
        from it then."""
        newest = self.broadcasts.newest()
        if newest is None or newest.version < version:
            if version == 0:
                return self.version
            newest = self.broadcasts.wait(version, self.deadline_s, self.alive)
        return self._take(newest)

    def exactly(self, version: int) -> int:
        """The same with this very version."""
        found = self.broadcasts.at(version)
        if found is None and version == 0:
            return self.version
        return self._take(found or self.broadcasts.wait(version, self.deadline_s, self.alive))

    def newer(self) -> int | None:
        """A newer version than the engines draw from, which they do now; None without."""
        newest = self.broadcasts.newest()
        if newest is None or newest.version <= self.version:
            return None
        return self._take(newest)

    def _take(self, broadcast: Broadcast) -> int:
        if self.held != broadcast:
            self.pool.update(broadcast)
            self.held = broadcast
            faultpoint(f"orchestrate.took/{broadcast.version}")
        return broadcast.version


class Engines:
    """The engines of a run with roles, as its batches draw from them. replay: they replay what is
    in flight at an update."""

    def __init__(self, pool: EnginePool, replay: bool = False) -> None:
        self.pool = pool
        self.replay = replay

    def generate(self, requests: list[Request], on_progress: Progress | None = None) -> list[Group]:
        """As `Engine.generate`."""
        return self.pool.generate(requests, on_progress)

    def add(self, request: Request) -> int:
        """As `EnginePool.add`."""
        return self.pool.add(request)

    def step(self) -> list[tuple[int, Group]]:
        """As `EnginePool.step`."""
        return self.pool.step()

    def abort(self, handle: int) -> bool:
        """As `EnginePool.abort`."""
        return self.pool.abort(handle)

    def so_far(self, handle: int) -> list[Drawn]:
        """As `EnginePool.so_far`."""
        return self.pool.so_far(handle)

    @contextmanager
    def without_noise(self, version: int) -> Iterator[None]:
        """For an evaluation; engines with noise are refused before (`orchestrate`)."""
        yield
        self.pool.reset_prefix_cache()

    @property
    def kv(self) -> CachePolicy:
        """Which keys their caches keep."""
        return self.pool.capabilities.kv

    def stats(self) -> EngineStats:
        """What they have in common."""
        dialect = self.pool.dialect
        replays, replayed, kept = self.pool.replays() if self.replay else (0, 0, 0)
        return EngineStats(
            weights=dialect.behavior.weights,
            weight_bits=dialect.weight_bits,
            cache_tokens=dialect.cache_tokens,
            cache_bytes=0,
            policy_bytes=0,
            virtual_memory_bytes=0,
            pages_peak=0,
            prefix_hits=0,
            running=0,
            waiting=0,
            tokens=sum(one.tokens for one in self.pool.stats().engines),
            replays=replays,
            replayed_tokens=replayed,
            kept_tokens=kept,
        )
