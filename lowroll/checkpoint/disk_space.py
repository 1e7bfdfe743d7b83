"""Writes that wait on a full disk instead of ending the run."""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from lowroll.checkpoint.atomic_files import is_disk_full
from lowroll.types import RunFailed

log = logging.getLogger(__name__)
Result = TypeVar("Result")

FIRST_PAUSE, LONGEST_PAUSE = 0.2, 10.0  # seconds between two attempts
REMIND = 300.0  # seconds between two log lines
NO_ROOM = 75  # exit code of a command that found the disk full and did not wait


class Space:
    """A wait of up to `seconds` for disk space, at each write."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def write(self, path: Path, action: Callable[[], Result]) -> Result:
        """Run `action`, which writes `path`, until the disk has space. A failing action must leave
        nothing behind. RunFailed at the timeout, and at once for another system error."""
        started = time.monotonic()
        last_logged_s = -REMIND
        pause_s = FIRST_PAUSE
        while True:
            try:
                result = action()
                break
            except FileExistsError:  # the caller's, not of space
                raise
            except OSError as error:
                waited_s = time.monotonic() - started
                self._refuse_to_wait(error, path, waited_s)
            if waited_s - last_logged_s >= REMIND:
                last_logged_s = waited_s
                log.warning(
                    "disk full: waiting for room to write %s, %s free; the run goes on when "
                    "there is some, and ends in %.0f s (ckpt.wait_for_space)",
                    path,
                    _free_space(path),
                    self.seconds - waited_s,
                )
            time.sleep(min(pause_s, self.seconds - waited_s))
            pause_s = min(2 * pause_s, LONGEST_PAUSE)
        if last_logged_s >= 0:
            log.warning(
                "there is room again after %.0f s: %s is written", time.monotonic() - started, path
            )
        return result

    def _refuse_to_wait(self, error: OSError, path: Path, waited_s: float) -> None:
        if not is_disk_full(error):
            raise RunFailed(
                f"{_describe_error(error, path)}. What was committed before is intact: mend the "
                "disk, then go on with --resume"
            ) from error
        if waited_s >= self.seconds:
            raise RunFailed(
                f"disk full: no room to write {path} within {self.seconds:g} s "
                f"(ckpt.wait_for_space), {_free_space(path)} free. What was committed before is "
                "intact: make room, then go on with --resume"
            ) from error


def _describe_error(error: OSError, path: Path) -> str:
    if error.errno is None:
        return str(error)
    filename = "" if error.filename in (None, str(path)) else f" ({error.filename})"
    return f"{path}: {error.strerror or os.strerror(error.errno)}{filename}"


def _free_space(path: Path) -> str:
    folder = next(
        (parent for parent in Path(path).absolute().parents if parent.is_dir()), Path("/")
    )
    return f"{shutil.disk_usage(folder).free / 2**20:.0f} MiB"
