"""Exclusive ownership of a run folder.

The kernel frees the `flock` on `.lock` when its owner and the owner's forked children have ended.
The file lists the attempts, one JSON line each; the line count is the attempt number, a fencing
token for names and logs.
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

from lowroll.checkpoint.atomic_files import naming, write_all
from lowroll.types import RunFailed

LOCK = ".lock"
NAME_S = 1.0  # seconds


class RunLockedError(RunFailed):
    """A run folder that another process owns."""


def refuse_locked(folder: Path) -> None:
    """Raise RunLockedError when a process owns `folder`, without taking the lock."""
    try:
        descriptor = os.open(Path(folder) / LOCK, os.O_RDONLY)
    except FileNotFoundError:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RunLockedError(f"{folder} is in use by {_describe_holder(descriptor)}") from None
    finally:
        os.close(descriptor)


class RunLock:
    """Exclusive ownership of a run folder, which is created. `attempt` counts the launches on it,
    from 1. RunLockedError when another process owns it."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _describe_holder(self._descriptor)
            os.close(self._descriptor)
            raise RunLockedError(f"{self.folder} is in use by {holder}") from None
        self.attempt = self._append_attempt()

    def _append_attempt(self) -> int:
        content = _read(self._descriptor)
        attempt = len(content.splitlines()) + 1
        entry = {
            "attempt": attempt,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }
        line = json.dumps(entry).encode() + b"\n"
        if content and not content.endswith(b"\n"):  # a dead process tore the last line
            line = b"\n" + line
        with naming(self.folder / LOCK):
            write_all(self._descriptor, line)
            os.fsync(self._descriptor)
        return attempt

    def release(self) -> None:
        """Release the folder; idempotent."""
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


def _describe_holder(descriptor: int) -> str:
    """Describe the last holder, after a wait for a new one to write its name."""
    deadline = time.monotonic() + NAME_S
    while (entry := _last_entry(descriptor)) is None or _has_ended(entry):
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    if entry is None:
        return "a process that has not written its name yet"
    return f"pid {entry['pid']} on {entry['host']} (attempt {entry['attempt']}, since {entry['started']})"


def _last_entry(descriptor: int) -> dict[str, Any] | None:
    try:
        entry = json.loads(_read(descriptor).splitlines()[-1])
        return {name: entry[name] for name in ("attempt", "pid", "host", "started")}
    except (IndexError, ValueError, KeyError, TypeError):
        return None


def _has_ended(entry: dict[str, Any]) -> bool:
    if entry["host"] != socket.gethostname() or not isinstance(entry["pid"], int):
        return False
    try:
        os.kill(entry["pid"], 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False
    return False
