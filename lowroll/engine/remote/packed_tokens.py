"""Tokens and log-probs of a sample as two strings in JSON, bit for bit: base64 of int32 and of float64,
both little-endian. As lists of numbers they cost a server and its client ten times as much.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence
from typing import Any


def pack(token_ids: Sequence[int], logprobs: Sequence[float]) -> dict[str, str]:
    """Both, equally many, by name."""
    count = len(token_ids)
    ids = struct.pack(f"<{count}i", *token_ids)
    values = struct.pack(f"<{count}d", *logprobs)
    return {
        "token_ids": base64.b64encode(ids).decode(),
        "logprobs": base64.b64encode(values).decode(),
    }


def unpack(packed: dict[str, Any]) -> tuple[list[int], list[float]]:
    """Decode what `pack` made. KeyError, TypeError or ValueError for anything else."""
    ids = base64.b64decode(packed["token_ids"], validate=True)
    values = base64.b64decode(packed["logprobs"], validate=True)
    if len(ids) % 4 or len(values) != 2 * len(ids):
        raise ValueError(f"{len(ids)} bytes of token ids and {len(values)} of log-probs")
    count = len(ids) // 4
    return list(struct.unpack(f"<{count}i", ids)), list(struct.unpack(f"<{count}d", values))
