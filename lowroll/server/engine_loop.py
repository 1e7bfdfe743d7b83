"""The engine's thread, the only one that calls the engine, and the requests in flight.

Each iteration runs the posted jobs, then one step. First tokens are sent at once. Other updates
wait until the device works on the next step, because the event loop would take the GIL before. A
step that raises answers its requests with EngineFailed.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

from lowroll.engine.base import Engine, PartialSample
from lowroll.server.metrics import Metrics, RequestTimes, ThreadState
from lowroll.server.protocol import PauseMode
from lowroll.types import FinishReason, Group, Request, Rollout

log = logging.getLogger(__name__)

T = TypeVar("T")
UPDATES_SENT_AT_ONCE = 8  # requests; so few delay the thread little
JOBS_S = 0.02  # seconds of jobs in an iteration with requests in flight


class ServerBusy(RuntimeError):
    """A refusal: too many requests are open, or the server is ending."""


class EngineStalled(RuntimeError):
    """A missing answer of the engine's thread; the message names its task."""


class EngineFailed(RuntimeError):
    """A request that the engine could not finish; the log has the reason."""


@dataclass(frozen=True)
class Delta:
    """The tokens of a sample since the last read."""

    sample: int
    token_ids: list[int]
    logprobs: list[float]
    top_logprobs: list[list[tuple[int, float]]] | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None

    @classmethod
    def since(cls, sample: int, drawn: PartialSample | Rollout, start: int = 0) -> Delta:
        top = drawn.top_logprobs
        return cls(
            sample,
            list(drawn.token_ids[start:]),
            list(drawn.logprobs[start:]),
            None if top is None else list(top[start:]),
            drawn.finish_reason,
            drawn.stop_reason,
        )

    def then(self, later: Delta) -> Delta:
        top = self.top_logprobs
        return replace(
            later,
            token_ids=self.token_ids + later.token_ids,
            logprobs=self.logprobs + later.logprobs,
            top_logprobs=None if top is None else top + (later.top_logprobs or []),
        )


class InFlightRequest:
    """A request, read by the event loop that submitted it. Leaving its `async with` block aborts
    it. check_alive: raises EngineStalled."""

    def __init__(
        self,
        loop: EngineLoop,
        request: Request,
        stream: bool,
        check_alive: Callable[[str], None],
        forget: Callable[[InFlightRequest], None],
    ) -> None:
        self.request = request
        self.stream = stream
        self.events = asyncio.get_running_loop()
        self.times = RequestTimes()
        self._loop = loop
        self._check_alive = check_alive
        self._forget = forget
        # used by the event loop alone
        self.pending: dict[int, Delta] = {}  # by sample, in the order of updates
        self._changed = asyncio.Event()
        self._end: Group | Exception | None = None
        self._abort_asked = False
        # used by the engine's thread alone
        self.handle: int | None = None
        self.aborted = False
        self._num_sent: dict[int, int] = {}
        self._ended: set[int] = set()

    # -- in the event loop -------------------------------------------------------------------------

    async def __aenter__(self) -> InFlightRequest:
        return self

    async def __aexit__(self, *error: object) -> None:
        self.abort()

    async def __aiter__(self) -> AsyncIterator[Delta]:
        """Yield one delta for each sample with new tokens; without `stream` only at the end. Raises
        EngineFailed, EngineStalled."""
        while True:
            while self.pending:
                yield self.pending.pop(next(iter(self.pending)))
            if self._end is not None:
                self._result()  # raises if the end is an error
                return
            self._changed.clear()
            await self._changed.wait()
            if not self.pending and self._end is None:
                self._check_alive("a request")

    async def group(self) -> Group:
        """Return the finished group. Raises EngineFailed, EngineStalled; ValueError for an invalid
        held request."""
        while self._end is None:
            self._changed.clear()
            await self._changed.wait()
            if self._end is None:
                self._check_alive("a request")
        return self._result()

    def abort(self) -> None:
        """End the request with the finish reason "abort"."""
        if self._end is None and not self._abort_asked:
            self._abort_asked = True
            self._loop.post(lambda: self._loop.abort(self))

    def receive(self, deltas: list[Delta], end: Group | Exception | None) -> None:
        """Merge new tokens with unread ones, and take the end."""
        for delta in deltas:
            earlier = self.pending.get(delta.sample)
            self.pending[delta.sample] = delta if earlier is None else earlier.then(delta)
        if end is not None and self._end is None:
            self._end = end
            self._forget(self)
        self._changed.set()

    def wake(self) -> None:
        self._changed.set()

    def _result(self) -> Group:
        assert self._end is not None
        if isinstance(self._end, Exception):
            raise self._end
        return self._end

    # -- on the engine's thread --------------------------------------------------------------------

    def new_deltas(self, samples: Sequence[PartialSample]) -> list[Delta]:
        """Return a delta for each sample with new tokens or a new end."""
        return [
            self._delta(sample, drawn)
            for sample, drawn in enumerate(samples)
            if len(drawn.token_ids) > self._num_sent.get(sample, 0)
            or (drawn.finish_reason is not None and sample not in self._ended)
        ]

    def last_deltas(self, group: Group) -> list[Delta]:
        """Return the deltas of samples whose end was not sent."""
        return [
            self._delta(sample, rollout)
            for sample, rollout in enumerate(group.rollouts)
            if sample not in self._ended
        ]

    def _delta(self, sample: int, drawn: PartialSample | Rollout) -> Delta:
        start = self._num_sent.get(sample, 0)
        self._num_sent[sample] = len(drawn.token_ids)
        if drawn.finish_reason is not None:
            self._ended.add(sample)
        return Delta.since(sample, drawn, start)


class Update(NamedTuple):
    """The news of a request. end: its group or error, if any."""

    request: InFlightRequest
    deltas: list[Delta]
    end: Group | Exception | None


class Watchdog:
    """The current task of the engine's thread. deadline_s: of one iteration."""

    def __init__(self, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self.start("its start")

    def start(self, busy_with: str, allowed_s: float | None = None) -> None:
        self.busy_with = busy_with
        self.allowed_s = self.deadline_s if allowed_s is None else allowed_s
        self._since = time.monotonic()

    def check(self, what: str) -> None:
        """Raise EngineStalled, for the waiting `what`, when the thread is late."""
        if time.monotonic() - self._since > self.allowed_s:
            raise EngineStalled(f"{what}: {self}")

    def __str__(self) -> str:
        seconds = time.monotonic() - self._since
        return f"the engine's thread has been busy with {self.busy_with} for {seconds:.1f} s"


class Outbox:
    """The updates from the engine's thread to the event loops."""

    def __init__(self, engine: Engine, metrics: Metrics) -> None:
        self._engine = engine
        self._metrics = metrics
        self._updates: list[Update] = []
        self._without_token: deque[InFlightRequest] = deque()

    def expect_first_token(self, request: InFlightRequest) -> None:
        self._without_token.append(request)

    def add(self, request: InFlightRequest, deltas: list[Delta], end: Group | Exception) -> None:
        self._updates.append(Update(request, deltas, end))

    def collect(self, in_flight: dict[int, InFlightRequest]) -> None:
        """Add the new tokens of streams. First tokens are sent at once, and the others if they are
        few."""
        first_updates: list[Update] = []
        moved = []
        for handle, request in in_flight.items():
            if not request.stream:
                continue
            if deltas := request.new_deltas(self._engine.so_far(handle)):
                is_first = request.times.first_at is None
                updates = first_updates if is_first else self._updates
                updates.append(Update(request, deltas, None))
                moved.append((request.times, max(len(delta.token_ids) for delta in deltas)))
        self._metrics.moved(moved)  # sets `first_at`
        _deliver(first_updates)
        self._observe_first_tokens(in_flight)
        if len(self._updates) <= UPDATES_SENT_AT_ONCE:
            self.send()

    def send(self) -> None:
        updates, self._updates = self._updates, []
        _deliver(updates)

    def _observe_first_tokens(self, in_flight: dict[int, InFlightRequest]) -> None:
        """Record the first tokens of requests that are no streams. They come in the order of the
        requests, so only the oldest is read."""
        while self._without_token:
            request = self._without_token[0]
            assert request.handle is not None
            if request.handle in in_flight:
                if not any(sample.token_ids for sample in self._engine.so_far(request.handle)):
                    return
                self._metrics.first_token(request.times)
            self._without_token.popleft()


class PauseControl:
    """The state of pausing."""

    def __init__(self) -> None:
        self.state: ThreadState = "running"
        self.drained: Future[None] | None = None

    def drain(self, drained: Future[None]) -> None:
        """Begin a pause that waits for the requests in flight. ValueError if another one waits."""
        if self.drained is not None and not self.drained.cancelled():
            raise ValueError("mode: another pause waits already")
        self.state = "draining"
        self.drained = drained

    def end_drain(self) -> None:
        self.state = "paused"
        self._answer(None)

    def cancel_drain(self, drained: Future[None]) -> None:
        """Resume, if this pause still waits."""
        if self.drained is drained:
            self.drained = None
            self.resume()

    def pause(self, done: Future[None]) -> None:
        self.state = "paused"
        self._answer(ValueError("mode: another pause came, which does not wait"))
        if done.set_running_or_notify_cancel():
            done.set_result(None)

    def resume(self) -> None:
        self.state = "running"
        self._answer(ValueError("mode: resumed before all requests had ended"))

    def stop(self) -> None:
        """Refuse the waiting pause."""
        self._answer(EngineStalled("pause: the server is ending"))

    def _answer(self, error: Exception | None) -> None:
        drained, self.drained = self.drained, None
        if drained is None or not drained.set_running_or_notify_cancel():
            return
        if error is None:
            drained.set_result(None)
        else:
            drained.set_exception(error)


class EngineLoop:
    """The iterations of the engine's thread, and its private state. idle_s: the longest iteration
    without work."""

    def __init__(self, engine: Engine, metrics: Metrics, watchdog: Watchdog, idle_s: float) -> None:
        self.engine = engine
        self.metrics = metrics
        self.watchdog = watchdog
        self.idle_s = idle_s
        self.stopping = False
        self.jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.outbox = Outbox(engine, metrics)
        self.pausing = PauseControl()
        self.in_flight: dict[int, InFlightRequest] = {}
        self.held: deque[InFlightRequest] = deque()  # came during a waiting pause
        self.failures = 0  # consecutive failed steps

    def post(self, job: Callable[[], None]) -> None:
        """Run a job between two steps. Thread-safe."""
        self.jobs.put(job)

    def run(self) -> None:
        """Iterate until `stopping`, and answer all requests."""
        try:
            while not self.stopping:
                self._iterate()
            self.abort_all()
            self._iterate()  # returns aborted requests
        finally:
            self._fail(EngineFailed("the server has ended"), self.held)
            self.pausing.stop()

    # -- jobs --------------------------------------------------------------------------------------

    def perform(
        self, job: Future[T], fn: Callable[[Engine], T], what: str, allowed_s: float | None
    ) -> None:
        if not job.set_running_or_notify_cancel():
            return
        self.watchdog.start(what, allowed_s)
        try:
            job.set_result(fn(self.engine))
        except Exception as error:
            job.set_exception(error)

    def submit(self, request: InFlightRequest) -> None:
        if self.stopping:
            raise ServerBusy("the server is ending")
        if self.held or self._holds_back():
            self.held.append(request)
        else:
            self._add(request)

    def abort(self, request: InFlightRequest) -> None:
        if request in self.held:
            self.held.remove(request)
            self._admit(request)
        if request.handle is not None and request.handle in self.in_flight:
            request.aborted = True
            self.engine.abort(request.handle)

    def abort_all(self) -> int:
        requests = [*self.in_flight.values(), *self.held]
        for request in requests:
            self.abort(request)
        return len(requests)

    def pause(self, mode: PauseMode, done: Future[None]) -> None:
        if mode == "wait" and self.in_flight:
            self.pausing.drain(done)
            return
        if mode == "abort":
            self.abort_all()
        self.pausing.pause(done)

    def num_streams(self) -> int:
        return sum(request.stream for request in self.in_flight.values())

    # -- iterations --------------------------------------------------------------------------------

    def _iterate(self) -> None:
        try:
            self._run_jobs()
            if self._can_step():
                self.watchdog.start("a step")
                ended = self.engine.step(self.outbox.send)
                self.failures = 0
                self.outbox.send()
                self._end(ended)
                self.outbox.collect(self.in_flight)
            if self.pausing.state == "draining" and not self.in_flight:
                self.outbox.send()
                self.pausing.end_drain()
        except Exception:  # other requests continue
            log.exception("the engine failed: %s", self.watchdog.busy_with)
            self.failures += 1
            self._give_up()

    def _run_jobs(self) -> None:
        """Admit held requests, then run posted jobs until none is left, or for `JOBS_S` if there is
        a step to do. Wait up to `idle_s` for the first job if there is nothing else to do; before
        that the outbox is sent."""
        self.watchdog.start("waiting for requests")
        while self.held and not self._holds_back():
            self._admit(self.held.popleft())
        if not self._can_step():
            self.outbox.send()
        is_busy = self.stopping or self._can_step() or self.pausing.state == "draining"
        job = self._next_job(0.0 if is_busy else self.idle_s)
        deadline = time.monotonic() + JOBS_S
        while job is not None:
            job()
            if self._can_step() and time.monotonic() > deadline:
                return
            job = self._next_job(0.0)

    def _next_job(self, wait_s: float) -> Callable[[], object] | None:
        """Return the next posted job, or None if none comes in time."""
        try:
            return self.jobs.get(timeout=wait_s)
        except queue.Empty:
            return None

    def _can_step(self) -> bool:
        return bool(self.in_flight) and (self.pausing.state != "paused" or self._all_aborted())

    def _holds_back(self) -> bool:
        return self.pausing.state == "draining" or self._all_aborted()

    def _all_aborted(self) -> bool:
        return bool(self.in_flight) and all(request.aborted for request in self.in_flight.values())

    def _add(self, request: InFlightRequest) -> None:
        request.handle = self.engine.add(request.request)
        self.in_flight[request.handle] = request
        if not request.stream:
            self.outbox.expect_first_token(request)

    def _admit(self, request: InFlightRequest) -> None:
        try:
            self._add(request)
        except ValueError as error:
            self.outbox.add(request, [], error)
            self.outbox.send()

    # -- ends --------------------------------------------------------------------------------------

    def _end(self, ended: list[tuple[int, Group]]) -> None:
        for handle, group in ended:
            if (request := self.in_flight.pop(handle, None)) is not None:
                self.metrics.ended(request.times, group)
                self.outbox.add(request, request.last_deltas(group), group)

    def _give_up(self) -> None:
        """Fail all requests in flight, and drop the prefix cache, which may be wrong."""
        handles = list(self.in_flight)
        self._fail(EngineFailed("the engine failed while it worked on this request"), [])
        try:
            for handle in handles:
                self.engine.abort(handle)
            self.engine.reset_prefix_cache()
        except Exception:
            log.exception("the engine could not give up what was in flight")

    def _fail(self, error: Exception, held: Iterable[InFlightRequest]) -> None:
        requests = [*self.in_flight.values(), *held]
        self.in_flight.clear()
        for request in requests:
            self.metrics.failed()
            self.outbox.add(request, [], error)
        self.outbox.send()


def _deliver(updates: list[Update]) -> None:
    updates_by_loop: dict[asyncio.AbstractEventLoop, list[Update]] = {}
    for update in updates:
        updates_by_loop.setdefault(update.request.events, []).append(update)
    for loop, loop_updates in updates_by_loop.items():
        if not loop.is_closed():
            loop.call_soon_threadsafe(_receive_all, loop_updates)


def _receive_all(updates: list[Update]) -> None:
    for request, deltas, end in updates:
        request.receive(deltas, end)
