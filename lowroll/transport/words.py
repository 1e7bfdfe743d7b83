"""The messages that the two ends of a rollout channel exchange beside the frames: one sealed line
each.

trainer        Said     a file: what it has received and committed
trainer        Ask      zmq: the same, and the piece of a frame that it wants
orchestrator   Answer   zmq: the piece, or why there is none
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeVar

from lowroll.checkpoint.seal import seal, unseal
from lowroll.transport.base import Cursor
from lowroll.transport.codec import decode_record, encode_record

FORMAT = 1
MOST_BYTES = 4096  # of a line
Word = TypeVar("Word", bound="Said | Ask | Answer | Place")


@dataclass(frozen=True)
class Said:
    """A trainer's cursor (`transport.base.Cursor`), and the run that it is of."""

    run: str
    attempt: int
    received: int
    committed: int
    format: int = FORMAT

    @property
    def cursor(self) -> Cursor:
        return Cursor(self.received, self.committed, self.attempt)


@dataclass(frozen=True)
class Ask:
    """The trainer wants the frame of step `want` from byte `offset` on; None: it only says."""

    run: str
    attempt: int
    received: int
    committed: int
    want: int | None = None
    offset: int = 0
    format: int = FORMAT

    @property
    def cursor(self) -> Cursor:
        return Cursor(self.received, self.committed, self.attempt)


Kind = Literal["piece", "wait", "heard", "ended", "gone", "fenced", "refused"]


@dataclass(frozen=True)
class Answer:
    """The answer of the orchestrator's attempt `attempt` to the trainer's attempt `to`.

    piece     bytes of the frame of `step` from `offset` on, of `size` in all; they follow the line
    wait      the frame is not there yet; it is sent as soon as it is
    heard     an ask that wanted nothing
    ended     no frame follows; `text` says why
    gone      only later frames are there
    fenced    a later attempt of the trainer has taken over, or is to; `text` says it
    refused   another run, or another format
    """

    kind: Kind
    run: str
    attempt: int
    to: int
    committed: int = 0  # as the orchestrator has heard it
    step: int = 0
    offset: int = 0
    size: int = 0
    text: str = ""
    format: int = FORMAT


@dataclass(frozen=True)
class Place:
    """The address of an orchestrator, such as tcp://127.0.0.1:41233."""

    run: str
    attempt: int
    address: str
    format: int = FORMAT


def encode_word(word: Said | Ask | Answer | Place) -> bytes:
    """Return a sealed line, its newline included."""
    line = encode_record(word, type(word).__name__.lower()).removesuffix(b"\n")
    return seal(line) + b"\n"


def decode_word(kind: type[Word], data: bytes) -> Word:
    """Return the message that `encode_word` wrote. ValueError for anything else, also for a cursor
    that cannot be."""
    if len(data) > MOST_BYTES:
        raise ValueError(f"{len(data)} bytes; a word has {MOST_BYTES} at most")
    content, sealed = unseal(data.removesuffix(b"\n"))
    if not sealed or not data.endswith(b"\n"):
        raise ValueError("torn: it has no checksum")
    word = decode_record(kind, content, kind.__name__.lower())
    if word.format != FORMAT:
        raise ValueError(f"format {word.format}, this program speaks {FORMAT}")
    if isinstance(word, Said | Ask):
        _ = word.cursor  # refuses what cannot be
    return word


def cursor_of(data: bytes, run: str) -> Cursor:
    """Return the cursor in the bytes of a `Said`. ValueError when they are of another run, or
    damaged."""
    said = decode_word(Said, data)
    if said.run != run:
        raise ValueError(f"of run {said.run!r}, this is run {run!r}")
    return said.cursor


def said(cursor: Cursor, run: str) -> Said:
    return Said(run, cursor.attempt, cursor.received, cursor.committed)
