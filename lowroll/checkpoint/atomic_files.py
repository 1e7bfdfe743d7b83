"""Single files that are whole or absent, and I/O errors that name their file."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lowroll.checkpoint.fault_injection import faultpoint

_DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
_MACHINE_ERRNOS = (  # the same call can succeed later, or elsewhere
    *_DISK_FULL_ERRNOS,
    errno.EIO,
    errno.ESTALE,
    errno.EAGAIN,
    errno.ENOMEM,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOBUFS,
    errno.ENOLCK,
    errno.ETIMEDOUT,
)
_RUST_OS_ERROR = re.compile(r"\(os error ([0-9]+)\)")  # safetensors' wording


def read_file(path: Path) -> bytes:
    """Read a regular file. OSError names it, also when reading fails half way."""
    with naming(path):
        if not stat.S_ISREG(os.stat(path).st_mode):  # a FIFO would block
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return Path(path).read_bytes()


def write_file(path: Path, data: bytes) -> None:
    """Write a file atomically: after a crash it has the old content or the new one."""
    path = Path(path)
    tmp = path.with_name(f".tmp-{path.name}")
    with naming(path):
        try:
            faultpoint(f"file.begin/{path.name}")
            with tmp.open("wb") as file:
                file.write(data)
                faultpoint(f"file.written/{path.name}")
                file.flush()
                os.fsync(file.fileno())
            faultpoint(f"file.synced/{path.name}")
            os.replace(tmp, path)
        except OSError:
            tmp.unlink(missing_ok=True)
            raise
        faultpoint(f"file.renamed/{path.name}")
        sync_folder(path.parent)


def append_line(path: Path, line: bytes) -> None:
    """Append a line and its newline, on disk at return; after an error the file is unchanged."""
    path = Path(path)
    with naming(path):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            size_before = os.fstat(descriptor).st_size
            try:
                write_all(descriptor, line + b"\n")
                faultpoint(f"file.appended/{path.name}")
                os.fsync(descriptor)
            except OSError:
                os.ftruncate(descriptor, size_before)
                raise
        finally:
            os.close(descriptor)


def write_all(descriptor: int, data: bytes) -> None:
    """Write every byte: on a disk that fills up, one call may write only some."""
    remaining = memoryview(data)
    while remaining:
        remaining = remaining[os.write(descriptor, remaining) :]


def sync_folder(path: Path) -> None:
    """Sync a directory's entries (names, renames) to disk."""
    with naming(path):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add this file's name to the block's OSErrors that have none."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror or os.strerror(error.errno), str(path)) from error


def system_error(error: BaseException) -> int | None:
    """Return the errno of a system error, also wrapped by a library; else None."""
    if isinstance(error, OSError):
        return error.errno
    match = _RUST_OS_ERROR.search(str(error))
    if match:
        return int(match[1])
    return next(
        (code for code in (*_DISK_FULL_ERRNOS, errno.EIO) if os.strerror(code) in str(error)), None
    )


def is_disk_full(error: BaseException) -> bool:
    return system_error(error) in _DISK_FULL_ERRNOS


def is_of_machine(error: BaseException) -> bool:
    """Return whether no name or setting caused this system error."""
    return isinstance(error, OSError) and error.errno in _MACHINE_ERRNOS
