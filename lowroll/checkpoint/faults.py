"""Named points at which a test may kill the process, fill the disk or break it.

`faultpoint(name)` does nothing in normal life. `LOWROLL_FAULT=name:kill` turns the point of that
name into SIGKILL, `name:enospc` into "no space left on device", `name:eio` into "input/output
error". A test enumerates the points of an operation by running it once with an observer and then
repeats it once per point, so a point that is added later is covered without touching the test.
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
    """Pass the point `name`. Names of one operation are unique: those inside a loop carry the
    item's name."""
    for observer in observers:
        observer(name)
    armed = os.environ.get(VARIABLE)
    if armed is None:
        return
    target, _, action = armed.rpartition(":")
    if action != "kill" and action not in ERRORS:
        raise ValueError(
            f"{VARIABLE}={armed!r}: expected NAME:kill, "
            f"{', '.join(f'NAME:{name}' for name in ERRORS)}"
        )
    if target != name:
        return
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise OSError(ERRORS[action], os.strerror(ERRORS[action]))
