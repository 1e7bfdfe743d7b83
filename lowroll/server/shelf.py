"""New weights by the id of a version: a folder below the one that `--weights-dir` names.

    weights-dir/step_7/    as `checkpoint.publish` leaves it, with its MANIFEST.json: a dense model
                           folder of the served model's sizes, or a PEFT adapter folder

A client says an id and never a path. What an id may be leads nowhere else; neither the folder nor
what is read of it may be a link; and every byte has the digest that it was published with.
"""

from __future__ import annotations

import re
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from lowroll.checkpoint.publish import MANIFEST, published_files, verify_folder
from lowroll.engine.base import Capabilities
from lowroll.server.errors import Refused
from lowroll.types import printable

if TYPE_CHECKING:
    from lowroll.weights.update import WeightUpdate

_VERSION = re.compile(r"(?!\.)[A-Za-z0-9._-]{1,64}", re.ASCII)
_NUMBER = re.compile(r"\d{1,18}$", re.ASCII)
_ADAPTER = ("adapter_config.json", "adapter_model.safetensors")


class WeightShelf:
    """The versions in a folder, for an engine that was made from the folder `model`. ValueError
    when there is no such folder."""

    def __init__(self, folder: str | Path, model: Path) -> None:
        self.folder = Path(folder).resolve()
        self.model = model
        self.current: str | None = None  # None before the first update
        if not self.folder.is_dir():
            raise ValueError(f"--weights-dir: {folder} is no folder")

    def versions(self) -> list[str]:
        """The ids of what is published there."""
        return sorted(
            path.name
            for path in self.folder.iterdir()
            if _VERSION.fullmatch(path.name) and _is_published(path)
        )

    def number(self, version: str, newest: int) -> int:
        """Of a policy: the number at the end of its id, or else the one after the newest."""
        found = _NUMBER.search(version)
        return newest + 1 if found is None else int(found[0])

    def read(self, version: str, number: int, able: Capabilities, weights: str) -> WeightUpdate:
        """The update to a version, as policy `number`, in this machine's memory. able, weights: what
        the engine can, and in which format it multiplies. Takes as long as reading it twice.

        Refused: 404 when there is none, 409 when it is damaged or not for this engine."""
        folder = self.find(version)
        try:
            verify_folder(folder)
            listed = published_files(folder)
            kind = "adapter" if _ADAPTER[0] in listed else "full"
            if kind not in able.updates:
                takes = ", ".join(sorted(able.updates)) or "none"
                raise ValueError(f"kind {kind!r}: this engine takes updates of kind {takes}")
            if kind == "adapter":
                return _adapter(folder, number, listed, weights)
            return _full(folder, number, listed, self.model)
        except (ValueError, OSError) as error:
            raise Refused(f"version: {self._told(error)}", "version", 409) from error

    def find(self, version: str) -> Path:
        """The folder of an id. Refused: 400 for what is no id, 404 when it is not there."""
        if not _VERSION.fullmatch(version):
            raise Refused(
                "version: expected up to 64 letters, digits, '.', '_' and '-', without a '.' in "
                f"front, got {printable(repr(version), 80)}",
                "version",
            )
        folder = self.folder / version
        if not _is_published(folder):
            raise Refused(f"version: there is no {version}", "version", 404)
        return folder

    def _told(self, error: Exception) -> str:
        """What is wrong, by names below the shelf."""
        return printable(str(error).replace(f"{self.folder}/", ""), 1000)


def _is_published(folder: Path) -> bool:
    """Whether it is a folder with a manifest, and no link to one."""
    return not folder.is_symlink() and (folder / MANIFEST).is_file()


def _adapter(folder: Path, number: int, listed: set[str], weights: str) -> WeightUpdate:
    from lowroll.model import base, lora
    from lowroll.weights.update import WeightUpdate

    _check_published(listed, [*_ADAPTER, *([base.FILE] if (folder / base.FILE).exists() else [])])
    stated = base.read(folder)
    if stated is not None and stated.low_bit and stated.weights != weights:
        raise ValueError(
            f"{base.FILE}: weights: it learned on {stated.weights}, and this engine's are {weights}"
        )
    scale = 1.0 if stated is None else stated.uaq_scale or 1.0
    alpha, tensors = lora.stored(folder, scale)
    return WeightUpdate(number, "adapter", tensors.items, lora_alpha=alpha, input_scale=scale)


def _full(folder: Path, number: int, listed: set[str], model: Path) -> WeightUpdate:
    from lowroll.model import hf
    from lowroll.weights.update import WeightUpdate

    spec, files, tensors = hf.stored(folder)
    _check_published(listed, ["config.json", *(path.name for path in files.values())])
    served = replace(hf.read_headers(model)[0], eos_ids=spec.eos_ids)  # a server's own
    odd = [f.name for f in fields(spec) if f.compare and vars(spec)[f.name] != vars(served)[f.name]]
    if odd:
        raise ValueError(f"config.json: {', '.join(odd)}: not as the served model's")
    return WeightUpdate(number, "full", tensors.items)


def _check_published(listed: set[str], names: list[str]) -> None:
    """ValueError for a file that was put there later."""
    for name in names:
        if name not in listed:
            raise ValueError(f"{name}: the folder was not published with it")
