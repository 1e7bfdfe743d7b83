"""The two ends of the configured rollout channel."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from lowroll.checkpoint.fault_injection import faultpoint
from lowroll.config import RunConfig
from lowroll.machine import raise_file_limit
from lowroll.runs.roles.run_paths import RunPaths
from lowroll.transport import filesystem
from lowroll.transport.base import FrameGone, PeerSilent
from lowroll.types import Batch

if TYPE_CHECKING:
    from lowroll.transport import zmq

log = logging.getLogger(__name__)

Alive = Callable[[], None]
SEND_S = 86400.0  # `alive` detects a silent trainer long before
POLL_S = 0.2  # between checks for a batch that is made again


def sender(cfg: RunConfig, paths: RunPaths, attempt: int, alive: Alive) -> filesystem.Sender:
    """Open the orchestrator's end. alive: raises when the trainer is gone."""
    transport_cfg = cfg.rollout_transport
    if transport_cfg.type == "filesystem":
        return filesystem.Sender(paths.spool, transport_cfg.hwm, SEND_S, alive=alive)
    from lowroll.transport import zmq

    raise_file_limit()  # each unauthenticated connection has a file until its handshake fails
    return zmq.Sender(
        paths.spool,
        transport_cfg.host,
        transport_cfg.port,
        transport_cfg.hwm,
        SEND_S,
        attempt=attempt,
        publish=paths.address,
        alive=alive,
        token=paths.tokens()[0],
    )


def receiver(
    cfg: RunConfig, paths: RunPaths, attempt: int, committed: int, alive: Alive
) -> filesystem.Receiver | zmq.Receiver:
    if cfg.rollout_transport.type == "filesystem":
        return filesystem.Receiver(paths.spool, attempt, committed, alive=alive)
    from lowroll.transport import zmq

    return zmq.Receiver(paths.address, attempt, committed, alive=alive, token=paths.tokens()[0])


class TrainerChannel:
    """The trainer's end of the channel. It waits for an orchestrator that restarts or makes batches
    again, until `alive` raises."""

    def __init__(
        self, alive: Alive, on_batch: Callable[[Batch], None] = lambda batch: None
    ) -> None:
        self.alive = alive
        self.on_batch = on_batch
        self.waited_s = 0.0  # for the last batch
        self._receiver: filesystem.Receiver | zmq.Receiver | None = None

    def open(self, receiver: filesystem.Receiver | zmq.Receiver) -> None:
        self._receiver = receiver

    def receive(self, deadline_s: float) -> Batch:
        began = time.monotonic()
        batch = self._receive(began + deadline_s)
        self.waited_s = time.monotonic() - began
        faultpoint(f"train.received/{batch.step}")
        self.on_batch(batch)
        return batch

    def _receive(self, deadline: float) -> Batch:
        assert self._receiver is not None
        has_warned = False
        while True:
            try:
                return self._receiver.receive(max(0.0, deadline - time.monotonic()))
            except PeerSilent:
                self.alive()
            except FrameGone as error:
                if time.monotonic() > deadline:
                    raise
                if not has_warned:
                    log.warning("%s. Waiting until it is made again", error)
                has_warned = True
                self.alive()
                time.sleep(POLL_S)

    def commit(self, step: int) -> None:
        assert self._receiver is not None
        self._receiver.commit(step)

    def close(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
