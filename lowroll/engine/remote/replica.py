"""One engine of a pool and its health (docs/roles.md).

A replica connects, loads the newest weights, is compared with a working engine (`verify`), and
works. It is evicted when it is silent, dead or stuck, or contradicts itself: its requests go to
others, and it reconnects after a pause that doubles while another works.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from lowroll.engine.base import InFlight
from lowroll.engine.remote.http_client import (
    EngineLost,
    HttpCall,
    HttpClient,
    ServerError,
    happens_within,
)
from lowroll.engine.remote.lowroll_server import WHAT, LowrollServer
from lowroll.engine.remote.protocol import Origin, ResponseAssembler
from lowroll.engine.remote.server_base import EngineServer, HeldPolicy, ServerProgress
from lowroll.engine.remote.verify import canary_logprobs, check_canary
from lowroll.engine.remote.versions import PolicyVersions
from lowroll.engine.remote.vllm.server import VllmServer
from lowroll.types import Request
from lowroll.weights.sync.base import Broadcast

log = logging.getLogger(__name__)

State = Literal["new", "ready", "evicted", "gone"]
HEARTBEATS = 6  # in `silent_s`
HEARTBEATS_BEFORE_EVICTION = 4  # without an answer
ONCE_MORE_S = 0.2  # before an unreachable engine is probed again
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 5.0  # seconds between two attempts to connect
FLAPS_S = 600.0  # window of evictions that double the pause
LONGEST_AWAY = 60.0  # seconds of that pause
OURS = 16  # connections beside those of requests
REFUSED = (401, 403, 404)  # statuses that waiting does not change

Connect = Callable[[HttpClient, "PoolOptions"], Awaitable[EngineServer]]


@dataclass(frozen=True)
class PoolOptions:
    """The settings of all engines of a pool. Times are in seconds.

    admin_token: of control routes. connect: default `connect_server`. lost: returns why the
    engine's process has ended, if known.
    """

    token: str | None = field(default=None, repr=False)
    admin_token: str | None = field(default=None, repr=False)
    model: str | None = None  # that all must serve, if `check_model`
    check_model: bool = True
    # of the model, where the name that a vLLM states does not lead there
    folder: Path | None = None
    concurrency: int = 256  # requests open at one engine
    timeout_s: float = 1200.0  # of one request at one engine
    silent_s: float = 30.0  # how long a silent engine keeps its requests
    # until the first engine has new weights; the others have `silent_s` more
    update_s: float = 600.0
    start_s: float = 600.0  # until one engine answers, at the start and when none is left
    in_flight: InFlight = "keep"  # "replay" needs lowroll's own engines
    # read tokens as they are drawn, for `so_far` and aborted requests; costs an event a token
    stream: bool = False
    # the first error is raised and aborts all; no retries, heartbeats or checks of versions
    fail_fast: bool = False
    connect: Connect | None = None
    lost: Callable[[], str | None] | None = None

    @property
    def heartbeat_s(self) -> float:
        return self.silent_s / HEARTBEATS


@dataclass
class ReplicaCounts:
    requests: int = 0
    tokens: int = 0
    retries: int = 0  # requests that it lost, or was too busy for
    handed_over: int = 0  # taken from it at an eviction
    refused: int = 0  # inconsistent answers
    late: int = 0  # after another attempt's answer
    evicted: int = 0


@dataclass(eq=False)
class QueuedRequest:
    handle: int
    request: Request
    attempt: int = 0
    failures: int = 0
    losses: int = 0
    busy_since: float = 0.0  # since when its engines have been busy
    avoid: set[str] = field(default_factory=set)  # engines that failed it
    aborted: bool = False
    ended: bool = False


@dataclass(eq=False)
class InFlightRequest:
    entry: QueuedRequest
    replica: Replica
    sent: int  # version that its engine had acknowledged
    call: HttpCall
    arrivals: ResponseAssembler
    origin: Origin
    load: int  # in tokens
    task: asyncio.Task[None] | None = None


class EngineActivity:
    """The times at which an engine last answered, drew a token for us or had nothing to draw, and
    knew of all our requests."""

    def __init__(self, now: float, tokens: int = -1) -> None:
        self.heard_at = self.drew_at = self.knew_at = now
        self.tokens = tokens

    def update(
        self, status: str, progress: ServerProgress, num_flights: int, now: float, allowed_s: float
    ) -> str | None:
        """Record the answer to a heartbeat. Return why the engine is stuck, if it is."""
        if not num_flights or progress.tokens != self.tokens or status != "running":
            self.drew_at, self.tokens = now, progress.tokens
        elif now - self.drew_at > allowed_s:
            return f"has drawn nothing for {now - self.drew_at:.1f} s"
        if progress.open >= num_flights:
            self.knew_at = now
        elif now - self.knew_at > allowed_s:
            return f"knows of {progress.open} requests, and {num_flights} wait for its answer"
        return None


class ReplicaOwner(Protocol):
    """The replica set, as its replicas see it."""

    versions: PolicyVersions
    replicas: list[Replica]

    def agree(self, replica: Replica) -> None:
        """Raise ValueError when it differs from the other replicas."""
        ...

    def admitted(self, replica: Replica) -> None: ...
    def evicted(self, replica: Replica) -> None: ...
    def heard(self, replica: Replica) -> None: ...

    def misfit(self, replica: Replica, error: Exception) -> None: ...


async def connect_server(http: HttpClient, options: PoolOptions) -> EngineServer:
    """Return a client for the kind of server that answers. ServerError without an answer;
    ValueError names what does not fit."""
    call = HttpCall("GET", "/v1/models", WHAT, None, options.heartbeat_s)
    answer = await http.answer(call)
    model = options.model if options.check_model else None
    try:
        is_vllm = answer["data"][0]["owned_by"] == "vllm"
    except (KeyError, IndexError, TypeError):
        is_vllm = False
    if is_vllm:
        return await VllmServer.meet(http, model, options.folder)
    return LowrollServer(http, answer, model, options.admin_token, options.in_flight)


async def _resume_if_paused(server: EngineServer, options: PoolOptions) -> None:
    status = await server.health(options.heartbeat_s)
    if status == "paused" and options.admin_token is not None:
        await server.resume()


class Replica:
    """An engine and its health, on the pool's loop alone. named: the configuration names it, so the
    run ends if it does not fit."""

    def __init__(
        self, url: str, owner: ReplicaOwner, options: PoolOptions, *, named: bool = True
    ) -> None:
        limit = options.concurrency + OURS
        self.http = HttpClient(url, token=options.token, concurrency=limit, lost=options.lost)
        self.url = self.http.url
        self.owner = owner
        self.options = options
        self.named = named
        self.state: State = "new"
        self.server: EngineServer | None = None
        self.held: HeldPolicy | None = None
        self.version = 0  # acknowledged
        self.last_error = "it was not asked yet"
        self.leaving = False  # takes no new requests
        self.suspect = False  # lost a connection: no new requests before its next heartbeat
        self.busy_until = self.busy_s = 0.0
        self.flights: set[InFlightRequest] = set()
        self.outstanding = 0  # tokens that it may still draw for us
        self.counts = ReplicaCounts()
        self.tried = asyncio.Event()  # set after the first attempt to connect
        self._taking = asyncio.Lock()
        self._wake = asyncio.Event()
        self._why: str | None = None
        self._met = False
        self._evictions: deque[float] = deque()

    async def live(self) -> None:
        await self.http.open()
        pause = FIRST_PAUSE
        try:
            while True:
                try:
                    await self.connect()
                    pause = FIRST_PAUSE
                    reason = await self._watch()
                except (ServerError, ValueError) as error:
                    reason = str(error)
                    self._report_misfit(error)
                away_s = self._evict(reason)
                await self._away(away_s)
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
        finally:
            self.state = "gone"
            await self.http.close()

    def mark_unhealthy(self, why: str) -> None:
        self._why = self._why or why
        self._wake.set()

    def mark_suspect(self, why: str) -> None:
        self.suspect = True
        self.last_error = why
        self._wake.set()

    @property
    def met_server(self) -> EngineServer:
        """The client of its server, once it has connected."""
        assert self.server is not None
        return self.server

    @property
    def models(self) -> set[str]:
        return {flight.arrivals.model for flight in self.flights}

    @property
    def taking(self) -> bool:
        return self._taking.locked()

    def takes_work(self, now: float) -> bool:
        is_unhealthy = self._why is not None
        if self.state != "ready" or is_unhealthy or self.suspect or self.leaving:
            return False
        if now < self.busy_until:
            return False
        if not self.taking:
            return True
        return self.met_server.in_flight and not self.owner.versions.settled.is_set()

    async def take(self, broadcast: Broadcast) -> HeldPolicy:
        """Have the engine take weights. ServerError when it acknowledges another version."""
        async with self._taking:
            warning_timer = asyncio.get_running_loop().call_later(
                self.options.silent_s, self._warn_late
            )
            try:
                held_policy = await self.met_server.take(
                    broadcast, self.options.update_s, self.models
                )
            finally:
                warning_timer.cancel()
            if held_policy.version != broadcast.version:
                raise ServerError(
                    f"{self.url} was told version {broadcast.version} and acknowledges "
                    f"{held_policy.version}"
                )
            self.held, self.version = held_policy, held_policy.version
            return held_policy

    # -- its life ----------------------------------------------------------------------------------

    async def connect(self) -> None:
        """Connect, check the server, and begin to take requests. ServerError when it does not
        answer or computes with other weights, ValueError when it will never fit."""
        options = self.options
        self._why = None
        server = self.server = await (options.connect or connect_server)(self.http, options)
        await _resume_if_paused(server, options)
        self.owner.agree(self)
        self.held = server.held
        await self._check_until_settled()
        self.state, self.suspect, self.busy_until = "ready", False, 0.0
        self._met = True
        self.last_error = ""
        self.tried.set()
        self.owner.admitted(self)

    async def _check_until_settled(self) -> None:
        versions = self.owner.versions
        while True:
            await self._catch_up()
            checked_policy = versions.held
            await self._check_logprobs()
            if versions.settled.is_set() and versions.held == checked_policy:
                return

    async def _catch_up(self) -> None:
        versions = self.owner.versions
        if versions.newest is None:
            self._check_first_weights()
        while (newest := versions.newest) is not None:
            was_settled = versions.settled.is_set()
            if was_settled and self.held is not None and self.held == versions.held:
                break
            if not was_settled and versions.broadcasting:
                # the working engines decide which digest is right
                await happens_within(versions.settled, self.options.update_s)
                continue
            held_policy = await self.take(newest)
            if newest is not versions.newest:
                continue
            if not was_settled and not versions.settled.is_set():
                versions.settle(held_policy)  # no other engine works: this one decides
            elif was_settled and held_policy != versions.held:
                raise ServerError(
                    f"{self.url}: its weights of version {newest.version} have another digest "
                    f"than those of the other engines"
                )
        assert versions.held is not None
        self.version = versions.held.version

    def _check_first_weights(self) -> None:
        versions = self.owner.versions
        held_policy = self.held or HeldPolicy(0, frozenset({""}))
        if versions.held is None:
            versions.settle(held_policy)
        elif held_policy != versions.held:
            raise ValueError(
                f"{self.url} draws from version {held_policy.version} with other weights than the "
                f"engines before it, which draw from version {versions.held.version}"
            )

    async def _check_logprobs(self) -> None:
        witness = self._witness()
        if witness is None or not self.met_server.scores:
            return
        seconds = self.options.silent_s
        own_logprobs, witness_logprobs = await asyncio.gather(
            canary_logprobs(self.met_server, seconds),
            canary_logprobs(witness.met_server, seconds),
            return_exceptions=True,
        )
        if isinstance(own_logprobs, BaseException):
            raise own_logprobs
        if isinstance(witness_logprobs, BaseException) or self._witness() is not witness:
            return  # the witness's own heartbeats judge it
        check_canary(own_logprobs, witness_logprobs, witness.url)

    def _witness(self) -> Replica | None:
        if not self.owner.versions.settled.is_set():
            return None
        for replica in self.owner.replicas:
            if replica is self or replica.state != "ready" or replica.taking:
                continue
            if replica.version == self.version:
                return replica
        return None

    def _others_work(self) -> bool:
        return any(
            replica.state == "ready" and replica is not self for replica in self.owner.replicas
        )

    async def _watch(self) -> str:
        clock = asyncio.get_running_loop().time
        heartbeat_s = self.options.heartbeat_s
        allowed_s = (HEARTBEATS_BEFORE_EVICTION - 0.5) * heartbeat_s
        activity = EngineActivity(clock())
        num_answered = self.counts.requests
        while True:
            if await happens_within(self._wake, heartbeat_s):
                self._wake.clear()
            if self._why is not None:
                return self._why
            if self.taking:  # it may be silent, and `take` has its own deadline
                activity = EngineActivity(clock(), activity.tokens)
                continue
            if num_answered != self.counts.requests:  # an answer counts like a heartbeat
                activity.heard_at = activity.drew_at = clock()
                num_answered = self.counts.requests
            try:
                status, progress = await self._heartbeat(heartbeat_s)
            except ServerError as error:
                self.last_error = str(error)
                if isinstance(error, EngineLost):
                    return self.last_error
                silent_s = clock() - activity.heard_at
                if silent_s > allowed_s:
                    return f"silent for {silent_s:.1f} s: {error}"
                continue
            activity.heard_at = clock()
            self.suspect = False
            self.owner.heard(self)
            stuck = activity.update(status, progress, len(self.flights), clock(), allowed_s)
            if stuck is not None:
                return stuck

    def _warn_late(self) -> None:
        log.warning(
            "engine %s has not answered for %g s, since it was told to take weights: it is stopped, "
            "hangs or reads a large model. Waiting for it",
            self.url,
            self.options.silent_s,
        )

    async def _heartbeat(self, heartbeat_s: float) -> tuple[str, ServerProgress]:
        """Return its status and, while it has requests, its counters. EngineLost when it is
        unreachable twice."""
        server = self.met_server
        try:
            status = await server.health(heartbeat_s)
        except EngineLost:
            await asyncio.sleep(ONCE_MORE_S)
            status = await server.health(heartbeat_s)
        if not self.flights:
            return status, ServerProgress(open=0, tokens=-1)
        return status, await server.progress(heartbeat_s)

    def _evict(self, why: str) -> float:
        away_s = 0.0
        if self.state == "ready":
            self.counts.evicted += 1
            away_s = self._count_eviction()
            note = ""
            if away_s:
                note = f"; it was evicted {len(self._evictions)} times lately: for {away_s:g} s"
            log.warning("engine %s is evicted: %s%s", self.url, why, note)
        elif why != self.last_error and (self._met or self._others_work()):
            log.warning("engine %s does not work yet: %s", self.url, why)
        self.state = "evicted"
        self.last_error = why
        self.tried.set()
        self.owner.evicted(self)
        return away_s

    def _count_eviction(self) -> float:
        now = asyncio.get_running_loop().time()
        self._evictions.append(now)
        while now - self._evictions[0] > FLAPS_S:
            self._evictions.popleft()
        num_repeats = len(self._evictions) - 1
        return min(FIRST_PAUSE * 2.0**num_repeats, LONGEST_AWAY) if num_repeats else 0.0

    async def _away(self, seconds: float) -> None:
        clock = asyncio.get_running_loop().time
        end = clock() + seconds
        while clock() < end and self._others_work():
            await asyncio.sleep(min(FIRST_PAUSE, end - clock()))

    def _report_misfit(self, error: ServerError | ValueError) -> None:
        will_never_fit = isinstance(error, ValueError) or error.status in REFUSED
        if will_never_fit and self.named and not self._met:
            self.owner.misfit(self, error)
