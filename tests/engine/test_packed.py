"""Tokens and log-probs as they travel between our server and our client."""

from __future__ import annotations

import base64
import math
from typing import Any

import pytest

from lowroll.engine.remote.protocol import pack, unpack


def test_the_bytes_are_little_endian() -> None:
    ids, logprobs = [1, 258], [-0.5, 1.0]
    assert base64.b64decode(pack(ids, logprobs)["token_ids"]) == b"\1\0\0\0\2\1\0\0"
    numbers = base64.b64decode(pack(ids, logprobs)["logprobs"])
    assert numbers == b"\0\0\0\0\0\0\xe0\xbf" + b"\0\0\0\0\0\0\xf0\x3f"  # IEEE 754


@pytest.mark.parametrize("count", [0, 1, 3, 257])
def test_every_number_comes_back(count: int) -> None:
    """Log-probs of float64, and with the sign of zero."""
    ids = [(i * 7919) % 2**31 for i in range(count)]
    logprobs = [-math.exp(i / 9.0) if i % 5 else -0.0 for i in range(count)]
    assert repr(unpack(pack(ids, logprobs))) == repr((ids, logprobs))


@pytest.mark.parametrize(
    "packed",
    [
        None,
        [],
        {"token_ids": "AQAAAA=="},
        {"token_ids": 1, "logprobs": ""},
        {"token_ids": "AQAAAA==", "logprobs": ""},
        {"token_ids": "AQAA", "logprobs": "AAAAAAAA"},
        {"token_ids": "AQAA AA==", "logprobs": "AAAAAAAA4L8="},
    ],
)
def test_what_was_not_packed_is_refused(packed: Any) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        unpack(packed)
