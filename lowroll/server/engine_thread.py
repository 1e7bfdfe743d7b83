"""The engine's thread (`engine_loop`), called from event loops with deadlines.

async with await thread.submit(request, stream=True) as in_flight:  # leaving it aborts
    async for delta in in_flight:
        ...
    group = await in_flight.group()
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from lowroll.engine.base import Engine
from lowroll.server.engine_loop import (
    EngineLoop,
    EngineStalled,
    InFlightRequest,
    ServerBusy,
    Watchdog,
)
from lowroll.server.metrics import EngineHealth, Metrics
from lowroll.server.protocol import PauseMode
from lowroll.types import Request

log = logging.getLogger(__name__)

T = TypeVar("T")


class EngineThread:
    """The thread that owns an engine.

    deadline_s: the longest iteration, after which callers get EngineStalled. drain_s: how long
    `pause("wait")` waits. max_samples: open samples beyond which `submit` raises ServerBusy.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        deadline_s: float = 30.0,
        drain_s: float = 600.0,
        max_samples: int = 16384,
    ) -> None:
        self.engine = engine
        self.drain_s = drain_s
        self.max_samples = max_samples
        self.metrics = Metrics()
        self.watchdog = Watchdog(deadline_s)
        self.loop = EngineLoop(engine, self.metrics, self.watchdog, deadline_s / 8)
        self.closing = False
        self.open: set[InFlightRequest] = set()
        self._open_samples = 0
        self._thread = threading.Thread(target=self.loop.run, name="engine", daemon=True)
        self._watch: asyncio.TimerHandle | None = None
        self._probe: asyncio.Task[EngineHealth | EngineStalled] | None = None

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Abort the requests in flight and end the thread; one that hangs is abandoned."""
        self.closing = True
        self.loop.stopping = True
        self.loop.post(lambda: None)
        if self._thread.is_alive():
            self._thread.join(timeout=self.watchdog.deadline_s)
            if self._thread.is_alive():
                log.error("the engine's thread did not end: %s", self.watchdog)

    async def submit(self, request: Request, *, stream: bool = False) -> InFlightRequest:
        """Queue a request. stream: report its tokens while they are drawn. ValueError as of
        `Engine.add`. Raises ServerBusy, EngineStalled."""
        if self.closing:
            raise ServerBusy("the server is ending")
        if self._open_samples >= self.max_samples:
            raise ServerBusy(
                f"{self._open_samples} samples are open, of {self.max_samples} at most"
            )
        in_flight = InFlightRequest(self.loop, request, stream, self.check_alive, self.forget)
        self.open.add(in_flight)
        self._open_samples += request.n
        if self._watch is None:
            self._watch = in_flight.events.call_later(self.loop.idle_s, self._watch_thread)
        try:
            await self.call(lambda engine: self.loop.submit(in_flight), "a new request")
        except BaseException:
            in_flight.abort()
            self.forget(in_flight)
            raise
        return in_flight

    async def call(self, fn: Callable[[Engine], T], what: str, allowed_s: float | None = None) -> T:
        """Run fn(engine) on the thread between two steps; return its result or raise its exception.

        EngineStalled when the thread does not begin the call, which is then cancelled, or when fn
        takes longer than allowed (default: an iteration).
        """
        job: Future[T] = Future()
        call_result = asyncio.wrap_future(job)
        self.check_alive(what)
        self.loop.post(lambda: self.loop.perform(job, fn, what, allowed_s))
        try:
            return await self._wait_for(call_result, what)
        finally:
            call_result.cancel()  # cancelled by the caller

    def compile_grammar(self, text: str) -> None:
        """Compile a grammar in the caller's thread, so that the engine finds it cached.
        ValueError."""
        grammars = getattr(self.engine, "grammars", None)  # a remote engine has none
        if grammars is not None:
            grammars.compile(text)

    async def pause(self, mode: PauseMode) -> None:
        """Stop drawing (docs/server.md). With "wait", EngineStalled after `drain_s`, and then
        nothing is paused; ValueError when a resume or another pause comes first."""
        drained: Future[None] = Future()  # ends when the thread has paused
        drain_result = asyncio.wrap_future(drained)

        def cancel(engine: Engine) -> None:
            self.loop.pausing.cancel_drain(drained)

        try:
            async with asyncio.timeout(self.drain_s):
                await self.call(lambda engine: self.loop.pause(mode, drained), "pause")
                await self._wait_for(drain_result, "pause")
        except TimeoutError:
            await self.call(cancel, "pause")
            if not drained.done():
                raise EngineStalled(
                    f"pause: {len(self.open)} requests still run after {self.drain_s:g} s"
                ) from None
            await drain_result
        except asyncio.CancelledError:  # the client has gone, and would not resume
            await self.call(cancel, "pause")
            raise
        finally:
            drain_result.cancel()  # cancelled by the caller

    async def resume(self) -> None:
        await self.call(lambda engine: self.loop.pausing.resume(), "resume")

    @property
    def paused(self) -> bool:
        return self.loop.pausing.state == "paused"

    async def abort_all(self) -> int:
        """End every request now. Return their number."""
        return await self.call(lambda engine: self.loop.abort_all(), "abort")

    async def health(self, deadline_s: float | None = None) -> EngineHealth:
        """Return the thread's health; concurrent callers share one answer. EngineStalled after the
        deadline (default: an iteration's)."""
        if self._probe is None or self._probe.done():
            self._probe = asyncio.ensure_future(self.ask_health())
        allowed_s = self.watchdog.deadline_s if deadline_s is None else deadline_s
        done, _ = await asyncio.wait([self._probe], timeout=allowed_s)
        if not done:
            raise EngineStalled(f"health: no answer in {allowed_s:g} s: {self.watchdog}")
        engine_health = await self._probe
        if isinstance(engine_health, EngineStalled):
            raise EngineStalled(str(engine_health))  # one for each caller
        return engine_health

    async def settle(self, grace_s: float) -> int:
        """Take no new requests, and wait for the open ones. Return how many are left."""
        self.closing = True
        end = time.monotonic() + grace_s
        while self.open and not self.paused and time.monotonic() < end:
            await asyncio.sleep(0.02)
        return len(self.open)

    def forget(self, request: InFlightRequest) -> None:
        if request in self.open:
            self.open.remove(request)
            self._open_samples -= request.request.n

    def check_alive(self, what: str) -> None:
        if not self._thread.is_alive():
            raise EngineStalled(f"{what}: the engine's thread does not run")
        self.watchdog.check(what)

    async def _wait_for(self, result: asyncio.Future[T], what: str) -> T:
        while not (await asyncio.wait([result], timeout=self.loop.idle_s))[0]:
            self.check_alive(what)
        return await result

    def _watch_thread(self) -> None:
        try:
            self.check_alive("a request")
        except EngineStalled:
            for request in self.open:
                request.wake()
        self._watch = None
        if self.open:
            events = asyncio.get_running_loop()
            self._watch = events.call_later(self.loop.idle_s, self._watch_thread)

    async def ask_health(self) -> EngineHealth | EngineStalled:
        """Return the thread's health, or EngineStalled."""

        def health(engine: Engine) -> EngineHealth:
            return EngineHealth(
                engine.behavior,
                engine.stats(),
                len(self.open),
                self.loop.pausing.state,
                self.loop.failures,
            )

        try:
            return await self.call(health, "health")
        except EngineStalled as error:
            return error
