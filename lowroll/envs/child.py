"""Child processes in their own process group, with few environment variables.

A fixed hash seed, which orders sets of strings, makes every run and worker behave the same.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from lowroll import machine

SET_ENV = {
    "PYTHONHASHSEED": "0",
    "PYTHONUNBUFFERED": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
PR_SET_PDEATHSIG = 1
FEW = 8  # children that any machine may run
A_CORE = 64  # children, most of which wait for a judge model
CHILD_MB = 64  # memory of a child that imported sympy
CHILD_FILES = 4  # file descriptors of a child


def start(
    module: str, stderr: int, pass_env: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Run `python -m module <pid of this process>` with pipes, as a session leader. Its environment
    is `machine.KEEP_ENV` and `pass_env`, without keys or tokens."""
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        env={**machine.kept_env(), **(pass_env or {}), **SET_ENV, "PYTHONPATH": path},
        start_new_session=True,
        bufsize=0,
    )


def die_with(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Make the kernel send `number` to this child when the thread that started it dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:  # the parent died before prctl
        os._exit(1)


def private_streams() -> tuple[BinaryIO, BinaryIO]:
    """Return (requests, replies) in the child; other output goes to standard error."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", buffering=0)
    with open(os.devnull, "rb") as null:
        os.dup2(null.fileno(), 0)
    os.dup2(2, 1)
    return requests, replies


def named(variables: Sequence[str], who: str = "pass_env") -> dict[str, str]:
    """Return these environment variables. ValueError if one is not set, or reserved."""
    for name in variables:
        if name not in os.environ:
            raise ValueError(f"{who}: the environment variable {name} is not set")
        if name in (*SET_ENV, "PYTHONPATH"):
            raise ValueError(f"{who}: the scoring workers have a {name} of their own")
    return {name: os.environ[name] for name in variables}


def check_count(workers: int) -> None:
    """Raise ValueError for more workers than this machine holds."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    files = _open_files()
    limits = {
        f"{cores} cores, {A_CORE} workers each": cores * A_CORE,
        f"{files} open files, {CHILD_FILES} each": files // CHILD_FILES,
    }
    if (memory := machine.free_memory()) is not None:
        limit_name = f"{memory / 2**30:.1f} GB of free memory, {CHILD_MB} MB each"
        limits[limit_name] = memory // (CHILD_MB << 20)
    limit_name = min(limits, key=limits.__getitem__)
    max_workers = max(FEW, limits[limit_name])
    if workers > max_workers:
        raise ValueError(
            f"score.workers: {workers} is more than the {max_workers} that this machine holds "
            f"({limit_name})"
        )


def _open_files() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft if soft != resource.RLIM_INFINITY else 1 << 20
