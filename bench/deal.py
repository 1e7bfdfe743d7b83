"""How evenly engines end when lengths are skewed: the pool's own dealing against dealing in turns.

    python -m bench.deal [--engines 2 4 8 32] [--requests 64] [--groups 8]

The real `Desk` deals to engines of arithmetic on a clock that jumps: each draws `--rows` samples at a
time, a token of each in a step whose time has a fixed part and one for each row; samples that it has
no row for wait in it. Lengths are log-normal with a mean of about a quarter of `--tokens`, where they
are cut; those of a group are alike. Shown is the largest over the mean of the times at which engines
end their work, and over all, how long a round takes: (in turns, dealt). With
`--slow 2` the first engine takes twice as long for everything.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import selectors
import statistics
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from lowroll.engine.remote.replica import PoolTerms, Replica
from lowroll.engine.remote.router import QueuedRequest, RequestRouter
from lowroll.engine.remote.versions import PolicyVersions
from lowroll.types import Group, Request

STEP_S, ROW_S = 0.008, 0.00004  # of a step, and of each row in it
SPREAD = 0.8  # of the logarithm of lengths between groups; half of it within one


class Clock(asyncio.SelectorEventLoop):
    """A loop on which nothing takes time but sleeping, which takes none."""

    def __init__(self) -> None:
        super().__init__(_Instantly(self))
        self.now = 0.0

    def time(self) -> float:
        return self.now


class _Instantly(selectors.DefaultSelector):
    def __init__(self, loop: Clock) -> None:
        super().__init__()
        self.loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout:
            self.loop.now += timeout
        return super().select(0)


class Engine:
    """An engine of arithmetic: a member, as the desk sees one."""

    url = ""

    def __init__(self, number: int, rows: int, cache: int, slow: float) -> None:
        self.url = f"engine {number}"
        self.slow = slow
        self.rows = rows
        self.peer = SimpleNamespace(dialect=SimpleNamespace(cache_tokens=cache))
        self.flights: set[Any] = set()
        self.part = None
        self.outstanding = 0
        self.ended = 0.0
        self._waiting: deque[list[int]] = deque()  # [tokens left] of samples
        self._task: asyncio.Task[None] | None = None
        self._left: dict[int, tuple[list[list[int]], asyncio.Event]] = {}

    def takes_work(self, now: float) -> bool:
        return True

    async def draw(self, lengths: list[int]) -> None:
        """Until all samples of a request are drawn."""
        samples, ended = [[length] for length in lengths], asyncio.Event()
        self._waiting.extend(samples)
        self._left[id(samples)] = samples, ended
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._work())
        await ended.wait()

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        drawing: list[list[int]] = []
        while self._waiting or drawing:
            while self._waiting and len(drawing) < self.rows:
                drawing.append(self._waiting.popleft())
            steps = min(one[0] for one in drawing)
            await asyncio.sleep(self.slow * steps * (STEP_S + ROW_S * len(drawing)))
            self.ended = loop.time()
            for one in drawing:
                one[0] -= steps
            drawing = [one for one in drawing if one[0]]
            for key, (samples, ended) in list(self._left.items()):
                if not any(one[0] for one in samples):
                    del self._left[key]
                    ended.set()
            await asyncio.sleep(0)


@dataclass(eq=False)
class Flown:
    """A ticket at an engine, as a desk counts it."""

    ticket: QueuedRequest
    member: Any
    load: int


class Dealt(RequestRouter):
    """The desk, whose flights are draws of arithmetic. lengths: of each request, by id."""

    def __init__(self, engines: list[Any], lengths: dict[str, list[int]], answer: Any) -> None:
        super().__init__(engines, PolicyVersions(), PoolTerms(concurrency=1 << 20), answer)
        self.lengths = lengths

    def _send(self, member: Replica, ticket: QueuedRequest) -> None:
        load = self._load(ticket)
        flight: Any = Flown(ticket, member, load)
        member.flights.add(flight)
        member.outstanding += load
        self._start(self._drawn(member, flight))

    async def _drawn(self, member: Any, flight: Any) -> None:
        lengths = self.lengths[flight.ticket.request.id]
        await member.draw(lengths)
        member.flights.discard(flight)
        member.outstanding -= flight.load
        rollouts: Any = [SimpleNamespace(token_ids=range(length)) for length in lengths]
        group = Group(flight.ticket.request, rollouts)
        self._learn(flight, group)
        self._end(flight.ticket, group)
        self.dispatch()


class InTurns(Dealt):
    """Each request to the next engine, at once."""

    def dispatch(self) -> None:
        while self._waiting:
            ticket = self._waiting.popleft()
            self._send(self.members[ticket.handle % len(self.members)], ticket)


def drawn_lengths(rng: random.Random, samples: int, most: int) -> list[int]:
    """Of a group."""
    own = rng.gauss(0.0, SPREAD)
    lengths = (0.18 * most * 2.718 ** (own + rng.gauss(0.0, SPREAD / 2)) for _ in range(samples))
    return [max(1, min(most, int(length))) for length in lengths]


def simulate(
    kind: type[Dealt], count: int, args: argparse.Namespace, seed: int
) -> tuple[float, float]:
    """(largest over mean of the engines' ends, seconds of the round): the median of three rounds,
    after one in which the desk learns how long samples are."""
    rng = random.Random(seed)
    loop = Clock()

    async def rounds() -> list[tuple[float, float]]:
        cache, slow = args.rows * args.cached, [args.slow] + [1.0] * (count - 1)
        engines = [Engine(i, args.rows, cache, slow[i]) for i in range(count)]
        found, lengths, handle = [], dict[str, list[int]](), 0
        left, over = 0, asyncio.Event()

        def answer(_: int, __: object) -> None:
            nonlocal left
            left -= 1
            if not left:
                over.set()

        desk = kind(engines, lengths, answer)
        for _ in range(4):
            began, tickets = loop.time(), []
            for _ in range(args.requests * count):
                handle += 1
                asked = Request([1], n=args.groups, max_tokens=args.tokens, id=str(handle))
                lengths[asked.id] = drawn_lengths(rng, args.groups, args.tokens)
                tickets.append(QueuedRequest(handle, asked))
            left = len(tickets)
            over.clear()
            desk.add(tickets)
            await over.wait()
            ends = [engine.ended - began for engine in engines]
            found.append((max(ends) / statistics.fmean(ends), max(ends)))
        return found[1:]

    found = _run(loop, rounds())
    return statistics.median(f[0] for f in found), statistics.median(f[1] for f in found)


def _run(loop: Clock, work: Coroutine[Any, Any, list[tuple[float, float]]]) -> Any:
    try:
        return loop.run_until_complete(work)
    finally:
        loop.close()


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", type=int, nargs="+", default=[2, 4, 8, 32])
    parser.add_argument("--requests", type=int, default=64, help="of a round, for each engine")
    parser.add_argument("--groups", type=int, default=8, help="samples of a request")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=128, help="that an engine draws together")
    parser.add_argument("--cached", type=int, default=512, help="tokens of cache for each row")
    parser.add_argument("--slow", type=float, default=1.0, help="times the first one's steps take")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(words)
    print("engines  largest over mean: in turns  dealt   seconds of a round: in turns  dealt")
    for count in args.engines:
        turns, ours = (simulate(kind, count, args, args.seed) for kind in (InTurns, Dealt))
        print(f"{count:7}  {turns[0]:27.3f}  {ours[0]:5.3f}  {turns[1]:28.1f}  {ours[1]:5.1f}")


if __name__ == "__main__":
    main()
