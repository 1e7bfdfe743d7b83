"""Trackers: what shows a run's records elsewhere, beside `metrics.jsonl`.

A tracker is a file here with `begin(run) -> Tracker`, and a name in `NAMES`. Each lives in a thread
of its own, to which records go through a queue: one that is slow is left behind, one that fails is
reported once and left out, and neither holds the run up. A run that goes on continues its tracker's
run.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import queue
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from lowroll.checkpoint.files import write_file

log = logging.getLogger(__name__)

# of files here, of packages, and of the extras that install them
NAMES = ("wandb", "tensorboard", "trackio", "mlflow")
TRACKED_FILE = "tracked.json"
MOST_WAITING = 1000  # records that a slow tracker is kept for
CLOSE_LIMIT = 30.0  # seconds that they may take at the end of a run
Metrics = Mapping[str, float]


class Tracker(Protocol):
    """One run in one tracker."""

    def log(self, step: int, metrics: Metrics) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Tracked:
    """The facts of a run that a tracker receives. `id` stays the same when the run goes on; `step`
    is the last one that it has made."""

    folder: Path
    project: str
    settings: Mapping[str, Any]
    step: int = 0
    id: str = ""

    @property
    def name(self) -> str:
        """The run's name, for people."""
        return f"{self.folder.resolve().name}-{self.id}"


def check(names: Sequence[str]) -> None:
    """Raise ValueError, with the line that installs it, for a tracker whose package is not
    there."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ValueError(
                f"track: {name} needs a package that is not installed: pip install "
                f"'lowroll[{name}]'"
            )


class Trackers:
    """The trackers of a run. Closed in the end, whatever became of it."""

    def __init__(self, names: Sequence[str], run: Tracked) -> None:
        if names:
            run = replace(run, id=_id(run.folder / TRACKED_FILE, run.step))
        self._threads = [_Thread(name, run) for name in names]

    def log(self, step: int, record: Mapping[str, float | None]) -> None:
        """Hand on the record of a step; numbers that are not finite (None) are left out."""
        metrics = {
            name: value for name, value in record.items() if name != "step" and value is not None
        }
        for thread in self._threads:
            thread.put((step, metrics))

    def close(self) -> None:
        """Wait for what is not sent yet; bounded. May be called twice."""
        for thread in self._threads:
            thread.put(None)
        for thread in self._threads:
            thread.end()
        self._threads = []


def _id(path: Path, step: int) -> str:
    """Return the stored id of a run that has made steps; else a new one."""
    if step > 0 and path.is_file():
        try:
            found = json.loads(path.read_text(encoding="utf-8"))["id"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("%s: damaged (%s); trackers begin a new run", path, error)
        else:
            return str(found)
    new = secrets.token_hex(4)
    try:
        write_file(path, json.dumps({"id": new}).encode() + b"\n")
    except OSError as error:
        log.warning("%s: %s; a resumed run will be another one to its trackers", path, error)
    return new


class _Thread:
    """One tracker, and what it has not received yet."""

    def __init__(self, name: str, run: Tracked) -> None:
        self.name = name
        self.waiting: queue.Queue[tuple[int, Metrics] | None] = queue.Queue(MOST_WAITING)
        self.over = self.behind = False
        self.thread = threading.Thread(
            target=self._serve, args=(run,), name=f"tracker-{name}", daemon=True
        )
        self.thread.start()

    def put(self, item: tuple[int, Metrics] | None) -> None:
        """Hand on a record, or None at the end; never waits."""
        if self.over:
            return
        try:
            self.waiting.put_nowait(item)
        except queue.Full:
            if item is None:
                self.waiting.get_nowait()
                self.waiting.put_nowait(None)
            if not self.behind:
                self.behind = True
                log.warning("track: %s is too slow: records are left out there", self.name)

    def end(self) -> None:
        """Wait for it, for a while."""
        self.thread.join(CLOSE_LIMIT)
        if self.thread.is_alive():
            log.warning(
                "track: %s has not taken everything after %g s, and is left", self.name, CLOSE_LIMIT
            )

    def _serve(self, run: Tracked) -> None:
        try:
            begin: Callable[[Tracked], Tracker] = importlib.import_module(
                f"lowroll.metrics.trackers.{self.name}"
            ).begin
            tracker = begin(run)
            while (item := self.waiting.get()) is not None:
                tracker.log(*item)
            tracker.close()
        except (Exception, SystemExit) as error:
            log.warning(
                "track: %s failed, and the run goes on without it (metrics.jsonl has everything): "
                "%s: %s",
                self.name,
                type(error).__name__,
                " ".join(str(error).split())[:300],
            )
        finally:
            self.over = True
