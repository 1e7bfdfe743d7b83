"""The sent batches that may be requested again: `step_000012.frame`, one file each
(docs/architecture.md).

The steps have no gaps. The newest frame stays, because a restarted orchestrator resumes from its
state.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

from lowroll.checkpoint.atomic_files import naming, read_file, sync_folder, write_file
from lowroll.checkpoint.fault_injection import faultpoint
from lowroll.transport.base import Cursor, DamagedFrame, Fenced, FrameGone, TransportError
from lowroll.transport.frame import check_frame, decode_frame, encode_frame
from lowroll.transport.messages import (
    EndOfBatches,
    decode_cursor,
    decode_line,
    encode_cursor,
    encode_line,
)
from lowroll.types import Batch, printable

log = logging.getLogger(__name__)

_FRAME_NAME = re.compile(r"step_([0-9]{6,15})\.frame")
END = "end.json"
CURSOR = "cursor.json"
DISMISSED = "dismissed.json"  # of the last dismissed trainer
_MAX_REASON_CHARS = 500
DAMAGED = ".damaged"  # suffix of frames set aside


class Spool:
    """The frames of a run in a folder. One process writes, and any may read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.progress = Progress(folder)

    def path(self, step: int) -> Path:
        return self.folder / f"step_{step:06d}.frame"

    def steps(self) -> list[int]:
        try:
            names = os.listdir(self.folder)
        except FileNotFoundError:
            return []
        steps = {int(match[1]) for name in names if (match := _FRAME_NAME.fullmatch(name))}
        return sorted(step for step in steps if self.path(step).is_file())

    def put(self, batch: Batch) -> None:
        """Store a batch durably; the same batch again changes nothing. TransportError for another
        batch of a present step or a gap, and CodecError, before anything is written."""
        data = encode_frame(batch)
        steps = self.steps()
        if batch.step in steps:
            if read_file(self.path(batch.step)) == data:
                return
            raise TransportError(f"{self.path(batch.step)}: another batch of this step was sent")
        if steps and batch.step != steps[-1] + 1:
            raise TransportError(
                f"{self.folder}: the batch of step {batch.step} does not follow step {steps[-1]}"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        self._unlink([self.folder / END])
        write_file(self.path(batch.step), data)

    def get(self, step: int) -> bytes:
        """Return the frame of a step. Raises FrameGone, DamagedFrame."""
        data = self._bytes(step)
        check_frame(data, step, str(self.path(step)))
        return data

    def read(self, step: int) -> Batch:
        """Return the batch of a step. Raises as `get`."""
        return decode_frame(self._bytes(step), step, str(self.path(step)))

    def _bytes(self, step: int) -> bytes:
        try:
            return read_file(self.path(step))
        except FileNotFoundError:
            raise self._gone(step) from None

    def _gone(self, step: int) -> FrameGone:
        return FrameGone(f"{self.path(step)}: the batch of step {step} is not there")

    def piece(self, step: int, offset: int, most: int) -> tuple[bytes, int]:
        """Return at most `most` unchecked bytes of a frame, and its size. Raises FrameGone."""
        path = self.path(step)
        try:
            with naming(path), path.open("rb", buffering=0) as file:
                return os.pread(file.fileno(), most, offset), os.fstat(file.fileno()).st_size
        except FileNotFoundError:
            raise self._gone(step) from None

    def newest(self) -> Batch | None:
        steps = self.steps()
        return self.read(steps[-1]) if steps else None

    def reaches(self, step: int) -> bool:
        """Return whether all batches after `step` are there."""
        steps = self.steps()
        return bool(steps) and steps[0] <= step + 1 and step <= steps[-1]

    def drop_through(self, step: int) -> None:
        """Delete the frames up to `step` but not the newest."""
        self._unlink([self.path(stored) for stored in self.steps()[:-1] if stored <= step])

    def drop_after(self, step: int) -> list[int]:
        """Delete the frames after `step`, the newest first; return which."""
        later_steps = [later_step for later_step in self.steps() if later_step > step]
        for later_step in reversed(later_steps):
            self._unlink([self.path(later_step)])
        return later_steps

    def repair(self) -> None:
        """Set aside the first damaged frame and those after it. Delete the frames before a gap."""
        steps = self.steps()
        for index, step in enumerate(steps):
            try:
                self.get(step)  # only the digest: to decode all frames would take seconds
            except (DamagedFrame, FrameGone) as error:
                log.error("%s; it is set aside with those after it, to be made again", error)
                self._set_aside(steps[index:])
                steps = steps[:index]
                break
        for index in range(len(steps) - 1, 0, -1):
            if steps[index] != steps[index - 1] + 1:
                self._unlink([self.path(step) for step in steps[:index]])
                break
        try:
            self.ended()
        except DamagedFrame as error:
            log.error("%s; it is taken back", error)
            self.reopen()

    def _set_aside(self, steps: list[int]) -> None:
        for path in map(self.path, reversed(steps)):
            os.replace(path, path.with_name(path.name + DAMAGED))
        sync_folder(self.folder)

    def end(self, reason: str) -> None:
        """Record why no batch follows. A later `put` revokes it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        end_of_batches = EndOfBatches(reason=reason[:_MAX_REASON_CHARS])
        write_file(self.folder / END, encode_line(end_of_batches))

    def ended(self) -> str | None:
        """Return why no batch follows; None while some may."""
        path = self.folder / END
        try:
            return decode_line(EndOfBatches, read_file(path)).reason
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise DamagedFrame(f"{path}: {printable(error)}") from error

    def reopen(self) -> None:
        self._unlink([self.folder / END])

    def _unlink(self, paths: list[Path]) -> None:
        existing_paths = [path for path in paths if path.exists()]
        for path in existing_paths:
            faultpoint(f"spool.drop/{path.name}")
            with naming(path):
                path.unlink(missing_ok=True)
        if existing_paths:
            sync_folder(self.folder)


class Progress:
    """The trainer's cursor, and that of the last dismissed attempt."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._refused = b""  # damaged, and logged

    def cursor(self) -> Cursor | None:
        """Return the trainer's cursor. None before its first report, for a dismissed attempt, and
        for a damaged report."""
        path = self.folder / CURSOR
        try:
            data = read_file(path)
        except FileNotFoundError:
            return None
        try:
            cursor = decode_cursor(data)
            return cursor if cursor.attempt > self.dismissed() else None
        except ValueError as error:
            if data != self._refused:
                self._refused = data
                log.warning("%s is ignored: %s", path, printable(error))
            return None

    def report(self, cursor: Cursor) -> None:
        """Store a trainer's cursor. Raises Fenced."""
        path, stored = self.folder / CURSOR, self.cursor()
        if stored is not None and stored.attempt > cursor.attempt:
            raise Fenced(f"{path}: {takeover(stored.attempt, cursor.attempt)}")
        self.check(cursor.attempt)
        self.folder.mkdir(parents=True, exist_ok=True)
        write_file(path, encode_cursor(cursor))

    def dismiss(self, cursor: Cursor) -> None:
        """Dismiss an attempt: it is Fenced, and the next starts from the checkpoint."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_file(self.folder / DISMISSED, encode_cursor(cursor))

    def dismissed(self) -> int:
        """Return the last dismissed attempt; -1 for none."""
        try:
            return decode_cursor(read_file(self.folder / DISMISSED)).attempt
        except (FileNotFoundError, ValueError):
            return -1

    def check(self, attempt: int) -> None:
        if attempt <= self.dismissed():
            raise Fenced(dismissal(attempt))


def takeover(newer: int, older: int) -> str:
    return f"attempt {newer} of the trainer has taken over from attempt {older}"


def dismissal(attempt: int) -> str:
    return (
        f"batches that attempt {attempt} of the trainer has received since its checkpoint are lost or "
        "damaged, and are drawn again: it ends, and the next one goes on from the checkpoint (lowroll "
        "train --resume; a launcher does that)"
    )
