"""The replicas of a pool, and whether they fit together."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from lowroll.engine.base import EngineStats
from lowroll.engine.remote.http_client import HttpCall, ServerError, happens_within
from lowroll.engine.remote.replica import PoolOptions, Replica, ReplicaCounts
from lowroll.engine.remote.router import RequestRouter
from lowroll.engine.remote.server_base import EngineServer
from lowroll.engine.remote.versions import PolicyVersions
from lowroll.engine.remote.weight_broadcaster import WeightBroadcaster
from lowroll.types import Group, printable
from lowroll.weights.sync.base import Broadcast

log = logging.getLogger(__name__)

TOGETHER_S = 5.0  # for the other engines, at the start
COUNTED = (  # summed over engines
    "cache_tokens",
    "prefix_hits",
    "running",
    "waiting",
    "tokens",
    "replays",
    "replayed_tokens",
    "kept_tokens",
)
METRIC = {"evicted": "fenced"}  # names that differ from the field's


@dataclass
class EngineReport(ReplicaCounts):
    url: str = ""
    state: str = "new"
    version: int = 0
    outstanding: int = 0  # tokens
    last_error: str = ""


@dataclass(frozen=True)
class PoolReport:
    """The state of a pool's engines. left: counts of engines that have left."""

    engines: tuple[EngineReport, ...]
    left: ReplicaCounts

    def metrics(self) -> dict[str, float]:
        """Return the totals, by the names of `metrics.names`."""
        num_healthy = sum(engine.state == "ready" for engine in self.engines)
        metrics = {"perf/engines_healthy": float(num_healthy)}
        for name in asdict(self.left):
            total = sum(getattr(counts, name) for counts in (*self.engines, self.left))
            metrics[f"perf/engine_{METRIC.get(name, name)}"] = float(total)
        return metrics


class ReplicaSet:
    """The engines of a pool, on the pool's loop alone. answer: receives each request's outcome by
    its handle; an error with handle -1 ends the run."""

    def __init__(
        self, options: PoolOptions, answer: Callable[[int, Group | Exception], None]
    ) -> None:
        self.options = options
        self.versions = PolicyVersions()
        self.replicas: list[Replica] = []
        self.router = RequestRouter(self.replicas, self.versions, options, answer)
        self.discovery_error: Callable[[], str] = lambda: ""
        self.none_since: float | None = time.monotonic()  # no engine is ready
        self._answer = answer
        self._broadcaster = WeightBroadcaster(
            self.replicas, self.versions, options, self.router.dispatch, self.describe
        )
        self._watch_tasks: dict[Replica, asyncio.Task[None]] = {}
        self._facts: tuple[str, dict[str, Any]] | None = None
        self._removed_counts = ReplicaCounts()

    # -- for the pool ------------------------------------------------------------------------------

    async def begin(self, urls: Sequence[str]) -> None:
        """Connect to engines: at once with `fail_fast`, which raises their errors, else in tasks.
        ValueError for one that is named twice."""
        for url in urls:
            replica = Replica(url.rstrip("/").removesuffix("/v1"), self, self.options)
            if any(replica.url == other.url for other in self.replicas):
                raise ValueError(f"client.base_url: {printable(url)} is named twice")
            self.replicas.append(replica)
        for replica in self.replicas:
            if self.options.fail_fast:
                await replica.http.open()
                await replica.connect()
            else:
                self._start_watching(replica)

    async def until_ready(self, is_over: Callable[[], bool]) -> None:
        """Wait until one engine works and, for a moment, until the others were tried. is_over:
        returns whether one does not fit. ServerError after `start_s`."""
        loop, start_s = asyncio.get_running_loop(), self.options.start_s
        warning_timer = loop.call_later(self.options.silent_s, self._warn_late)
        try:
            async with asyncio.timeout(start_s):
                while not any(candidate.state == "ready" for candidate in self.replicas):
                    await asyncio.sleep(0.01)
                    if is_over():
                        return
        except TimeoutError:
            raise ServerError(
                f"no engine has answered within {start_s:g} s: {self.describe()}"
            ) from None
        finally:
            warning_timer.cancel()
        seconds = min(TOGETHER_S, start_s)
        await asyncio.gather(*(happens_within(replica.tried, seconds) for replica in self.replicas))

    def meet(self, urls: Sequence[str]) -> None:
        """Connect to new engines; those that are not in `urls` get no new requests."""
        for replica in self.replicas:
            if not replica.named:
                replica.leaving = replica.url not in urls
        known_urls = {replica.url for replica in self.replicas}
        for url in urls:
            if url not in known_urls:
                replica = Replica(url, self, self.options, named=False)
                self.replicas.append(replica)
                self._start_watching(replica)
        self._remove_leavers()
        self.router.dispatch()

    async def end(self) -> None:
        self.router.drop_all()
        watch_tasks = list(self._watch_tasks.values())
        for watch_task in watch_tasks:
            watch_task.cancel()
        await asyncio.gather(*watch_tasks, return_exceptions=True)
        await asyncio.gather(*(replica.http.close() for replica in self.replicas))

    async def update(self, broadcast: Broadcast, superseded: Callable[[], bool]) -> None:
        if await self._broadcaster.update(broadcast, superseded):
            for replica in self.replicas:
                self.router.hand_over(replica)

    def ready(self) -> EngineServer:
        """Return a working engine's server. ServerError for none."""
        for replica in self.replicas:
            if replica.state == "ready":
                return replica.met_server
        raise ServerError(f"no engine works: {self.describe()}")

    async def ask_all(self, call: HttpCall) -> list[Any]:
        ready = [replica for replica in self.replicas if replica.state == "ready"]
        return await asyncio.gather(*(replica.http.answer(call) for replica in ready))

    async def stats(self) -> EngineStats:
        """Sum the engines' metrics; with `fail_fast`, raise their errors."""
        servers = [replica.server for replica in self.replicas if replica.server is not None]
        pages = await asyncio.gather(
            *(server.metrics(self.options.heartbeat_s) for server in servers),
            return_exceptions=not self.options.fail_fast,
        )
        all_stats = [
            server.stats(page)
            for server, page in zip(servers, pages, strict=True)
            if not isinstance(page, BaseException)
        ]
        sums = {name: sum(getattr(stats, name) for stats in all_stats) for name in COUNTED}
        return replace(self.router.server.stats(""), **sums)

    async def report(self) -> PoolReport:
        engines = tuple(_engine_report(replica) for replica in self.replicas)
        return PoolReport(engines, replace(self._removed_counts))

    def describe(self) -> str:
        states = [
            f"{replica.url}: {replica.state}: {replica.last_error}" for replica in self.replicas
        ]
        if error := self.discovery_error():
            states.append(error)
        return printable("; ".join(states) or "none is known", 2000)

    # -- for the replicas --------------------------------------------------------------------------

    def agree(self, replica: Replica) -> None:
        """Check an engine against the first one. ValueError names what differs."""
        facts = dict(replica.met_server.facts())
        if self.options.check_model and not self.options.model:
            facts["model"] = replica.met_server.model
        if self._facts is None:
            self._facts = replica.url, facts
        first_url, first_facts = self._facts
        for name, value in first_facts.items():
            if facts[name] != value:
                raise ValueError(
                    f"engines do not agree: {name}: {replica.url} has {printable(facts[name])}, and "
                    f"{first_url} has {printable(value)}"
                )

    def admitted(self, replica: Replica) -> None:
        self.router.known = replica.met_server
        log.info("engine %s works", replica.url)
        self._update_none_since()
        self.router.dispatch()

    def heard(self, replica: Replica) -> None:
        self._remove_leavers()
        self.router.dispatch()

    def evicted(self, replica: Replica) -> None:
        self.router.hand_over(replica)
        self._remove_leavers()

    def misfit(self, replica: Replica, error: Exception) -> None:
        outcome = error if isinstance(error, ValueError) else ValueError(f"{replica.url}: {error}")
        self._answer(-1, outcome)

    # -- inside ------------------------------------------------------------------------------------

    def _start_watching(self, replica: Replica) -> None:
        task = self._watch_tasks[replica] = asyncio.ensure_future(replica.live())

        def report_failure(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                outcome = ServerError(f"engine {replica.url} is not watched any more: {error!r}")
                outcome.__cause__ = error
                self._answer(-1, outcome)

        task.add_done_callback(report_failure)

    def _remove_leavers(self) -> None:
        leavers = [replica for replica in self.replicas if replica.leaving and not replica.flights]
        for replica in leavers:
            self._watch_tasks.pop(replica).cancel()
            self.replicas.remove(replica)
            for name, count in asdict(replica.counts).items():
                setattr(self._removed_counts, name, getattr(self._removed_counts, name) + count)
            log.info("engine %s has left", replica.url)
        self._update_none_since()

    def _update_none_since(self) -> None:
        if any(replica.state == "ready" for replica in self.replicas):
            self.none_since = None
        elif self.none_since is None:
            self.none_since = time.monotonic()

    def _warn_late(self) -> None:
        seconds, states = self.options.silent_s, self.describe()
        log.warning("no engine has answered for %g s: %s. Waiting for one", seconds, states)


def _engine_report(replica: Replica) -> EngineReport:
    return EngineReport(
        **asdict(replica.counts),
        url=replica.url,
        state="leaving" if replica.leaving else replica.state,
        version=replica.version,
        outstanding=replica.outstanding,
        last_error=replica.last_error,
    )
