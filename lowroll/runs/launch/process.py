"""The process of a role, as any launcher has it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from lowroll.checkpoint.logfile import last_error
from lowroll.runs.roles.parent import PARENT


class RoleProcess:
    """A process of `lowroll WORDS` in a process group of its own, which ends with this process.
    env: whole. folder: in which it is started; None: where this one is."""

    def __init__(
        self, words: Sequence[str], env: Mapping[str, str], log: Path, folder: Path | None = None
    ) -> None:
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as out:
            self.began = out.tell()  # its output in the log
            self.process = subprocess.Popen(
                [sys.executable, "-m", "lowroll", *words],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env={**env, PARENT: str(os.getpid())},
                start_new_session=True,
                cwd=folder,
            )

    @property
    def pid(self) -> int:
        """The process ID."""
        return self.process.pid

    def alive(self) -> bool:
        """Return whether the process runs. One that has ended keeps its ID until `kill`, so that no
        other process gets it."""
        if self.process.returncode is not None:
            return False
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self.process.pid, flags) is None

    def signal(self, number: int) -> None:
        """Send a signal to the process alone."""
        if self.alive():
            os.kill(self.process.pid, number)

    def kill(self) -> int:
        """End the process and all of its group now, wait for that, and return its exit code.
        Idempotent: an ID that was given back may be another's."""
        if self.process.returncode is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(timeout=30.0)
        return self.process.returncode

    def last_words(self) -> str:
        """Return the last error in its log since its start, with the log's path."""
        return f"{last_error(self.log, self.began)} (log: {self.log})"


def how(code: int) -> str:
    """Describe an exit code."""
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"


def reserved(host: str) -> socket.socket:
    """Return a socket at a port of its own. Until it is closed, nobody who asks for a free port
    gets that one, and whoever names it may listen there."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((host, 0))
    return held


def is_free(host: str, port: int) -> bool:
    """Return whether nobody listens there, so that a server could."""
    with socket.socket() as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((host, port))
        except OSError:
            return False
    return True
