"""The pool's loop (`engine.remote.event_loop`) on a clock of the test: whoever comes late to its sockets
does not call others late."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from lowroll.engine.remote.event_loop import CappedClock, CappedClockLoop
from lowroll.engine.remote.http_client import DeadlineExceeded
from lowroll.engine.remote.pool import TURNS
from lowroll.engine.remote.replica import PoolOptions, Replica
from lowroll.engine.remote.server_base import ServerProgress

TERMS = PoolOptions(silent_s=30.0)
ROUNDS = 4  # turns of the loop until an answer has been sent for, has come and was read


class Busy(CappedClock):
    """Each turn of the loop takes `work` seconds, each wait `over` more than was asked."""

    def __init__(self, work: float = 0.0, over: float = 0.0, turn_s: float | None = None) -> None:
        self.now, self.work, self.over = 0.0, work, over
        super().__init__(TERMS.heartbeat_s / TURNS if turn_s is None else turn_s, lambda: self.now)

    def wait(self, timeout: float | None) -> list[Any]:
        found = super().wait(0.0)
        if timeout and not found:
            self.now += timeout + self.over
        return found

    def select(self, timeout: float | None = None) -> list[Any]:
        self.now += self.work
        return super().select(timeout)


class Healthy:
    """An engine that answers within `ROUNDS` turns; from some time of the test's clock on never."""

    def __init__(self, turns: Busy, until: float = float("inf")) -> None:
        self.turns, self.until = turns, until
        self.beats = self.drawn = 0

    async def health(self, deadline_s: float) -> str:
        await self._answer(deadline_s)
        self.beats += 1
        return "running"

    async def progress(self, deadline_s: float) -> ServerProgress:
        await self._answer(deadline_s)
        self.drawn += 1
        return ServerProgress(1, self.drawn)

    async def _answer(self, deadline_s: float) -> None:
        try:
            async with asyncio.timeout(deadline_s):
                for _ in range(ROUNDS):
                    await asyncio.sleep(0)
                while self.turns.now > self.until:
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise DeadlineExceeded("no answer") from None


def run(turns: Busy, work: Coroutine[Any, Any, Any]) -> Any:
    with asyncio.Runner(loop_factory=lambda: CappedClockLoop(turns)) as runner:
        return runner.run(work)


async def watched(peer: Healthy, beats: int) -> str:
    """Why an engine with a request of ours is evicted, or "" after so many beats."""
    owner = SimpleNamespace(heard=lambda member: None)
    member = Replica("http://engine", owner, TERMS)  # type: ignore[arg-type]
    member.server = peer  # type: ignore[assignment]
    member.flights = {object()}  # type: ignore[arg-type]
    life = asyncio.ensure_future(member._watch())
    while not life.done() and peer.beats < beats:
        await asyncio.sleep(0.5)
    if life.done():
        return life.result()
    life.cancel()
    with suppress(asyncio.CancelledError):
        await life
    return ""


@pytest.mark.parametrize("work, over", [(0.0, 0.0), (2.5, 0.0), (60.0, 0.0), (0.0, 60.0)])
def test_a_late_watcher_does_not_blame_the_watched(work: float, over: float) -> None:
    turns = Busy(work, over)
    assert run(turns, watched(Healthy(turns), 10)) == ""
    assert turns.now >= 10 * TERMS.heartbeat_s


@pytest.mark.parametrize("work, turn_s", [(0.0, None), (2.5, None), (2.5, 100.0)])
def test_who_is_silent_is_evicted_in_time(work: float, turn_s: float | None) -> None:
    """Without lateness within the longest silence. A loop that counts all of its time, as others do,
    evicts one that answers."""
    turns = Busy(work, turn_s=turn_s)
    peer = Healthy(turns, until=100.0 if turn_s is None else float("inf"))
    why = run(turns, watched(peer, 1000))
    assert "silent for" in why
    if not work:
        assert 100.0 < turns.now < 100.0 + TERMS.silent_s


def test_its_time_is_that_of_the_clock_where_nobody_is_late() -> None:
    turns = Busy()
    seen: list[float] = []

    async def sleep() -> None:
        for seconds in (0.01, 5.0, 0.3):
            await asyncio.sleep(seconds)
            turns.now += 0.4  # work, of one turn
            seen.append(asyncio.get_running_loop().time() - turns.now)

    run(turns, sleep())
    assert seen == pytest.approx([0.0] * 3)


def test_its_time_never_goes_back() -> None:
    turns = Busy(turn_s=0.5)
    seen: list[float] = []

    async def work() -> None:
        loop = asyncio.get_running_loop()
        for _ in range(5):
            seen.append(loop.time())
            turns.now += 3.0
            seen.append(loop.time())
            await asyncio.sleep(0.01)

    run(turns, work())
    assert seen == sorted(seen) and seen[-1] - seen[0] == pytest.approx(5 * 0.5 + 4 * 0.01)
