"""One request in flight: its end in the event loop (`Ticket`) and on the engine's thread
(`Flight`)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from lowroll.types import FinishReason, Group, Request

if TYPE_CHECKING:
    from lowroll.engine.base import PartialSample


class EngineFailed(RuntimeError):
    """The engine could not finish this request. The reason is in the log, not in the message."""


@dataclass(frozen=True)
class Delta:
    """What a sample has drawn since it was last read. The stop reason is the stop id or stop
    string that ended it."""

    sample: int
    token_ids: list[int]
    logprobs: list[float]
    top_logprobs: list[list[tuple[int, float]]] | None  # where the request asks for them
    finish_reason: FinishReason | None  # None while it goes on
    stop_reason: int | str | None

    def then(self, later: Delta) -> Delta:
        """Both as one."""
        top = self.top_logprobs
        if top is not None and later.top_logprobs is not None:
            top = top + later.top_logprobs
        return Delta(
            self.sample,
            self.token_ids + later.token_ids,
            self.logprobs + later.logprobs,
            top,
            later.finish_reason,
            later.stop_reason,
        )


class Home(Protocol):
    """What a ticket asks of its `EngineLoop`."""

    def post(self, job: Callable[[], None]) -> None: ...

    def drop(self, flight: Flight) -> None: ...

    def forget(self, ticket: Ticket) -> None: ...

    def check(self, what: str) -> None: ...


class Ticket:
    """Read it in the event loop that submitted it. Leaving its `async with` block aborts what is
    left of the request. Its waits end: `EngineLoop` watches the thread for all of them."""

    def __init__(self, home: Home, request: Request, stream: bool) -> None:
        self.request = request
        self.events = asyncio.get_running_loop()
        self.flight = Flight(self, request, stream)
        self._home = home
        self._news = asyncio.Event()
        self._over = asyncio.Event()
        self._end: Group | Exception | None = None
        self._pending: dict[int, Delta] = {}  # by sample, the first to move first
        self._aborted = False

    async def __aenter__(self) -> Ticket:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.abort()

    async def __aiter__(self) -> AsyncIterator[Delta]:
        """What is new, one Delta a sample that has moved, until all have ended; without `stream`
        everything at the end. EngineFailed, Stalled."""
        while True:
            while self._pending:
                yield self._pending.pop(next(iter(self._pending)))
            if self._end is not None:
                self._result()
                return
            self._news.clear()
            await self._news.wait()
            if not self._pending and self._end is None:
                self._home.check("a request")

    async def group(self) -> Group:
        """The finished group. EngineFailed, Stalled; ValueError for a request that was held back
        and turned out to be wrong."""
        while self._end is None:
            self._over.clear()
            await self._over.wait()
            if self._end is None:
                self._home.check("a request")
        return self._result()

    def abort(self) -> None:
        """End the request now, if it has not ended: its group comes back with finish reason
        "abort". It may be called again."""
        if self._end is None and not self._aborted:
            self._aborted = True
            self._home.post(lambda: self._home.drop(self.flight))

    def arrive(self, deltas: list[Delta], end: Group | Exception | None) -> None:
        """Take news of the engine's thread, in the event loop."""
        for delta in deltas:
            before = self._pending.get(delta.sample)
            self._pending[delta.sample] = delta if before is None else before.then(delta)
        if end is not None and self._end is None:
            self._end = end
            self._over.set()
            self._home.forget(self)
        self._news.set()

    def wake(self) -> None:
        """Have who waits see whether it is any use."""
        self._news.set()
        self._over.set()

    def _result(self) -> Group:
        assert self._end is not None
        if isinstance(self._end, Exception):
            raise self._end
        return self._end


@dataclass(eq=False)
class Flight:
    """What the engine's thread knows of a request."""

    ticket: Ticket
    request: Request
    stream: bool
    handle: int | None = None  # None before it is in the engine
    aborted: bool = False
    began_at: float = field(default_factory=time.monotonic)
    first_at: float | None = None  # when its first token was seen
    moved_at: float = 0.0  # when its newest was
    told: dict[int, int] = field(default_factory=dict)  # tokens of each sample that went out
    ended: set[int] = field(default_factory=set)  # samples whose end went out

    def moved(self, samples: Sequence[PartialSample]) -> list[Delta]:
        """What is new of a request that goes on."""
        deltas = []
        for sample, drawn in enumerate(samples):
            count = self.told.get(sample, 0)
            over = drawn.finish_reason is not None and sample not in self.ended
            if len(drawn.token_ids) > count or over:
                deltas.append(self._delta(sample, drawn, count))
        return deltas

    def last(self, group: Group) -> list[Delta]:
        """What is new of a request that has ended."""
        return [
            self._delta(sample, rollout, self.told.get(sample, 0))
            for sample, rollout in enumerate(group.rollouts)
            if sample not in self.ended
        ]

    def _delta(self, sample: int, drawn: Any, count: int) -> Delta:
        """Of a `PartialSample` or a `Rollout`, from token `count` on."""
        top = drawn.top_logprobs
        self.told[sample] = len(drawn.token_ids)
        if drawn.finish_reason is not None:
            self.ended.add(sample)
        return Delta(
            sample,
            list(drawn.token_ids[count:]),
            list(drawn.logprobs[count:]),
            None if top is None else list(top[count:]),
            drawn.finish_reason,
            drawn.stop_reason,
        )
