"""Rollouts through a folder that both sides see: the spool, and one file of the trainer's words.

    orchestrator   step_000012.frame      whole or absent, never changed
    trainer        cursor.json            what it has received and committed, replaced whole

Nothing else passes between them. Each side learns of the other by looking again, fifty times a second
at most; who is not there any more is found out by `alive`, which the caller gives.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from lowroll.checkpoint.faults import faultpoint
from lowroll.transport.base import (
    ChannelClosed,
    Cursor,
    DamagedFrame,
    FrameGone,
    check_deadline,
    wait_until,
)
from lowroll.transport.queue import DurableSender
from lowroll.transport.spool import Spool
from lowroll.types import Batch

TRIES = 3  # to read what is damaged
_PAUSE_S = 0.2  # between them


class Sender(DurableSender):
    """The orchestrator's end. hwm: batches that the trainer may not have received yet; `send` waits
    at most `deadline_s` seconds for room."""

    def __init__(
        self,
        folder: Path,
        hwm: int = 2,
        deadline_s: float = 3600.0,
        *,
        run: str = "",
        alive: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(Spool(folder, run), hwm, deadline_s, alive)
        self._cursor: Cursor | None = None

    def cursor(self) -> Cursor | None:
        cursor = self.spool.cursor()
        if cursor is not None and cursor.follows(self._cursor):
            self._cursor = cursor
        return self._cursor

    def go_back(self, cursor: Cursor) -> None:
        super().go_back(cursor)
        self._cursor = None


class Receiver:
    """The trainer's end. committed: the step of the checkpoint that it goes on from, 0 at the
    beginning. `attempt` grows with every start of the trainer; an earlier one is fenced."""

    def __init__(
        self,
        folder: Path,
        attempt: int,
        committed: int = 0,
        *,
        run: str = "",
        alive: Callable[[], None] | None = None,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self.spool = Spool(folder, run)
        self.alive = alive
        self.pause = pause
        self._cursor = Cursor(committed, committed, attempt)
        self._say(self._cursor)

    def receive(self, deadline_s: float) -> Batch:
        """Return the next batch. FrameGone when the orchestrator has only later ones, DamagedFrame
        when the file is not what was sent, Fenced when a later attempt has taken over."""
        step = self._cursor.received + 1
        wait_until(
            lambda: self._is_decided(step),
            f"the batch of step {step} from the orchestrator, in {self.spool.folder}",
            check_deadline(deadline_s),
            self.alive,
            self.pause,
        )
        if not self.spool.path(step).exists():
            raise ChannelClosed(
                f"the orchestrator has ended before step {step}: {self.spool.ended()}"
            )
        batch = self._read(step)
        faultpoint(f"receive.read/{step}")
        self._say(self._cursor.receive())
        faultpoint(f"receive.said/{step}")
        return batch

    def commit(self, step: int) -> None:
        self._say(self._cursor.commit(step))

    def close(self) -> None:
        """Do nothing: no resource is held."""

    def _is_decided(self, step: int) -> bool:
        """Return whether the batch is there, or will never be. FrameGone when only later ones are
        there."""
        self.spool.check(self._cursor.attempt)
        if self.spool.path(step).exists() or self.spool.ended() is not None:
            return True
        oldest = min(self.spool.steps(), default=step)
        if oldest > step and not self.spool.path(step).exists():
            raise FrameGone(
                f"{self.spool.folder}: the trainer needs the batch of step {step}; "
                f"the oldest that the orchestrator keeps is of step {oldest}"
            )
        return False

    def _read(self, step: int) -> Batch:
        for tries in range(TRIES):
            try:
                return self.spool.read(step)
            except DamagedFrame as error:
                if tries == TRIES - 1:
                    raise DamagedFrame(
                        f"{error}; read {TRIES} times. An orchestrator that is started again makes "
                        "it again"
                    ) from error
                self.pause(_PAUSE_S)
        raise AssertionError("not reached")

    def _say(self, cursor: Cursor) -> None:
        self.spool.say(cursor)
        self._cursor = cursor
