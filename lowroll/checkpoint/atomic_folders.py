"""Atomic publication of folders, with damage detection.

    write into .tmp-lowroll-*  ->  fsync files  ->  MANIFEST.json, fsync  ->  fsync folder  ->  rename  ->  fsync parent

A dead process leaves the finished folder, or a `.tmp-lowroll-*` that no reader opens and the next
writer removes, since its flock is free. The fsyncs order the data before the name, against power
loss (Pillai et al., OSDI 2014). The manifest has size and SHA-256 of every file, because neither
safetensors nor the file system notices a flipped bit.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lowroll.checkpoint.atomic_files import (
    is_disk_full,
    naming,
    read_file,
    sync_folder,
    system_error,
)
from lowroll.checkpoint.fault_injection import faultpoint
from lowroll.types import printable

log = logging.getLogger(__name__)

MANIFEST = "MANIFEST.json"
TEMPORARY = ".tmp-lowroll-"  # the next writer removes leftovers of this name
FORMAT = 1
_CHUNK = 1 << 20
_MAX_MANIFEST_BYTES = 16 << 20
_MAX_DIGEST_THREADS = 16


class DamagedError(ValueError):
    """A damaged published folder."""


class DiskFullError(OSError):
    """A full disk; nothing was published and no partial data is left."""


class NotSyncedError(OSError):
    """A published folder that could not be synced to disk."""


def publish_folder(dest: Path, write: Callable[[Path], None], meta: dict[str, Any]) -> Path:
    """Publish the folder `dest` with the files that `write(folder)` creates; return `dest`. meta:
    JSON data for the manifest.

    FileExistsError for an existing `dest`, before anything is written. After another error the
    partial folder is removed; a full disk becomes DiskFullError, another system error an OSError
    with the path. NotSyncedError when only the last sync failed.
    """
    dest = Path(dest)
    _check_absent(dest)
    encode_manifest({}, meta)  # meta that is not JSON fails before any write
    dest.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(dest.parent)
    with _temporary_sibling(dest) as tmp:
        faultpoint("publish.begin")
        write(tmp)
        faultpoint("publish.written")
        names = _file_names(tmp)
        _open_to_readers(tmp, names)
        files = {}
        with _digest_threads() as pool:
            digests = pool.map(_sync_and_digest, [tmp / name for name in names])
            for name, digest in zip(names, digests, strict=True):
                files[name] = {"size": (tmp / name).stat().st_size, "sha256": digest}
                faultpoint(f"publish.synced/{name}")
        (tmp / MANIFEST).write_bytes(encode_manifest(files, meta))
        faultpoint("publish.manifest_written")
        _sync_and_digest(tmp / MANIFEST)
        for folder in [*(p for p in tmp.rglob("*") if p.is_dir()), tmp]:
            sync_folder(folder)
        faultpoint("publish.manifest_synced")
        _check_absent(dest)
        os.rename(tmp, dest)
    try:
        faultpoint("publish.renamed")
        sync_folder(dest.parent)
        faultpoint("publish.parent_synced")
    except OSError as error:
        raise NotSyncedError(
            f"{dest} is published, but a power loss could still take it away: {dest.parent} could "
            f"not be synced ({error.strerror})"
        ) from error
    return dest


def verify_folder(path: Path) -> dict[str, Any]:
    """Read every byte that the manifest lists and return its meta. DamagedError names the file."""
    path = Path(path)
    files, meta = _read_manifest(path / MANIFEST)
    for name, entry in files.items():
        file = path / name
        try:
            file_status = file.lstat()
        except (FileNotFoundError, NotADirectoryError):
            raise DamagedError(f"{printable(file)}: listed in {MANIFEST} but missing") from None
        if not stat.S_ISREG(file_status.st_mode):
            raise DamagedError(f"{printable(file)}: not a regular file")
        if file_status.st_size != entry["size"]:
            raise DamagedError(
                f"{printable(file)}: {file_status.st_size} bytes, {entry['size']} were published"
            )
    with _digest_threads() as pool:
        digests = pool.map(_digest, [path / name for name in files])
        for (name, entry), digest in zip(files.items(), digests, strict=True):
            if digest != entry["sha256"]:
                raise DamagedError(
                    f"{printable(path / name)}: SHA-256 differs from what was published"
                )
    return meta


def read_meta(path: Path) -> dict[str, Any] | None:
    """Return a published folder's meta, unverified; None if it is unpublished or damaged."""
    try:
        return _read_manifest(Path(path) / MANIFEST)[1]
    except DamagedError:
        return None


def published_files(path: Path) -> set[str]:
    """Return a published folder's file names. DamagedError for a damaged manifest."""
    return set(_read_manifest(Path(path) / MANIFEST)[0])


def encode_manifest(files: dict[str, dict[str, Any]], meta: dict[str, Any]) -> bytes:
    """Return a manifest's canonical bytes, with a digest of its content. ValueError unless `meta`
    is JSON."""
    body = {"format": FORMAT, "files": files, "meta": meta}
    try:
        text = json.dumps(body, sort_keys=True, allow_nan=False)
        digest = hashlib.sha256(text.encode()).hexdigest()
        return (json.dumps({**body, "sha256": digest}, sort_keys=True, indent=1) + "\n").encode()
    except (TypeError, ValueError) as error:
        raise ValueError(f"meta: not JSON data: {error}") from error


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary folders in `folder` whose writers are dead."""
    for path in Path(folder).glob(f"{TEMPORARY}*"):
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:  # already gone, or foreign
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path)
            log.warning("removed %s, left by an attempt that died", path)
        except BlockingIOError:
            pass  # its writer is alive
        except FileNotFoundError:
            pass  # another writer removed it first
        finally:
            os.close(descriptor)


@contextmanager
def _temporary_sibling(dest: Path) -> Iterator[Path]:
    tmp, descriptor = _lock_new_sibling(dest)
    try:
        yield tmp
    except BaseException as error:
        shutil.rmtree(tmp, ignore_errors=True)
        if is_disk_full(error):
            free = shutil.disk_usage(dest.parent).free
            raise DiskFullError(
                errno.ENOSPC,
                f"disk full while publishing {dest}, {free / 2**20:.0f} MiB free after removing "
                "the partial data; nothing was published",
            ) from error
        code = system_error(error)
        if code is not None and not isinstance(error, FileExistsError):
            raise OSError(
                code, f"{os.strerror(code)} while publishing, nothing was published", str(dest)
            ) from error
        raise
    finally:
        os.close(descriptor)


def _lock_new_sibling(dest: Path) -> tuple[Path, int]:
    """Make and lock a folder beside `dest`; return it and the lock's descriptor. If another writer
    removes it first, try another name."""
    for _ in range(16):
        tmp = dest.parent / f"{TEMPORARY}{dest.name}-{secrets.token_hex(4)}"
        tmp.mkdir(mode=0o755)
        try:
            descriptor = os.open(tmp, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue
        except OSError:
            tmp.rmdir()
            raise
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if tmp.exists():  # else it was removed before it was locked
                return tmp, descriptor
        except BlockingIOError:
            pass  # another writer is about to remove it
        os.close(descriptor)
    raise RuntimeError(f"{dest.parent}: could not keep a temporary folder, other writers remove it")


def _open_to_readers(folder: Path, names: list[str]) -> None:
    """Give files the folder's read permissions: safetensors writes for the owner alone."""
    read_bits = folder.stat().st_mode & 0o444
    for path in (folder / name for name in names):
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode | read_bits != mode:
            path.chmod(mode | read_bits)


def _check_absent(dest: Path) -> None:
    if dest.is_symlink() or dest.exists():
        raise FileExistsError(errno.EEXIST, "already published, refusing to overwrite", str(dest))


def _file_names(folder: Path) -> list[str]:
    names = []
    for path in sorted(folder.rglob("*")):
        mode = path.lstat().st_mode
        if stat.S_ISREG(mode):
            names.append(path.relative_to(folder).as_posix())
        elif not stat.S_ISDIR(mode):
            raise ValueError(f"{path}: only regular files can be published")
    if MANIFEST in names:
        raise ValueError(f"{MANIFEST}: the name is reserved")
    return names


def _read_manifest(path: Path) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode):  # a FIFO would block
            raise DamagedError(f"{path}: not a regular file")
        if status.st_size > _MAX_MANIFEST_BYTES:
            raise DamagedError(
                f"{path}: {status.st_size:,} bytes; a manifest has {_MAX_MANIFEST_BYTES:,} at most"
            )
        raw = read_file(path)
    except (FileNotFoundError, NotADirectoryError):
        raise DamagedError(f"{path}: missing") from None
    try:
        content = json.loads(raw)
        files, meta = content["files"], content["meta"]
        is_intact = encode_manifest(files, meta) == raw
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedError(f"{path}: unreadable ({printable(error)})") from error
    if not is_intact:
        raise DamagedError(f"{path}: its content differs from what was published")
    if not isinstance(meta, dict) or not isinstance(files, dict):
        raise DamagedError(f"{path}: files and meta must be objects")
    for name, entry in files.items():
        _check_entry(path, name, entry)
    return files, meta


def _check_entry(path: Path, name: str, entry: object) -> None:
    if "\0" in name or name in ("", ".") or Path(name).is_absolute() or ".." in Path(name).parts:
        raise DamagedError(f"{path}: {printable(repr(name))} is no file of the folder")
    if (
        not isinstance(entry, dict)
        or type(entry.get("size")) is not int
        or not isinstance(entry.get("sha256"), str)
    ):
        raise DamagedError(f"{path}: {printable(name)}: expected a size and a sha256")


def _digest_threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(_MAX_DIGEST_THREADS, os.cpu_count() or 1))


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with naming(path), path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _sync_and_digest(path: Path) -> str:
    with naming(path):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    return _digest(path)
