"""Writes that wait on a full disk instead of ending the run."""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from lowroll.checkpoint.files import is_disk_full
from lowroll.types import RunFailed

log = logging.getLogger(__name__)
Result = TypeVar("Result")

FIRST_PAUSE, LONGEST_PAUSE = 0.2, 10.0  # seconds between two attempts
REMIND = 300.0  # seconds between two log lines
NO_ROOM = 75  # exit code of a command that met a full disk and did not wait


class Space:
    """A wait of up to `seconds` for disk space, at each write."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def write(self, path: Path, action: Callable[[], Result]) -> Result:
        """Run `action`, which writes `path`, again until the disk has space.

        A failing action must leave nothing behind. RunFailed names the path at the timeout, and at
        once for any other system error.
        """
        began, told, pause = time.monotonic(), -REMIND, FIRST_PAUSE
        while True:
            try:
                result = action()
            except FileExistsError:
                raise
            except OSError as error:
                waited = time.monotonic() - began
                if not is_disk_full(error):
                    raise RunFailed(
                        f"{_words(error, path)}. What was committed before is intact: mend the "
                        "disk, then go on with --resume"
                    ) from error
                if waited >= self.seconds:
                    raise RunFailed(
                        f"disk full: no room to write {path} within {self.seconds:g} s "
                        f"(ckpt.wait_for_space), {_free(path)} free. What was committed before is "
                        "intact: make room, then go on with --resume"
                    ) from error
                if waited - told >= REMIND:
                    told = waited
                    log.warning(
                        "disk full: waiting for room to write %s, %s free; the run goes on when "
                        "there is some, and ends in %.0f s (ckpt.wait_for_space)",
                        path,
                        _free(path),
                        self.seconds - waited,
                    )
            else:
                if told >= 0:
                    log.warning(
                        "there is room again after %.0f s: %s is written",
                        time.monotonic() - began,
                        path,
                    )
                return result
            time.sleep(min(pause, self.seconds - waited))
            pause = min(2 * pause, LONGEST_PAUSE)


def _words(error: OSError, path: Path) -> str:
    if error.errno is None:
        return str(error)
    named = "" if error.filename in (None, str(path)) else f" ({error.filename})"
    return f"{path}: {error.strerror or os.strerror(error.errno)}{named}"


def _free(path: Path) -> str:
    folder = next(
        (parent for parent in Path(path).absolute().parents if parent.is_dir()), Path("/")
    )
    return f"{shutil.disk_usage(folder).free / 2**20:.0f} MiB"
