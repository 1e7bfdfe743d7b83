"""Experiment trackers beside `metrics.jsonl`.

A tracker is a file here with `begin(run) -> Tracker`, and a name in `NAMES`. Each has a thread and
a queue: a slow one lags, a failing one is reported once and dropped, and neither blocks the run.
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

from lowroll.checkpoint.atomic_files import write_file

log = logging.getLogger(__name__)

# names of files here, packages, and extras
NAMES = ("wandb", "tensorboard", "trackio", "mlflow")
TRACKED_FILE = "tracked.json"
MOST_WAITING = 1000  # records queued for a slow tracker
CLOSE_LIMIT = 30.0  # seconds for them at the end of a run
Metrics = Mapping[str, float]


class Tracker(Protocol):
    """A run in a tracker."""

    def log(self, step: int, metrics: Metrics) -> None: ...

    def close(self) -> None: ...


class PackageRun:
    """A run object of a tracker's package with `log(metrics, step=)` and `finish()`."""

    def __init__(self, run: Any) -> None:
        self.run = run

    def log(self, step: int, metrics: Metrics) -> None:
        self.run.log(dict(metrics), step=step)

    def close(self) -> None:
        self.run.finish()


@dataclass(frozen=True)
class Tracked:
    """A run's facts for a tracker. `id` survives a resume; `step` is the last one made."""

    folder: Path
    project: str
    settings: Mapping[str, Any]
    step: int = 0
    id: str = ""

    @property
    def name(self) -> str:
        return f"{self.folder.resolve().name}-{self.id}"


def check(names: Sequence[str]) -> None:
    """Raise ValueError, with the install command, for a missing package."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ValueError(
                f"track: {name} needs a package that is not installed: pip install "
                f"'lowroll[{name}]'"
            )


class Trackers:
    """The trackers of a run."""

    def __init__(self, names: Sequence[str], run: Tracked) -> None:
        if names:
            run = replace(run, id=run_id(run.folder / TRACKED_FILE, run.step))
        self._threads = [_Thread(name, run) for name in names]

    def log(self, step: int, record: Mapping[str, float | None]) -> None:
        """Queue a step's record without its non-finite numbers (None)."""
        metrics = {
            name: value for name, value in record.items() if name != "step" and value is not None
        }
        for thread in self._threads:
            thread.put((step, metrics))

    def close(self) -> None:
        """Wait for unsent records; bounded and idempotent."""
        for thread in self._threads:
            thread.put(None)
        for thread in self._threads:
            thread.end()
        self._threads = []


def run_id(path: Path, step: int) -> str:
    """Return a resumed run's stored id, else a new one."""
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
    def __init__(self, name: str, run: Tracked) -> None:
        self.name = name
        self.waiting: queue.Queue[tuple[int, Metrics] | None] = queue.Queue(MOST_WAITING)
        self.over = self.behind = False
        self.thread = threading.Thread(
            target=self._serve, args=(run,), name=f"tracker-{name}", daemon=True
        )
        self.thread.start()

    def put(self, item: tuple[int, Metrics] | None) -> None:
        """Queue a record, or None at the end; never waits."""
        if self.over:
            return
        try:
            self.waiting.put_nowait(item)
        except queue.Full:
            if item is None:  # the end replaces the oldest record
                self.waiting.get_nowait()
                self.waiting.put_nowait(None)
            if not self.behind:
                self.behind = True
                log.warning("track: %s is too slow: records are left out there", self.name)

    def end(self) -> None:
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
