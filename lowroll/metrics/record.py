"""`metrics.jsonl`: one JSON object a step, `{"step": 12, "reward/mean": 0.41, ...}`, names as in `metrics.names`.

A line is on disk when `write` returns. A process that dies while writing leaves a torn last line, which every reader
drops; a resumed run cuts the file back to its checkpoint's step with `truncate`, so no step is missing or doubled.
Numbers that are not finite are stored as null and counted in `record/nonfinite`.

`about.json` holds what the report's header shows: settings in words, versions and the machine.
"""
from __future__ import annotations

import json
import logging
import math
import os
import platform
from collections.abc import Mapping
from importlib import metadata
from numbers import Real
from pathlib import Path
from typing import Any

from lowroll.metrics.names import find

log = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
ABOUT_FILE = "about.json"
Record = dict[str, Any]                # "step": int, every other key: float or None


class Recorder:
    """Appends to `folder/metrics.jsonl`. One writer at a time; steps only grow."""

    def __init__(self, folder: Path) -> None:
        self.path = Path(folder) / METRICS_FILE
        self.path.parent.mkdir(parents=True, exist_ok=True)
        records = _read_lines(self.path)
        self._last = records[-1][0] if records else -1
        if self.path.exists() and self.path.read_bytes()[-1:] not in (b"", b"\n"):
            self._replace(records)                  # the next line must not be glued to a torn one

    @property
    def last_step(self) -> int:
        """The step of the last record, -1 when there is none."""
        return self._last

    def write(self, step: int, metrics: Mapping[str, float]) -> Record:
        """Append the record of `step` and return it as stored.

        ValueError, before anything is written, for a name that the table does not know, a value that is not a number,
        or a step that is not above the last one.
        """
        if isinstance(step, bool) or not isinstance(step, int) or step <= self._last:
            raise ValueError(f"step: {step!r} is not an integer above the last recorded step {self._last}")
        record: Record = {"step": step}
        for name, value in metrics.items():
            find(name)
            if isinstance(value, bool) or not isinstance(value, Real):
                raise ValueError(f"metric {name!r}: expected a number, got {type(value).__name__}")
            number = float(value)
            record[name] = number if math.isfinite(number) else None
        nonfinite = sum(value is None for value in record.values())
        if nonfinite:
            record["record/nonfinite"] = float(nonfinite)
        with self.path.open("ab") as file:
            file.write((json.dumps(record, allow_nan=False) + "\n").encode())
            file.flush()
            os.fsync(file.fileno())
        self._last = step
        return record

    def truncate(self, step: int) -> None:
        """Drop every record after `step`, atomically."""
        records = _read_lines(self.path)
        kept = [(recorded, line) for recorded, line in records if recorded <= step]
        if len(kept) < len(records):
            self._replace(kept)
        self._last = kept[-1][0] if kept else -1

    def _replace(self, records: list[tuple[int, bytes]]) -> None:
        _write_atomically(self.path, b"".join(line + b"\n" for _, line in records))


def read(folder: Path) -> list[Record]:
    """The records of a run in step order. An unreadable line other than a torn last one is a ValueError naming it."""
    return [json.loads(line) for _, line in _read_lines(Path(folder) / METRICS_FILE)]


def reproducible(record: Mapping[str, Any]) -> Record:
    """The part of a record that a second run of the same seed, or a resumed one, repeats bit for bit."""
    return {name: value for name, value in record.items() if name == "step" or find(name).reproducible}


def write_about(folder: Path, about: Mapping[str, str]) -> Record:
    """Write `about.json`: the caller's facts (title, model, env, rollout, correction, device, ...), then the versions
    of what is installed and the machine. Returns what was written."""
    content: Record = {**about, "versions": _versions(), "machine": _machine()}
    path = Path(folder) / ABOUT_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    _write_atomically(path, (json.dumps(content, indent=1) + "\n").encode())
    return content


def _versions() -> str:
    found = [f"Python {platform.python_version()}"]
    for package in ("lowroll", "torch", "transformers", "math-verify"):
        try:
            found.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


def _machine() -> str:
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    return f"{model}, {os.cpu_count()} cores, {memory:.0f} GB, {platform.system()}"


def _read_lines(path: Path) -> list[tuple[int, bytes]]:
    if not path.exists():
        return []
    *lines, tail = path.read_bytes().split(b"\n")
    if tail:
        log.warning("%s: dropped a torn last line of %d bytes", path, len(tail))
    records: list[tuple[int, bytes]] = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            step = record["step"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}:{number}: not a record: {error}") from error
        if type(step) is not int or (records and step <= records[-1][0]):
            raise ValueError(f"{path}:{number}: step {step!r} does not follow step {records[-1][0] if records else -1}")
        records.append((step, line))
    return records


def _write_atomically(path: Path, data: bytes) -> None:
    tmp = path.with_name(f".tmp-{path.name}")
    with tmp.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(tmp, path)
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
