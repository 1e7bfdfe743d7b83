"""Child processes of this room: same interpreter, few environment variables, one fixed hash seed, a process group.

The hash seed orders Python's sets of strings. With it fixed, a child does the same in every run and in every worker.
"""
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import IO, BinaryIO

KEEP_ENV = ("PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
SET_ENV = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def start(module: str, stderr: IO[bytes] | int) -> subprocess.Popen[bytes]:
    """Run `python -m module <pid of this process>` with pipes for input and output, as leader of a new session.

    Of this process's environment it sees `KEEP_ENV` alone: no keys or tokens.
    """
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    kept = {key: os.environ[key] for key in KEEP_ENV if key in os.environ}
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, str(os.getpid())], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=stderr, env=kept | SET_ENV | {"PYTHONPATH": path}, start_new_session=True, bufsize=0)


def private_streams() -> tuple[BinaryIO, BinaryIO]:
    """In the child: (requests, replies). What other code prints goes to standard error; what it reads is empty."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", buffering=0)
    with open(os.devnull, "rb") as null:
        os.dup2(null.fileno(), 0)
    os.dup2(2, 1)
    return requests, replies
