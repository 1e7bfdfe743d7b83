"""The orchestrator's side of every durable channel: a spool, and how far behind the trainer may be."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from lowroll.checkpoint.faults import faultpoint
from lowroll.transport.base import (
    ChannelClosed,
    Cursor,
    FrameGone,
    check_deadline,
    wait_until,
)
from lowroll.transport.spool import Spool
from lowroll.types import Batch


class DurableSender(ABC):
    """The orchestrator's end of a channel between processes: batches that were sent and not yet
    committed. hwm: how many the trainer may not have received yet; `send` waits at most `deadline_s`
    seconds for room. alive: raises when the trainer cannot answer any more."""

    def __init__(
        self, spool: Spool, hwm: int, deadline_s: float, alive: Callable[[], None] | None
    ) -> None:
        if isinstance(hwm, bool) or not isinstance(hwm, int) or hwm < 1:
            raise ValueError(f"hwm: expected an integer of at least 1, got {hwm!r}")
        self.spool = spool
        self.hwm = hwm
        self.deadline_s = check_deadline(deadline_s)
        self.alive = alive
        self.closed = False
        self._ended: str | None = None  # why no batch follows
        spool.repair()

    @abstractmethod
    def cursor(self) -> Cursor | None:
        """Return the progress that the trainer has reported by now."""

    def notify(self) -> None:  # noqa: B027  a folder needs no word
        """Notify the trainer that there is something new in the spool."""

    def send(self, batch: Batch) -> None:
        """Keep a batch in the spool, from which the trainer gets it. DeadlineExceeded when that is
        too far behind, FrameGone when it needs a batch that is not there any more; then nothing is
        sent."""
        if self.closed:
            raise ChannelClosed(f"batch of step {batch.step} was sent on a closed rollout channel")
        steps = self.spool.steps()
        if batch.step not in steps:  # one that is there was sent, and is only compared
            wait_until(
                lambda: self._has_room(batch.step, self.cursor()),
                f"the trainer to receive a batch: step {batch.step} would be one more than the "
                f"{self.hwm} that it may be behind",
                self.deadline_s,
                self.alive,
            )
        faultpoint(f"send.begin/{batch.step}")
        self.spool.put(batch)
        faultpoint(f"send.spooled/{batch.step}")
        if (cursor := self.cursor()) is not None:
            self.spool.drop_through(cursor.committed)
        self.notify()

    def _has_room(self, step: int, cursor: Cursor | None) -> bool:
        steps = self.spool.steps()
        if cursor is None:
            return len(steps) < self.hwm
        self._refuse_gap(cursor, [*steps, step])
        if cursor.received >= step:
            raise FrameGone(
                f"{self.spool.folder}: the batch of step {step} that the trainer has received is not "
                "here any more"
            )
        return step - 1 - cursor.received < self.hwm

    def check(self) -> None:
        """Raise FrameGone when the trainer has fallen back behind the oldest batch that is here."""
        if (cursor := self.cursor()) is not None:
            self._refuse_gap(cursor, self.spool.steps())

    def _refuse_gap(self, cursor: Cursor, steps: list[int]) -> None:
        oldest = min(steps, default=0)
        if cursor.received + 1 < oldest:
            raise FrameGone(
                f"{self.spool.folder}: the trainer needs the batch of step {cursor.received + 1}; "
                f"the oldest is of step {oldest}"
            )

    def go_back(self, cursor: Cursor) -> None:
        """Forget all that was sent: what follows the trainer's checkpoint is made again. One that has
        received more than that is fenced, and the next word is of one that goes on from there."""
        if cursor.received > cursor.committed:
            self.spool.dismiss(cursor)
        self.spool.drop_after(-1)
        self.spool.reopen()
        self.closed, self._ended = False, None

    def end(self, reason: str) -> None:
        """Declare that no batch follows, ever: the trainer gets ChannelClosed with the reason
        behind the last."""
        self.closed, self._ended = True, reason
        self.spool.end(reason)
        self.notify()

    def drain(self, deadline_s: float) -> None:
        """Wait until the trainer has committed everything that was sent: no other process can
        answer it."""
        last = max(self.spool.steps(), default=0)

        def done() -> bool:
            if self._ended is not None and self.spool.ended() is None:
                self.spool.end(self._ended)  # a trainer that was started again has taken it back
            self.check()
            cursor = self.cursor()
            return last == 0 or (cursor is not None and cursor.committed >= last)

        wait_until(done, f"the trainer to commit step {last}", deadline_s, self.alive)

    def close(self) -> None:
        """Send nothing more; what was sent stays. Idempotent."""
        self.closed = True
