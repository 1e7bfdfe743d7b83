"""A role as a child process: its command, its log, and how often it was started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from lowroll.checkpoint.logfile import last_error
from lowroll.runs.roles.heart import Watch
from lowroll.runs.roles.parent import PARENT

MOST_RESTARTS = 5  # within WINDOW_S
WINDOW_S = 600.0
FIRST_PAUSE_S = 0.5  # before a restart; then twice as long each time
LONGEST_PAUSE_S = 10.0
LOOK_S = 0.05
ENDING_S = 120.0  # from its last sign of life to its end: it gives a large model's memory back
START_S = 900.0  # until the first sign of life: loading a large model takes minutes


class Child:
    """role: its name. command: words after `lowroll`. heart: of the role's sign of life. log:
    appended to."""

    def __init__(
        self, role: str, command: Sequence[str], env: Mapping[str, str], heart: Path, log: Path
    ) -> None:
        self.role = role
        self.command = list(command)
        self.env = dict(env)
        self.heart = heart
        self.log = log
        self.process: subprocess.Popen[bytes] | None = None
        self.watch = Watch(heart)
        self.starts: deque[float] = deque()
        self.ready = False  # in this launch it was past its start once
        self.again_at = 0.0  # of `time.monotonic`, when it is to be started again
        self.done = False  # it has ended as it should
        self._began = 0  # of its output in the log

    def start(self, *more: str) -> None:
        """Start it, in a process group of its own."""
        self.starts.append(time.monotonic())
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as out:
            self._began = out.tell()
            self.process = subprocess.Popen(
                [sys.executable, "-m", "lowroll", *self.command, *more],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=self.env | {PARENT: str(os.getpid())},
                start_new_session=True,
            )
        self.watch = Watch(self.heart)

    def alive(self) -> bool:
        """Whether its process runs. One that has ended keeps its number until `kill`, so that nobody
        else gets it."""
        if self.process is None or self.process.returncode is not None:
            return False
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self.process.pid, flags) is None

    def look(self) -> None:
        """See its sign of life."""
        if self.watch.look() and self._is_mine():
            # "ended" says nothing: a user's mistake ends a role in its start, too
            said = self.watch.said or {}
            self.ready |= said.get("phase", "starting") not in ("starting", "ended")

    def _is_mine(self) -> bool:
        said, process = self.watch.said, self.process
        if said is None or process is None:
            return False
        return process.pid in (said.get("pid"), said.get("parent"))

    @property
    def phase(self) -> str:
        """What this very process has said that it does; "" before."""
        said = self.watch.said if self.alive() and self._is_mine() else None
        return str((said or {}).get("phase", ""))

    def hangs(self) -> str | None:
        """Why it counts as hanging; None when it does not."""
        if not self.alive():
            return None
        limit = START_S
        if (said := self.watch.said) is not None and self._is_mine():
            limit = ENDING_S if said["phase"] == "ended" else self.watch.silent_s
        if self.watch.silent_for <= limit:
            return None
        return (
            f"the {self.watch.name} gives no sign of life for {self.watch.silent_for:.0f} s: it is "
            f"stopped or hangs; last it said: {self.watch.told() or 'nothing'}"
        )

    def pause(self) -> float | None:
        """Seconds before it is started again; None when that was too often."""
        now = time.monotonic()
        while self.starts and now - self.starts[0] > WINDOW_S:
            self.starts.popleft()
        restarts = len(self.starts) - 1
        if restarts >= MOST_RESTARTS:
            return None
        return float(min(FIRST_PAUSE_S * 2.0 ** max(0, restarts), LONGEST_PAUSE_S))

    def signal(self, number: int) -> None:
        """To the process alone."""
        if self.process is not None and self.alive():
            os.kill(self.process.pid, number)

    def kill(self) -> None:
        """End it and all of its group now, and wait for that. Idempotent: a number that was given back
        may be another's."""
        if self.process is None or self.process.returncode is not None:
            return
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(timeout=30.0)

    def end(self, seconds: float) -> None:
        """Ask it to end, and end it after so many seconds."""
        self.signal(signal.SIGTERM)
        until = time.monotonic() + seconds
        while self.alive() and time.monotonic() < until:
            time.sleep(LOOK_S)
        self.kill()

    @property
    def code(self) -> int:
        """With which it has ended, once it was killed or found dead; 0 before."""
        return 0 if self.process is None else self.process.returncode or 0

    def last_words(self) -> str:
        """Of its log since its last start, with the log's path."""
        return f"{last_error(self.log, self._began)} (log: {self.log})"
