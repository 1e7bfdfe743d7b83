"""The memory and cores of this process, its children's environment, and garbage collection.

Memory is in bytes, within the limit of the container's control group (version 2); None if unknown.
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
    "HF_HOME",
    "HF_HUB_CACHE",
    "HF_HUB_OFFLINE",
)


def kept_env(*more: str) -> dict[str, str]:
    """Return the environment variables of `KEEP_ENV` and `more` that are set, for a child process:
    others may hold keys and tokens."""
    return {name: os.environ[name] for name in (*KEEP_ENV, *more) if name in os.environ}


def total_memory() -> int | None:
    """Return the total memory of the process."""
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
    """Return the usable cores, within a container's share of time."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:
        cores = os.cpu_count() or 1
    try:
        share, period = (GROUP / "cpu.max").read_text().split()
        return max(1, min(cores, -(-int(share) // int(period))))
    except (OSError, ValueError):  # no such file, or "max"
        return cores


def raise_file_limit() -> int:
    """Raise the soft limit of open files to the hard limit and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # a system may allow less than it reports
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def _limit() -> int | None:
    try:
        return int((GROUP / "memory.max").read_text())
    except (OSError, ValueError):  # no such file, or "max"
        return None


def _held() -> int:
    try:
        used = int((GROUP / "memory.current").read_text())
        kept = dict(line.split() for line in (GROUP / "memory.stat").read_text().splitlines())
        return used - int(kept.get("inactive_file", 0))
    except (OSError, ValueError):
        return 0


class _Heap:
    """A count of the `long_lived` blocks."""

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
                gc.unfreeze()  # Triton reports uncollected objects as leaked

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
    """Exclude existing objects from garbage collections in the outermost block: a full collection
    of those of torch and transformers takes 0.2 to 0.4 s."""
    _HEAP.enter()
    try:
        yield
    finally:
        _HEAP.leave()


def collect_garbage() -> None:
    """Collect all garbage, also what a single `long_lived` block excludes."""
    _HEAP.collect()
