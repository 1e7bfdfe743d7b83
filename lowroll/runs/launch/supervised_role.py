"""A role that a launcher keeps alive: its command, its heartbeat and its restarts. How its process
is started, reached and ended is the launcher's own (`child`, `role_process`)."""

from __future__ import annotations

import signal
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from lowroll.runs.roles.heartbeat import HeartbeatMonitor

MOST_RESTARTS = 5  # within WINDOW_S
WINDOW_S = 600.0
FIRST_PAUSE_S = 0.5  # before a restart; then twice as long each time
LONGEST_PAUSE_S = 10.0
LOOK_S = 0.05
ENDING_S = 120.0  # from its last sign of life to its end: it gives a large model's memory back
START_S = 900.0  # until the first sign of life: loading a large model takes minutes
STARTING = 10.0  # times as patient: a library that comes from a slow disk holds Python's lock


class SupervisedRole(ABC):
    """A role with its heartbeat and restarts. role: its name. command: words after `lowroll`.
    heart: the file of the role's heartbeat. log: what its process says is appended there."""

    here = "127.0.0.1"  # the address of its machine, at which it listens

    def __init__(self, role: str, command: Sequence[str], heart: Path, log: Path) -> None:
        self.role = role
        self.command = list(command)
        self.heart = heart
        self.log = log
        self.watch = HeartbeatMonitor(heart)
        self.starts: deque[float] = deque()
        self.ready = False  # in this launch it was past its start once
        self.again_at = 0.0  # of `time.monotonic`, when it is to be started again
        self.done = False  # it has ended as it should
        self.no_room_at: deque[float] = deque()  # when it has ended since a disk was full

    def start(self, *more: str) -> None:
        """Start the role, in a process group of its own."""
        self.starts.append(time.monotonic())
        self.begin([*self.command, *more])
        self.watch = HeartbeatMonitor(self.heart)

    @abstractmethod
    def begin(self, words: list[str]) -> None:
        """Start the process of `lowroll WORDS`."""

    def placed(self) -> bool:
        """Return whether there is a machine to start the role on. RunFailed when none is found in
        time."""
        return True

    @abstractmethod
    def is_free(self, port: int) -> bool:
        """Return whether the role could listen on a port of its machine."""

    @abstractmethod
    def is_mine(self, said: dict[str, object]) -> bool:
        """Return whether a heartbeat is that of the role's current process."""

    @abstractmethod
    def alive(self) -> bool:
        """Return whether the role's process runs."""

    @abstractmethod
    def signal(self, number: int) -> None:
        """Send a signal to the process alone."""

    @abstractmethod
    def kill(self) -> None:
        """End the process and all of its group now, and wait for that. Idempotent."""

    @property
    @abstractmethod
    def code(self) -> int:
        """The exit code, once the process was killed or found dead; 0 before."""

    @abstractmethod
    def ended(self) -> str:
        """Describe how the process has ended."""

    @abstractmethod
    def last_words(self) -> str:
        """Return the last error in the role's log since its last start, with the log's path."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The name of the role's process, for the log."""

    def look(self) -> None:
        """Read the role's heartbeat."""
        if self.watch.look() and self._said() is not None:
            # "ended" says nothing: a user's mistake ends a role in its start, too
            said = self.watch.said or {}
            self.ready |= said.get("phase", "starting") not in ("starting", "meeting", "ended")

    def _said(self) -> dict[str, object] | None:
        said = self.watch.said
        return said if said is not None and self.is_mine(said) else None

    @property
    def phase(self) -> str:
        """The phase that the current process has reported; "" before."""
        said = self._said() if self.alive() else None
        return str((said or {}).get("phase", ""))

    def hangs(self) -> str | None:
        """Return why the role counts as hanging; None when it does not."""
        if not self.alive():
            return None
        limit = START_S
        if (said := self._said()) is not None:
            usual = self.watch.silent_s
            phases = {"starting": STARTING * usual, "ended": ENDING_S}
            limit = phases.get(str(said["phase"]), usual)
        if self.watch.silent_for <= limit:
            return None
        return (
            f"the {self.watch.name} gives no sign of life for {self.watch.silent_for:.0f} s: it is "
            f"stopped or hangs; last it said: {self.watch.told()}"
        )

    def pause(self) -> float | None:
        """Return the seconds before the role is restarted; None when that was too often."""
        now = time.monotonic()
        while self.starts and now - self.starts[0] > WINDOW_S:
            self.starts.popleft()
        restarts = len(self.starts) - 1
        if restarts >= MOST_RESTARTS:
            return None
        return float(min(FIRST_PAUSE_S * 2.0 ** max(0, restarts), LONGEST_PAUSE_S))

    def without_room(self) -> float:
        """Note that the role has ended since a disk is full, which is no restart that counts;
        return the seconds since it first did so. After WINDOW_S without such an end the disk counts
        as full anew."""
        now = time.monotonic()
        if self.no_room_at and now - self.no_room_at[-1] > WINDOW_S:
            self.no_room_at.clear()
        self.no_room_at.append(now)
        if self.starts:
            self.starts.pop()
        return now - self.no_room_at[0]

    def end(self, seconds: float) -> None:
        """Ask the process to end, and end it after so many seconds."""
        self.signal(signal.SIGTERM)
        until = time.monotonic() + seconds
        while self.alive() and time.monotonic() < until:
            time.sleep(LOOK_S)
        self.kill()
