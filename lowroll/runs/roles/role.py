"""A role: a process with a heartbeat, deadlines and a restart budget.

Its `RoleProcess` is the launcher's child (`local`) or belongs to a Ray actor (`ray_actor`).
"""

from __future__ import annotations

import signal
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lowroll.runs.roles.heartbeat import HeartbeatMonitor

MOST_RESTARTS = 5  # within WINDOW_S
WINDOW_S = 600.0
FIRST_PAUSE_S = 0.5  # before a restart; doubles each time
LONGEST_PAUSE_S = 10.0
POLL_S = 0.05
ENDING_S = 120.0  # from the last heartbeat on: releasing a large model takes time
START_S = 900.0  # until the first heartbeat: loading a large model takes minutes
STARTING_FACTOR = 10.0  # of the usual deadline: a library on a slow disk holds Python's lock
USERS_MISTAKE = 2  # the commands' exit code for invalid settings


@dataclass(frozen=True)
class Exit:
    """The end of a process. code: negative after a signal. error: the last one in its log."""

    code: int
    cause: str
    error: str


class RoleProcess(ABC):
    """A role's process, which can be restarted. exit: set when it was killed or found dead."""

    log: Path
    address = "127.0.0.1"
    exit: Exit | None = None

    def is_placed(self) -> bool:
        """Return whether a machine is available."""
        return True

    @abstractmethod
    def start(self, words: Sequence[str]) -> None:
        """Start `lowroll WORDS` in its own process group."""

    @abstractmethod
    def is_alive(self) -> bool:
        """Return whether the process runs."""

    @abstractmethod
    def wrote(self, heartbeat: Mapping[str, object]) -> bool:
        """Return whether this process, or a rank that it started, wrote a heartbeat."""

    @abstractmethod
    def is_port_free(self, port: int) -> bool:
        """Return whether a port of its machine is free."""

    @abstractmethod
    def signal(self, number: int) -> None:
        """Signal the process, not its group."""

    @abstractmethod
    def kill(self) -> None:
        """Kill the process group and wait for the end. Idempotent."""

    @abstractmethod
    def describe(self) -> str:
        """Describe the process for a log."""


def is_writer(pid: int, heartbeat: Mapping[str, object]) -> bool:
    """Return whether a process (0: none) wrote a heartbeat, or started the rank that did."""
    return pid > 0 and pid in (heartbeat.get("pid"), heartbeat.get("parent"))


class RestartBudget:
    """The restarts of a role: MOST_RESTARTS within WINDOW_S, and any number for a full disk."""

    def __init__(self) -> None:
        self.starts: deque[float] = deque()
        self.full_disks: deque[float] = deque()  # times of exits because of one

    @property
    def restarts(self) -> int:
        return len(self.starts) - 1

    def count_start(self) -> None:
        self.starts.append(time.monotonic())

    def pause_s(self) -> float | None:
        """Return the seconds until the next restart; None when the budget is spent."""
        now = time.monotonic()
        while self.starts and now - self.starts[0] > WINDOW_S:
            self.starts.popleft()
        if self.restarts >= MOST_RESTARTS:
            return None
        return float(min(FIRST_PAUSE_S * 2.0 ** max(0, self.restarts), LONGEST_PAUSE_S))

    def count_full_disk(self) -> float:
        """Undo the count of a start that ended with a full disk. Return the seconds since the first
        such end in a row."""
        now = time.monotonic()
        if self.full_disks and now - self.full_disks[-1] > WINDOW_S:
            self.full_disks.clear()
        self.full_disks.append(now)
        if self.starts:
            self.starts.pop()
        return now - self.full_disks[0]


class Role:
    """A role and its process. words: the command after `lowroll`."""

    def __init__(
        self, name: str, words: Sequence[str], process: RoleProcess, heartbeat: Path
    ) -> None:
        self.name = name
        self.words = list(words)
        self.process = process
        self.monitor = HeartbeatMonitor(heartbeat)
        self.budget = RestartBudget()
        self.is_ready = False
        self.is_done = False
        self.start_at = 0.0  # `time.monotonic` of a planned start, else 0

    def start(self, *more: str) -> None:
        """Start the process. more: words that are known only now."""
        self.budget.count_start()
        self.process.start([*self.words, *more])
        self.monitor = HeartbeatMonitor(self.monitor.path)

    @property
    def exit_code(self) -> int:
        return 0 if self.process.exit is None else self.process.exit.code

    def update(self) -> None:
        if self.monitor.look() and (heartbeat := self._own_heartbeat()) is not None:
            # "ended" does not count: a user's mistake also ends a role in its start
            phase = heartbeat.get("phase", "starting")
            self.is_ready |= phase not in ("starting", "meeting", "ended")

    def _own_heartbeat(self) -> dict[str, object] | None:
        report = self.monitor.report
        return report if report is not None and self.process.wrote(report) else None

    @property
    def phase(self) -> str:
        """Return the reported phase, or ""."""
        heartbeat = self._own_heartbeat() if self.process.is_alive() else None
        return str((heartbeat or {}).get("phase", ""))

    def find_hang(self) -> str | None:
        """Describe why the process hangs, or return None."""
        if not self.process.is_alive():
            return None
        deadline_s = START_S
        if (heartbeat := self._own_heartbeat()) is not None:
            usual_silence_s = self.monitor.silent_s
            deadlines = {"starting": STARTING_FACTOR * usual_silence_s, "ended": ENDING_S}
            deadline_s = deadlines.get(str(heartbeat["phase"]), usual_silence_s)
        if self.monitor.silent_for <= deadline_s:
            return None
        return self.monitor.describe_silence("is stopped or hangs")

    def describe_exit(self) -> str:
        assert self.process.exit is not None, "it was killed or found dead"
        return f"{self.name} has ended ({self.process.exit.cause}): {self.process.exit.error}"

    def raise_users_mistake(self) -> None:
        """Raise ValueError with the error of a role that refused its settings."""
        end = self.process.exit
        if end is not None and end.code == USERS_MISTAKE and not self.is_ready:
            raise ValueError(f"{self.name}: {end.error.removeprefix('error: ')}")

    def stop(self, deadline_s: float) -> None:
        """Terminate the process; kill it after the deadline."""
        self.process.signal(signal.SIGTERM)
        deadline = time.monotonic() + deadline_s
        while self.process.is_alive() and time.monotonic() < deadline:
            time.sleep(POLL_S)
        self.process.kill()
