"""Errors and warnings in the log of a child process."""

from __future__ import annotations

import os
import re
from pathlib import Path

from lowroll.types import printable

_ERROR = re.compile(r"\b[A-Za-z_.]*(?:Error|Exception|error): \S")
# errors that point at another one
_ECHO = re.compile(r"root cause|EngineDeadError|See stack trace|RequestCancelled|CancelledError")
_MOST = 1 << 18  # bytes read from the log's end
_NUMBER = re.compile(r"[0-9.]+(e[-+]?[0-9]+)?", re.ASCII)
_LOUD = re.compile(r"^\S+ \S+ (?:WARNING|ERROR|CRITICAL) \S+: (.*)$")


def last_error(log: Path, since: int = 0) -> str:
    """Return the last error after byte `since` that does not point at another, else the last
    line."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(since, size - _MOST))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError as error:
        return printable(f"(the log cannot be read: {error.strerror or error})")
    told = [line for line in lines if line.strip()]
    errors = [line for line in told if _ERROR.search(line)]
    causes = [line for line in errors if not _ECHO.search(line)]
    return printable((causes or errors or told or ["(nothing)"])[-1].strip())


class Warnings:
    """Warnings and errors in lowroll's logs `<name>_<attempt>.log`: the first of each kind (the
    text without numbers), whichever of `names` wrote it."""

    def __init__(self, folder: Path, *names: str) -> None:
        self.folder = folder
        self.names = names
        self._read = {path: path.stat().st_size for path in self._logs()}
        self._kinds: set[str] = set()

    def new(self) -> list[str]:
        """Return the lines since the last call, without those present at the start."""
        found = []
        for line in self._written():
            kind = _NUMBER.sub("", line)
            if kind not in self._kinds:
                self._kinds.add(kind)
                found.append(line)
        return found

    def _written(self) -> list[str]:
        found: list[str] = []
        for path in self._logs():
            begin = self._read.get(path, 0)
            if path.stat().st_size <= begin:
                continue
            with path.open("rb") as file:
                file.seek(begin)
                whole = file.read(_MOST).rpartition(b"\n")[0]
            self._read[path] = begin + len(whole)
            lines = whole.decode(errors="replace").splitlines()
            found += [printable(match[1]) for line in lines if (match := _LOUD.match(line))]
        return found

    def _logs(self) -> list[Path]:
        return sorted(path for name in self.names for path in self.folder.glob(f"{name}_*.log"))
