"""Routing of a pool's requests to its replicas: least loaded, with affinity and retries
(docs/roles.md). A request is all samples of a group. A lost one is sent to another replica with the
same id and seed, so that the same weights draw the same tokens."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence

from lowroll.engine.base import PartialSample
from lowroll.engine.remote.http_client import (
    AGAIN,
    DeadlineExceeded,
    EngineLost,
    HttpCall,
    ServerError,
    happens_within,
    parse_json,
)
from lowroll.engine.remote.protocol import PATH, Origin, ResponseAssembler, most_bytes
from lowroll.engine.remote.replica import (
    REFUSED,
    InFlightRequest,
    PoolOptions,
    QueuedRequest,
    Replica,
)
from lowroll.engine.remote.server_base import EngineServer
from lowroll.engine.remote.versions import PolicyVersions
from lowroll.types import Group, Request

log = logging.getLogger(__name__)

FAILURES = 4  # of one request, at engines that continue, before the run ends
LOSSES = 32  # evictions that one request may see
BUSY_S, LONGEST_BUSY_S = 0.2, 5.0  # of an engine that answered "busy"
# caches full of tokens that are sent to one engine, which must not run out of work before the last
# sample of a group has ended (docs/log/engine.md)
AHEAD = 3.0
BEHIND = 1.25  # times the least load that the engine with a turn's pages may have
LEARNED = 1 / 64  # weight of an answer in the mean of used budgets
MOST_HOMES = 1 << 16  # requests whose engine is remembered

Answer = Callable[[int, "Group | Exception"], None]


class LoadBalancer:
    def __init__(self, concurrency: int) -> None:
        self._concurrency = concurrency
        self._share = 1.0  # mean drawn share of max_tokens
        self._homes: dict[str, str] = {}

    def choose(self, able: Sequence[Replica], entry: QueuedRequest) -> Replica | None:
        """Return the engine with the fewest outstanding tokens; None when all are full. A later
        turn goes to the engine that may hold its pages, unless that has clearly more to do or has
        failed it."""
        free_replicas = [replica for replica in able if self._is_free(replica, entry)]
        if not free_replicas:
            return None
        least_loaded = min(free_replicas, key=lambda r: (r.url in entry.avoid, r.outstanding))
        home_url = self._homes.get(entry.request.follows or "")
        home = next((replica for replica in free_replicas if replica.url == home_url), None)
        if home is None or home.url in entry.avoid:
            return least_loaded
        max_outstanding = BEHIND * least_loaded.outstanding + self.load(entry)
        return home if home.outstanding <= max_outstanding else least_loaded

    def load(self, entry: QueuedRequest) -> int:
        """Return the tokens that a request will probably hold."""
        request = entry.request
        return int(request.n * request.max_tokens * self._share) + len(request.prompt_ids)

    def learn(self, flight: InFlightRequest, group: Group) -> None:
        """Learn from an answer which share of its budget a request draws, and which
        engine drew it."""
        request = flight.entry.request
        num_drawn = sum(len(rollout.token_ids) for rollout in group.rollouts)
        drawn_share = num_drawn / (request.n * request.max_tokens)
        self._share += LEARNED * (drawn_share - self._share)
        if request.id:
            self._homes[request.id] = flight.replica.url
            if len(self._homes) > MOST_HOMES:
                oldest_id = next(iter(self._homes))
                del self._homes[oldest_id]

    def _is_free(self, replica: Replica, entry: QueuedRequest) -> bool:
        if not replica.flights:
            return True
        cache_tokens = replica.met_server.cache_tokens
        if cache_tokens and replica.outstanding + self.load(entry) > AHEAD * cache_tokens:
            return False
        return len(replica.flights) < self._concurrency


class RequestRouter:
    """The requests of a pool on their way, on the pool's loop alone."""

    def __init__(
        self,
        replicas: list[Replica],
        versions: PolicyVersions,
        options: PoolOptions,
        answer: Answer,
    ):
        self.replicas = replicas
        self.versions = versions
        self.options = options
        self._answer = answer
        self.known: EngineServer | None = None
        self._waiting: deque[QueuedRequest] = deque()
        self._flights: dict[int, InFlightRequest] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._balancer = LoadBalancer(options.concurrency)
        self._dispatch_due = False

    def add(self, entries: Sequence[QueuedRequest]) -> None:
        """Queue requests; those of one iteration of the loop are dispatched together."""
        self._waiting.extend(entries)
        if not self._dispatch_due:
            self._dispatch_due = True
            asyncio.get_running_loop().call_soon(self.dispatch)

    @property
    def server(self) -> EngineServer:
        server = next(
            (replica.server for replica in [*self.replicas] if replica.server is not None),
            self.known,
        )
        assert server is not None, "no engine was met"
        return server

    def abort(self, entry: QueuedRequest) -> None:
        """Abort a request; its group has the tokens read of a stream, or none."""
        if entry.ended:
            return
        flight = self._flights.get(entry.handle)
        if flight is not None:
            self._drop(flight)
        elif entry in self._waiting:
            self._waiting.remove(entry)
        if flight is not None and self.options.stream:
            arrivals, origin = flight.arrivals, flight.origin
        else:
            arrivals = self._arrivals(entry, self.server)
            origin = _origin_of_samples(entry.request, self.server)
        self._end(entry, arrivals.aborted(origin))
        self.dispatch()

    def so_far(self, entry: QueuedRequest) -> list[PartialSample]:
        """Return the tokens read of each sample, none without a stream. Thread-safe."""
        flight = self._flights.get(entry.handle)
        if flight is None or not self.options.stream:
            return [PartialSample([], [], None) for _ in range(entry.request.n)]
        return flight.arrivals.so_far()

    def drop_all(self) -> None:
        self._waiting.clear()
        for flight in list(self._flights.values()):
            flight.entry.ended = True
            self._drop(flight)

    def hand_over(self, replica: Replica) -> None:
        lost_flights = sorted(replica.flights, key=lambda flight: flight.entry.handle)
        for flight in lost_flights:
            self._drop(flight)
        replica.counts.handed_over += len(lost_flights)
        self._waiting.extendleft(flight.entry for flight in reversed(lost_flights))
        self.dispatch()

    def dispatch(self) -> None:
        self._dispatch_due = False
        if not self._waiting:
            return
        now = asyncio.get_running_loop().time()
        able_replicas = [replica for replica in self.replicas if replica.takes_work(now)]
        while self._waiting:
            replica = self._balancer.choose(able_replicas, self._waiting[0])
            if replica is None:
                return
            self._send(replica, self._waiting.popleft())

    # -- one request -------------------------------------------------------------------------------

    def _send(self, replica: Replica, entry: QueuedRequest) -> None:
        entry.attempt += 1
        request, server = entry.request, replica.met_server
        arrivals = self._arrivals(entry, server)
        body = server.body(request)
        if self.options.stream:
            body["stream"] = True
        call = HttpCall(
            "POST",
            PATH,
            arrivals.what,
            body,
            deadline_s=self.options.timeout_s,
            most_bytes=most_bytes(request),
            # retry the only engine, unless a stream may have been read
            again=self.options.fail_fast and not self.options.stream,
        )
        flight = InFlightRequest(
            entry,
            replica,
            sent=replica.version,
            call=call,
            arrivals=arrivals,
            origin=_origin_of_samples(request, server),
            load=self._balancer.load(entry),
        )
        self._flights[entry.handle] = flight
        replica.flights.add(flight)
        replica.outstanding += flight.load
        flight.task = asyncio.ensure_future(self._fly(flight))
        self._tasks.add(flight.task)
        flight.task.add_done_callback(self._done)

    async def _fly(self, flight: InFlightRequest) -> None:
        replica, arrivals = flight.replica, flight.arrivals
        try:
            if self.options.stream:
                await replica.http.body(flight.call, arrivals.on_line)
            else:
                arrivals.take(parse_json(await replica.http.body(flight.call), arrivals.what))
            group = arrivals.group(flight.origin)
            if not self.options.fail_fast:
                await self._believe(flight, group)
        except ServerError as error:
            self._failed(flight, error)
            return
        if self._is_late(flight):
            return
        self._remove(flight)
        replica.counts.requests += 1
        replica.counts.tokens += sum(len(rollout.token_ids) for rollout in group.rollouts)
        replica.busy_s = 0.0
        self._balancer.learn(flight, group)
        self._end(flight.entry, group)
        self.dispatch()

    async def _believe(self, flight: InFlightRequest, group: Group) -> None:
        """Raise ServerError when a group was drawn from another version than its engine was sent.
        Wait while engines agree on one."""
        problem = self.versions.problem(group, flight.sent)
        if problem is not None and not self.versions.settled.is_set():
            await happens_within(self.versions.settled, self.options.update_s)
            problem = self.versions.problem(group, flight.sent)
        if problem is not None:
            raise ServerError(f"{flight.arrivals.what}: {flight.replica.url}: {problem}")

    def _is_late(self, flight: InFlightRequest) -> bool:
        if self._flights.get(flight.entry.handle) is flight:
            return False
        flight.replica.counts.late += 1
        return True

    def _failed(self, flight: InFlightRequest, error: ServerError) -> None:
        entry = flight.entry
        if self._is_late(flight):
            return
        self._remove(flight)
        if self.options.fail_fast:
            self._end(entry, error)
        elif self._may_retry(flight, error) and entry.failures < FAILURES and entry.losses < LOSSES:
            flight.replica.counts.retries += 1
            self._waiting.appendleft(entry)
            self.dispatch()
        elif entry.attempt == 1:
            self._end(entry, error)
        else:
            note = f" (sent {entry.attempt} times)"
            self._end(entry, ServerError(f"{error}{note}", error.status))

    def _may_retry(self, flight: InFlightRequest, error: ServerError) -> bool:
        entry, replica = flight.entry, flight.replica
        if isinstance(error, EngineLost):
            entry.losses += 1
            replica.mark_suspect(str(error))
        elif error.status in AGAIN:
            return self._pause(flight, error)
        elif error.status in REFUSED:  # another server than the one at the start
            entry.failures += 1
            replica.mark_unhealthy(str(error))
        elif isinstance(error, DeadlineExceeded) or (error.status or 0) >= 500:
            # the heartbeat judges the engine
            entry.failures += 1
            entry.avoid.add(replica.url)
            replica.last_error = str(error)
        elif error.status is None:
            entry.failures += 1
            entry.avoid.add(replica.url)
            replica.counts.refused += 1
            replica.mark_unhealthy(f"its answer is not believed: {error}")
        else:
            return False
        return True

    def _pause(self, flight: InFlightRequest, error: ServerError) -> bool:
        """Pause a busy engine for a time that doubles while it stays busy. Return whether the
        request may wait, for `start_s` in all."""
        loop, replica, entry = asyncio.get_running_loop(), flight.replica, flight.entry
        now = loop.time()
        replica.last_error = str(error)
        if now >= replica.busy_until:  # else another request of this pause has failed too
            replica.busy_s = min(max(2 * replica.busy_s, BUSY_S), LONGEST_BUSY_S)
            replica.busy_until = now + replica.busy_s
            loop.call_later(replica.busy_s + 0.001, self.dispatch)
        entry.busy_since = entry.busy_since or now
        return now - entry.busy_since <= self.options.start_s

    def _drop(self, flight: InFlightRequest) -> None:
        self._remove(flight)
        assert flight.task is not None
        flight.task.cancel()

    def _remove(self, flight: InFlightRequest) -> None:
        del self._flights[flight.entry.handle]
        flight.replica.flights.remove(flight)
        flight.replica.outstanding -= flight.load

    def _end(self, entry: QueuedRequest, outcome: Group | Exception) -> None:
        if not entry.ended:
            entry.ended = True
            self._answer(entry.handle, outcome)

    def _arrivals(self, entry: QueuedRequest, server: EngineServer) -> ResponseAssembler:
        request = entry.request
        label = f"request {request.id or entry.handle}"
        stop_ids = server.stop_ids(request)
        return ResponseAssembler(request, label, server.vocab_size, server.model, stop_ids)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._answer(-1, error if isinstance(error, Exception) else RuntimeError(str(error)))


def _origin_of_samples(request: Request, server: EngineServer) -> Origin:
    behavior = server.behavior
    return lambda i, one: (server.tag(request, behavior, i, one), server.evictions(one))
