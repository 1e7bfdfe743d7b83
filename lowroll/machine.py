"""The memory and cores of this machine that the process may use, what a child of it may know, and
when garbage is collected.

Memory is in bytes, as the kernel says it (/proc/meminfo, and the control group of version 2 that a
container sees as its own), less than there is where a container bounds it; None where the system
does not say.
"""

from __future__ import annotations

import gc
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock

MEMINFO = Path("/proc/meminfo")
GROUP = Path("/sys/fs/cgroup")
KEEP_ENV = (
    "PATH",
    "HOME",
    "LANG",
    "LC_ALL",
    "LC_CTYPE",
    "TZ",
    "TMPDIR",
    "LD_LIBRARY_PATH",
    "VIRTUAL_ENV",
    "HF_HOME",  # where models of the hub lie, and whether it may be asked for more
    "HF_HUB_CACHE",
    "HF_HUB_OFFLINE",
)


def kept_env(*more: str) -> dict[str, str]:
    """Return the environment variables that a child process is started with: those of `KEEP_ENV`
    and `more` that are set. Others may be keys and tokens."""
    return {name: os.environ[name] for name in (*KEEP_ENV, *more) if name in os.environ}


def total_memory() -> int | None:
    """Return the memory that the process may use in all."""
    try:
        found = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None
    limit = _limit()
    return found if limit is None else min(found, limit)


def free_memory() -> int | None:
    """Return the memory that is free, or can be freed at once."""
    try:
        lines = MEMINFO.read_text().splitlines()
        free = next(
            int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")
        )
    except (OSError, StopIteration, ValueError):
        return None
    limit = _limit()
    return free if limit is None else max(0, min(free, limit - _held()))


def usable_cores() -> int:
    """Return the cores that the process may keep busy: a container's share of time counts as that
    many."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on this system
        cores = os.cpu_count() or 1
    try:
        share, period = (GROUP / "cpu.max").read_text().split()
        return max(1, min(cores, -(-int(share) // int(period))))
    except (OSError, ValueError):  # no such file, or "max"
        return cores


def raise_file_limit() -> int:
    """Raise this process's soft limit of open files to its hard limit and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # a system may allow less than it says
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def _limit() -> int | None:
    """Return the bound of the container; None where there is none."""
    try:
        return int((GROUP / "memory.max").read_text())
    except (OSError, ValueError):  # no such file, or "max"
        return None


def _held() -> int:
    """Return what the container uses, without the files that the kernel only keeps while their
    memory is not needed."""
    try:
        used = int((GROUP / "memory.current").read_text())
        kept = dict(line.split() for line in (GROUP / "memory.stat").read_text().splitlines())
        return used - int(kept.get("inactive_file", 0))
    except (OSError, ValueError):
        return 0


class _Heap:
    """How many blocks of this process leave what existed before them out of garbage collections."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.blocks = 0

    def enter(self) -> None:
        with self.lock:
            self.blocks += 1
            if self.blocks == 1:
                gc.collect()
                gc.freeze()

    def leave(self) -> None:
        with self.lock:
            self.blocks -= 1
            if not self.blocks:
                gc.unfreeze()  # Triton reports what is never collected as leaked

    def collect(self) -> None:
        with self.lock:
            if self.blocks == 1:
                gc.unfreeze()
            gc.collect()
            if self.blocks == 1:
                gc.freeze()


_HEAP = _Heap()


@contextmanager
def long_lived() -> Iterator[None]:
    """Leave all objects that exist now out of garbage collections in the block, unless it is within
    another one: among all that torch and transformers load, a full collection takes 0.2 to 0.4 s."""
    _HEAP.enter()
    try:
        yield
    finally:
        _HEAP.leave()


def collect_garbage() -> None:
    """Collect all garbage, also of what the one block of `long_lived` leaves out."""
    _HEAP.collect()
