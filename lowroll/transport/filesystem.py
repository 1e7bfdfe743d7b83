"""Rollouts through a shared folder: the spool, and one file with the trainer's cursor.

Each side polls the folder; the caller's `alive` detects a dead peer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from lowroll.checkpoint.fault_injection import faultpoint
from lowroll.transport.base import (
    ChannelClosed,
    Cursor,
    DamagedFrame,
    FrameGone,
    wait_until,
)
from lowroll.transport.spool import Spool
from lowroll.types import Batch

TRIES = 3  # of a damaged frame
_PAUSE_S = 0.2  # between reads of a damaged frame


class Sender:
    """The orchestrator's end. hwm: how many batches the trainer may be behind; `send` waits at most
    `deadline_s` seconds for it. alive: raises when the trainer cannot answer."""

    def __init__(
        self,
        folder: Path,
        hwm: int = 2,
        deadline_s: float = 3600.0,
        *,
        alive: Callable[[], None] | None = None,
    ) -> None:
        self.spool = Spool(folder)
        self.hwm = hwm
        self.deadline_s = deadline_s
        self.alive = alive
        self.closed = False
        self._ended: str | None = None  # why no batch follows
        self._cursor: Cursor | None = None
        self.spool.repair()

    def cursor(self) -> Cursor | None:
        cursor = self.spool.progress.cursor()
        if cursor is not None and cursor.follows(self._cursor):
            self._cursor = cursor
        return self._cursor

    def notify(self) -> None:
        """Do nothing: the trainer polls the folder."""

    def send(self, batch: Batch) -> None:
        """Put a batch into the spool. DeadlineExceeded when the trainer is too far behind,
        FrameGone when it needs a batch that is gone; nothing is sent then."""
        if self.closed:
            raise ChannelClosed(f"batch of step {batch.step} was sent on a closed rollout channel")
        if batch.step not in self.spool.steps():  # `put` only compares a present one
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
        """Raise FrameGone when the trainer needs a batch that is gone."""
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
        """Drop the batches after the trainer's checkpoint. A trainer that has received more is
        dismissed."""
        if cursor.received > cursor.committed:
            self.spool.progress.dismiss(cursor)
        self.spool.drop_after(-1)
        self.spool.reopen()
        self.closed, self._ended, self._cursor = False, None, None

    def end(self, reason: str) -> None:
        """Declare that no batch follows."""
        self.closed, self._ended = True, reason
        self.spool.end(reason)
        self.notify()

    def drain(self, deadline_s: float) -> None:
        """Wait until the trainer has committed all batches: nobody else can answer it."""
        last_step = max(self.spool.steps(), default=0)

        def done() -> bool:
            if self._ended is not None and self.spool.ended() is None:
                self.spool.end(self._ended)  # a restarted trainer may have reopened it
            self.check()
            cursor = self.cursor()
            return last_step == 0 or (cursor is not None and cursor.committed >= last_step)

        wait_until(done, f"the trainer to commit step {last_step}", deadline_s, self.alive)

    def close(self) -> None:
        """Stop sending; sent batches stay. Idempotent."""
        self.closed = True


class Receiver:
    """The trainer's end. attempt: grows with every start; earlier ones are fenced. committed: the
    step of the checkpoint that it resumes from."""

    def __init__(
        self,
        folder: Path,
        attempt: int,
        committed: int = 0,
        *,
        alive: Callable[[], None] | None = None,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self.spool = Spool(folder)
        self.alive = alive
        self.pause = pause
        self._cursor = Cursor(committed, committed, attempt)
        self._report(self._cursor)

    def receive(self, deadline_s: float) -> Batch:
        """Return the next batch. Raises FrameGone, DamagedFrame, Fenced."""
        step = self._cursor.received + 1
        wait_until(
            lambda: self._is_decided(step),
            f"the batch of step {step} from the orchestrator, in {self.spool.folder}",
            deadline_s,
            self.alive,
            self.pause,
        )
        if not self.spool.path(step).exists():
            raise ChannelClosed(
                f"the orchestrator has ended before step {step}: {self.spool.ended()}"
            )
        batch = self._read(step)
        faultpoint(f"receive.read/{step}")
        self._report(self._cursor.receive())
        faultpoint(f"receive.said/{step}")
        return batch

    def commit(self, step: int) -> None:
        self._report(self._cursor.commit(step))

    def close(self) -> None:
        """Do nothing: no resource is held."""

    def _is_decided(self, step: int) -> bool:
        self.spool.progress.check(self._cursor.attempt)
        if self.spool.path(step).exists() or self.spool.ended() is not None:
            return True
        oldest = min(self.spool.steps(), default=step)
        # it may have come since, with later ones
        if oldest > step and not self.spool.path(step).exists():
            raise FrameGone(
                f"{self.spool.folder}: the trainer needs the batch of step {step}; "
                f"the oldest that the orchestrator keeps is of step {oldest}"
            )
        return False

    def _read(self, step: int) -> Batch:
        for attempt in range(TRIES):
            try:
                return self.spool.read(step)
            except DamagedFrame as error:
                if attempt == TRIES - 1:
                    raise DamagedFrame(
                        f"{error}; read {TRIES} times. An orchestrator that is started again makes "
                        "it again"
                    ) from error
                self.pause(_PAUSE_S)
        raise AssertionError("not reached")

    def _report(self, cursor: Cursor) -> None:
        self.spool.progress.report(cursor)
        self._cursor = cursor
