"""The numbered checkpoints of a run: `step_000012/{<name>.safetensors, state.json, MANIFEST.json}`.

Processes that hold shards write `<name>.1of2.safetensors` and so on into the same folder. A
tensor's rows are its parts' in order, so any number of processes can read them.

A checkpoint exists whole or not at all. `load()` returns the newest undamaged one; an empty store
raises: a run never restarts from scratch by accident. A checkpoint is removed only after a newer
one was synced, read back and verified.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowroll.checkpoint.atomic_files import sync_folder
from lowroll.checkpoint.atomic_folders import (
    TEMPORARY,
    DamagedError,
    NotSyncedError,
    publish_folder,
    published_files,
    read_meta,
    remove_leftovers,
    verify_folder,
)
from lowroll.checkpoint.fault_injection import faultpoint
from lowroll.checkpoint.folder_swap import foreign_in

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

STATE = "state.json"
DAMAGED = "damaged"
TRASH = ".trash-"
_STEP_FOLDER = re.compile(r"step_([0-9]{6,})")


class Pieces:
    """A tensor with rows in several files, which are joined when sliced."""

    def __init__(self, pieces: Sequence[torch.Tensor]) -> None:
        self.pieces = pieces
        self.dtype = pieces[0].dtype
        self.shape = (sum(map(len, pieces)), *pieces[0].shape[1:])

    def __getitem__(self, rows: slice) -> torch.Tensor:
        import torch

        start, stop, _ = rows.indices(self.shape[0])
        slices = []
        first_row = 0
        for piece in self.pieces:
            slices.append(piece[max(start - first_row, 0) : max(stop - first_row, 0)])
            first_row += len(piece)
        return torch.cat(slices)


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint, tensors on the CPU."""

    step: int
    tensors: dict[str, dict[str, Any]]  # each is a torch.Tensor, or Pieces
    state: dict[str, Any]
    meta: dict[str, Any]  # of the writer: versions, hashes, attempt
    path: Path


class Store:
    """The checkpoints of a run in `folder`, for the process that holds its `RunLock`.

    keep_last: how many of the newest to keep (None: all). keep_interval: multiples of it are kept
    forever.
    """

    def __init__(
        self, folder: Path, keep_last: int | None = None, keep_interval: int | None = None
    ) -> None:
        self.folder = Path(folder)
        self.keep_last = keep_last
        self.keep_interval = keep_interval
        self._foreign: set[str] = set()

    def steps(self) -> list[int]:
        """Return the steps with a folder, ascending, verified or not. Other names cause a
        warning."""
        steps = []
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            match = _STEP_FOLDER.fullmatch(path.name)
            if (
                match
                and _folder_name(int(match[1])) == path.name
                and path.is_dir()
                and not path.is_symlink()
            ):
                steps.append(int(match[1]))
            elif path.name != DAMAGED and not path.name.startswith((TEMPORARY, TRASH)):
                self._warn_foreign(path)
        return sorted(steps)

    def path(self, step: int) -> Path:
        return self.folder / _folder_name(step)

    def save(
        self,
        step: int,
        tensors: dict[str, dict[str, torch.Tensor]],
        state: dict[str, Any],
        meta: dict[str, Any] | None = None,
        parts: int = 1,
        share: Callable[[Path], object] | None = None,
    ) -> Path:
        """Publish checkpoint `step`, verify it from disk, then apply the retention rule.

        parts: the number of processes with shards; `tensors` are then the first one's, and
        share(folder) makes the others `write_part` theirs. ValueError for state that JSON would
        change, such as NaN or tuples. FileExistsError when `step` exists, NotSyncedError when it
        could not be read back.
        """
        text = _encode_state(state)

        def write(folder: Path) -> None:
            if share is not None:
                share(folder)
                faultpoint("store.shared")
            write_part(folder, tensors, 0, parts)
            (folder / STATE).write_text(text, encoding="utf-8")

        path, synced = self.path(step), True
        try:
            publish_folder(path, write, {**(meta or {}), "step": step, "tensors": sorted(tensors)})
        except NotSyncedError as error:
            synced = False
            log.warning("%s; older checkpoints stay for now", error)
        try:
            verify_folder(path)
            faultpoint("store.verified")
        except OSError as error:
            raise NotSyncedError(
                f"{path} is published, but could not be read back: {error.strerror}"
            ) from error
        if synced:
            self._apply_retention(step)
        return path

    def load(
        self,
        step: int | None = None,
        only: Collection[str] | None = None,
        verified: bool = False,
    ) -> Checkpoint:
        """Return the newest verified checkpoint, or checkpoint `step`. only: the tensor files to
        read. verified: this step was just loaded.

        A damaged newest one is moved to `damaged/` and the one before is tried; DamagedError when
        none is left. A requested damaged `step` raises and stays. FileNotFoundError when there is
        none.
        """
        if step is not None:
            if step not in self.steps():
                raise FileNotFoundError(
                    f"{self.folder}: no checkpoint of step {step}, there are {self.steps()}"
                )
            return self._read(step, only, verified)
        for candidate in reversed(self.steps()):
            try:
                return self._read(candidate, only)
            except DamagedError as error:
                quarantine_path = self._quarantine(candidate)
                log.warning(
                    "DAMAGED CHECKPOINT: %s. Moved to %s; falling back to the one before.",
                    error,
                    quarantine_path,
                )
        if (self.folder / DAMAGED).is_dir():
            raise DamagedError(
                f"{self.folder}: no undamaged checkpoint is left; the damaged ones are in "
                f"{self.folder / DAMAGED}. Start a new run folder to begin from scratch."
            )
        raise FileNotFoundError(f"{self.folder}: no checkpoint")

    def truncate(self, step: int) -> None:
        """Remove every checkpoint after `step`."""
        for newer_step in self.steps():
            if newer_step > step:
                self._remove(newer_step)
        self.clean()

    def clean(self) -> None:
        """Remove a dead process's half-written and half-removed checkpoints."""
        remove_leftovers(self.folder)
        for leftover in self.folder.glob(f"{TRASH}step_*"):
            if _STEP_FOLDER.fullmatch(leftover.name.removeprefix(TRASH)):
                shutil.rmtree(leftover)

    def _read(
        self, step: int, only: Collection[str] | None = None, verified: bool = False
    ) -> Checkpoint:
        path = self.folder / _folder_name(step)
        meta = (read_meta(path) if verified else None) or verify_folder(path)
        if meta.get("step") != step or "tensors" not in meta:
            raise DamagedError(f"{path}: its manifest is not that of checkpoint {step}")
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
        tensors = {
            name: _read_tensors(path, name)
            for name in meta["tensors"]
            if only is None or name in only
        }
        return Checkpoint(step, tensors, state, meta, path)

    def _apply_retention(self, newest: int) -> None:
        if self.keep_last is None:
            return
        older = [step for step in self.steps() if step < newest]
        num_superseded = max(0, len(older) - (self.keep_last - 1))
        try:
            self.clean()
            for step in older[:num_superseded]:
                is_pinned = self.keep_interval is not None and step % self.keep_interval == 0
                if not is_pinned and not self._holds_foreign(step):
                    self._remove(step)
        except OSError as error:
            log.warning(
                "an old checkpoint could not be removed, the next save tries again: %s", error
            )

    def _holds_foreign(self, step: int) -> bool:
        foreign = foreign_in(self.path(step), contents=False)
        if foreign:
            log.warning("%s: the folder stays", foreign)
        return bool(foreign)

    def _remove(self, step: int) -> None:
        self.clean()
        name = _folder_name(step)
        trash = self.folder / f"{TRASH}{name}"
        os.rename(self.folder / name, trash)  # hides it from readers first
        faultpoint(f"store.trashed/{name}")
        shutil.rmtree(trash)
        faultpoint(f"store.removed/{name}")

    def _quarantine(self, step: int) -> Path:
        target = self.folder / DAMAGED
        target.mkdir(exist_ok=True)
        name = _folder_name(step)
        num_quarantined = sum(1 for path in target.iterdir() if path.name.startswith(f"{name}-"))
        quarantine_path = target / f"{name}-{num_quarantined + 1}"
        os.rename(self.folder / name, quarantine_path)
        sync_folder(self.folder)
        return quarantine_path

    def _warn_foreign(self, path: Path) -> None:
        if path.name not in self._foreign:
            self._foreign.add(path.name)
            log.warning("%r is not a checkpoint name, ignored", str(path))


def write_part(
    folder: Path, tensors: Mapping[str, Mapping[str, torch.Tensor]], part: int, parts: int
) -> None:
    """Write one process's shards into a checkpoint's unpublished folder."""
    for name, group in tensors.items():
        _write_tensors(folder / _file_name(name, part, parts), group)
        faultpoint(f"store.tensors_written/{name}")


def check_pieces(where: str, state: Mapping[str, Any], wanted: Collection[str]) -> None:
    """Raise ValueError unless `state` has exactly the pieces `wanted`: none may silently get a
    default."""
    if differing := sorted({*wanted} ^ state.keys()):
        raise ValueError(
            f"{where}: {differing[0]} is {'missing' if differing[0] in wanted else 'unknown'}: the checkpoint "
            "is of another lowroll, continue it there"
        )


def _file_name(name: str, part: int, parts: int) -> str:
    return f"{name}.safetensors" if parts == 1 else f"{name}.{part + 1}of{parts}.safetensors"


def _folder_name(step: int) -> str:
    return f"step_{step:06d}"


def _encode_state(state: dict[str, Any]) -> str:
    if not isinstance(state, dict):
        raise ValueError(f"state: expected a dict, got {type(state).__name__}")
    _check_json(state, "state")
    return json.dumps(state, allow_nan=False, indent=1) + "\n"


def _check_json(value: object, where: str) -> None:
    if type(value) is dict:
        for key, item in value.items():
            if type(key) is not str:
                raise ValueError(f"{where}: key {key!r} is not a string")
            _check_json(item, f"{where}.{key}")
    elif type(value) is list:
        for index, item in enumerate(value):
            _check_json(item, f"{where}[{index}]")
    elif type(value) is float:
        if value != value or value in (float("inf"), float("-inf")):
            raise ValueError(f"{where}: {value} is not a JSON number")
    elif value is not None and type(value) not in (str, int, bool):
        raise ValueError(f"{where}: a {type(value).__name__} does not survive JSON")


def _write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write tensors, copied where they share memory, which safetensors refuses."""
    from safetensors.torch import save_file

    contiguous_tensors: dict[str, torch.Tensor] = {}
    seen_addresses: set[int] = set()
    for name, tensor in tensors.items():
        contiguous = tensor.detach().cpu().contiguous()
        storage = contiguous.untyped_storage()
        is_view = storage.nbytes() != contiguous.nbytes  # its whole buffer would be written
        if is_view or storage.data_ptr() in seen_addresses:
            contiguous = contiguous.clone()
        elif contiguous.nbytes:  # empty tensors have no address
            seen_addresses.add(storage.data_ptr())
        contiguous_tensors[name] = contiguous
    save_file(contiguous_tensors, path)


def _read_tensors(path: Path, name: str) -> dict[str, Any]:
    """Return the tensors of a file, or of its parts; those with rows in several parts are Pieces.
    DamagedError when parts are missing."""
    from safetensors.torch import load_file

    whole_file = path / f"{name}.safetensors"
    if whole_file.is_file():
        return dict(load_file(whole_file))
    part_counts = []
    for file in published_files(path):
        if match := re.fullmatch(rf"{name}\.1of([0-9]+)\.safetensors", file):
            part_counts.append(int(match[1]))
    if len(part_counts) != 1:
        raise DamagedError(f"{path}: {name}: neither whole nor in the parts of one save")
    num_parts = part_counts[0]
    pieces_by_name: dict[str, list[torch.Tensor]] = {}
    for part in range(num_parts):
        for key, tensor in load_file(path / _file_name(name, part, num_parts)).items():
            pieces_by_name.setdefault(key, []).append(tensor)
    return {
        key: pieces[0] if len(pieces) == 1 else Pieces(pieces)
        for key, pieces in pieces_by_name.items()
    }
