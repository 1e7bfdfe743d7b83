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
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any, TypeVar

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
    `pause("wait")` waits. max_samples: open samples beyond which a request is refused with
    ServerBusy.
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
        """Queue a request. stream: its tokens are reported while they are drawn.

        ValueError that names the wrong field as the engine does; ServerBusy, EngineStalled.
        """
        if self.closing:
            raise ServerBusy("the server is ending")
        if self._open_samples >= self.max_samples:
            raise ServerBusy(
                f"{self._open_samples} samples are open, of {self.max_samples} at most"
            )
        submitted_request = InFlightRequest(
            self.loop, request, stream, self.check_alive, self.forget
        )
        self.open.add(submitted_request)
        self._open_samples += request.n
        if self._watch is None:
            event_loop = submitted_request.events
            self._watch = event_loop.call_later(self.loop.idle_s, self._watch_thread)
        try:
            await self.call(lambda engine: self.loop.submit(submitted_request), "a new request")
        except BaseException:
            submitted_request.abort()
            self.forget(submitted_request)
            raise
        return submitted_request

    async def call(self, fn: Callable[[Engine], T], what: str, allowed_s: float | None = None) -> T:
        """Run fn(engine) on the thread between two steps; return its result or raise its exception.

        Raises EngineStalled when the thread does not get there, which cancels the call, or when fn
        takes longer than allowed (default: an iteration).
        """
        job: Future[T] = Future()
        call_result = asyncio.wrap_future(job)
        self.check_alive(what)
        self.loop.post(lambda: self.loop.perform(job, fn, what, allowed_s))
        try:
            await self._wait_while_alive(lambda: asyncio.wait([call_result]), what)
            return await call_result
        finally:
            call_result.cancel()  # cancelled by the caller

    def compile_grammar(self, text: str) -> None:
        """Compile a grammar in the caller's thread, so that the engine finds it cached. ValueError.
        Does nothing for a remote engine."""
        grammars = getattr(self.engine, "grammars", None)
        if grammars is not None:
            grammars.compile(text)

    async def pause(self, mode: PauseMode) -> None:
        """Stop drawing.

        keep: requests in flight go on after `resume`. wait: they finish first, and new ones are
        held back; EngineStalled when that takes more than `drain_s`, and then nothing is paused;
        ValueError when a resume or another pause comes first. abort: they end now, with what they
        have drawn.
        """
        drained: Future[None] = Future()  # ends when the thread has paused
        drain_result = asyncio.wrap_future(drained)

        def cancel(engine: Engine) -> None:
            self.loop.pausing.cancel_drain(drained)

        try:
            async with asyncio.timeout(self.drain_s):
                await self.call(lambda engine: self.loop.pause(mode, drained), "pause")
                await self._wait_while_alive(lambda: asyncio.wait([drain_result]), "pause")
                await drain_result
        except TimeoutError:
            await self.call(cancel, "pause")
            if not drained.done():  # else it has just ended, and its outcome counts
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
        """End every request now, with the tokens drawn so far. Return their number."""
        return await self.call(lambda engine: self.loop.abort_all(), "abort")

    async def health(self, deadline_s: float | None = None) -> EngineHealth:
        """Return the thread's health; concurrent callers share one answer. EngineStalled when there
        is none in time (default: an iteration's)."""
        if self._probe is None or self._probe.done():
            self._probe = asyncio.ensure_future(self.ask_health())
        allowed_s = self.watchdog.deadline_s if deadline_s is None else deadline_s
        done, _ = await asyncio.wait([self._probe], timeout=allowed_s)
        if not done:
            raise EngineStalled(f"health: no answer in {allowed_s:g} s: {self.watchdog}")
        engine_health = await self._probe
        if isinstance(engine_health, EngineStalled):
            raise EngineStalled(str(engine_health))  # one of its own for each caller
        return engine_health

    async def settle(self, grace_s: float) -> int:
        """Take no new requests, and wait at most `grace_s` for the open ones. Return how many are
        left."""
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

    async def _wait_while_alive(self, wait: Callable[[], Awaitable[Any]], what: str) -> None:
        """Wait until `wait()` returns, beginning it again after each check that the engine's thread
        is alive. Raises EngineStalled when it is not."""
        while True:
            try:
                async with asyncio.timeout(self.loop.idle_s):
                    await wait()
                return
            except TimeoutError:
                self.check_alive(what)

    def _watch_thread(self) -> None:
        """Wake the readers of all open requests when the thread hangs: one timer for all."""
        try:
            self.check_alive("a request")
        except EngineStalled:
            for request in self.open:
                request.wake()
        self._watch = None
        if self.open:
            loop = asyncio.get_running_loop()
            self._watch = loop.call_later(self.loop.idle_s, self._watch_thread)

    async def ask_health(self) -> EngineHealth | EngineStalled:
        """Ask the engine's thread for its health; return EngineStalled when it does not answer in
        time."""

        def health(engine: Engine) -> EngineHealth:
            state, failures = self.loop.pausing.state, self.loop.failures
            return EngineHealth(engine.behavior, engine.stats(), len(self.open), state, failures)

        try:
            return await self.call(health, "health")
        except EngineStalled as error:  # the answer may have been cancelled
            return error
