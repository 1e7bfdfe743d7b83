"""Channels between the rooms: rollouts to the trainer, weights to the engine, and the codec that
both speak.

A channel moves a Batch or a set of weights and never changes a byte of it; which channel carries it
is a choice of deployment. Every wait has a deadline and an error that names what it waited for.
"""

from __future__ import annotations

from lowroll.transport.base import (
    ChannelClosed,
    DeadlineExceeded,
    TransportError,
)
from lowroll.transport.codec import (
    CodecError,
    decode_batch,
    decode_sample,
    encode_batch,
    encode_sample,
)
from lowroll.transport.memory import MemoryRolloutChannel
from lowroll.transport.rollout_log import read_rollouts, write_rollouts

__all__ = [
    "ChannelClosed",
    "CodecError",
    "DeadlineExceeded",
    "MemoryRolloutChannel",
    "TransportError",
    "decode_batch",
    "decode_sample",
    "encode_batch",
    "encode_sample",
    "read_rollouts",
    "write_rollouts",
]
