"""Compilation of this package's sources on first use, called through ctypes.

A library is stored in `$XDG_CACHE_HOME/lowroll/kernels` (or `~/.cache/lowroll/kernels`) under the
digest of its source, headers, compiler and options. It is renamed once built, so concurrent builds
are safe. Sources include no torch headers: a build takes seconds and fits every torch.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import stat
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from lowroll.kernels.support import YES, Support, no

log = logging.getLogger(__name__)


def fields(kind: type, *names: str) -> list[tuple[str, Any]]:
    """Return the fields of one type in a ctypes struct."""
    return [(name, kind) for name in names]


def pointer(t: Tensor | None) -> int | None:
    """Return a tensor's address; None is null."""
    return None if t is None else t.data_ptr()


def library(
    source: Path, headers: Sequence[Path], compiler: Path, flags: list[str], deadline_s: float
) -> ctypes.CDLL:
    """Return the shared library of a source, built unless cached.

    RuntimeError when the compiler fails or takes too long; PermissionError when another user owns
    the folder.
    """
    folder = cache_folder()
    version = run([str(compiler), "--version"], source.name, deadline_s)
    texts = [path.read_text() for path in (source, *headers)]
    digest = hashlib.sha256("\0".join([*texts, version, *flags]).encode()).hexdigest()[:24]
    path = folder / f"{source.stem}-{digest}.so"
    if not path.exists():
        descriptor, temporary_path = tempfile.mkstemp(suffix=".so", dir=folder)
        os.close(descriptor)
        try:
            run([str(compiler), *flags, str(source), "-o", temporary_path], source.name, deadline_s)
            os.replace(temporary_path, path)
        finally:
            Path(temporary_path).unlink(missing_ok=True)
    return ctypes.CDLL(str(path))


def supports(make: Callable[[], object], otherwise: str) -> Support:
    """Return whether `make` succeeds. A failure warns of what happens `otherwise`."""
    try:
        make()
    except (RuntimeError, OSError) as error:
        log.warning("%s: their kernel cannot be built (%s)", otherwise, error)
        return no(f"cannot be built: {error}")
    return YES


def cache_folder() -> Path:
    """Return the folder of libraries. PermissionError when another user owns it."""
    root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    folder = Path(root) / "lowroll" / "kernels"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode):
        raise PermissionError(
            f"{folder}: expected a folder of the user's own, to load compiled kernels from"
        )
    if status.st_mode & 0o077:
        folder.chmod(0o700)
    return folder


def run(command: list[str], what: str, deadline_s: float) -> str:
    """Run a compiler and return what it prints. RuntimeError when it fails or takes too long."""
    compiler = Path(command[0]).name
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=deadline_s)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{what}: {compiler} did not end within {deadline_s} s") from None
    if result.returncode:
        lines = (result.stderr or result.stdout).strip().splitlines()[:8]
        raise RuntimeError(f"{what}: {compiler} failed ({result.returncode}):\n" + "\n".join(lines))
    return result.stdout
