"""The two ends of a channel of rollouts, and the errors they raise.

The orchestrator sends a Batch a step, in order, and the trainer receives each once. Nothing is lost: a
full channel makes the orchestrator wait. Rollouts are pulled: the trainer says what it has received and
what is in a checkpoint of its own (`Cursor`); one that comes back after a crash says less than
before, and gets the same batches again. In one process both ends are one object.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from lowroll.types import Batch, RunFailed

log = logging.getLogger(__name__)

REMIND_S = 300.0  # between two lines that say what is waited for


class TransportError(RunFailed):
    """Something went wrong between two rooms."""


class DeadlineExceeded(TransportError):
    """A wait ran out of time; the message names what it waited for and how long."""

    def __init__(self, waited_for: str, deadline_s: float) -> None:
        super().__init__(f"waited {deadline_s:g} s for {waited_for}")
        self.waited_for = waited_for
        self.deadline_s = deadline_s


class PeerSilent(DeadlineExceeded):
    """The other side was there and says nothing any more; the message names it."""


class ChannelClosed(TransportError):
    """The other side closed the channel and nothing is left in it."""


class DamagedFrame(TransportError):
    """A batch on its way is not what was sent, also after it was asked for again."""


class FrameGone(TransportError):
    """The trainer needs a batch that the orchestrator does not have any more."""


class Fenced(TransportError):
    """A later attempt of the same role has taken over; this one may say nothing any more."""


@dataclass(frozen=True)
class Cursor:
    """The progress that a trainer has reported: the last step that it has received, the last one
    that is in a checkpoint, and its attempt. Within an attempt both only grow; reports of an
    earlier attempt no longer count."""

    received: int
    committed: int
    attempt: int

    def __post_init__(self) -> None:
        if not 0 <= self.committed <= self.received or self.attempt < 0:
            raise ValueError(f"expected 0 <= committed <= received and attempt >= 0, got {self}")

    def follows(self, other: Cursor | None) -> bool:
        """Return whether this cursor may replace `other`, which was reported before."""
        if other is None or self.attempt > other.attempt:
            return True
        return (
            self.attempt == other.attempt
            and self.received >= other.received
            and self.committed >= other.committed
        )

    def receive(self) -> Cursor:
        """Return the cursor one step further."""
        return replace(self, received=self.received + 1)

    def commit(self, step: int) -> Cursor:
        """Return the cursor with everything up to `step` in a checkpoint. ValueError when that
        cannot be."""
        if not self.committed <= step <= self.received:
            raise ValueError(
                f"commit: step {step} is not between the committed step {self.committed} and the "
                f"received step {self.received}"
            )
        return replace(self, committed=step)


class RolloutSender(Protocol):
    """The orchestrator's end: batches in the order of their steps."""

    def send(self, batch: Batch) -> None:
        """Hand `batch` over. DeadlineExceeded when the receiver is too far behind, ChannelClosed
        after `close`."""

    def cursor(self) -> Cursor | None:
        """Return the progress that the trainer has reported; None before its first report."""

    def close(self) -> None:
        """Stop sending from this process; batches in the channel can still be received."""


class RolloutReceiver(Protocol):
    """The trainer's end: each batch once, in order."""

    def receive(self, deadline_s: float) -> Batch:
        """Return the next batch, within `deadline_s` seconds. DeadlineExceeded, or ChannelClosed
        when none can come."""

    def commit(self, step: int) -> None:
        """Record that everything up to `step` is in a checkpoint: those batches will not be asked
        for again. ValueError for a step that was not received, or that is before an earlier one."""

    def close(self) -> None:
        """Stop receiving."""


def check_deadline(deadline_s: float) -> float:
    """Return the deadline as a float. ValueError unless it is a finite number of seconds, 0 or
    more."""
    if (
        isinstance(deadline_s, bool)
        or not isinstance(deadline_s, (int, float))
        or not 0 <= deadline_s < 1e9
    ):
        raise ValueError(
            f"deadline_s: expected a finite number of seconds, 0 or more, got {deadline_s!r}"
        )
    return float(deadline_s)


LONGEST_PAUSE_S = 0.02


class Reminder:
    """Says in the log what is waited for, every REMIND_S seconds of a wait that has just begun."""

    def __init__(self, waited_for: Callable[[], str], deadline_s: float) -> None:
        self.waited_for = waited_for
        self.deadline_s = deadline_s
        self._told = 0.0

    def look(self, left: float) -> None:
        """Log a reminder when one is due. left: seconds until the deadline."""
        waited = self.deadline_s - left
        if waited - self._told >= REMIND_S:
            self._told = waited
            log.warning(
                "waiting for %s, for %.0f s so far and %.0f s more at most",
                self.waited_for(),
                waited,
                left,
            )


def wait_until(
    ready: Callable[[], bool],
    waited_for: str,
    deadline_s: float,
    alive: Callable[[], None] | None = None,
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """Ask `ready` until it says yes, at first after milliseconds, then fifty times a second.

    alive: called between two questions; it raises when the other side cannot answer any more.
    The log says every REMIND_S seconds what is waited for. DeadlineExceeded after `deadline_s`
    seconds.
    """
    until = time.monotonic() + check_deadline(deadline_s)
    reminder = Reminder(lambda: waited_for, deadline_s)
    seconds = 0.002
    while not ready():
        if alive is not None:
            alive()
        left = until - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded(waited_for, deadline_s)
        reminder.look(left)
        pause(min(seconds, left))
        seconds = min(2 * seconds, LONGEST_PAUSE_S)
