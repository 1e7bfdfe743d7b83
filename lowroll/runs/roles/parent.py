"""A role that a launcher started ends with it, however that ends."""

from __future__ import annotations

import ctypes
import os
import signal

PARENT = "LOWROLL_LAUNCHER_PID"
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Have the kernel kill this process when the launcher that the environment names is gone; at
    once when it is gone already. Nothing without a launcher."""
    parent = os.environ.get(PARENT)
    if parent is None:
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        os._exit(128 + signal.SIGKILL)
