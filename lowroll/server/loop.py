"""The engine's thread, and the only one that calls the engine.

    loop = EngineLoop(engine)
    loop.start()
    async with await loop.submit(request, stream=True) as ticket:    # leaving it aborts the request
        async for delta in ticket:
            ...
        group = await ticket.group()

The thread takes turns: first what was asked of it since the last turn (`call`, `submit`, aborts),
then one step of the engine. First tokens go to the tickets at once; what else the step drew goes
while the device works on the next one: their event loop would take Python's lock from the thread
before. It waits for no reader:
what piles up for a slow one is merged, and is never more than the response. The event loop waits
for the thread with a deadline, and says what the thread is busy with when that passes.

A step that raises answers its requests with `EngineFailed`; the engine goes on with the next ones.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from lowroll.engine.base import Engine, EngineStats
from lowroll.server.metrics import Metrics
from lowroll.server.ticket import Delta, EngineFailed, Flight, Ticket
from lowroll.types import BehaviorTag, Group, Request

log = logging.getLogger(__name__)

T = TypeVar("T")
PauseMode = Literal["keep", "wait", "abort"]
State = Literal["running", "draining", "paused"]
News = tuple[Ticket, list[Delta], Group | Exception | None]
FEW = 8  # tickets that have news: their event loop is done with it before it is in the way
ASKED_S = 0.02  # of a turn, for what was asked: then what is in flight goes on
FAILURES = 3  # steps that fail one after the other before the engine counts as broken


class Busy(RuntimeError):
    """As many requests are open as may be, or the server is ending."""


class Stalled(RuntimeError):
    """The engine's thread did not answer in time; the message says what it is busy with."""


@dataclass(frozen=True)
class Health:
    """What the engine's thread says of itself between two steps."""

    behavior: BehaviorTag
    stats: EngineStats
    open: int  # requests
    state: State
    failures: int  # steps that have failed since the last one that did not

    @property
    def well(self) -> bool:
        """Whether requests are answered."""
        return self.failures < FAILURES


class EngineLoop:
    """See the top of the file.

    deadline_s: the longest turn; whoever waits for a longer one gets Stalled. drain_s: how long
    `pause("wait")` waits for the requests in flight. max_samples: samples of open requests, running
    and waiting; a request that comes on top of as many is Busy.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        deadline_s: float = 30.0,
        drain_s: float = 600.0,
        max_samples: int = 16384,
        metrics: Metrics | None = None,
    ) -> None:
        self.deadline_s = deadline_s
        self._turn_s = deadline_s / 8  # of a thread without work, so that it shows that it is alive
        self.drain_s = drain_s
        self.max_samples = max_samples
        self.metrics = metrics or Metrics()
        self.closing = False  # no new requests
        self._engine = engine
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._stopping = False
        self._doing = "its start"
        self._since = time.monotonic()
        self._allowed_s = deadline_s
        # of the event loop alone
        self._open: set[Ticket] = set()
        self._samples = 0  # of them
        self._watch: asyncio.TimerHandle | None = None  # of the thread, while requests are open
        self._probe: asyncio.Task[Health | Stalled] | None = None
        # of the thread alone
        self._flights: dict[int, Flight] = {}  # by handle
        self._unseen: deque[Flight] = deque()  # without a token, as far as is known
        self._held: deque[Flight] = deque()  # that came while others were waited for
        self._news: list[News] = []  # that was not sent yet
        self._state: State = "running"
        self._drained: Future[None] | None = None
        self._failures = 0

    def start(self) -> None:
        """Begin to take turns."""
        self._thread.start()

    def stop(self) -> None:
        """Abort what is in flight and end the thread; one that hangs is left behind."""
        self.closing = True
        self._stopping = True
        self.post(lambda: None)
        if self._thread.is_alive():
            self._thread.join(timeout=self.deadline_s)
            if self._thread.is_alive():
                log.error("the engine's thread did not end: %s", self._busy())

    async def submit(self, request: Request, *, stream: bool = False) -> Ticket:
        """Queue a request. stream: its ticket tells what is drawn while it is drawn.

        ValueError names the wrong field, as the engine does; Busy, Stalled."""
        if self.closing:
            raise Busy("the server is ending")
        if self._samples >= self.max_samples:
            raise Busy(f"{self._samples} samples are open, of {self.max_samples} at most")
        ticket = Ticket(self, request, stream)
        self._open.add(ticket)
        self._samples += request.n
        if self._watch is None:
            self._watch = ticket.events.call_later(self._turn_s, self._look)
        try:
            await self.call(lambda engine: self._begin(ticket.flight), "a new request")
        except BaseException:
            ticket.abort()
            self.forget(ticket)
            raise
        return ticket

    async def call(self, fn: Callable[[Engine], T], what: str, allowed_s: float | None = None) -> T:
        """What fn(engine) returns or raises, run on the engine's thread between two steps. Stalled
        when the thread does not get there, or fn takes longer than allowed (default: a turn); what
        had not begun by then never will."""
        job: Future[T] = Future()
        answer = asyncio.wrap_future(job)
        self.check(what)
        self.post(lambda: self._do(job, fn, what, allowed_s))
        try:
            await self.patiently(lambda: asyncio.wait([answer]), what)
            return await answer
        finally:
            answer.cancel()  # nobody waits any more

    def compile_grammar(self, text: str) -> None:
        """Have a grammar compiled that a request will name, in the caller's thread: the engine's finds
        it done. ValueError says what is wrong with it. One that lies elsewhere compiles it there."""
        grammars = getattr(self._engine, "grammars", None)
        if grammars is not None:
            grammars.compile(text)

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stop drawing. keep: requests in flight stay as they are and go on after `resume`. wait:
        they run to their end first, and new ones are held back; Stalled when that takes more than
        `drain_s`, and nothing is paused then. abort: they end now, with what they have drawn.
        ValueError for one that waits, when a resume or another pause comes first.
        """
        drained: Future[None] = Future()
        answer = asyncio.wrap_future(drained)
        try:
            async with asyncio.timeout(self.drain_s):
                await self.call(lambda engine: self._pause(mode, drained), "pause")
                await self.patiently(lambda: asyncio.wait([answer]), "pause")
                await answer
        except TimeoutError:
            await self.call(lambda engine: self._stop_drain(drained), "pause")
            if not drained.done():
                raise Stalled(
                    f"pause: {len(self._open)} requests still run after {self.drain_s:g} s"
                ) from None
            await answer
        finally:
            answer.cancel()  # nobody waits any more

    async def resume(self) -> None:
        """Go on drawing."""
        await self.call(lambda engine: self._resume(), "resume")

    @property
    def paused(self) -> bool:
        """Whether nothing is drawn until `resume`."""
        return self._state == "paused"

    async def abort_all(self) -> int:
        """End every request now, with what it has drawn. Returns how many there were."""
        return await self.call(lambda engine: self._abort_all(), "abort")

    async def health(self, deadline_s: float | None = None) -> Health:
        """The thread's own answer; Stalled when there is none in time (default: a turn's). Who asks
        meanwhile gets the same."""
        if self._probe is None or self._probe.done():
            self._probe = asyncio.ensure_future(self._ask_health())
        allowed = self.deadline_s if deadline_s is None else deadline_s
        done, _ = await asyncio.wait([self._probe], timeout=allowed)
        if not done:
            raise Stalled(f"health: no answer in {allowed:g} s: {self._busy()}")
        found = await self._probe
        if isinstance(found, Stalled):
            raise Stalled(str(found))
        return found

    async def settle(self, grace_s: float) -> int:
        """Take no new requests, and wait so long for the open ones. Returns how many are left."""
        self.closing = True
        until = time.monotonic() + grace_s
        while self._open and not self.paused and time.monotonic() < until:
            await asyncio.sleep(0.02)
        return len(self._open)

    # -- for tickets -------------------------------------------------------------------------------

    def post(self, job: Callable[[], None]) -> None:
        """Have the thread do this between two steps."""
        self._inbox.put(job)

    def drop(self, flight: Flight) -> None:
        """On the thread: end a request, wherever it is."""
        if flight in self._held:
            self._held.remove(flight)
            self._admit(flight)
        if flight.handle is not None and flight.handle in self._flights:
            flight.aborted = True
            self._engine.abort(flight.handle)

    def forget(self, ticket: Ticket) -> None:
        """A ticket has got its end, or was never in."""
        if ticket in self._open:
            self._open.remove(ticket)
            self._samples -= ticket.request.n

    def _look(self) -> None:
        """One clock for all open requests: who waits for one is told when the thread hangs."""
        try:
            self.check("a request")
        except Stalled:
            for ticket in self._open:
                ticket.wake()
        self._watch = None
        if self._open:
            events = asyncio.get_running_loop()
            self._watch = events.call_later(self._turn_s, self._look)

    async def patiently(self, wait: Callable[[], Awaitable[Any]], what: str) -> None:
        """Wait as long as the thread takes its turns; else Stalled."""
        while True:
            try:
                async with asyncio.timeout(self._turn_s):
                    await wait()
                return
            except TimeoutError:
                self.check(what)

    def check(self, what: str) -> None:
        """Stalled when waiting for the thread is no use."""
        if not self._thread.is_alive():
            raise Stalled(f"{what}: the engine's thread does not run")
        if time.monotonic() - self._since > self._allowed_s:
            raise Stalled(f"{what}: {self._busy()}")

    @property
    def streams(self) -> int:
        """Requests in the engine whose tokens are told as they are drawn; on the engine's thread."""
        return sum(flight.stream for flight in self._flights.values())

    def _busy(self) -> str:
        seconds = time.monotonic() - self._since
        return f"the engine's thread has been busy with {self._doing} for {seconds:.1f} s"

    # -- the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._turn()
            self._abort_all()
            self._turn()  # what was aborted comes back from a step
        finally:
            self._fail(EngineFailed("the server has ended"), self._held)
            self._answer_drain(Stalled("pause: the server is ending"))

    def _turn(self) -> None:
        try:
            self._take()
            if self._can_step():
                self._now("a step")
                ended = self._engine.step(self._tell)
                self._failures = 0
                self._tell()
                self._deliver(ended)
            if self._state == "draining" and not self._flights:
                self._end_drain()
        except Exception:  # of a step or of an abort: the engine goes on with other requests
            log.exception("the engine failed: %s", self._doing)
            self._failures += 1
            self._give_up()

    def _take(self) -> None:
        """Do what was asked, for a moment where there is something to step; else wait for it a
        while."""
        self._now("waiting for requests")
        while self._held and not self._holds():
            self._admit(self._held.popleft())
        try:
            busy = self._stopping or self._can_step() or self._state == "draining"
            if not self._can_step():
                self._tell()
            wait_s = 0.0 if busy else self._turn_s
            job = self._inbox.get(timeout=wait_s)
            until = time.monotonic() + ASKED_S
            while True:
                job()
                if time.monotonic() > until and self._can_step():
                    return
                job = self._inbox.get_nowait()
        except queue.Empty:
            return

    def _can_step(self) -> bool:
        """Whether the engine has something to draw, or what was aborted to return."""
        return bool(self._flights) and (self._state != "paused" or self._all_aborted())

    def _do(
        self, job: Future[T], fn: Callable[[Engine], T], what: str, allowed_s: float | None
    ) -> None:
        if not job.set_running_or_notify_cancel():
            return
        self._now(what, allowed_s)
        try:
            job.set_result(fn(self._engine))
        except Exception as error:  # raised where it was asked for
            job.set_exception(error)

    def _now(self, doing: str, allowed_s: float | None = None) -> None:
        self._doing = doing
        self._allowed_s = self.deadline_s if allowed_s is None else allowed_s
        self._since = time.monotonic()

    def _holds(self) -> bool:
        """Whether new requests are held back: while others are waited for, and until a step, which
        draws nothing then, has returned what was aborted."""
        return self._state == "draining" or self._all_aborted()

    def _begin(self, flight: Flight) -> None:
        if self._stopping:
            raise Busy("the server is ending")
        if self._held or self._holds():
            self._held.append(flight)
        else:
            self._add(flight)

    def _add(self, flight: Flight) -> None:
        flight.handle = self._engine.add(flight.request)
        self._flights[flight.handle] = flight
        if not flight.stream:
            self._unseen.append(flight)

    def _admit(self, flight: Flight) -> None:
        """Add a request that was held back; its ticket learns what is wrong with it."""
        try:
            self._add(flight)
        except ValueError as error:
            self._send((flight.ticket, [], error))
            self._tell()

    def _deliver(self, ended: list[tuple[int, Group]]) -> None:
        for handle, group in ended:
            flight = self._flights.pop(handle, None)
            if flight is not None:
                deltas = flight.last(group)
                self.metrics.ended(flight, group)
                self._send((flight.ticket, deltas, group))
        streams = [
            (flight, flight.moved(self._engine.so_far(handle)))
            for handle, flight in self._flights.items()
            if flight.stream
        ]
        firsts = [one for one in streams if one[1] and one[0].first_at is None]
        self.metrics.moved(streams)
        if firsts:  # they are waited for
            later, self._news = self._news, []
            self._send(*((flight.ticket, deltas, None) for flight, deltas in firsts))
            self._tell()
            self._news = later
            begun = {flight for flight, _ in firsts}
            streams = [one for one in streams if one[0] not in begun]
        self._see_first_tokens()
        self._send(*((flight.ticket, deltas, None) for flight, deltas in streams if deltas))
        if len(self._news) <= FEW:
            self._tell()

    def _see_first_tokens(self) -> None:
        """Of whole answers, for the metrics. They begin in the order in which they came."""
        while self._unseen:
            flight = self._unseen[0]
            assert flight.handle is not None
            if flight.handle in self._flights:
                if not any(drawn.token_ids for drawn in self._engine.so_far(flight.handle)):
                    return
                self.metrics.first(flight)
            self._unseen.popleft()

    def _send(self, *news: News) -> None:
        self._news += news

    def _tell(self) -> None:
        """Hand the news to the tickets in their event loops, one wake-up for all."""
        news, self._news = self._news, []
        loops: dict[asyncio.AbstractEventLoop, list[News]] = {}
        for one in news:
            loops.setdefault(one[0].events, []).append(one)
        for events, some in loops.items():
            if not events.is_closed():
                events.call_soon_threadsafe(_arrive, some)

    async def _ask_health(self) -> Health | Stalled:
        try:
            return await self.call(self._health, "health")
        except Stalled as error:  # nobody may be left who asks
            return error

    def _health(self, engine: Engine) -> Health:
        return Health(engine.behavior, engine.stats(), len(self._open), self._state, self._failures)

    # -- pausing -----------------------------------------------------------------------------------

    def _pause(self, mode: PauseMode, drained: Future[None]) -> None:
        if mode == "wait" and self._flights:
            if self._drained is not None and not self._drained.cancelled():
                raise ValueError("mode: another pause waits already")
            self._state = "draining"
            self._drained = drained
            return
        if mode == "abort":
            self._abort_all()
        self._state = "paused"
        self._answer_drain(ValueError("mode: another pause came, which does not wait"))
        if drained.set_running_or_notify_cancel():
            drained.set_result(None)

    def _end_drain(self) -> None:
        self._tell()
        self._state = "paused"
        self._answer_drain(None)

    def _stop_drain(self, drained: Future[None]) -> None:
        """Wait no longer, if this is what still waits."""
        if self._drained is drained:
            self._drained = None
            self._resume()

    def _resume(self) -> None:
        self._state = "running"
        self._answer_drain(ValueError("mode: resumed before all requests had ended"))

    def _answer_drain(self, error: Exception | None) -> None:
        drained, self._drained = self._drained, None
        if drained is None or not drained.set_running_or_notify_cancel():
            return
        if error is None:
            drained.set_result(None)
        else:
            drained.set_exception(error)

    # -- ends --------------------------------------------------------------------------------------

    def _all_aborted(self) -> bool:
        return bool(self._flights) and all(f.aborted for f in self._flights.values())

    def _abort_all(self) -> int:
        flights = [*self._flights.values(), *self._held]
        for flight in flights:
            self.drop(flight)
        return len(flights)

    def _give_up(self) -> None:
        """After a failure: nothing in flight goes on, and no page of a prompt may be trusted."""
        handles = list(self._flights)
        self._fail(EngineFailed("the engine failed while it worked on this request"), [])
        try:
            for handle in handles:
                self._engine.abort(handle)
            self._engine.reset_prefix_cache()
        except Exception:
            log.exception("the engine could not give up what was in flight")

    def _fail(self, error: Exception, held: Iterable[Flight]) -> None:
        """Answer everything in flight, and what was held back, with an error."""
        flights = [*self._flights.values(), *held]
        self._flights.clear()
        for flight in flights:
            self.metrics.failed(flight)
        self._send(*((flight.ticket, [], error) for flight in flights))
        self._tell()


def _arrive(news: list[News]) -> None:
    for ticket, deltas, end in news:
        ticket.arrive(deltas, end)
