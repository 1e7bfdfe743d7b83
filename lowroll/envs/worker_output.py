"""A scoring worker's output: the log shows its beginning, a crash message its end.

The pool reads the pipe while it waits, so output is unlimited.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import IO

logger = logging.getLogger(__name__)

MAX_LOGGED = 4096  # bytes of a worker
MAX_KEPT = 4096  # bytes kept of the end
LAST_WORDS = 300  # characters of the end in an error
PIECE = 1 << 16


def readable(text: str, secrets: Mapping[str, str]) -> str:
    """Return printable Unicode, with the values of `secrets` replaced by their names."""
    for name, value in secrets.items():
        text = text.replace(value, f"${name}") if value else text
    return text.encode("utf-8", "backslashreplace").decode()


class Output:
    """The reading end of a worker's output and errors."""

    def __init__(self, pipe: IO[bytes], secrets: Mapping[str, str]) -> None:
        self.pipe, self.secrets = pipe, secrets
        os.set_blocking(pipe.fileno(), False)
        self.ended = False
        self._room = MAX_LOGGED
        self._line = self._end = b""

    def read(self) -> bool:
        """Read available output; False for nothing."""
        try:
            data = os.read(self.pipe.fileno(), PIECE)
        except BlockingIOError:
            return False
        self.ended = not data
        self._end = (self._end + data)[-MAX_KEPT:]
        if self._room > 0:
            complete_lines, newline, self._line = (self._line + data).rpartition(b"\n")
            if len(self._line) >= self._room:
                complete_lines, self._line = complete_lines + newline + self._line, b""
            self._log(complete_lines)
        return bool(data)

    def close(self) -> str:
        """Read the rest, close the pipe and return its end."""
        for _ in range((1 << 20) // PIECE):  # a pipe's capacity
            if not self.read():
                break
        self._log(self._line)
        self.pipe.close()
        return readable(self._end.decode(errors="replace"), self.secrets)[-LAST_WORDS:].strip()

    def _log(self, lines: bytes) -> None:
        if not lines or self._room <= 0:
            return
        text = readable(lines.decode(errors="replace"), self.secrets)
        for line in text[: self._room].splitlines():
            logger.info("a scorer printed: %s", line)
        self._room -= len(lines) + 1
        if self._room <= 0:
            logger.info("the rest of what this worker prints is dropped")
