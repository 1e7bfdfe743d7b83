"""A batch as the bytes that travel and lie on disk, the same on every transport.

    {"kind":"frame","format":2,"run":"...","step":12,"size":48123,"sha256":"...", "crc": "9cf16ae5"}
    the lines of the batch, packed (`transport.packed`)

The first line is sealed (`checkpoint.seal`); `sha256` is of the bytes behind it. `run` names the run
that the batch belongs to: one of another run is refused, wherever it lies.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

from lowroll.checkpoint.seal import seal, unseal
from lowroll.transport.base import DamagedFrame
from lowroll.transport.codec import MAX_BYTES, CodecError, decode_record, encode_record
from lowroll.transport.packed import decode_batch, encode_batch
from lowroll.types import Batch, printable

FORMAT = 2
LONGEST_HEADER = 4096


@dataclass(frozen=True)
class Header:
    """The first line of a frame. size: bytes behind it."""

    run: str
    step: int
    size: int
    sha256: str
    kind: Literal["frame"] = "frame"
    format: int = FORMAT


def encode_frame(batch: Batch, run: str) -> bytes:
    """Return the frame of a batch. CodecError for a batch that the codec cannot carry, or one that
    no reader would take."""
    payload = encode_batch(batch)
    if len(payload) > MAX_BYTES:
        raise CodecError(
            f"step {batch.step}: a batch of {len(payload)} bytes is over the limit of {MAX_BYTES}"
        )
    header = Header(run, batch.step, len(payload), hashlib.sha256(payload).hexdigest())
    first = seal(encode_record(header, "frame").removesuffix(b"\n")) + b"\n"
    if len(first) > LONGEST_HEADER:
        raise CodecError(f"run: a name of {len(run)} characters is too long for a frame")
    return first + payload


def decode_frame(data: bytes, run: str, step: int, where: str) -> Batch:
    """Return the batch of `step` of `run`. DamagedFrame, beginning with `where`, for anything
    else."""
    payload = check_frame(data, run, step, where)
    try:
        batch = decode_batch(payload)
    except CodecError as error:
        raise DamagedFrame(f"{where}: {printable(error)}") from error
    if batch.step != step:
        raise DamagedFrame(f"{where}: its batch is of step {batch.step}, not of step {step}")
    return batch


def check_frame(data: bytes, run: str, step: int, where: str) -> bytes:
    """Return the bytes behind the header, which have its size and digest. DamagedFrame
    otherwise."""
    line, newline, payload = data[:LONGEST_HEADER].partition(b"\n")
    payload = data[len(line) + len(newline) :]
    try:
        if not newline:
            raise ValueError("no header of a frame")
        content, sealed = unseal(line)
        header = decode_record(Header, content, "header")
        if not sealed or header.format != FORMAT:
            raise ValueError(f"header of format {header.format}, this program reads {FORMAT}")
    except ValueError as error:  # CodecError is one too
        raise DamagedFrame(f"{where}: {printable(error)}") from error
    if header.run != run:
        raise DamagedFrame(f"{where}: of run {printable(header.run)!r}, this is run {run!r}")
    if header.step != step:
        raise DamagedFrame(f"{where}: of step {header.step}, not of step {step}")
    if header.size != len(payload):
        raise DamagedFrame(f"{where}: {len(payload)} bytes, {header.size} were sent")
    if hashlib.sha256(payload).hexdigest() != header.sha256:
        raise DamagedFrame(f"{where}: its SHA-256 is not that of what was sent")
    return payload
