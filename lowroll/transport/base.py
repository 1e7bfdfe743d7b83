"""What a channel is: two protocols and the errors they raise.

| channel | producer | consumer | unblocked by |
|---|---|---|---|
| RolloutChannel | orchestrator, one Batch a step, in order | trainer | `send` |
| WeightChannel | trainer, one version an update, growing | engine | `publish` |

A rollout channel loses nothing: a full one makes the producer wait. A weight channel keeps the
newest only: an engine that was busy for two updates takes the second.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from lowroll.types import Batch


class TransportError(RuntimeError):
    """Something went wrong between two rooms."""


class DeadlineExceeded(TransportError):
    """A wait ran out of time; the message names what it waited for and how long."""

    def __init__(self, waited_for: str, deadline_s: float) -> None:
        super().__init__(f"waited {deadline_s:g} s for {waited_for}")
        self.waited_for = waited_for
        self.deadline_s = deadline_s


class ChannelClosed(TransportError):
    """The other side closed the channel and nothing is left in it."""


@dataclass(frozen=True)
class Weights:
    """One published policy. `payload` is the channel's business: tensors in memory, a path, a
    communicator's handle."""

    version: int
    digest: str
    payload: Any = None


class RolloutChannel(Protocol):
    """Batches in the order they were sent, each received once."""

    def send(self, batch: Batch) -> None:
        """Hand `batch` over. DeadlineExceeded when the receiver is too far behind, ChannelClosed
        after `close`."""

    def receive(self, deadline_s: float) -> Batch:
        """The next batch, within `deadline_s` seconds. DeadlineExceeded, or ChannelClosed when none
        can come."""

    def close(self) -> None:
        """No more batches will be sent; those inside can still be received."""


class WeightChannel(Protocol):
    """The newest published weights."""

    def publish(self, version: int, digest: str, payload: Any = None) -> None:
        """Replace what is published. ValueError unless `version` is above every earlier one."""

    def receive(self, deadline_s: float) -> Weights:
        """The newest weights that were not received yet, within `deadline_s` seconds, or
        DeadlineExceeded."""

    def close(self) -> None:
        """No more weights will be published; an unreceived one can still be received."""


def check_deadline(deadline_s: float) -> float:
    """The deadline as a float. ValueError unless it is a finite number of seconds, 0 or more."""
    if (
        isinstance(deadline_s, bool)
        or not isinstance(deadline_s, (int, float))
        or not 0 <= deadline_s < 1e9
    ):
        raise ValueError(
            f"deadline_s: expected a finite number of seconds, 0 or more, got {deadline_s!r}"
        )
    return float(deadline_s)
