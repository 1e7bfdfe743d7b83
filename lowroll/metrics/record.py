"""`metrics.jsonl`: one JSON object a step, `{"step": 12, "reward/mean": 0.41, ..., "crc":
"9cf16ae5"}`.

A line is on disk when `write` returns. Readers drop a torn last line; a resumed run cuts the file
to its checkpoint's step. Non-finite numbers become null. Older files have no checksum `crc`. A
damaged or missing record becomes `{"step": 12, "record/lost": 1.0}`.
"""

from __future__ import annotations

import json
import logging
import math
import os
import platform
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from itertools import islice
from numbers import Real
from pathlib import Path
from typing import Any

from lowroll.checkpoint.atomic_files import append_line, read_file, write_file
from lowroll.checkpoint.line_checksum import FIELD, seal, unseal
from lowroll.metrics.names import find

log = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
EVALUATIONS_FILE = Path("orchestrator", "evaluations.jsonl")
ABOUT_FILE = "about.json"
LOST = "record/lost"
Record = dict[str, Any]  # "step": int, every other key: float or None
_MAX_LOGGED = 5  # damaged lines that are logged
_MAX_LOST = 100_000  # lost records that are marked, as a folder may claim any step
_MAX_STEP = 10**9


class Recorder:
    """An appender to `folder/metrics.jsonl`. One writer at a time; steps only grow."""

    def __init__(self, folder: Path) -> None:
        self.path = Path(folder) / METRICS_FILE
        self.path.parent.mkdir(parents=True, exist_ok=True)
        records_file = _scan(self.path)
        self._last = max(records_file.lines, default=-1)
        self._mended = None if records_file.in_order else records_file.content(self._last)

    @property
    def last_step(self) -> int:
        """The last record's step, or -1."""
        return self._last

    def write(self, step: int, metrics: Mapping[str, float]) -> Record:
        """Append the record of `step` and return it as readers will see it.

        ValueError, before anything is written, for an unknown name, a value that is no number, or a
        step not above the last one. OSError leaves the file unchanged.
        """
        if isinstance(step, bool) or not isinstance(step, int) or step <= self._last:
            raise ValueError(
                f"step: {step!r} is not an integer above the last recorded step {self._last}"
            )
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
        if self._mended is not None:  # do not extend a torn line
            write_file(self.path, self._mended)
            self._mended = None
        append_line(self.path, _encode_record(record))
        self._last = step
        return record

    def truncate(self, step: int) -> None:
        """Cut the file to `step` steps, atomically; lost records are marked."""
        records_file = _scan(self.path)
        if lost_steps := records_file.lost(step):
            log.warning(
                "%s: the records of %s are lost; they are marked, and the run goes on without them",
                self.path,
                spans(lost_steps),
            )
        content = records_file.content(step)
        if content != records_file.data:
            write_file(self.path, content)
        self._mended = None
        kept_steps = (kept for kept in (*records_file.lines, *lost_steps) if kept <= step)
        self._last = max(kept_steps, default=-1)


def read(folder: Path) -> list[Record]:
    """Return a run's records in step order, one a step up to the newest record or checkpoint."""
    folder = Path(folder)
    # A run writes a record before its checkpoint, so they are read the other way round.
    checkpoint_step = _newest_checkpoint(folder)
    records_file = _scan(folder / METRICS_FILE)
    lost_steps = records_file.lost(max([*records_file.lines, checkpoint_step], default=-1))
    if lost_steps:
        log.warning("%s: the records of %s are lost", folder / METRICS_FILE, spans(lost_steps))
    records = {step: json.loads(unseal(line)[0]) for step, line in records_file.lines.items()}
    for step, evaluation in read_evaluations(folder).items():
        if (record := records.get(max(1, step))) is not None:
            _merge_evaluation(record, evaluation)
    records |= {step: _lost_marker(step) for step in lost_steps}
    return [records[step] for step in sorted(records)]


def add_evaluation(folder: Path, step: int, metrics: Mapping[str, float]) -> None:
    """Append an evaluation after a step (0: before the first)."""
    record: Record = {"step": step}
    for name, value in metrics.items():
        find(name)
        record[name] = float(value) if math.isfinite(value) else None
    path = Path(folder) / EVALUATIONS_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    ends_torn = path.exists() and not read_file(path).endswith(b"\n")
    append_line(path, (b"\n" if ends_torn else b"") + _encode_record(record))


def read_evaluations(folder: Path) -> dict[int, Record]:
    """Return an orchestrator's evaluations by step, without damaged lines."""
    evaluations: dict[int, Record] = {}
    path = Path(folder) / EVALUATIONS_FILE
    if not path.is_file():
        return evaluations
    for number, line in enumerate(read_file(path).split(b"\n"), 1):
        if not line:
            continue
        try:
            content, _ = unseal(line)
            evaluations[_step_of(content)] = json.loads(content)
        except ValueError as error:
            log.warning("%s:%d: not an evaluation: %s", path, number, error)
    return evaluations


def forget_evaluations(folder: Path, step: int) -> None:
    """Remove the evaluations after a step to which the run has returned."""
    evaluations = read_evaluations(folder)
    kept_lines = [_encode_record(record) for made, record in evaluations.items() if made <= step]
    if len(kept_lines) < len(evaluations):
        write_file(Path(folder) / EVALUATIONS_FILE, b"".join(kept_lines))


def _merge_evaluation(record: Record, evaluation: Mapping[str, Any]) -> None:
    """Merge an evaluation as one process would have recorded it: numbers stay, times add up."""
    for name, value in evaluation.items():
        if name.startswith("time/") and value is not None:
            record[name] = (record.get(name) or 0.0) + value
        else:
            record.setdefault(name, value)


def reproducible(record: Mapping[str, Any]) -> Record:
    """Return the numbers that a run of the same seed repeats bit for bit."""
    return {
        name: value for name, value in record.items() if name == "step" or find(name).reproducible
    }


def write_about(folder: Path, about: Mapping[str, str]) -> Record:
    """Write `about.json` and return it: the caller's facts, then versions and machine."""
    content: Record = {**about, **_versions_and_machine()}
    path = Path(folder) / ABOUT_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, (json.dumps(content, indent=1) + "\n").encode())
    return content


def computed_otherwise(folder: Path, about: Mapping[str, str]) -> list[str]:
    """List differences from `about.json` that may change results' last bits."""
    try:
        recorded = json.loads(read_file(Path(folder) / ABOUT_FILE))
        current = {"device": about["device"], **_versions_and_machine()}
        return [
            f"{name} was {recorded[name]} and is {value}"
            for name, value in current.items()
            if recorded[name] != value
        ]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _versions_and_machine() -> dict[str, str]:
    return {"versions": _versions(), "machine": _machine()}


def _versions() -> str:
    versions = [f"Python {platform.python_version()}"]
    for package in ("lowroll", "torch", "transformers", "math-verify"):
        with suppress(metadata.PackageNotFoundError):
            versions.append(f"{package} {metadata.version(package)}")
    return ", ".join(versions)


def _machine() -> str:
    cpuinfo = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    name = re.search(r"model name.*?: *(.*)", cpuinfo)
    model = name[1] if name else platform.processor() or platform.machine()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    return f"{model}, {os.cpu_count()} cores, {memory:.0f} GB, {platform.system()}"


@dataclass
class _RecordsFile:
    data: bytes = b""
    lines: dict[int, bytes] = field(default_factory=dict)
    in_order: bool = True

    def lost(self, step: int) -> list[int]:
        """Return the steps from 1 to `step` without a record, the first _MAX_LOST of them."""
        missing = (number for number in range(1, step + 1) if number not in self.lines)
        return list(islice(missing, _MAX_LOST))

    def content(self, step: int) -> bytes:
        lines = {number: line for number, line in self.lines.items() if number <= step}
        lines |= {number: _encode_record(_lost_marker(number)) for number in self.lost(step)}
        return b"".join(lines[number] + b"\n" for number in sorted(lines))


def _scan(path: Path) -> _RecordsFile:
    """Read a records file and drop damaged lines. Of two different records of one step neither is
    kept."""
    if not path.exists():
        return _RecordsFile()
    records_file = _RecordsFile(read_file(path))
    *lines, torn_line = records_file.data.split(b"\n")
    if torn_line:
        log.warning("%s: dropped a torn last line of %d bytes", path, len(torn_line))
    problems: list[str] = []
    repeated_steps: set[int] = set()
    last_step, seen_checksum = -1, False
    for number, line in enumerate(lines, 1):
        try:
            content, has_checksum = unseal(line)
            step = _step_of(content)
            # only the first lines of a file may be of older versions, without a checksum
            follows = last_step < step <= last_step + 1 + len(lines)
            if not has_checksum and (seen_checksum or not follows):
                raise ValueError(f"step {step} without a checksum does not follow step {last_step}")
        except ValueError as error:
            problems.append(f"{path}:{number}: not a record: {error}")
            continue
        if records_file.lines.get(step, line) != line:
            problems.append(
                f"{path}:{number}: a second record of step {step}, which is not the first"
            )
            repeated_steps.add(step)
        records_file.in_order &= step > last_step
        last_step = max(last_step, step)
        seen_checksum |= has_checksum
        records_file.lines[step] = line
    for step in repeated_steps:
        del records_file.lines[step]
    records_file.in_order &= not torn_line and len(records_file.lines) == len(lines)
    for problem in problems[:_MAX_LOGGED]:
        log.warning("%s", problem)
    if len(problems) > _MAX_LOGGED:
        log.warning("%s: %d more damaged lines", path, len(problems) - _MAX_LOGGED)
    return records_file


def _step_of(content: bytes) -> int:
    try:
        record = json.loads(content)
        step = record["step"]
        all_numbers = all(
            value is None or type(value) in (int, float) and math.isfinite(value)
            for value in record.values()
        )
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        OverflowError,
        RecursionError,
    ) as error:
        raise ValueError(str(error)) from error
    if type(step) is not int or not 0 <= step < _MAX_STEP:
        raise ValueError(f"step {step!r} is not a count")
    if not all_numbers or FIELD in record:
        raise ValueError("a value is not a number")
    return step


def _encode_record(record: Record) -> bytes:
    return seal(json.dumps(record, allow_nan=False).encode())


def _lost_marker(step: int) -> Record:
    return {"step": step, LOST: 1.0}


def _newest_checkpoint(folder: Path) -> int:
    steps = [path.name.removeprefix("step_") for path in (folder / "checkpoints").glob("step_*")]
    numbers = (int(step) for step in steps if step.isascii() and step.isdigit() and len(step) < 20)
    return max((number for number in numbers if number < _MAX_STEP), default=-1)


def spans(steps: Iterable[int]) -> str:
    """Describe steps: steps 1, 4 to 7."""
    step_ranges: list[list[int]] = []
    for step in steps:
        if step_ranges and step == step_ranges[-1][1] + 1:
            step_ranges[-1][1] = step
        else:
            step_ranges.append([step, step])
    words = [f"{first}" if first == last else f"{first} to {last}" for first, last in step_ranges]
    return f"step{'s' if len(words) > 1 or ' to ' in words[0] else ''} {', '.join(words)}"
