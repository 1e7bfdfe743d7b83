"""The ledger as an append-only file: what happened to every group of a run, a line an event.

    {"event": "planned", "step": 3, "ids": [...]}
    {"event": "dispatched", "version": 2, "ids": [...]}          sent to the engines
    {"event": "done", "ids": [...]}                              all rollouts are back
    {"event": "batched", "step": 3, "ids": [...], "oldest": [...], "learner": 2, "most": 8}
    {"event": "dropped", "step": 3, "reason": "stale", "ids": [...]}
    {"event": "consumed", "step": 3}                             up to this batch, in a checkpoint
    {"event": "rolled_back", "step": 2}                          what came after batch 2 is undone
    {"event": "begun", "step": 0, "open": [...]}                 nothing before this counts

Each line has a checksum with its number (`checkpoint.seal`). The file is flushed to the disk before a
batch is sent. `orchestrator.audit` checks the invariants of a run on it. A last line that a crash cut
off is removed when the file is opened again; other damage is refused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lowroll.checkpoint.faults import faultpoint
from lowroll.checkpoint.files import naming, read_file, sync_folder, write_all
from lowroll.checkpoint.seal import seal, unseal

Event = dict[str, Any]
FIELDS: dict[str, tuple[str, ...]] = {
    "planned": ("step", "ids"),
    "dispatched": ("version", "ids"),
    "done": ("ids",),
    "batched": ("step", "ids", "oldest", "learner", "most"),
    "dropped": ("step", "reason", "ids"),
    "consumed": ("step",),
    "rolled_back": ("step",),
    "begun": ("step", "open"),
}


def read(path: Path) -> tuple[list[Event], int]:
    """Return the events of a file, and its bytes without a torn last line. ValueError names the
    first other line that is damaged or no event."""
    data = read_file(path)
    events: list[Event] = []
    length = 0
    lines = data.split(b"\n")
    for number, line in enumerate(lines, 1):
        is_last = number >= len(lines) - 1 and not any(lines[number:])
        if not line and number == len(lines):
            break
        try:
            if number == len(lines):
                raise ValueError("torn: no newline at its end")
            events.append(_event(line, number))
        except ValueError as error:
            if is_last:
                break
            raise ValueError(f"{path}: line {number}: {error}") from None
        length += len(line) + 1
    return events, length


def _event(line: bytes, number: int) -> Event:
    content, has_sum = unseal(line, number)
    if not has_sum:
        raise ValueError("damaged: no checksum")
    found = json.loads(content)
    fields = FIELDS.get(str(found.get("event"))) if isinstance(found, dict) else None
    if fields is None or set(found) != {"event", *fields}:
        raise ValueError("no event of a ledger")
    return found


class Journal:
    """The ledger file of a run, opened to go on with it. ValueError when it is damaged."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        events: list[Event] = []
        length = 0
        if self.path.exists():
            events, length = read(self.path)
        self.step: int | None = None  # of the last batch that stands; None before there is a line
        self.marks: list[int] = []  # batches that stand
        self._dirty = False  # something came after it
        self._lines = 0
        for event in events:
            self._note(event)
        with naming(self.path):
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            self._file = os.open(self.path, flags, 0o644)
            os.ftruncate(self._file, length)
        sync_folder(self.path.parent)

    def close(self) -> None:
        """Close the file; may be called twice."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def write(self, event: str, **fields: Any) -> None:
        """Append an event. TypeError for one that this file does not know."""
        if set(fields) != set(FIELDS[event]):
            raise TypeError(f"{event}: expected {FIELDS[event]}, got {sorted(fields)}")
        entry = {"event": event, **fields}
        line = json.dumps(entry, ensure_ascii=False, allow_nan=False).encode()
        with naming(self.path):
            write_all(self._file, seal(line, self._lines + 1) + b"\n")
        self._note(entry)
        faultpoint(f"ledger.{event}")

    def sync(self) -> None:
        """Flush the file to the disk."""
        with naming(self.path):
            os.fsync(self._file)

    def go_on(self, step: int, open_ids: Sequence[str], again: bool = False) -> None:
        """Go on from the state after batch `step` (0: from the beginning), which has these open
        groups, and undo what came after it. With `again` nothing of before counts. ValueError when
        the file does not reach so far."""
        if self.step is None or again:
            self.write("begun", step=step, open=list(open_ids))
        elif step not in self.marks:
            raise ValueError(
                f"{self.path}: no batch of step {step} stands in it (the last one is "
                f"{self.step}): it is cut short, or another run's"
            )
        elif step != self.step or self._dirty:
            self.write("rolled_back", step=step)
        self.sync()

    def _note(self, event: Event) -> None:
        self._lines += 1
        kind = event["event"]
        if kind == "begun":
            self.marks = [event["step"]]
        elif kind == "batched":
            self.marks.append(event["step"])
        elif kind == "rolled_back":
            while self.marks and self.marks[-1] != event["step"]:
                self.marks.pop()
        self._dirty = kind not in ("begun", "batched", "rolled_back", "consumed")
        self.step = self.marks[-1] if self.marks else None
