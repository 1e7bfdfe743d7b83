"""The errors, the waits and the trainer's cursor of all rollout channels (docs/architecture.md).
The orchestrator sends one Batch a step, in order. The trainer receives each once, and after a crash
those since its checkpoint again."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from lowroll.types import Batch, RunFailed

log = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.002, 0.02  # between two polls
REMIND_S = 300.0  # between two log lines


class TransportError(RunFailed):
    """An error between processes."""


class OtherFormat(TransportError, ValueError):
    """A file of another version of lowroll, which no restart helps."""


class DeadlineExceeded(TransportError):
    """A wait that ran out of time."""

    def __init__(self, waited_for: str, deadline_s: float) -> None:
        super().__init__(f"waited {deadline_s:g} s for {waited_for}")


class PeerSilent(DeadlineExceeded):
    """A silence of the other side, which was there."""


class ChannelClosed(TransportError):
    """The channel is closed and empty."""


class DamagedFrame(TransportError):
    """A batch that is still damaged after retries."""


class FrameGone(TransportError):
    """A batch that the trainer needs and the orchestrator no longer has."""


class Fenced(TransportError):
    """A later attempt of the role has taken over."""


@dataclass(frozen=True)
class Cursor:
    """The last step that a trainer's attempt has received, and the last in a checkpoint. Both only
    grow."""

    received: int
    committed: int
    attempt: int

    def __post_init__(self) -> None:
        if not 0 <= self.committed <= self.received or self.attempt < 0:
            raise ValueError(f"expected 0 <= committed <= received and attempt >= 0, got {self}")

    def follows(self, other: Cursor | None) -> bool:
        if other is None or self.attempt > other.attempt:
            return True
        return (
            self.attempt == other.attempt
            and self.received >= other.received
            and self.committed >= other.committed
        )

    def receive(self) -> Cursor:
        return replace(self, received=self.received + 1)

    def commit(self, step: int) -> Cursor:
        """Return the cursor with all steps up to `step` in a checkpoint. ValueError for a step that
        was not received, or goes back."""
        if not self.committed <= step <= self.received:
            raise ValueError(
                f"commit: step {step} is not between the committed step {self.committed} and the "
                f"received step {self.received}"
            )
        return replace(self, committed=step)


class RolloutReceiver(Protocol):
    """The trainer's end of a channel."""

    def receive(self, deadline_s: float) -> Batch:
        """Return the next batch, each once and in order. DeadlineExceeded after `deadline_s`
        seconds, ChannelClosed when none can come."""


def check_deadline(deadline_s: float) -> float:
    """Return the deadline. ValueError unless it is finite and not negative."""
    if (
        isinstance(deadline_s, bool)
        or not isinstance(deadline_s, (int, float))
        or not 0 <= deadline_s < 1e9
    ):
        raise ValueError(
            f"deadline_s: expected a finite number of seconds, 0 or more, got {deadline_s!r}"
        )
    return float(deadline_s)


def wait_until(
    ready: Callable[[], bool],
    waited_for: str | Callable[[], str],
    deadline_s: float,
    alive: Callable[[], None] | None = None,
    pause: Callable[[float], None] | None = None,
) -> None:
    """Poll `ready` until it is true, and log every REMIND_S seconds what is waited for.

    alive: called between polls; raises when the other side cannot answer. pause: replaces
    `time.sleep`. Raises DeadlineExceeded.
    """
    deadline_s = check_deadline(deadline_s)
    began = time.monotonic()
    reminded_s = 0.0
    pause_s = FIRST_PAUSE_S
    while not ready():
        if alive is not None:
            alive()
        waited_s = time.monotonic() - began
        remaining_s = deadline_s - waited_s
        if remaining_s <= 0:
            raise DeadlineExceeded(_describe(waited_for), deadline_s)
        if waited_s - reminded_s >= REMIND_S:
            reminded_s = waited_s
            log.warning(
                "waiting for %s, for %.0f s so far and %.0f s more at most",
                _describe(waited_for),
                waited_s,
                remaining_s,
            )
        (pause or time.sleep)(min(pause_s, remaining_s))
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def _describe(waited_for: str | Callable[[], str]) -> str:
    return waited_for if isinstance(waited_for, str) else waited_for()
