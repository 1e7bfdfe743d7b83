"""The heartbeat of a role: `roles/<role>.json`, written every second with a growing count."""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lowroll.checkpoint.atomic_files import read_file
from lowroll.transport.base import PeerSilent
from lowroll.types import printable

log = logging.getLogger(__name__)

INTERVAL_S = 1.0
SILENT_S = 30.0  # without a heartbeat until a warning
GONE_S = 1800.0  # until others stop waiting for a restart
LONGEST_STEP_S = 86_400.0  # for another role's output, while its heartbeat tells if it is gone
VARIABLE = "LOWROLL_SILENT_S"  # replaces SILENT_S, for tests


def silent_s() -> float:
    """Return the seconds without a heartbeat until a warning."""
    return float(os.environ.get(VARIABLE, SILENT_S))


class Heartbeat:
    """This process's heartbeat, written by a thread inside the block."""

    def __init__(self, path: Path, role: str, attempt: int, **told: object) -> None:
        self.path = path
        self.report: dict[str, Any] = {
            "role": role,
            "pid": os.getpid(),
            "parent": os.getppid(),  # rank 0's ranks have it as their starter
            "host": socket.gethostname(),
            "attempt": attempt,
            "step": 0,
            "phase": "starting",
            "doing": "",
            "beat": 0,
            **told,
        }
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._trouble = ""

    def __enter__(self) -> Heartbeat:
        self._write()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(timeout=5.0)
        self.update(phase="ended", doing="")

    def update(self, **told: object) -> None:
        self.report |= told
        self._write()

    def progress(self, phase: str, done: int, total: int) -> None:
        """Set the progress that the next beat reports."""
        self.report["doing"] = f"{phase} {done}/{total}" if total else phase

    def _run(self) -> None:
        while not self._over.wait(min(INTERVAL_S, silent_s() / 4)):
            self._write()

    def _write(self) -> None:
        with self._lock:
            self.report["beat"] += 1
            temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}")
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                temporary.write_text(json.dumps(self.report))
                os.replace(temporary, self.path)
                self._trouble = ""
            except OSError as error:  # a full disk must not end the run
                if self._trouble != str(error):
                    self._trouble = str(error)
                    log.warning("%s: %s", self.path, error.strerror or error)


def read_heartbeat(path: Path) -> dict[str, Any] | None:
    """Return a role's last heartbeat; None if unreadable."""
    try:
        report = json.loads(read_file(path))
        return report if isinstance(report, dict) and isinstance(report.get("beat"), int) else None
    except (OSError, ValueError):
        return None


class HeartbeatMonitor:
    """The heartbeat of another role. Silence is measured by this process's own clock."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.path = path
        self.clock = clock
        self.silent_s = silent_s()
        self.report: dict[str, Any] | None = read_heartbeat(path)
        self._changed_at = clock()
        self._changes = 0
        self._has_warned = False

    def look(self) -> bool:
        """Read the heartbeat. Return whether it has changed."""
        report = read_heartbeat(self.path)
        if report is None or report == self.report:
            return False
        self.report = report
        self._changed_at = self.clock()
        self._changes += 1
        if self._has_warned:
            what = "is here" if self._changes == 1 else "answers again"
            log.warning("the %s %s", self.name, what)
            self._has_warned = False
        return True

    @property
    def name(self) -> str:
        report = self.report
        if report is None:
            return f"{self.path.stem} (which has not shown itself)"
        return f"{self.path.stem} (process {report.get('pid')} on {printable(report.get('host'))})"

    @property
    def alive(self) -> bool:
        """Return whether a change was seen and none is overdue."""
        self.look()
        return self._changes > 0 and self.silent_for < self.silent_s

    @property
    def silent_for(self) -> float:
        """Return the seconds since the last change, or since the first look."""
        return self.clock() - self._changed_at

    def describe_report(self) -> str:
        report = self.report or {}
        step = "" if report.get("step") is None else f"step {report['step']}"
        parts = (step, report.get("phase"), report.get("doing"))
        return printable(", ".join(str(part) for part in parts if part)) or "nothing"

    def check(self) -> None:
        """Warn once of a silent role; raise PeerSilent when it stays silent."""
        self.look()
        silent = self.silent_for
        if silent > self.silent_s and not self._has_warned:
            self._has_warned = True
            if self.report is None:
                log.warning(
                    "no %s has shown itself for %.0f s (%s would be there). Waiting for it",
                    self.path.stem,
                    silent,
                    self.path,
                )
            else:
                description = self.describe_silence("has ended, is stopped or hangs")
                log.warning("%s. Waiting for it", description)
        if silent > GONE_S:
            raise PeerSilent(
                f"a sign of life of the {self.name}; last it said: {self.describe_report()}", GONE_S
            )

    def describe_silence(self, cause: str) -> str:
        return (
            f"the {self.name} gives no sign of life for {self.silent_for:.0f} s: it {cause}; last it "
            f"said: {self.describe_report()}"
        )
