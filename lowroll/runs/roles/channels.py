"""The two ends of the configured rollout channel."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from lowroll.config import RunConfig
from lowroll.machine import raise_file_limit
from lowroll.runs.roles.run_paths import RunPaths
from lowroll.transport import filesystem
from lowroll.transport.base import FrameGone, PeerSilent, RolloutReceiver
from lowroll.types import Batch

log = logging.getLogger(__name__)

Alive = Callable[[], None]
SEND_S = 86400.0  # `alive` detects a silent trainer long before
TURN_S = 0.2  # between two looks for a repeated batch


def sender(cfg: RunConfig, place: RunPaths, attempt: int, alive: Alive) -> filesystem.Sender:
    transport_cfg = cfg.rollout_transport
    if transport_cfg.type == "filesystem":
        return filesystem.Sender(place.spool, transport_cfg.hwm, SEND_S, alive=alive)
    from lowroll.transport import zmq

    raise_file_limit()  # each unauthenticated connection has a file until its handshake fails
    return zmq.Sender(
        place.spool,
        transport_cfg.host,
        transport_cfg.port,
        transport_cfg.hwm,
        SEND_S,
        attempt=attempt,
        publish=place.address,
        alive=alive,
        token=place.tokens()[0],
    )


def receiver(
    cfg: RunConfig, place: RunPaths, attempt: int, committed: int, alive: Alive
) -> RolloutReceiver:
    transport_cfg = cfg.rollout_transport
    if transport_cfg.type == "filesystem":
        return ReconnectingReceiver(
            filesystem.Receiver(place.spool, attempt, committed, alive=alive), alive
        )
    from lowroll.transport import zmq

    return ReconnectingReceiver(
        zmq.Receiver(place.address, attempt, committed, alive=alive, token=place.tokens()[0]), alive
    )


class ReconnectingReceiver:
    """A receiver that waits for a restarted orchestrator, or one that goes back with this trainer
    to make batches again; `alive` sets the limit."""

    def __init__(self, channel: RolloutReceiver, alive: Alive) -> None:
        self.channel = channel
        self.alive = alive
        self.commit = channel.commit
        self.close = channel.close

    def receive(self, deadline_s: float) -> Batch:
        deadline, has_warned = time.monotonic() + deadline_s, False
        while True:
            try:
                return self.channel.receive(max(0.0, deadline - time.monotonic()))
            except PeerSilent:
                self.alive()
            except FrameGone as error:
                if time.monotonic() > deadline:
                    raise
                if not has_warned:
                    log.warning("%s. Waiting until it is made again", error)
                has_warned = True
                self.alive()
                time.sleep(TURN_S)
