"""A batch as it travels between processes: the codec's lines, and in each the long lists of a sample
as bytes.

Numbers as text are for people, who read the log of rollouts. Writing and reading them was most of
what a batch cost on its way to the trainer.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from lowroll.transport import codec
from lowroll.transport.codec import MAX_BYTES, CodecError, decode_record, encode_record
from lowroll.types import Batch, Sample


@dataclass(frozen=True)
class Packed:
    """A sample, and beside it the lists that it lacks: little-endian numbers, one behind the other."""

    sample: Sample
    prompt_ids: bytes  # int32
    token_ids: bytes  # int32
    logprobs: bytes  # float64: no engine's are rounded
    loss_mask: bytes  # a byte each


def encode_batch(batch: Batch) -> bytes:
    """Encode as `codec.encode_batch`, for `decode_batch` of this file."""
    return codec.encode_batch(batch, encode_sample)


def decode_batch(data: bytes, max_bytes: int = MAX_BYTES) -> Batch:
    """Return the batch that `encode_batch` wrote as `data`."""
    return codec.decode_batch(data, max_bytes, decode_sample)


def encode_sample(sample: Sample) -> bytes:
    """Return a sample as one line, newline included. CodecError names a list with a number that does not
    fit."""
    rollout = sample.rollout
    bare = replace(rollout, token_ids=[], logprobs=[])
    packed = Packed(
        replace(sample, prompt_ids=[], loss_mask=[], rollout=bare),
        _pack("i", sample.prompt_ids, {int}, "sample.prompt_ids"),
        _pack("i", rollout.token_ids, {int}, "sample.rollout.token_ids"),
        _pack("d", rollout.logprobs, {float, int}, "sample.rollout.logprobs"),
        _pack("B", sample.loss_mask, {int}, "sample.loss_mask"),
    )
    return encode_record(packed, "sample")


def decode_sample(line: bytes, where: str = "sample") -> Sample:
    """Return the sample that `encode_sample` wrote as `line`."""
    packed = decode_record(Packed, line, where)
    sample, rollout = packed.sample, packed.sample.rollout
    if sample.prompt_ids or sample.loss_mask or rollout.token_ids or rollout.logprobs:
        raise CodecError(f"{where}: numbers as text, where they are packed")
    sample.prompt_ids = _unpack("i", packed.prompt_ids, f"{where}.prompt_ids")
    sample.loss_mask = _unpack("B", packed.loss_mask, f"{where}.loss_mask")
    rollout.token_ids = _unpack("i", packed.token_ids, f"{where}.token_ids")
    rollout.logprobs = _unpack("d", packed.logprobs, f"{where}.logprobs")
    return sample


def _pack(code: str, values: Sequence[Any], kinds: set[type], where: str) -> bytes:
    if odd := set(map(type, values)) - kinds:
        names = " or ".join(sorted(kind.__name__ for kind in kinds))
        raise CodecError(f"{where}: expected {names}, got {odd.pop().__name__}")
    try:
        return struct.pack(f"<{len(values)}{code}", *values)
    except struct.error as error:
        raise CodecError(f"{where}: {error}") from None


def _unpack(code: str, data: bytes, where: str) -> list[Any]:
    count, rest = divmod(len(data), struct.calcsize(code))
    if rest:
        raise CodecError(f"{where}: {len(data)} bytes are no whole numbers")
    return list(struct.unpack(f"<{count}{code}", data))
