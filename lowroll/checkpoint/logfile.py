"""Errors and warnings in the log of a child process."""

from __future__ import annotations

import os
import re
from pathlib import Path

from lowroll.types import printable

_ERROR = re.compile(r"\b[A-Za-z_.]*(?:Error|Exception|error): \S")
# errors that point at another one
_SECONDARY_ERROR = re.compile(
    r"root cause|EngineDeadError|See stack trace|RequestCancelled|CancelledError"
)
_MAX_BYTES = 1 << 18  # from the log's end
_NUMBER = re.compile(r"[0-9.]+(e[-+]?[0-9]+)?", re.ASCII)
_WARNING_LINE = re.compile(r"^\S+ \S+ (?:WARNING|ERROR|CRITICAL) \S+: (.*)$")


def last_error(log: Path, since: int = 0) -> str:
    """Return the last error after byte `since` that points at no other one, else the last line."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(since, size - _MAX_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError as error:
        return printable(f"(the log cannot be read: {error.strerror or error})")
    non_empty_lines = [line for line in lines if line.strip()]
    errors = [line for line in non_empty_lines if _ERROR.search(line)]
    causes = [line for line in errors if not _SECONDARY_ERROR.search(line)]
    return printable((causes or errors or non_empty_lines or ["(nothing)"])[-1].strip())


class Warnings:
    """New warnings and errors in the logs `<name>_<attempt>.log`: the first of each kind, the text
    without numbers."""

    def __init__(self, folder: Path, *names: str) -> None:
        self.folder = folder
        self.names = names
        self._read = {path: path.stat().st_size for path in self._logs()}
        self._kinds: set[str] = set()

    def new(self) -> list[str]:
        """Return the lines since the last call."""
        new_lines: list[str] = []
        for path in self._logs():
            offset = self._read.get(path, 0)
            with path.open("rb") as file:
                file.seek(offset)
                complete_lines = file.read(_MAX_BYTES).rpartition(b"\n")[0]
            self._read[path] = offset + len(complete_lines)
            for line in complete_lines.decode(errors="replace").splitlines():
                if not (match := _WARNING_LINE.match(line)):
                    continue
                message = printable(match[1])
                kind = _NUMBER.sub("", message)
                if kind not in self._kinds:
                    self._kinds.add(kind)
                    new_lines.append(message)
        return new_lines

    def _logs(self) -> list[Path]:
        return sorted(path for name in self.names for path in self.folder.glob(f"{name}_*.log"))
