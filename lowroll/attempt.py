"""What surrounds an attempt at a run: its log file, and the signals that ask it to stop."""
from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

log = logging.getLogger(__name__)


class LogFile(logging.FileHandler):
    """A log that may lose lines, which is said once: a full disk or a broken one costs no run and prints no traces."""

    _told = False

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exception()
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._told:
            self._told = True
            print(f"warning: {self.baseFilename}: {error.strerror}: lines of the log are lost", file=sys.stderr)

    def close(self) -> None:
        """Give the file back, without a word about lines that could not be written."""
        with suppress(OSError):
            super().close()


@contextmanager
def log_file(folder: Path, attempt: int) -> Iterator[None]:
    """Everything that is logged in the block goes to logs/attempt_N.log, and warnings to the terminal too."""
    (folder / "logs").mkdir(exist_ok=True)
    file, terminal = LogFile(folder / "logs" / f"attempt_{attempt}.log"), logging.StreamHandler()
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    terminal.setLevel(logging.WARNING)
    root = logging.getLogger("lowroll")
    before = root.level
    root.setLevel(logging.INFO)
    for handler in (file, terminal):
        root.addHandler(handler)
    try:
        yield
    finally:
        root.setLevel(before)
        for handler in (file, terminal):
            root.removeHandler(handler)
            handler.close()


@contextmanager
def polite_stop() -> Iterator[list[int]]:
    """The list fills when SIGINT or SIGTERM asks to stop; a second signal has its usual, immediate effect."""
    asked: list[int] = []
    before: dict[int, Any] = {}

    def ask(number: int, _frame: FrameType | None) -> None:
        asked.append(number)
        log.warning("%s: finishing this step, then stopping; again to stop at once", signal.Signals(number).name)
        signal.signal(number, before[number])

    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, ask)
    except ValueError:                      # not the main thread: signals are somebody else's
        before.clear()
    try:
        yield asked
    finally:
        for caught, handler in before.items():
            signal.signal(caught, handler)
