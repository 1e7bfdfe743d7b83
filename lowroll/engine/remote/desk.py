"""The requests of a pool: who waits, who is where, and who goes to another engine.

A request, which is all samples of a group, goes to the engine with the fewest tokens outstanding. A
later turn of a conversation goes to the one that drew the turn before and may have its pages, unless
that one has clearly more to do. An engine whose cache is full is sent no more than it can begin soon:
the rest waits here for whoever ends first. What an engine loses goes on at another one with the same
id and seed, so under the same weights it has the same noise. Every sending has a number, and an
answer of an earlier one is no answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lowroll.engine.remote.completions import PATH, Arrivals, Origin, most_bytes
from lowroll.engine.remote.engine import Dialect
from lowroll.engine.remote.member import Member, Terms
from lowroll.engine.remote.versions import Versions
from lowroll.engine.remote.wire import AGAIN, Call, EngineLost, Late, ServerError, happens, parsed
from lowroll.types import Group, Request

log = logging.getLogger(__name__)

FAILURES = 4  # of one request before it ends the run: at an engine that goes on
LOSSES = 32  # engines that one request may see die
BUSY_S, LONGEST_BUSY_S = 0.2, 5.0  # without requests for an engine that said that it is busy
# caches full of tokens that an engine is sent: a group counts until its last sample has ended, and
# with less an engine lacks work meanwhile (`bench.deal`)
AHEAD = 3.0
BEHIND = 1.25  # times the work of the engine with least that the one with a turn's pages may have
LEARNED = 1 / 64  # weight of an answer in the mean of how much of their tokens requests draw
MOST_HOMES = 1 << 16  # requests of which it is known who drew them

Answer = Callable[[int, "Group | Exception"], None]


@dataclass(eq=False)
class Ticket:
    """A request of the pool's caller."""

    handle: int
    request: Request
    attempt: int = 0
    failures: int = 0
    losses: int = 0
    busy_since: float = 0.0  # its engines have been
    avoid: set[str] = field(default_factory=set)  # engines that did not do it right
    ended: bool = False


@dataclass(eq=False)
class Flight:
    """A ticket at an engine."""

    ticket: Ticket
    member: Member
    attempt: int
    sent: int  # the version that its engine had acknowledged
    call: Call
    arrivals: Arrivals
    origin: Origin
    load: int  # tokens that it counts for at its engine
    task: asyncio.Task[None] | None = None


class Desk:
    """On the pool's loop alone. answer: takes what has become of each handle."""

    def __init__(self, members: list[Member], versions: Versions, terms: Terms, answer: Answer):
        self.members = members
        self.versions = versions
        self.terms = terms
        self._answer = answer
        self.known: Dialect | None = None  # of the engine that was met last
        self._waiting: deque[Ticket] = deque()
        self._flights: dict[int, Flight] = {}  # by handle
        self._tasks: set[asyncio.Task[None]] = set()
        self._called = False  # requests came, and are dealt in this turn of the loop
        self._share = 1.0  # of the tokens that requests may draw, those that they do
        self._homes: dict[str, str] = {}  # by id: the engine

    def add(self, tickets: Sequence[Ticket]) -> None:
        """Requests. They are dealt once for all that come in one turn of the loop."""
        self._waiting.extend(tickets)
        if not self._called:
            self._called = True
            asyncio.get_running_loop().call_soon(self._pump_added)

    @property
    def dialect(self) -> Dialect:
        """Of the first engine that was met; when all have left, of the last one."""
        found = next((m.peer.dialect for m in [*self.members] if m.peer is not None), self.known)
        assert found is not None, "no engine was met"
        return found

    @property
    def idle(self) -> bool:
        """Whether nothing is to be done."""
        return not (self._waiting or self._flights)

    def abort(self, ticket: Ticket) -> None:
        """End a request; its group comes back with what is known of it: nothing."""
        if ticket.ended:
            return
        flight = self._flights.get(ticket.handle)
        if flight is not None:
            self._drop(flight)
        elif ticket in self._waiting:
            self._waiting.remove(ticket)
        dialect = self.dialect
        arrivals = self._arrivals(ticket, dialect)
        self._end(ticket, arrivals.aborted(_origin(ticket.request, dialect)))
        self.pump()

    def drop_all(self) -> None:
        """Forget all requests."""
        self._waiting.clear()
        for flight in list(self._flights.values()):
            flight.ticket.ended = True
            self._drop(flight)

    def hand_over(self, member: Member) -> None:
        """What an engine has, to others."""
        lost = sorted(member.flights, key=lambda flight: flight.ticket.handle)
        for flight in lost:
            self._drop(flight)
            member.counts.handed_over += not flight.ticket.ended
        self._waiting.extendleft(flight.ticket for flight in reversed(lost))
        self.pump()

    def _pump_added(self) -> None:
        self._called = False
        self.pump()

    def pump(self) -> None:
        """Send what can be sent."""
        if not self._waiting:
            return  # nothing: every answer and every heartbeat asks
        now = asyncio.get_running_loop().time()
        able = [member for member in self.members if member.takes_work(now)]
        while self._waiting:
            free = [m for m in able if self._has_room(m, self._waiting[0])]
            if not free:
                return
            self._send(self._choose(free, self._waiting[0]), self._waiting.popleft())

    def _has_room(self, member: Member, ticket: Ticket) -> bool:
        assert member.peer is not None
        if not member.flights:
            return True
        cache = getattr(member.peer.dialect, "cache_tokens", 0)
        if cache and member.outstanding + self._load(ticket) > AHEAD * cache:
            return False
        return len(member.flights) < self.terms.concurrency

    def _choose(self, free: Sequence[Member], ticket: Ticket) -> Member:
        """Who is to draw it."""
        least = min(free, key=lambda m: (m.url in ticket.avoid, m.outstanding))
        url = self._homes.get(ticket.request.follows or "")  # of the turn before
        home = next((m for m in free if m.url == url and url not in ticket.avoid), least)
        most = BEHIND * least.outstanding + self._load(ticket)
        return home if home.outstanding <= most else least

    def _load(self, ticket: Ticket) -> int:
        """Tokens that it is likely to hold: samples end before their longest."""
        request = ticket.request
        return int(request.n * request.max_tokens * self._share) + len(request.prompt_ids)

    def _learn(self, flight: Flight, group: Group) -> None:
        """Who drew it, and how long its samples were."""
        request = flight.ticket.request
        drawn = sum(len(one.token_ids) for one in group.rollouts)
        self._share += LEARNED * (drawn / (request.n * request.max_tokens) - self._share)
        if request.id:
            self._homes[request.id] = flight.member.url
            if len(self._homes) > MOST_HOMES:
                del self._homes[next(iter(self._homes))]

    # -- one request -------------------------------------------------------------------------------

    def _send(self, member: Member, ticket: Ticket) -> None:
        assert member.peer is not None
        ticket.attempt += 1
        request, dialect = ticket.request, member.peer.dialect
        arrivals = self._arrivals(ticket, dialect)
        body = dialect.body(request)
        call = Call("POST", PATH, arrivals.what, body, self.terms.timeout_s, most_bytes(request))
        origin = _origin(request, dialect)
        load = self._load(ticket)
        flight = Flight(
            ticket, member, ticket.attempt, member.version, call, arrivals, origin, load
        )
        self._flights[ticket.handle] = flight
        member.flights.add(flight)
        member.outstanding += load
        flight.task = self._start(self._fly(flight))

    async def _fly(self, flight: Flight) -> None:
        member, arrivals = flight.member, flight.arrivals
        try:
            arrivals.take(parsed(await member.wire.body(flight.call), arrivals.what))
            group = arrivals.group(flight.origin)
            await self._believe(flight, group)
        except ServerError as error:
            self._failed(flight, error)
            return
        if not self._over(flight):
            return
        member.counts.requests += 1
        member.counts.tokens += sum(len(one.token_ids) for one in group.rollouts)
        member.busy_s = 0.0
        self._learn(flight, group)
        self._end(flight.ticket, group)
        self.pump()

    async def _believe(self, flight: Flight, group: Group) -> None:
        """ServerError when it was drawn from another version than its engine was told."""
        spoken = self.versions.problem(group, flight.sent)
        if spoken is not None and not self.versions.settled.is_set():
            await happens(self.versions.settled, self.terms.update_s)
            spoken = self.versions.problem(group, flight.sent)
        if spoken is not None:
            raise ServerError(f"{flight.arrivals.what}: {flight.member.url}: {spoken}")

    def _over(self, flight: Flight) -> bool:
        """Take a flight out; False when nobody waits for it any more."""
        if self._flights.get(flight.ticket.handle) is not flight:
            flight.member.counts.late += 1
            return False
        del self._flights[flight.ticket.handle]
        flight.member.flights.discard(flight)
        flight.member.outstanding -= flight.load
        return True

    def _failed(self, flight: Flight, error: ServerError) -> None:
        """Again, somewhere else, later, or never."""
        ticket, member = flight.ticket, flight.member
        if not self._over(flight):
            return
        final = self._weigh(flight, error)
        if ticket.ended:
            pass
        elif final or ticket.failures >= FAILURES or ticket.losses >= LOSSES:
            told = ServerError(f"{error} (sent {ticket.attempt} times)", error.status)
            self._end(ticket, error if ticket.attempt == 1 else told)
            return
        else:
            member.counts.retries += 1
        self._waiting.appendleft(ticket)
        self.pump()

    def _weigh(self, flight: Flight, error: ServerError) -> bool:
        """What an error says of the engine and the request. Returns whether the request is wrong."""
        ticket, member = flight.ticket, flight.member
        if isinstance(error, EngineLost):
            ticket.losses += 1
            member.doubt(str(error))
        elif error.status in AGAIN:
            return self._wait_for(flight, error)
        elif error.status in (401, 403, 404):  # another server than the one that was met
            ticket.failures += 1
            member.kick(str(error))
        elif error.status is None and not isinstance(error, Late):
            ticket.failures += 1
            ticket.avoid.add(member.url)
            member.counts.refused += 1
            member.kick(f"its answer is not believed: {error}")
        elif isinstance(error, Late) or (error.status or 0) >= 500:
            ticket.failures += 1
            ticket.avoid.add(member.url)
            member.last_error = str(error)
        else:
            return True
        return False

    def _wait_for(self, flight: Flight, error: ServerError) -> bool:
        """A busy engine: after a while that doubles. Returns whether that was long enough."""
        loop, member, ticket = asyncio.get_running_loop(), flight.member, flight.ticket
        now = loop.time()
        member.last_error = str(error)
        if now >= member.busy_until:
            member.busy_s = min(max(2 * member.busy_s, BUSY_S), LONGEST_BUSY_S)
            member.busy_until = now + member.busy_s
            loop.call_later(member.busy_s + 0.001, self.pump)
        ticket.busy_since = ticket.busy_since or now
        return now - ticket.busy_since > self.terms.patience_s

    def _drop(self, flight: Flight) -> None:
        """Close its connection, upon which the engine ends it."""
        if self._flights.get(flight.ticket.handle) is flight:
            del self._flights[flight.ticket.handle]
        if flight in flight.member.flights:
            flight.member.flights.discard(flight)
            flight.member.outstanding -= flight.load
        if flight.task is not None:
            flight.task.cancel()

    def _end(self, ticket: Ticket, outcome: Group | Exception) -> None:
        if not ticket.ended:
            ticket.ended = True
            self._answer(ticket.handle, outcome)

    def _arrivals(self, ticket: Ticket, dialect: Dialect) -> Arrivals:
        request = ticket.request
        what = f"request {request.id or ticket.handle}"
        stop_ids = dialect.stop_ids(request)
        return Arrivals(request, what, dialect.vocab_size, dialect.model, stop_ids)

    def _start(self, work: object) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)  # type: ignore[call-overload]
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._answer(-1, error if isinstance(error, Exception) else RuntimeError(str(error)))


def _origin(request: Request, dialect: Dialect) -> Origin:
    behavior = dialect.behavior
    return lambda i, one: (dialect.tag(request, behavior, i, one), dialect.evictions(one))
