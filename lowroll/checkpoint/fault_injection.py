"""Named points at which a test kills the process or breaks the disk.

`LOWROLL_FAULT=name:kill` turns the point `faultpoint(name)` into SIGKILL, `name:enospc` into "no
space left on device", `name:eio` into "input/output error".
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable

VARIABLE = "LOWROLL_FAULT"
ERRORS = {"enospc": errno.ENOSPC, "eio": errno.EIO}
observers: list[Callable[[str], None]] = []


def faultpoint(name: str) -> None:
    """Pass the point `name`, unique within an operation."""
    for observer in observers:
        observer(name)
    setting = os.environ.get(VARIABLE)
    if setting is None:
        return
    target, _, action = setting.rpartition(":")
    if action != "kill" and action not in ERRORS:
        raise ValueError(
            f"{VARIABLE}={setting!r}: expected NAME:kill, "
            f"{', '.join(f'NAME:{name}' for name in ERRORS)}"
        )
    if target != name:
        return
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise OSError(ERRORS[action], os.strerror(ERRORS[action]))
