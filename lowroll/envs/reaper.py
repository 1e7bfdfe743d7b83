"""The reaper of a scoring worker: a process between pool and worker that runs no scorer code.

As a subreaper (Linux) it adopts a scorer's leftover processes, and ends them when the worker ends,
on the pool's SIGTERM, or when the pool's process dies. It exits with the worker's status or signal.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from lowroll.envs import child

PR_SET_CHILD_SUBREAPER = 36
END_LIMIT = 3.0  # seconds
HEARD = (signal.SIGCHLD, signal.SIGTERM)


def fork_worker(parent: int) -> None:
    """Fork and return in the worker; the reaper never returns."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, HEARD)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    child.die_with(parent, signal.SIGTERM)
    reaper = os.getpid()
    worker = os.fork()
    if worker == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)
        os.setsid()  # protects the reaper from a scorer that kills its group
        child.die_with(reaper)
        return
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):  # the end of the pool's pipes must mark the worker's end
        os.dup2(null, stream)
    status = _watch(worker)
    _kill_all(worker)
    _exit_like(status)


def _watch(worker: int) -> int:
    while True:
        if signal.sigwait(HEARD) == signal.SIGTERM:
            os.kill(worker, signal.SIGKILL)
        while (reaped := _reap()) is not None:
            if reaped[0] == worker:
                return reaped[1]


def _reap() -> tuple[int, int] | None:
    try:
        pid, status = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None
    return (pid, status) if pid else None


def _kill_all(worker: int) -> None:
    _kill(-worker)
    deadline = time.monotonic() + END_LIMIT
    while time.monotonic() < deadline:
        descendants = list(_descendants(os.getpid()))
        for pid in descendants:
            _kill(pid)
        while _reap() is not None:
            pass
        if not descendants:
            return
        time.sleep(0.002)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def _descendants(root: int) -> Iterator[int]:
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = entry.read_text(errors="replace").rpartition(")")[2].split()[:2]
        except (OSError, ValueError):
            continue
        if state != "Z":
            parents.setdefault(int(parent), []).append(int(entry.parent.name))
    pending = list(parents.get(root, ()))
    while pending:
        pid = pending.pop()
        yield pid
        pending += parents.get(pid, ())


def _exit_like(status: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 1)
