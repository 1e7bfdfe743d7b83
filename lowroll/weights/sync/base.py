"""Published weights as their readers see them: one folder for each version (docs/server.md).

    broadcasts/step_000007/    as `checkpoint.atomic_folders` leaves it, with its MANIFEST.json
               step_000007/STABLE    JSON: version, attempt, kind, manifest_digest, noise

The marker is written last; a folder without it is ignored. The SHA-256 of the manifest covers every
byte, so it never matches the files of another attempt.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from lowroll.checkpoint.atomic_files import read_file
from lowroll.checkpoint.atomic_folders import MANIFEST, read_meta
from lowroll.transport.base import TransportError, wait_until
from lowroll.types import printable

STABLE = "STABLE"
Kind = Literal["full", "adapter", "codes"]
WAYS = ("filesystem", "nccl", "cuda_ipc")
FORMAT = 1
_NAME = re.compile(r"step_([0-9]{1,18})", re.ASCII)
_MOST_MARKER = 1 << 16


class LinkFailed(TransportError):
    """A failure of the direct route."""


class Replaced(TransportError):
    """The files were replaced while they were read."""


class Gap(ValueError):
    """A version whose changes are of other weights than the engine's."""


@dataclass(frozen=True)
class Broadcast:
    """The weights of a version. noise: {"seed", "sigma"} for the engine's norms, or None. since:
    the base version of `codes`. way: of the tensors; "filesystem": in the folder."""

    version: int
    path: Path
    kind: Kind
    digest: str  # of the manifest, and so of every byte
    attempt: int  # of the trainer that wrote it
    noise: dict[str, Any] | None = None
    since: int | None = None
    way: str = "filesystem"

    def lies(self) -> str:
        """Return the present digest of its folder, "" for none."""
        found = broadcast_in(self.path)
        return "" if found is None else found.digest


class Broadcasts:
    """The versions in a folder, which need not exist yet. Other entries are ignored."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def versions(self) -> list[Broadcast]:
        """Return all broadcasts, the oldest first."""
        return list(filter(None, map(self.at, sorted(self._numbers()))))

    def newest(self, most: int | None = None) -> Broadcast | None:
        """Return the broadcast of the highest version (up to `most`), or None."""
        numbers = [n for n in self._numbers() if most is None or n <= most]
        return next(filter(None, map(self.at, sorted(numbers, reverse=True))), None)

    def at(self, version: int) -> Broadcast | None:
        """Return the broadcast of a version, or None. `step_000007` precedes `step_7`."""
        names = (folder_name(version), f"step_{version}")
        return next(filter(None, (broadcast_in(self.folder / name) for name in names)), None)

    def wait(
        self, version: int, deadline_s: float, alive: Callable[[], None] | None = None
    ) -> Broadcast:
        """Wait for the broadcast of a version. alive: as in `wait_until`. DeadlineExceeded."""
        found: Broadcast | None = None

        def is_there() -> bool:
            nonlocal found
            found = self.at(version)
            return found is not None

        wait_until(
            is_there,
            lambda: (
                f"the weights of version {version} in {self.folder} ({self._describe_state(version)})"
            ),
            deadline_s,
            alive,
        )
        assert found is not None
        return found

    def _describe_state(self, version: int) -> str:
        path = self.folder / folder_name(version)
        if path.exists():
            try:
                read_broadcast(path)
            except (ValueError, OSError) as error:
                return printable(error)
        newest = self.newest()
        return "none is there" if newest is None else f"the newest is version {newest.version}"

    def _numbers(self) -> set[int]:
        try:
            names = os.listdir(self.folder)
        except FileNotFoundError:
            return set()
        return {n for n in map(number_of, names) if n is not None}


def transfer_token(admin: str) -> str:
    """Return the token of the direct route, whose readers must not be able to command an engine."""
    return hashlib.sha256(f"weights {admin}".encode()).hexdigest()[:32]


def folder_name(version: int) -> str:
    return f"step_{version:06d}"


def number_of(name: str) -> int | None:
    """Return the version in a folder's name, `step_000007` or `step_7`; None for other names."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    number = int(match[1])
    return number if name in (folder_name(number), f"step_{number}") else None


class _MarkerNoise(msgspec.Struct, forbid_unknown_fields=True):
    seed: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
    sigma: Annotated[float, msgspec.Meta(ge=0)]


class _Marker(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    format: int
    version: int
    attempt: Annotated[int, msgspec.Meta(ge=0)]
    kind: Kind
    manifest_digest: str
    noise: _MarkerNoise | None = None


def encode_marker(
    version: int, attempt: int, kind: Kind, manifest_digest: str, noise: dict[str, Any] | None
) -> bytes:
    noise_fields = None if noise is None else _MarkerNoise(**noise)
    marker = _Marker(FORMAT, version, attempt, kind, manifest_digest, noise_fields)
    return msgspec.json.encode(marker) + b"\n"


def manifest_digest(folder: Path) -> str:
    """Return the SHA-256 of a published folder's manifest in hex. OSError without one."""
    return hashlib.sha256(read_file(folder / MANIFEST)).hexdigest()


def read_broadcast(path: Path) -> Broadcast:
    """Return the broadcast in a folder. ValueError or OSError, with the file and the field, unless
    marker and manifest belong together."""
    number = number_of(path.name)
    if number is None or path.is_symlink():
        raise ValueError(f"{path}: no folder of a version")
    marker = _read_marker(path / STABLE)
    digest = manifest_digest(path)
    if digest != marker.manifest_digest:
        raise ValueError(
            f"{path / STABLE}: manifest_digest: {MANIFEST} is not the one that it was written for"
        )
    meta = read_meta(path)
    if meta is None or marker.version != number:
        raise ValueError(f"{path / STABLE}: version: it is not of this folder")
    noise = None if marker.noise is None else msgspec.structs.asdict(marker.noise)
    expected = {"broadcast": marker.format, "version": number, "kind": marker.kind, "noise": noise}
    if any(meta.get(name) != value for name, value in expected.items()):
        raise ValueError(f"{path / STABLE}: it and {MANIFEST} say different things")
    since, way = meta.get("since"), meta.get("way", "filesystem")
    has_base = type(since) is int  # only changed codes have one
    if has_base != (marker.kind == "codes") or way not in WAYS:
        raise ValueError(f"{path / MANIFEST}: meta: since, way: of no broadcast")
    return Broadcast(number, path, marker.kind, digest, marker.attempt, noise, since, way)


def broadcast_in(path: Path) -> Broadcast | None:
    """Return the broadcast in a folder, or None."""
    with suppress(ValueError, OSError):
        return read_broadcast(path)
    return None


@contextmanager
def reading(broadcast: Broadcast) -> Iterator[None]:
    """Protect a broadcast's files from removal in the block, by a shared lock. Raises Replaced at
    its beginning or end."""
    try:
        descriptor = os.open(broadcast.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        raise _replaced(broadcast) from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _replaced(broadcast) from None
        _check_same(broadcast)
        try:
            yield
        except (ValueError, OSError):
            _check_same(broadcast)  # errors from replaced files do not count
            raise
        _check_same(broadcast)
    finally:
        os.close(descriptor)


def _check_same(broadcast: Broadcast) -> None:
    if broadcast_in(broadcast.path) != broadcast:
        raise _replaced(broadcast)


def _replaced(broadcast: Broadcast) -> Replaced:
    return Replaced(f"{broadcast.path}: version {broadcast.version} was removed or written again")


def _read_marker(path: Path) -> _Marker:
    if path.lstat().st_size > _MOST_MARKER or path.is_symlink():
        raise ValueError(f"{path}: no marker of ours")
    try:
        marker = msgspec.json.decode(read_file(path), type=_Marker)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"{path}: {printable(error)}") from None
    if marker.format != FORMAT:
        raise ValueError(f"{path}: format: {marker.format} is of another lowroll")
    return marker
