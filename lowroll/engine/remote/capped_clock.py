"""An event loop whose clock does not count the loop's own lateness.

An engine is silent when it did not answer for so long, and a call late when its deadline passed. A
process that is starved, stopped or busy with thousands of answers comes to its sockets seconds late,
in turn after turn, though what it waits for has long come. So a turn of this loop, however long it
takes, counts for `turn_s` at most, and a wait for no more than was asked and that; all timeouts and
times of the loop go by it. What truly does not answer is late after as many turns.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Callable

Clock = Callable[[], float]


class CappedClock(selectors.DefaultSelector):
    """Waits of a loop, and what its time is."""

    def __init__(self, turn_s: float, clock: Clock = time.monotonic) -> None:
        super().__init__()
        self._turn_s = turn_s
        self._clock = clock
        self._counted = self._since = clock()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._count(self._turn_s)
        found = self.wait(timeout)
        self._count(float("inf") if timeout is None else max(0.0, timeout) + self._turn_s)
        return found

    def wait(self, timeout: float | None) -> list[tuple[selectors.SelectorKey, int]]:
        """Until something has come, or the time has passed."""
        return super().select(timeout)

    def time(self) -> float:
        """Seconds. Never goes back."""
        return self._counted + min(self._clock() - self._since, self._turn_s)

    def _count(self, most: float) -> None:
        now = self._clock()
        self._counted += min(now - self._since, most)
        self._since = now


class CappedClockLoop(asyncio.SelectorEventLoop):
    """See the top of the file."""

    def __init__(self, turns: CappedClock) -> None:
        self._turns = turns
        super().__init__(turns)

    def time(self) -> float:
        return self._turns.time()
