"""A channel inside one process. Thread-safe."""

from __future__ import annotations

import threading
from collections import deque

from lowroll.transport.base import ChannelClosed, DeadlineExceeded, check_deadline
from lowroll.types import Batch


class MemoryRolloutChannel:
    """A queue of at most `capacity` batches; `send` waits at most `send_deadline_s` seconds."""

    def __init__(self, capacity: int = 2, send_deadline_s: float = 60.0) -> None:
        self._capacity = capacity
        self._send_deadline_s = check_deadline(send_deadline_s)
        self._batches: deque[Batch] = deque()
        self._closed = False
        self._changed = threading.Condition()

    def send(self, batch: Batch) -> None:
        with self._changed:
            has_room = self._changed.wait_for(
                lambda: self._closed or len(self._batches) < self._capacity, self._send_deadline_s
            )
            if self._closed:
                raise ChannelClosed(
                    f"batch of step {batch.step} was sent on a closed rollout channel"
                )
            if not has_room:
                raise DeadlineExceeded(
                    f"room in the rollout channel for the batch of step {batch.step} "
                    f"({len(self._batches)} wait for the trainer)",
                    self._send_deadline_s,
                )
            self._batches.append(batch)
            self._changed.notify_all()

    def receive(self, deadline_s: float) -> Batch:
        deadline_s = check_deadline(deadline_s)
        with self._changed:
            if not self._changed.wait_for(lambda: self._closed or self._batches, deadline_s):
                raise DeadlineExceeded("a batch of rollouts from the orchestrator", deadline_s)
            if not self._batches:
                raise ChannelClosed("the rollout channel is closed and empty")
            batch = self._batches.popleft()
            self._changed.notify_all()
            return batch

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
