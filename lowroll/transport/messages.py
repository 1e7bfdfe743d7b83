"""The messages of a rollout channel other than the frames: one sealed line each."""

from __future__ import annotations

from typing import Literal, TypeVar

import msgspec

from lowroll.checkpoint.line_checksum import seal, unseal
from lowroll.transport.base import Cursor

MAX_LINE_BYTES = 4096
Line = TypeVar("Line", bound=msgspec.Struct)


class SealedMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A message of a channel. ValueError for an unknown or impossible field."""

    run: Literal[""] = ""  # kept for the format of files


class _Report(SealedMessage, frozen=True, kw_only=True):
    attempt: int
    received: int
    committed: int

    def __post_init__(self) -> None:
        _ = self.cursor  # raises for an impossible one

    @property
    def cursor(self) -> Cursor:
        return Cursor(self.received, self.committed, self.attempt)


class CursorReport(_Report, frozen=True, kw_only=True):
    """A trainer's cursor, as a file."""

    format: Literal[1] = 1


class PieceRequest(_Report, frozen=True, kw_only=True):
    """A request for the frame of step `want` from byte `offset`; None only reports the cursor."""

    want: int | None = None
    offset: int = 0
    format: Literal[1] = 1


ReplyKind = Literal["piece", "wait", "heard", "ended", "gone", "fenced", "refused"]


class PieceReply(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The reply of the orchestrator's attempt `attempt` to the trainer's attempt `to`.

    piece     bytes of the frame of `step` from `offset` on, of `size` in all; they follow the line
    wait      the frame is not there yet; it is sent as soon as it is
    heard     acknowledges a request without `want`
    ended     no frame follows, for the reason in `text`
    gone      only later frames are there
    fenced    a later attempt of the trainer has taken over, or will
    refused   the frame cannot be read, for the reason in `text`
    """

    kind: ReplyKind
    run: Literal[""] = ""
    attempt: int
    to: int
    committed: int = 0  # the orchestrator's record
    step: int = 0
    offset: int = 0
    size: int = 0
    text: str = ""
    format: Literal[1] = 1


class SenderAddress(SealedMessage, frozen=True, kw_only=True):
    """An orchestrator's address, such as tcp://127.0.0.1:41233, as a file."""

    attempt: int
    address: str
    format: Literal[1] = 1


class EndOfBatches(SealedMessage, frozen=True, kw_only=True):
    """The end of a run's batches, and its reason, as a file."""

    reason: str


def encode_line(message: msgspec.Struct) -> bytes:
    return seal(msgspec.json.encode(message)) + b"\n"


def decode_line(kind: type[Line], data: bytes) -> Line:
    """Decode `encode_line`. ValueError for anything else."""
    if len(data) > MAX_LINE_BYTES:
        raise ValueError(f"{len(data)} bytes; a line has {MAX_LINE_BYTES} at most")
    content, has_checksum = unseal(data.removesuffix(b"\n"))
    if not has_checksum or not data.endswith(b"\n"):
        raise ValueError("torn: it has no checksum")
    try:
        message = msgspec.json.decode(content, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(str(error)) from error
    if msgspec.json.encode(message) != content:
        raise ValueError("fields that are missing, doubled or written in another way")
    return message


def encode_cursor(cursor: Cursor) -> bytes:
    return encode_line(CursorReport(**vars(cursor)))


def decode_cursor(data: bytes) -> Cursor:
    """Decode `encode_cursor`. ValueError for anything else."""
    return decode_line(CursorReport, data).cursor
