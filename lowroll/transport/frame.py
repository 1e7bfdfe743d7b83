"""A batch as bytes, the same on every transport and on disk.

  {"run":"","step":12,"size":48123,"sha256":"...","kind":"frame","format":3, "crc": "9cf16ae5"}
  {"kind":"batch","format":1,"num_samples":256,"step":12,...}
  the samples, a MessagePack array

The first line is sealed (`checkpoint.line_checksum`); `sha256` is of the bytes after it. The second
line is the log's header. A sample is its line of the log without the long lists of numbers, which
follow as bytes: as text they are most of the cost.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import msgspec

from lowroll.transport.base import DamagedFrame, OtherFormat
from lowroll.transport.codec import (
    MAX_BYTES,
    CodecError,
    decode_header,
    decode_sample,
    encode_header,
    encode_sample,
    strictly,
)
from lowroll.transport.messages import MAX_LINE_BYTES, SealedMessage, decode_line, encode_line
from lowroll.types import Batch, Sample, printable

FORMAT = 3


class Header(SealedMessage, frozen=True, kw_only=True):
    """The first line of a frame. size: bytes after it."""

    step: int
    size: int
    sha256: str
    kind: Literal["frame"] = "frame"
    format: int = FORMAT


class PackedSample(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """A sample, and its long lists as little-endian numbers."""

    sample: bytes  # its line of the log
    prompt_ids: bytes  # int32
    token_ids: bytes  # int32
    logprobs: bytes  # float64, since engines' values are not rounded
    loss_mask: bytes  # one byte each


def encode_frame(batch: Batch) -> bytes:
    """Return the frame of a batch. Raises CodecError."""
    payload = pack_batch(batch)
    if len(payload) > MAX_BYTES:
        raise CodecError(
            f"step {batch.step}: a batch of {len(payload)} bytes is over the limit of {MAX_BYTES}"
        )
    digest = hashlib.sha256(payload).hexdigest()
    return encode_line(Header(step=batch.step, size=len(payload), sha256=digest)) + payload


def decode_frame(data: bytes, step: int, where: str) -> Batch:
    """Decode the frame of `step`. DamagedFrame, beginning with `where`, for anything else, and
    OtherFormat."""
    payload = check_frame(data, step, where)
    try:
        batch = unpack_batch(payload)
    except CodecError as error:
        raise DamagedFrame(f"{where}: {printable(error)}") from error
    if batch.step != step:
        raise DamagedFrame(f"{where}: its batch is of step {batch.step}, not of step {step}")
    return batch


def check_frame(data: bytes, step: int, where: str) -> bytes:
    """Return the checked bytes after the header. Raises as `decode_frame`."""
    payload_start = data.find(b"\n", 0, MAX_LINE_BYTES) + 1
    try:
        if not payload_start:
            raise ValueError("no header of a frame")
        header = decode_line(Header, data[:payload_start])
    except ValueError as error:
        raise DamagedFrame(f"{where}: {printable(error)}") from error
    if header.format != FORMAT:
        raise OtherFormat(
            f"{where}: a frame of format {header.format}, this program reads {FORMAT}: finish the "
            "run with the version of lowroll that began it"
        )
    if header.step != step:
        raise DamagedFrame(f"{where}: of step {header.step}, not of step {step}")
    payload = data[payload_start:]
    if header.size != len(payload):
        raise DamagedFrame(f"{where}: {len(payload)} bytes, {header.size} were sent")
    if hashlib.sha256(payload).hexdigest() != header.sha256:
        raise DamagedFrame(f"{where}: its SHA-256 is not that of what was sent")
    return payload


def pack_batch(batch: Batch) -> bytes:
    """Return a frame without its first line. Raises CodecError."""
    return encode_header(batch) + msgspec.msgpack.encode([pack_sample(s) for s in batch.samples])


def unpack_batch(data: bytes) -> Batch:
    """Decode `pack_batch`. CodecError for anything else."""
    header_line, _, samples = data.partition(b"\n")
    packed_samples = strictly(
        "samples", lambda: msgspec.msgpack.decode(samples, type=list[PackedSample])
    )
    batch = decode_header(header_line, len(packed_samples))
    for index, packed_sample in enumerate(packed_samples):
        batch.samples.append(unpack_sample(packed_sample, f"samples[{index}]"))
    return batch


def pack_sample(sample: Sample) -> PackedSample:
    """Return a sample with its long lists as bytes. CodecError names a list with another number."""
    rollout = sample.rollout
    rollout_without_lists = replace(rollout, token_ids=[], logprobs=[])
    return PackedSample(
        encode_sample(replace(sample, prompt_ids=[], loss_mask=[], rollout=rollout_without_lists)),
        _pack_numbers("i", sample.prompt_ids, {int}, "sample.prompt_ids"),
        _pack_numbers("i", rollout.token_ids, {int}, "sample.rollout.token_ids"),
        _pack_numbers("d", rollout.logprobs, {float, int}, "sample.rollout.logprobs"),
        _pack_numbers("B", sample.loss_mask, {int}, "sample.loss_mask"),
    )


def unpack_sample(packed: PackedSample, where: str = "sample") -> Sample:
    sample = decode_sample(packed.sample, where)
    rollout = sample.rollout
    if sample.prompt_ids or sample.loss_mask or rollout.token_ids or rollout.logprobs:
        raise CodecError(f"{where}: numbers as text, where they are packed")
    sample.prompt_ids = _unpack_numbers("i", packed.prompt_ids, f"{where}.prompt_ids")
    sample.loss_mask = _unpack_numbers("B", packed.loss_mask, f"{where}.loss_mask")
    rollout.token_ids = _unpack_numbers("i", packed.token_ids, f"{where}.rollout.token_ids")
    rollout.logprobs = _unpack_numbers("d", packed.logprobs, f"{where}.rollout.logprobs")
    return sample


def _pack_numbers(code: str, values: Sequence[Any], kinds: set[type], where: str) -> bytes:
    if other_types := set(map(type, values)) - kinds:
        names = " or ".join(sorted(kind.__name__ for kind in kinds))
        raise CodecError(f"{where}: expected {names}, got {other_types.pop().__name__}")
    try:
        return struct.pack(f"<{len(values)}{code}", *values)
    except (struct.error, OverflowError) as error:
        raise CodecError(f"{where}: {error}") from None


def _unpack_numbers(code: str, data: bytes, where: str) -> list[Any]:
    count, remainder = divmod(len(data), struct.calcsize(code))
    if remainder:
        raise CodecError(f"{where}: {len(data)} bytes are no whole numbers")
    return list(struct.unpack(f"<{count}{code}", data))
