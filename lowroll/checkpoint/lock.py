"""One process at a time owns a run folder.

`flock` on `.lock` is freed by the kernel when its owner dies, however it dies, so there are no
stale locks to clean. The file is an append-only list of attempts, one JSON line each; the line
count is the attempt number, which therefore grows by one with every launch and can serve as a
fencing token in names and logs.

A forked child inherits the lock and keeps it while it lives: workers of a dead run hold its folder
until they are gone. Children started by exec (spawn, forkserver, subprocess) do not.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from lowroll.checkpoint.files import naming, write_all
from lowroll.types import RunFailed

LOCK = ".lock"
NAME_S = 1.0  # for the name of who has just taken it


class RunLockedError(RunFailed):
    """Another process owns the run folder; the message names its pid and host."""


def refuse_locked(folder: Path) -> None:
    """Raise RunLockedError when a process owns `folder`. Changes nothing: who asks does not own
    it."""
    try:
        descriptor = os.open(Path(folder) / LOCK, os.O_RDONLY)
    except FileNotFoundError:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RunLockedError(f"{folder} is in use by {_holder(descriptor)}") from None
    finally:
        os.close(descriptor)


class RunLock:
    """`with RunLock(folder) as lock:` owns `folder`; `lock.attempt` counts the launches on it, from
    1.

    Raises RunLockedError at once when another process owns it; the folder is created when absent.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _holder(self._descriptor)
            os.close(self._descriptor)
            raise RunLockedError(f"{self.folder} is in use by {holder}") from None
        self.attempt = self._append_attempt()

    def _append_attempt(self) -> int:
        content = _read(self._descriptor)
        attempt = len(content.splitlines()) + 1
        line = (
            json.dumps(
                {
                    "attempt": attempt,
                    "pid": os.getpid(),
                    "host": socket.gethostname(),
                    "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
                }
            )
            + "\n"
        )
        torn = bool(content) and not content.endswith(b"\n")
        with naming(self.folder / LOCK):
            write_all(self._descriptor, (b"\n" if torn else b"") + line.encode())
            os.fsync(self._descriptor)
        return attempt

    def release(self) -> None:
        """Give the folder back; safe to call twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> RunLock:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


def _read(descriptor: int) -> bytes:
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0)


def _holder(descriptor: int) -> str:
    """Describe the process that took the lock last. One that has just taken it is still writing its
    name: until then the last name is of one that has ended."""
    until = time.monotonic() + NAME_S
    while (entry := _last(descriptor)) is None or _has_ended(entry):
        if time.monotonic() > until:
            break
        time.sleep(0.02)
    if entry is None:
        return "a process that has not written its name yet"
    return f"pid {entry['pid']} on {entry['host']} (attempt {entry['attempt']}, since {entry['started']})"


def _last(descriptor: int) -> dict[str, Any] | None:
    try:
        entry = json.loads(_read(descriptor).splitlines()[-1])
        return {name: entry[name] for name in ("attempt", "pid", "host", "started")}
    except (IndexError, ValueError, KeyError, TypeError):
        return None


def _has_ended(entry: dict[str, Any]) -> bool:
    """Return whether the holder was a process of this machine, and is gone."""
    if entry["host"] != socket.gethostname() or not isinstance(entry["pid"], int):
        return False
    try:
        os.kill(entry["pid"], 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False
    return False
