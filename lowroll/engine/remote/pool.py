"""Several engines at the end of wires as one: `orchestrator.client.EngineClient` without torch.

    pool = EnginePool(["http://a:8000", "http://b:8000/v1"], token=..., admin_token=...)
    pool.update(broadcast)                 # all draw from it, or are fenced
    groups = pool.generate(requests)

A `replica` is one engine and its health. The `router` sends requests to replicas, the `weight_broadcaster`
weights, and `versions` remembers which weights all replicas acknowledged; `discovery` finds engines by DNS.
All of it runs on one event loop in a thread of its own. Callers are plain threads, one at a time.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import wait
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lowroll.engine.base import Capabilities, InFlight, PartialSample
from lowroll.engine.remote.capped_clock import CappedClock, CappedClockLoop
from lowroll.engine.remote.discovery import Discovery, Elastic, Resolver, resolve
from lowroll.engine.remote.http_client import ServerError, happens_within
from lowroll.engine.remote.identify import facts
from lowroll.engine.remote.lowroll_server import LowrollServer
from lowroll.engine.remote.replica import PoolTerms, QueuedRequest, Replica, ReplicaCounts
from lowroll.engine.remote.router import RequestRouter
from lowroll.engine.remote.server_base import HeldPolicy, Published
from lowroll.engine.remote.versions import PolicyVersions
from lowroll.engine.remote.weight_broadcaster import WeightBroadcaster
from lowroll.engine.request import validate
from lowroll.types import BehaviorTag, Group, PolicySpan, Request, printable

log = logging.getLogger(__name__)

TURNS = 10  # of its loop that an engine has at least to answer a heartbeat
TURN = 0.25  # seconds that a step waits for an answer before it returns without one
MARGIN = 10.0  # seconds that a waiting thread grants the loop beyond what it was asked for
TOGETHER_S = 5.0  # after the first engine answered, for the others to do so at the start


@dataclass(frozen=True)
class EngineReport:
    """One engine, since the pool was made. Counters as `member.Counts`."""

    url: str
    state: str
    version: int
    outstanding: int  # tokens
    last_error: str
    requests: int
    tokens: int
    retries: int
    handed_over: int
    refused: int
    late: int
    fenced: int


@dataclass(frozen=True)
class PoolStats:
    """The state of a pool's engines. left: counts of engines that DNS does not list any more."""

    engines: tuple[EngineReport, ...]
    left: ReplicaCounts

    def metrics(self) -> dict[str, float]:
        """Totals, by the names of `metrics.names`."""
        names = ("requests", "tokens", "retries", "handed_over", "refused", "late", "fenced")
        all_of = (*self.engines, self.left)
        totals = {
            f"perf/engine_{name}": float(sum(getattr(e, name) for e in all_of)) for name in names
        }
        return {
            "perf/engines_healthy": float(sum(e.state == "ready" for e in self.engines)),
            **totals,
        }


class EnginePool:
    """See the top of the file.

    urls: with or without /v1. token: of clients; admin_token: of control routes, for weights.
    timeout_s: of one request at one engine. model: that all must serve, unless `check_model` is off. elastic:
    engines by a name in DNS, beside `urls`. start_s: until the first engine answers, and until one
    does when none is left. silent_s: the longest that a silent engine holds its requests. update_s:
    until the first engine has taken new weights; the others have `silent_s` more before they are
    fenced. concurrency: requests open at one engine. folder: of the model, where a vLLM's name of
    it does not lead there. in_flight: whether what is in flight at an update goes on or is replayed
    by the engines, which must be lowroll's own then. alive: called while the first engine is waited
    for, or an update; what it raises ends the wait.

    ValueError for engines that do not fit together, ServerError when none answers; either names the
    address and what it said last.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        token: str | None = None,
        admin_token: str | None = None,
        timeout_s: float = 1200.0,
        model: str | None = None,
        check_model: bool = True,
        elastic: Elastic | None = None,
        start_s: float = 600.0,
        silent_s: float = 30.0,
        update_s: float = 600.0,
        concurrency: int = 256,
        folder: Path | None = None,
        in_flight: InFlight = "keep",
        resolver: Resolver = resolve,
        alive: Callable[[], None] = lambda: None,
    ) -> None:
        if not urls and elastic is None:
            raise ValueError("client.base_url: no engine is named, and no client.elastic.hostname")
        self._terms = PoolTerms(
            token, admin_token, model, check_model, folder, concurrency, timeout_s, silent_s,
            update_s, start_s, in_flight,
        )  # fmt: skip
        self.versions = PolicyVersions()
        self._replicas: list[Replica] = []
        self._lives: dict[Replica, asyncio.Task[None]] = {}
        self._facts: tuple[str, dict[str, Any]] | None = None  # of the first, by its address
        self._answered: queue.SimpleQueue[tuple[int, Group | Exception]] = queue.SimpleQueue()
        self._open: dict[int, QueuedRequest] = {}
        self._ended: dict[int, Group] = {}
        self._next = 0
        self._left = ReplicaCounts()  # of engines that have left
        self._none_since: float | None = time.monotonic()  # no engine is ready
        self._closed = False
        self._alive = alive
        self._discovery: Discovery | None = None
        self._loop = CappedClockLoop(CappedClock(self._terms.heartbeat_s / TURNS))
        self._router = RequestRouter(self._replicas, self.versions, self._terms, self._answer)
        self._broadcaster = WeightBroadcaster(
            self._replicas, self.versions, self._terms, self._router.dispatch, self._told
        )
        self._thread = threading.Thread(target=self._run, name="engine-pool", daemon=True)
        self._thread.start()
        try:
            self._do(self._begin(urls), MARGIN)
            if elastic is not None:
                self._discovery = Discovery(elastic, self._found, resolver)
            self._do(self._until_ready(), start_s + MARGIN, alive)
            self._take_errors()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> EnginePool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give up what is in flight and close the connections. The engines go on. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._discovery is not None:
            self._discovery.close()
        if self._thread.is_alive():
            try:
                self._do(self._end(), MARGIN)
            finally:
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join(timeout=MARGIN)

    # -- requests ----------------------------------------------------------------------------------

    @property
    def capabilities(self) -> Capabilities:
        """Return the features that every engine supports."""
        return self._dialect().capabilities

    @property
    def behavior(self) -> BehaviorTag:
        """The policy that the next request is drawn from."""
        held = self.versions.held or HeldPolicy(0, frozenset({""}))
        spans = tuple(PolicySpan(held.version, digest) for digest in sorted(held.digests))
        told = self._dialect().behavior
        return BehaviorTag(spans, told.weights, told.kv_policy, told.kv_budget, told.kv_dtype)

    @property
    def has_work(self) -> bool:
        """Return whether `step` has something to wait for or to return."""
        return bool(self._open or self._ended)

    def add(self, request: Request) -> int:
        """Send a request; returns its handle. ValueError names the wrong field."""
        self._validate(request, "")
        entry = self._enqueue(request)
        self._loop.call_soon_threadsafe(self._router.add, [entry])
        return entry.handle

    def step(self) -> list[tuple[int, Group]]:
        """Wait a moment for answers. Returns the requests that have ended, by handle; [] at once
        when nothing is in flight."""
        if self._open and not self._ended:
            self._turn()
        ended = list(self._ended.items())
        self._ended.clear()
        return ended

    def abort(self, handle: int) -> bool:
        """Give a request up: its group comes back with finish reason "abort". False if it had
        ended."""
        entry = self._open.get(handle)
        if entry is None or entry.ended:
            return False
        self._loop.call_soon_threadsafe(self._router.abort, entry)
        return True

    def so_far(self, handle: int) -> list[PartialSample]:
        """A sample for each that is in flight, without tokens: they come whole, at the end."""
        entry = self._open.get(handle)
        return (
            [] if entry is None else [PartialSample([], [], None) for _ in range(entry.request.n)]
        )

    def generate(
        self, requests: list[Request], on_progress: Callable[[int, int], None] | None = None
    ) -> list[Group]:
        """The groups of all requests, in their order. Checks every request before it sends any."""
        for i, request in enumerate(requests):
            self._validate(request, f"requests[{i}].")
        entries = [self._enqueue(request) for request in requests]
        mine = {entry.handle for entry in entries}
        if entries:
            self._loop.call_soon_threadsafe(self._router.add, entries)
        done: dict[int, Group] = {}
        try:
            while len(done) < len(entries):
                self._turn()
                done |= {handle: self._ended.pop(handle) for handle in self._ended.keys() & mine}
                if on_progress is not None:
                    on_progress(len(done), len(entries))
        except BaseException:
            self._loop.call_soon_threadsafe(self._abort_all, entries)
            for handle in mine:
                self._open.pop(handle, None)
                self._ended.pop(handle, None)
            raise
        return [done[entry.handle] for entry in entries]

    # -- weights -----------------------------------------------------------------------------------

    def update(
        self, broadcast: Published, superseded: Callable[[], bool] = lambda: False
    ) -> BehaviorTag:
        """Have every engine draw from a broadcast; what is in flight goes on, and its spans say so.

        All are told at once. Returns when they have acknowledged the same version and digest, or when
        one has and the others have had as long again: those draw nothing new before they have it,
        too, and are fenced when they are silent. A version that is not newer than the last one
        takes its place: what is in flight is then drawn again. superseded: whether another version
        is to be told instead by now; asked when an engine does not find this one, and while none has
        taken it. `versions.Superseded` when it is. ServerError when no engine takes it, or when they
        hold different weights afterwards.
        """
        terms = self._terms
        longest = terms.update_s + terms.silent_s + terms.patience_s
        self._do(self._update(broadcast, superseded), longest, self._alive)
        return self.behavior

    def replays(self) -> tuple[int, int, int]:
        """Sum `LowrollServer.replays` over the engines that answer."""

        async def read() -> tuple[int, int, int]:
            servers = [m.server for m in self._replicas if isinstance(m.server, LowrollServer)]
            asked = (server.replays(self._terms.heartbeat_s) for server in servers)
            found = await asyncio.gather(*asked, return_exceptions=True)
            sums = [one for one in found if isinstance(one, tuple)]
            return sum(s[0] for s in sums), sum(s[1] for s in sums), sum(s[2] for s in sums)

        told: tuple[int, int, int] = self._do(read(), self._terms.silent_s)
        return told

    def stats(self) -> PoolStats:
        """Every engine that is there or expected."""

        async def read() -> PoolStats:
            reports = tuple(_report(replica) for replica in self._replicas)
            return PoolStats(reports, replace(self._left))

        found: PoolStats = self._do(read(), MARGIN)
        return found

    # -- inside, on the caller's thread ------------------------------------------------------------

    def _do(
        self,
        work: Coroutine[Any, Any, Any],
        deadline_s: float,
        alive: Callable[[], None] = lambda: None,
    ) -> Any:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        end = time.monotonic() + deadline_s + MARGIN
        try:
            while (left := end - time.monotonic()) > 0:
                if wait([future], timeout=min(TURN, left)).done:
                    return future.result(0)
                alive()
        finally:
            future.cancel()  # nothing of one that is done
        raise ServerError(f"the pool's loop did not answer; {self._told()}")

    @property
    def dialect(self) -> Any:
        """Return the dialect of the first engine that was met."""
        return self._dialect()

    def _dialect(self) -> Any:
        return self._router.dialect

    def _validate(self, request: Request, where: str) -> None:
        dialect = self._dialect()
        length = dialect.capabilities.context_length
        try:
            validate(
                request,
                vocab_size=dialect.vocab_size,
                context_length=length,
                cache_tokens=length,
                has_tokenizer="stop_strings" in dialect.capabilities.sampler,
            )
            dialect.check(request)
        except ValueError as error:
            raise ValueError(f"{where}{error}") from None

    def _enqueue(self, request: Request) -> QueuedRequest:
        entry = QueuedRequest(self._next, request)
        self._next += 1
        self._open[entry.handle] = entry
        return entry

    def _turn(self) -> None:
        """Wait for an answer, and take those that have come. An error gives up all in flight."""
        try:
            handle, outcome = self._answered.get(timeout=TURN)
            while True:
                self._land(handle, outcome)
                handle, outcome = self._answered.get_nowait()
        except queue.Empty:
            pass
        except BaseException:
            self._give_up()
            raise
        since = self._none_since
        if since is not None and time.monotonic() - since > self._terms.patience_s:
            self._give_up()
            raise ServerError(
                f"no engine has answered for {self._terms.patience_s:g} s: {self._told()}"
            )

    def _land(self, handle: int, outcome: Group | Exception) -> None:
        if isinstance(outcome, Exception) and (handle < 0 or handle in self._open):
            raise outcome
        if self._open.pop(handle, None) is not None and isinstance(outcome, Group):
            self._ended[handle] = outcome

    def _take_errors(self) -> None:
        try:
            while True:
                self._land(*self._answered.get_nowait())
        except queue.Empty:
            return

    def _give_up(self) -> None:
        self._open.clear()
        self._loop.call_soon_threadsafe(self._router.drop_all)

    def _told(self) -> str:
        """Describe each engine's state and last error in a line."""
        told = [f"{m.url}: {m.state}: {m.last_error}" for m in self._replicas]
        if self._discovery is not None and self._discovery.last_error:
            told.append(self._discovery.last_error)
        return printable("; ".join(told) or "none is known", 2000)

    # -- inside, on the loop -----------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    def _answer(self, handle: int, outcome: Group | Exception) -> None:
        self._answered.put((handle, outcome))

    def _abort_all(self, entries: list[QueuedRequest]) -> None:
        for entry in entries:
            self._router.abort(entry)

    async def _begin(self, urls: Sequence[str]) -> None:
        for url in urls:
            replica = Replica(url.rstrip("/").removesuffix("/v1"), self, self._terms)
            if any(replica.url == other.url for other in self._replicas):
                raise ValueError(f"client.base_url: {printable(url)} is named twice")
            self._replicas.append(replica)
        for replica in self._replicas:
            self._begin_life(replica)

    def _begin_life(self, replica: Replica) -> None:
        life = self._lives[replica] = asyncio.ensure_future(replica.live())

        def over(life: asyncio.Task[None]) -> None:
            if not life.cancelled() and (error := life.exception()) is not None:
                told = ServerError(f"engine {replica.url} is not watched any more: {error!r}")
                told.__cause__ = error
                self._answer(-1, told)

        life.add_done_callback(over)

    async def _until_ready(self) -> None:
        """One engine answers; the others had a moment to do so, too."""
        loop, silent_s = asyncio.get_running_loop(), self._terms.silent_s
        late = loop.call_later(silent_s, self._tell_late, silent_s)
        try:
            async with asyncio.timeout(self._terms.patience_s):
                while not any(m.state == "ready" for m in self._replicas):
                    await asyncio.sleep(0.01)
                    if not self._answered.empty():
                        return  # an error
        except TimeoutError:
            raise ServerError(
                f"no engine has answered within {self._terms.patience_s:g} s: {self._told()}"
            ) from None
        finally:
            late.cancel()
        seconds = min(TOGETHER_S, self._terms.patience_s)
        await asyncio.gather(
            *(happens_within(replica.tried, seconds) for replica in self._replicas)
        )

    def _tell_late(self, seconds: float) -> None:
        log.warning("no engine has answered for %g s: %s. Waiting for one", seconds, self._told())

    async def _end(self) -> None:
        self._router.drop_all()
        lives = list(self._lives.values())
        for life in lives:
            life.cancel()
        await asyncio.gather(*lives, return_exceptions=True)
        mine = asyncio.current_task()
        others = [task for task in asyncio.all_tasks() if task is not mine]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def _found(self, urls: list[str]) -> None:
        """Take the addresses that discovery found, on its thread."""
        self._loop.call_soon_threadsafe(self._meet, urls)

    def _meet(self, urls: list[str]) -> None:
        """Connect to new engines; engines that are no longer listed get no new requests."""
        for replica in self._replicas:
            if not replica.named:
                replica.leaving = replica.url not in urls
        known = {replica.url for replica in self._replicas}
        for url in urls:
            if url not in known:
                replica = Replica(url, self, self._terms, named=False)
                self._replicas.append(replica)
                self._begin_life(replica)
        self._say_goodbye()
        self._router.dispatch()

    def _say_goodbye(self) -> None:
        """Forget those that were to leave and have nothing in flight."""
        for replica in [m for m in self._replicas if m.leaving and not m.flights]:
            self._lives.pop(replica).cancel()
            self._replicas.remove(replica)
            for name, count in asdict(replica.counts).items():
                setattr(self._left, name, getattr(self._left, name) + count)
            log.info("engine %s has left", replica.url)
        self._note()

    def _note(self) -> None:
        if any(m.state == "ready" for m in self._replicas):
            self._none_since = None
        elif self._none_since is None:
            self._none_since = time.monotonic()

    async def _update(self, broadcast: Published, superseded: Callable[[], bool]) -> None:
        if await self._broadcaster.update(broadcast, superseded):
            for replica in self._replicas:
                self._router.hand_over(replica)

    # -- for members -------------------------------------------------------------------------------

    @property
    def updating(self) -> bool:
        """Return whether a version is being broadcast to engines that work."""
        return self._broadcaster.telling

    def agree(self, replica: Replica) -> None:
        """ValueError names what is odd."""
        assert replica.server is not None
        found = dict(facts(replica.server))
        if self._terms.check_model and not self._terms.model:
            found["model"] = replica.server.dialect.model
        if self._facts is None:
            self._facts = replica.url, found
        first, wanted = self._facts
        for name, value in wanted.items():
            if found[name] != value:
                raise ValueError(
                    f"engines do not agree: {name}: {replica.url} has {printable(found[name])}, and "
                    f"{first} has {printable(value)}"
                )

    def admitted(self, replica: Replica) -> None:
        assert replica.server is not None
        self._router.known = replica.server.dialect
        log.info("engine %s works", replica.url)
        self._note()
        self._router.dispatch()

    def heard(self, replica: Replica) -> None:
        if replica.leaving:
            self._say_goodbye()
        self._router.dispatch()

    def fenced(self, replica: Replica) -> None:
        self._note()
        self._router.hand_over(replica)
        if replica.leaving:
            self._say_goodbye()

    def others_work(self, replica: Replica) -> bool:
        """Return whether another engine is ready."""
        return any(m.state == "ready" and m is not replica for m in self._replicas)

    def witness(self, replica: Replica) -> Replica | None:
        """Another one that works with the same weights."""
        if not self.versions.settled.is_set():
            return None
        able = (
            m for m in self._replicas if m is not replica and m.state == "ready" and not m.taking
        )
        return next((m for m in able if m.version == replica.version), None)

    def misfit(self, replica: Replica, error: Exception) -> None:
        said = error if isinstance(error, ValueError) else ValueError(f"{replica.url}: {error}")
        self._answer(-1, said)


def _report(replica: Replica) -> EngineReport:
    state = "leaving" if replica.leaving else replica.state
    return EngineReport(
        replica.url,
        state,
        replica.version,
        replica.outstanding,
        replica.last_error,
        **asdict(replica.counts),
    )
