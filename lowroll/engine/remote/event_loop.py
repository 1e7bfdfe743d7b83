"""A thread with an event loop whose clock does not count the loop's own lateness.

A busy or stopped process reads its sockets late, and would take healthy engines for silent. So one
iteration counts for `turn_s` at most, and a wait for its timeout plus that.
"""

from __future__ import annotations

import asyncio
import selectors
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, wait
from typing import Any

Clock = Callable[[], float]
LOOK = 0.25  # seconds between two calls of `alive`
MARGIN = 10.0  # seconds beyond a deadline that a thread grants the loop


class LoopStalled(Exception):
    """A loop that has not answered within the deadline and its margin."""


class CappedClock(selectors.DefaultSelector):
    """The selector of the loop, which counts its time."""

    def __init__(self, turn_s: float, clock: Clock = time.monotonic) -> None:
        super().__init__()
        self._turn_s = turn_s
        self._clock = clock
        self._counted = self._since = clock()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._count(self._turn_s)
        events = self.wait(timeout)
        longest_s = float("inf") if timeout is None else max(0.0, timeout) + self._turn_s
        self._count(longest_s)
        return events

    def wait(self, timeout: float | None) -> list[tuple[selectors.SelectorKey, int]]:
        return super().select(timeout)

    def time(self) -> float:
        return self._counted + min(self._clock() - self._since, self._turn_s)

    def _count(self, most: float) -> None:
        now = self._clock()
        self._counted += min(now - self._since, most)
        self._since = now


class CappedClockLoop(asyncio.SelectorEventLoop):
    def __init__(self, turns: CappedClock) -> None:
        self._turns = turns
        super().__init__(turns)

    def time(self) -> float:
        return self._turns.time()


class LoopThread:
    def __init__(self, name: str, turn_s: float) -> None:
        self._loop = CappedClockLoop(CappedClock(turn_s))
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Cancel everything and end the thread. Idempotent."""
        if not self._thread.is_alive():
            return
        try:
            self.run(self._cancel_all(), MARGIN)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout=MARGIN)

    def call(self, function: Callable[..., object], *arguments: Any) -> None:
        self._loop.call_soon_threadsafe(function, *arguments)

    def begin(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(
        self,
        work: Coroutine[Any, Any, Any],
        deadline_s: float,
        alive: Callable[[], None] = lambda: None,
    ) -> Any:
        """Return a coroutine's result. LoopStalled MARGIN after its own deadline. alive: called
        meanwhile; an exception in it ends the wait."""
        future = self.begin(work)
        end = time.monotonic() + deadline_s + MARGIN
        try:
            while (seconds_left := end - time.monotonic()) > 0:
                if wait([future], timeout=min(LOOK, seconds_left)).done:
                    return future.result(0)
                alive()
        finally:
            future.cancel()
        raise LoopStalled

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    async def _cancel_all(self) -> None:
        this_task = asyncio.current_task()
        other_tasks = [task for task in asyncio.all_tasks() if task is not this_task]
        for task in other_tasks:
            task.cancel()
        await asyncio.gather(*other_tasks, return_exceptions=True)
