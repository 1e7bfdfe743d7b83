"""The folder route: a version of the weights becomes a folder that engines read (docs/server.md).

    publisher = FolderPublisher(run / "broadcasts", learner, attempt=1, keep=2, base=model_folder)
    publisher.publish(7)      # broadcasts/step_000007, and its STABLE last
    read_update(broadcasts / "step_000007", 7, "full", engine_folder, "int8")    # in the engine

An adapter's folder also has the exact tensors of a base that carries s. With a server
(`sync.server`) the folder of a full version has the layout of buckets in place of the tensors.

A version that is published again stays where its bytes are the same. Otherwise the old folder is
renamed first, so no reader mixes the files of two attempts.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import msgspec
from safetensors.torch import load_file, save_file
from torch import Tensor

from lowroll.checkpoint.atomic_files import sync_folder, write_file
from lowroll.checkpoint.atomic_folders import (
    MANIFEST,
    DamagedError,
    publish_folder,
    published_files,
    read_meta,
    remove_leftovers,
    verify_folder,
)
from lowroll.checkpoint.fault_injection import faultpoint
from lowroll.model import adapter_base as bases
from lowroll.model import hf, lora, scaling
from lowroll.model.headers import read_headers
from lowroll.model.spec import ModelSpec, read_spec
from lowroll.model.transformer import Transformer
from lowroll.quant.formats import get_format
from lowroll.weights.exploration_noise import NoiseSchedule
from lowroll.weights.sync.base import (
    FORMAT,
    STABLE,
    Broadcast,
    Broadcasts,
    Kind,
    encode_marker,
    folder_name,
    manifest_digest,
    number_of,
)
from lowroll.weights.sync.buckets import BucketLayout, pack, unpack
from lowroll.weights.sync.changes import Changes, Shadow
from lowroll.weights.sync.client import WeightClient
from lowroll.weights.sync.server import ServedVersion, WeightServer
from lowroll.weights.sync.update import WeightUpdate

log = logging.getLogger(__name__)

FULL_INTERVAL = 8  # versions: an engine that missed some resumes at a full one
ADAPTER = ("adapter_config.json", "adapter_model.safetensors")
CHANGES = "changes.safetensors"
LAYOUT = "layout.json"  # in place of the tensors
SCALED = "scaled.safetensors"  # an adapter's tensors that dividing by s would round
_CANDIDATE = ".candidate-"
_RETIRED = ".retired-"


@dataclass(frozen=True)
class FolderContent:
    """The content of a version's folder. meta: for the manifest. buckets: served, not written.
    as_files: the same content with them as files."""

    kind: Kind
    write: Callable[[Path], None]
    meta: Mapping[str, Any]
    buckets: list[Tensor] | None = None
    as_files: FolderContent | None = None


class FolderPublisher:
    """A publisher of the learner's versions in `folder`, which requires the run's lock.

    keep: how many versions stay (at least 1), with the bases of changes. base: of an adapter, a
    folder or hub id. shadow: of an aligned learner, to publish changes. server: for whole models.
    ValueError for a model of which nothing learns.
    """

    def __init__(
        self,
        folder: str | Path,
        model: Transformer,
        *,
        attempt: int,
        keep: int,
        base: str = "",
        noise: NoiseSchedule | None = None,
        shadow: Shadow | None = None,
        server: WeightServer | None = None,
    ) -> None:
        self.folder = Path(folder)
        self.model = model
        self.attempt = attempt
        self.keep = keep
        self.base = base
        self.noise = noise
        self.shadow = shadow
        self.server = server
        self._lock = threading.RLock()  # of the folder: the server's thread writes too
        self.broadcasts = Broadcasts(self.folder)
        self._adapted = any(linear.adapter for _, linear in model.linears())
        kept = model.weight_format
        if not self._adapted and kept is not None and not get_format(kept).dense:
            raise ValueError(f"model: its weights are {kept}, and nothing of it learns")
        self.folder.mkdir(parents=True, exist_ok=True)
        self._clean()

    def publish(self, version: int) -> dict[str, float]:
        """Publish a version durably; return its metrics."""
        content = self._changes(version) or self._adapter() or self._full(version)
        with self._lock:
            path = self._write(version, content)
            self._retain(version)
        if content.buckets is not None:
            assert self.server is not None
            self.server.forget_older()
        size = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
        metrics = {"perf/broadcast_bytes": float(size)}
        if self.shadow is not None:
            if content.kind == "codes":
                changed_bytes = (path / CHANGES).stat().st_size
                metrics["perf/changed_bytes_fraction"] = changed_bytes / self.shadow.nbytes
            self.shadow.renew(version)  # the next changes are relative to this version
        return metrics

    def check(self) -> None:
        """Raise TransportError when the direct route has failed."""
        if self.server is not None:
            self.server.check()

    def forget_after(self, version: int) -> None:
        """Retire later versions, which a learner that went back makes again."""
        with self._lock:
            for number, path in reversed(self._folders()):
                if number > version:
                    log.warning(
                        "%s: of a future that the run does not have any more; retired", path
                    )
                    self._retire(path)

    def close(self) -> None:
        """End the direct route, and write the newest version as files."""
        if self.server is not None:
            for newest in self.server.versions[-1:]:
                newest.write()
            self.server.close()
            self.server = None

    # -- the content of a version ------------------------------------------------------------------

    def _changes(self, version: int) -> FolderContent | None:
        """Return the changes since the previous version; None when engines do not hold that, and
        for every FULL_INTERVAL-th."""
        shadow = self.shadow
        if shadow is None or shadow.version != version - 1 or version % FULL_INTERVAL == 0:
            return None
        if self.broadcasts.at(version - 1) is None:
            return None
        stream, changes = shadow.changes()

        def write(target: Path) -> None:
            save_file(stream, target / CHANGES)

        return FolderContent("codes", write, self._scale() | asdict(changes))

    def _adapter(self) -> FolderContent | None:
        if not self._adapted:
            return None
        meta = self._scale()

        def write(target: Path) -> None:
            scale = meta["input_scale"]
            lora.write(self.model, target, self.base, input_scale=scale)
            exact = lora.state(self.model)
            unscaled = lora.unscaled(exact, scale)
            # where `unscaled` converted a tensor, it may have rounded
            converted = {
                name: t.contiguous() for name, t in exact.items() if t is not unscaled[name]
            }
            if converted:
                save_file(converted, target / SCALED)

        return FolderContent("adapter", write, meta)

    def _full(self, version: int) -> FolderContent:
        meta = self._scale()
        config, tensors = hf.contents(self.model)
        if self.server is None or self.server.broken:
            return _model_files(config, tensors, meta)
        update = WeightUpdate(version, "full", tensors.items, input_scale=meta["input_scale"])
        layout, buckets = pack(tensors, update.content_digest(), self.model.device)

        def write(target: Path) -> None:
            (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
            (target / LAYOUT).write_text(json.dumps(layout.to_json()) + "\n")

        as_files = _model_files(config, unpack(layout, buckets), meta)
        return FolderContent("full", write, meta | {"way": self.server.way}, buckets, as_files)

    def _scale(self) -> dict[str, float]:
        return {"input_scale": scaling.applied(self.model) or 1.0}

    # -- its folder --------------------------------------------------------------------------------

    def _write(self, version: int, content: FolderContent, same: bool = False) -> Path:
        """Write a version's folder and its marker. same: only the files differ from the present
        folder. Requires `_lock`."""
        noise = None
        if self.noise is not None:
            drawn = self.noise.at(version)
            noise = {"seed": drawn.seed, "sigma": drawn.sigma}
        own = {"broadcast": FORMAT, "version": version, "kind": content.kind, "noise": noise}
        meta = {**content.meta, **own}
        dest = self.folder / folder_name(version)
        if not dest.exists():
            publish_folder(dest, content.write, meta)
        else:
            is_replaced = self._replace(dest, content.write, meta, same)
            if is_replaced and not same:
                log.warning("%s: written again with other bytes, by attempt %d", dest, self.attempt)
        digest = manifest_digest(dest)
        if content.buckets is not None:
            self._serve(version, digest, content)
        present = self.broadcasts.at(version)
        if present is None or present.path != dest:  # a kept folder has its marker
            marker = encode_marker(version, self.attempt, content.kind, digest, noise)
            write_file(dest / STABLE, marker)
        return dest

    def _serve(self, version: int, digest: str, content: FolderContent) -> None:
        assert self.server is not None and content.buckets is not None

        def write_as_files() -> None:
            with self._lock:
                found = self.broadcasts.at(version)
                if found is not None and found.way != "filesystem":
                    assert content.as_files is not None
                    self._write(version, content.as_files, same=True)

        self.server.serve(ServedVersion(version, digest, content.buckets, write_as_files))

    def _replace(
        self, dest: Path, write: Callable[[Path], None], meta: dict[str, Any], same: bool
    ) -> bool:
        """Replace a folder unless its bytes are the same, and retire later versions unless the
        weights are. Return whether the bytes differ."""
        candidate = self.folder / f"{_CANDIDATE}{dest.name}"
        publish_folder(candidate, write, meta)
        faultpoint("broadcast.candidate")
        if _is_same(dest, candidate):
            shutil.rmtree(candidate)
            return False
        if not same:
            self.forget_after(meta["version"])
        self._retire(dest)
        os.rename(candidate, dest)
        sync_folder(self.folder)
        faultpoint("broadcast.replaced")
        return True

    def _retire(self, path: Path) -> None:
        taken = len(list(self.folder.glob(f"{_RETIRED}{path.name}-*")))
        while (target := self.folder / f"{_RETIRED}{path.name}-{taken}").exists():
            taken += 1
        os.rename(path, target)
        sync_folder(self.folder)
        faultpoint(f"broadcast.retired/{path.name}")

    def _retain(self, newest: int) -> None:
        """Retire versions that no engine needs. An error costs only space."""
        needed = self._needed(newest)
        try:
            for number, path in self._folders():
                if number < newest and number not in needed and path.name == folder_name(number):
                    if not _is_read(path):
                        self._retire(path)
            self._clean()
        except OSError as error:
            log.warning("old weights could not be removed, the next version tries again: %s", error)

    def _needed(self, newest: int) -> set[int]:
        needed: set[int] = set()
        for kept in range(newest, newest - self.keep, -1):
            version: int | None = kept
            while version is not None and version not in needed:
                needed.add(version)
                found = self.broadcasts.at(version)
                version = None if found is None else found.since
        return needed

    def _folders(self) -> list[tuple[int, Path]]:
        return [
            (number, path)
            for path in sorted(self.folder.iterdir())
            if not path.is_symlink() and (number := number_of(path.name)) is not None
        ]

    def _clean(self) -> None:
        remove_leftovers(self.folder)
        for path in sorted(self.folder.iterdir()):
            name = path.name
            if name.startswith((_CANDIDATE, _RETIRED)) and not path.is_symlink():
                if not _is_read(path):
                    shutil.rmtree(path)
                    faultpoint(f"broadcast.removed/{name}")


def _model_files(
    config: dict[str, Any], tensors: dict[str, Tensor], meta: Mapping[str, Any]
) -> FolderContent:
    return FolderContent("full", lambda target: hf.write((config, tensors), target, None), meta)


def _is_same(old: Path, new: Path) -> bool:
    try:
        verify_folder(old)
        return (old / MANIFEST).read_bytes() == (new / MANIFEST).read_bytes()
    except (DamagedError, OSError):
        return False


def _is_read(folder: Path) -> bool:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


# -- the reader's side -----------------------------------------------------------------------------


def read_update(
    folder: Path,
    number: int,
    kind: str,
    model: Path,
    weights: str,
    broadcast: Broadcast | None = None,
    client: WeightClient | None = None,
) -> WeightUpdate:
    """Return the update in a verified folder, as policy `number`.

    model, weights: of the engine. broadcast: if a trainer wrote the folder. ValueError for a folder
    that is not for this engine, TransportError as by `WeightClient.fetch`.
    """
    meta = read_meta(folder) or {}
    if kind == "adapter":
        return _read_adapter(folder, number, weights)
    if kind == "codes":
        return _read_changes(folder, number, meta)
    if broadcast is not None and broadcast.way != "filesystem":
        return _fetch(broadcast, number, model, meta, client)
    spec, files, tensors = hf.stored(folder)
    _check_published(folder, "config.json", *(path.name for path in files.values()))
    scale = _checked_scale(spec, model, meta)
    return WeightUpdate(number, "full", tensors.items, input_scale=scale)


def _read_adapter(folder: Path, number: int, weights: str) -> WeightUpdate:
    optional = [name for name in (bases.FILE, SCALED) if (folder / name).exists()]
    _check_published(folder, *ADAPTER, *optional)
    scale = 1.0
    base = bases.read(folder)
    if base is not None:
        if base.low_bit and base.weights != weights:
            raise ValueError(
                f"{bases.FILE}: weights: it learned on {base.weights}, and this engine's are "
                f"{weights}"
            )
        scale = base.uaq_scale or 1.0
    alpha, tensors = lora.stored(folder, scale)
    if SCALED in optional:
        exact = load_file(folder / SCALED)
        if not exact.keys() <= tensors.keys():
            raise ValueError(f"{folder / SCALED}: it has tensors that the adapter has not")
        tensors |= exact
    return WeightUpdate(number, "adapter", tensors.items, lora_alpha=alpha, input_scale=scale)


def _read_changes(folder: Path, number: int, meta: Mapping[str, Any]) -> WeightUpdate:
    _check_published(folder, CHANGES)
    try:
        changes = msgspec.convert(meta, Changes)
        scale = msgspec.convert(meta.get("input_scale"), float)
    except msgspec.ValidationError as error:
        raise ValueError(
            f"{folder / MANIFEST}: meta: since, before, after, input_scale: {error}"
        ) from None
    tensors = load_file(folder / CHANGES)
    return WeightUpdate(number, "codes", tensors.items, input_scale=scale, changes=changes)


def _fetch(
    broadcast: Broadcast,
    number: int,
    model: Path,
    meta: Mapping[str, Any],
    client: WeightClient | None,
) -> WeightUpdate:
    if client is None:
        raise ValueError(
            f"way: its tensors come by {broadcast.way}; start the engine with --weights-from"
        )
    _check_published(broadcast.path, "config.json", LAYOUT)
    scale = _checked_scale(read_spec(broadcast.path), model, meta)
    layout = read_layout(broadcast.path)
    tensors = client.fetch(broadcast, layout)
    return WeightUpdate(number, "full", tensors.items, layout.digest, input_scale=scale)


def read_layout(folder: Path) -> BucketLayout:
    """Return the layout of a version's buckets. ValueError names the file."""
    try:
        return BucketLayout.from_json(json.loads((folder / LAYOUT).read_bytes()))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{folder / LAYOUT}: {error}") from None


def _checked_scale(spec: ModelSpec, model: Path, meta: Mapping[str, Any]) -> float:
    served = replace(read_headers(model)[0], eos_ids=spec.eos_ids)  # a server sets its own
    compared = [field.name for field in fields(spec) if field.compare]
    different = [name for name in compared if getattr(spec, name) != getattr(served, name)]
    if different:
        raise ValueError(f"config.json: {', '.join(different)}: not as the served model's")
    if "broadcast" not in meta:
        return 1.0  # a folder exported by others is an ordinary model, so its s is ignored
    return float(spec.config.get(scaling.KEY) or 1.0)


def _check_published(folder: Path, *names: str) -> None:
    listed = published_files(folder)
    for name in names:
        if name not in listed:
            raise ValueError(f"{name}: the folder was not published with it")
