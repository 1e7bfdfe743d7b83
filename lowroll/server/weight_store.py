"""Weights by the id of a version, a folder in `--weights-dir` (docs/server.md).

A client sends an id and never a path. Folders and files must not be links, and every byte has its
published digest.
"""

from __future__ import annotations

import os
import re
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from lowroll.checkpoint.atomic_folders import MANIFEST, published_files, read_meta, verify_folder
from lowroll.engine.base import Capabilities
from lowroll.server.protocol import wrong_field
from lowroll.transport.base import TransportError
from lowroll.types import printable
from lowroll.weights.sync.base import (
    STABLE,
    Broadcast,
    Replaced,
    folder_name,
    number_of,
    read_broadcast,
    reading,
)

if TYPE_CHECKING:
    from lowroll.weights.exploration_noise import Noise
    from lowroll.weights.sync.client import WeightClient
    from lowroll.weights.sync.update import WeightUpdate

_VERSION_ID = re.compile(r"(?!\.)[A-Za-z0-9._-]{1,64}", re.ASCII)
_TRAILING_NUMBER = re.compile(r"\d{1,18}$", re.ASCII)
_MAX_READS = 3  # of a broadcast that is being rewritten


@dataclass(frozen=True)
class WeightVersion:
    """A published version of the weights. broadcast: None without a trainer's marker."""

    folder: Path
    broadcast: Broadcast | None = None

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def kind(self) -> str:
        """The kind of its weights. DamagedError without a manifest."""
        if self.broadcast is not None:
            return self.broadcast.kind
        return "adapter" if "adapter_config.json" in published_files(self.folder) else "full"

    def number(self, newest: int) -> int:
        """Return its policy number: of the broadcast, else in its name, else after the newest."""
        if self.broadcast is not None:
            return self.broadcast.version
        match = _TRAILING_NUMBER.search(self.name)
        return newest + 1 if match is None else int(match[0])


VersionUpdates = list[tuple[WeightVersion, "WeightUpdate"]]  # in the order to take them


class WeightStore:
    """The versions in a folder, for an engine of the folder `model`. client: of the trainer's
    direct route. ValueError when there is no such folder."""

    def __init__(self, folder: str | Path, model: Path, client: WeightClient | None = None) -> None:
        self.folder = Path(folder).resolve()
        self.model = model
        self.client = client
        self.current: WeightVersion | None = None
        if not self.folder.is_dir():
            raise ValueError(f"--weights-dir: {folder} is no folder")
        # loads torch, for which no request should wait
        import_module("lowroll.weights.sync.folder")

    def versions(self) -> list[str]:
        return sorted(
            path.name
            for path in self.folder.iterdir()
            if _VERSION_ID.fullmatch(path.name) and _is_published(path)
        )

    @property
    def held(self) -> Broadcast | None:
        return None if self.current is None else self.current.broadcast

    def load(
        self, id: str, newest: int, able: Capabilities, weights: str, gap: bool = False
    ) -> tuple[WeightVersion, VersionUpdates]:
        """Return the version of an id and the updates to it; none if the engine holds it."""
        for _ in range(_MAX_READS):
            version = self.find(id)
            if version.broadcast is not None and version.broadcast == self.held:
                return version, []
            with suppress(Replaced):
                return version, self.read(version, newest, able, weights, gap)
        raise wrong_field("version", f"{id} is being written again", 409)

    def read(
        self,
        version: WeightVersion,
        newest: int,
        able: Capabilities,
        weights: str,
        gap: bool = False,
    ) -> VersionUpdates:
        """Return the updates to a version, in memory, in order. A version of changes begins where
        the engine is, or with `gap` at a complete version. newest: the number of the engine's
        policy. able, weights: the engine's capabilities and format. Refuse with 404 an unknown
        version, with 409 a damaged or unfit one."""
        updates = []
        try:
            for link in self._chain(version, gap):
                # finds out whether a broadcast is being rewritten
                with nullcontext() if link.broadcast is None else reading(link.broadcast):
                    update = self._read(link, link.number(newest), able, weights)
                updates.append((link, update))
            return updates
        except Replaced:
            raise
        except (ValueError, OSError, TransportError) as error:
            raise wrong_field("version", self._message(error), 409) from error

    def _chain(self, version: WeightVersion, gap: bool) -> list[WeightVersion]:
        """Return the versions to take, the oldest first.

        A broadcast of changes needs the version `since` before it, back to the one that the engine
        holds or, with `gap`, to a complete one.
        """
        held_broadcast = None if gap else self.held
        versions = [version]
        while (oldest := versions[0].broadcast) is not None and oldest.since is not None:
            if held_broadcast is not None and held_broadcast.version == oldest.since:
                break
            if not 0 <= oldest.since < oldest.version:
                raise ValueError(
                    f"{oldest.path.name}: since: {oldest.since} is no version before it"
                )
            base_folder = self.folder / folder_name(oldest.since)
            versions.insert(0, WeightVersion(base_folder, read_broadcast(base_folder)))
        return versions

    def _read(
        self, version: WeightVersion, number: int, able: Capabilities, weights: str
    ) -> WeightUpdate:
        from lowroll.weights.sync.folder import read_update

        folder, broadcast = version.folder, version.broadcast
        verify_folder(folder)
        kind = version.kind
        if kind not in able.updates:
            kinds = ", ".join(sorted(able.updates)) or "none"
            raise ValueError(f"kind {kind!r}: this engine takes updates of kind {kinds}")
        update = read_update(folder, number, kind, self.model, weights, broadcast, self.client)
        return replace(update, noise=_noise_of(broadcast, able))

    def find(self, version: str) -> WeightVersion:
        """Return the version of an id; `step_7` and `step_000007` are one. Refuse with 400 an
        invalid id, with 404 an unknown version, with 409 one whose marker is of other files."""
        if not _VERSION_ID.fullmatch(version):
            raise wrong_field(
                "version",
                "expected up to 64 letters, digits, '.', '_' and '-', without a '.' in "
                f"front, got {printable(repr(version), 80)}",
            )
        number = number_of(version)
        names = [version] if number is None else [version, folder_name(number), f"step_{number}"]
        folders = (self.folder / name for name in names)
        folder = next((folder for folder in folders if _is_published(folder)), None)
        if folder is None:
            raise wrong_field("version", f"there is no {version}", 404)
        if not os.path.lexists(folder / STABLE):  # no broadcast, or an unfinished one
            if "broadcast" in (read_meta(folder) or {}):
                raise wrong_field("version", f"there is no {version} yet: no {STABLE}", 404)
            return WeightVersion(folder)
        try:
            return WeightVersion(folder, read_broadcast(folder))
        except (ValueError, OSError) as error:
            raise wrong_field("version", self._message(error), 409) from error

    def _message(self, error: Exception) -> str:
        return printable(str(error).replace(f"{self.folder}/", ""), 1000)


def _is_published(folder: Path) -> bool:
    return not folder.is_symlink() and (folder / MANIFEST).is_file()


def _noise_of(broadcast: Broadcast | None, able: Capabilities) -> Noise | None:
    from lowroll.weights.exploration_noise import Noise

    if broadcast is None or broadcast.noise is None:
        return None
    noise = Noise(broadcast.noise["seed"], float(broadcast.noise["sigma"]))
    if noise.sigma and not able.noise:
        raise ValueError("noise: this engine's norms take none; start it with --noisy")
    return noise
