"""The ledger as an append-only file: the history of every group of a run, one event a line.

    {"event": "planned", "step": 3, "ids": [...]}
    {"event": "dispatched", "version": 2, "ids": [...]}          sent to the engines
    {"event": "done", "ids": [...]}                              all rollouts are back
    {"event": "batched", "step": 3, "ids": [...], "oldest": [...], "learner": 2, "most": 8}
    {"event": "dropped", "step": 3, "reason": "stale", "ids": [...]}
    {"event": "consumed", "step": 3}                             up to this batch, in a checkpoint
    {"event": "rolled_back", "step": 2}                          undoes what came after batch 2
    {"event": "begun", "step": 0, "open": [...]}                 nothing before this counts

Each line has a checksum seeded with its number. The file is synced before a batch is sent. A torn
last line is removed; other damage is an error.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lowroll.checkpoint.atomic_files import naming, read_file, sync_folder, write_all
from lowroll.checkpoint.fault_injection import faultpoint
from lowroll.checkpoint.line_checksum import seal, unseal

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
    """Return the events of a file, and its length in bytes without a torn last line. ValueError for
    another invalid line."""
    *lines, text_after_last_newline = read_file(path).split(b"\n")
    events: list[Event] = []
    valid_length = 0
    for number, line in enumerate(lines, 1):
        try:
            events.append(_parse_event(line, number))
        except ValueError as error:
            is_last = number == len(lines) and not text_after_last_newline
            if is_last:
                break  # perhaps written in part
            raise ValueError(f"{path}: line {number}: {error}") from None
        valid_length += len(line) + 1
    return events, valid_length


def _parse_event(line: bytes, number: int) -> Event:
    content, has_checksum = unseal(line, number)
    if not has_checksum:
        raise ValueError("damaged: no checksum")
    event = json.loads(content)
    fields = FIELDS.get(str(event.get("event"))) if isinstance(event, dict) else None
    if fields is None or set(event) != {"event", *fields}:
        raise ValueError("no event of a ledger")
    return event


class Journal:
    """A run's ledger file, opened to append. ValueError when it is damaged."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        events: list[Event] = []
        length = 0
        if self.path.exists():
            events, length = read(self.path)
        self.batches: list[int] = []  # 0 for the beginning
        self._dirty = False  # events follow the last batch
        self._lines = 0
        for event in events:
            self._note(event)
        with naming(self.path):
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            self._file = os.open(self.path, flags, 0o644)
            os.ftruncate(self._file, length)
        sync_folder(self.path.parent)

    @property
    def step(self) -> int | None:
        """The step of the last batch not rolled back; None for an empty file."""
        return self.batches[-1] if self.batches else None

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def write(self, event: str, **fields: Any) -> None:
        """Append an event. TypeError for unexpected fields."""
        if set(fields) != set(FIELDS[event]):
            raise TypeError(f"{event}: expected {FIELDS[event]}, got {sorted(fields)}")
        entry = {"event": event, **fields}
        line = json.dumps(entry, ensure_ascii=False, allow_nan=False).encode()
        with naming(self.path):
            write_all(self._file, seal(line, self._lines + 1) + b"\n")
        self._note(entry)
        faultpoint(f"ledger.{event}")

    def sync(self) -> None:
        with naming(self.path):
            os.fsync(self._file)

    def go_on(self, step: int, open_ids: Sequence[str], again: bool = False) -> None:
        """Resume after batch `step` (0: from the beginning) with these open groups. `again`
        discards all earlier events. ValueError when the file has no such batch."""
        if self.step is None or again:
            self.write("begun", step=step, open=list(open_ids))
        elif step not in self.batches:
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
            self.batches = [event["step"]]
        elif kind == "batched":
            self.batches.append(event["step"])
        elif kind == "rolled_back":
            while self.batches and self.batches[-1] != event["step"]:
                self.batches.pop()
        self._dirty = kind not in ("begun", "batched", "rolled_back", "consumed")
