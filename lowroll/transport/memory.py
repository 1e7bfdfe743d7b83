"""Channels inside one process: objects are passed, not copied. Safe between threads."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

from lowroll.transport.base import (
    ChannelClosed,
    Cursor,
    DeadlineExceeded,
    Weights,
    check_deadline,
)
from lowroll.types import Batch


class MemoryRolloutChannel:
    """A queue of at most `capacity` batches; `send` waits at most `send_deadline_s` seconds for
    room."""

    def __init__(self, capacity: int = 2, send_deadline_s: float = 60.0) -> None:
        if isinstance(capacity, bool) or not isinstance(capacity, int) or capacity < 1:
            raise ValueError(f"capacity: expected an integer of at least 1, got {capacity!r}")
        self._capacity = capacity
        self._send_deadline_s = check_deadline(send_deadline_s)
        self._batches: deque[Batch] = deque()
        self._closed = False
        self._cursor: Cursor | None = None
        self._changed = threading.Condition()

    def send(self, batch: Batch) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or len(self._batches) < self._capacity, self._send_deadline_s
            )
            if self._closed:
                raise ChannelClosed(
                    f"batch of step {batch.step} was sent on a closed rollout channel"
                )
            if len(self._batches) >= self._capacity:
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
            self._changed.wait_for(lambda: self._closed or self._batches, deadline_s)
            if not self._batches:
                if self._closed:
                    raise ChannelClosed("the rollout channel is closed and empty")
                raise DeadlineExceeded("a batch of rollouts from the orchestrator", deadline_s)
            batch = self._batches.popleft()
            committed = 0 if self._cursor is None else self._cursor.committed
            self._cursor = Cursor(batch.step, min(committed, batch.step), attempt=0)
            self._changed.notify_all()
            return batch

    def cursor(self) -> Cursor | None:
        with self._changed:
            return self._cursor

    def commit(self, step: int) -> None:
        with self._changed:
            self._cursor = (self._cursor or Cursor(0, 0, attempt=0)).commit(step)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class MemoryWeightChannel:
    """Holds the newest weights only."""

    def __init__(self) -> None:
        self._newest: Weights | None = None
        self._version = -1
        self._closed = False
        self._changed = threading.Condition()

    def publish(self, version: int, digest: str, payload: Any = None) -> None:
        if isinstance(version, bool) or not isinstance(version, int) or version < 0:
            raise ValueError(f"version: expected an integer of at least 0, got {version!r}")
        with self._changed:
            if self._closed:
                raise ChannelClosed(f"version {version} was published on a closed weight channel")
            if version <= self._version:
                raise ValueError(
                    f"version: {version} is not above the published version {self._version}"
                )
            self._version = version
            self._newest = Weights(version, digest, payload)
            self._changed.notify_all()

    def receive(self, deadline_s: float) -> Weights:
        deadline_s = check_deadline(deadline_s)
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._newest is not None, deadline_s)
            if self._newest is None:
                if self._closed:
                    raise ChannelClosed(
                        f"the weight channel is closed, its last version was {self._version}"
                    )
                raise DeadlineExceeded(
                    f"weights newer than version {self._version} from the trainer", deadline_s
                )
            newest, self._newest = self._newest, None
            return newest

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
