"""The trainer's end of a broadcast: a version of the weights becomes a folder that engines read.

    broadcaster = Broadcaster(run / "broadcasts", learner, attempt=1, keep=2, base=model_folder)
    broadcaster.publish(7)      # broadcasts/step_000007, and its STABLE last

    adapter    a PEFT folder for the base as it was, and the exact tensors of a base that carries s
    full       a dense Hugging Face folder in the master's own dtype
    codes      what differs from the version before in the tensors that engines hold, where an aligned
               learner has them (`weights.changes`); every eighth version is a full one

With `offers` the tensors of a full version go from device to device, and the folder has the rest and
where each tensor lies in what is sent.

Engines quantize what they read by the corridor of one process, so they hold the same bits
(`weights.receive`). Noise (`weights.noise`) travels as its seed and sigma, and the engine draws it.

A version that is published again (a trainer that died learnt it again) is kept where its bytes are
the same. Else the old folder is renamed out of the readers' sight before the new one has its name,
and the new marker names the new manifest: no reader takes files of two attempts for one version.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from lowroll.checkpoint.faults import faultpoint
from lowroll.checkpoint.files import sync_folder, write_file
from lowroll.checkpoint.publish import (
    MANIFEST,
    DamagedError,
    publish_folder,
    remove_leftovers,
    verify_folder,
)
from lowroll.model import base as bases
from lowroll.model import hf, lora, scaling
from lowroll.model.transformer import Transformer
from lowroll.quant.formats import get_format
from lowroll.transport.broadcasts import (
    FORMAT,
    STABLE,
    Broadcasts,
    encode_marker,
    folder_name,
    manifest_digest,
    number_of,
    read_broadcast,
)
from lowroll.weights.changes import Changes, Shadow
from lowroll.weights.noise import NoiseSchedule
from lowroll.weights.offers import Offer, Offers
from lowroll.weights.parcel import Layout, pack, unpack
from lowroll.weights.update import Kind, WeightUpdate

log = logging.getLogger(__name__)

FULL_INTERVAL = 8  # versions: an engine that missed some begins at a full one
CHANGES = "changes.safetensors"
LAYOUT = "layout.json"  # of a parcel, in the place of its tensors
SCALED = "scaled.safetensors"  # of an adapter: tensors that dividing by s would round
_CANDIDATE = ".candidate-"
_RETIRED = ".retired-"


@dataclass(frozen=True)
class Payload:
    """The planned content of a version's folder: its kind, the function that writes the files, and
    the other entries of its manifest. parcel: the tensors that are not among the files."""

    kind: Kind
    write: Callable[[Path], None]
    meta: Mapping[str, Any]
    parcel: Parcel | None = None


@dataclass(frozen=True)
class Parcel:
    """The tensors of a version as they travel, and as the files that they can still become."""

    buckets: list[Tensor]
    files: Payload


class Broadcaster:
    """Publishes the learner's versions in `folder`; one at a time: the run's lock is held.

    attempt: of the trainer. keep: how many of the newest versions stay at least, what they are
    changes of among them. base: the folder or hub id that an adapter is told to belong to. noise:
    of the run, where it has any. shadow: of an aligned learner, to publish what changes. offers:
    the direct way that whole models take; one that came to nothing takes none any more.
    ValueError for a model of which nothing can be published.
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
        offers: Offers | None = None,
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep: expected at least 1, got {keep}")
        self.folder = Path(folder)
        self.model = model
        self.attempt = attempt
        self.keep = keep
        self.base = base
        self.noise = noise
        self.shadow = shadow
        self.offers = offers
        self._last: Callable[[], None] | None = None  # writes what is offered as files
        self._lock = threading.Lock()  # of the folder: offers write from a thread of their own
        self.broadcasts = Broadcasts(self.folder)
        self._adapted = any(linear.adapter for _, linear in model.linears())
        kept = model.weight_format
        if not self._adapted and kept is not None and not get_format(kept).dense:
            raise ValueError(f"model: its weights are {kept}, and nothing of it learns")
        self.folder.mkdir(parents=True, exist_ok=True)
        self._clean()

    def publish(self, version: int) -> dict[str, float]:
        """Have readers see a version; metrics of it. When this returns, a power loss does not take
        the version away."""
        payload = self._payload(version)
        with self._lock:
            path = self._lay(version, payload)
            self._retain(version)
        if payload.parcel is not None:
            assert self.offers is not None
            self.offers.forget_older()
        metrics = {"perf/broadcast_bytes": float(_size(path))}
        if self.shadow is not None:
            if payload.kind == "codes":
                changed = (path / CHANGES).stat().st_size / self.shadow.nbytes
                metrics["perf/changed_bytes_fraction"] = changed
            self.shadow.renew(version)
        return metrics

    def check(self) -> None:
        """Raise TransportError when the direct way has ended by itself, with the reason."""
        if self.offers is not None:
            self.offers.check()

    def forget_after(self, version: int) -> None:
        """Retire later versions: the learner went back to this one, and they may come out as others."""
        with self._lock:
            self._forget_after(version)

    def close(self) -> None:
        """End the direct way: the version that it offers stays in the folder, as files."""
        if self.offers is None:
            return
        if self._last is not None:
            self._last()
        self.offers.close()
        self.offers = None

    def _payload(self, version: int) -> Payload:
        if (changed := self._changes(version)) is not None:
            return changed
        scale = scaling.applied(self.model) or 1.0
        if self._adapted:
            return Payload("adapter", self._write_adapter, {"input_scale": scale})
        return self._whole(version, scale)

    def _whole(self, version: int, scale: float) -> Payload:
        config, tensors = hf.contents(self.model)
        meta = {"input_scale": scale}
        if self.offers is None or self.offers.broken:
            return Payload("full", lambda target: hf.write((config, tensors), target, None), meta)
        update = WeightUpdate(version, "full", tensors.items, input_scale=scale)
        layout, buckets = pack(tensors, update.content_digest(), self.model.device)

        def write(target: Path) -> None:
            (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
            (target / LAYOUT).write_text(json.dumps(layout.to_json()) + "\n")

        copies = unpack(layout, buckets)
        files = Payload("full", lambda target: hf.write((config, copies), target, None), meta)
        return Payload("full", write, meta | {"way": self.offers.way}, Parcel(buckets, files))

    def _offer(self, version: int, path: Path, payload: Payload) -> None:
        """Have engines fetch a version that lies in `path` without its tensors."""
        assert self.offers is not None and payload.parcel is not None
        parcel = payload.parcel

        def write() -> None:
            with self._lock:
                found = self.broadcasts.at(version)
                if found is not None and found.way != "filesystem":
                    self._lay(version, parcel.files, same=True)

        self._last = write
        self.offers.offer(Offer(version, manifest_digest(path), parcel.buckets, write))

    def _changes(self, version: int) -> Payload | None:
        """Return the changes since the previous version. None when engines do not hold that
        version, when its folder is gone, and for every FULL_INTERVAL-th version."""
        shadow = self.shadow
        if shadow is None or shadow.version != version - 1 or version % FULL_INTERVAL == 0:
            return None
        if self.broadcasts.at(version - 1) is None:
            return None
        stream, changes = shadow.changes()
        scale = scaling.applied(self.model) or 1.0
        return Payload(
            "codes",
            lambda target: save_file(stream, target / CHANGES),
            {"input_scale": scale, **asdict(changes)},
        )

    def _write_adapter(self, target: Path) -> None:
        scale = scaling.applied(self.model) or 1.0
        lora.write(self.model, target, self.base, input_scale=scale)
        exact = lora.state(self.model)
        plain = lora.unscaled(exact, scale)
        moved = {name: t.contiguous() for name, t in exact.items() if t is not plain[name]}
        if moved:
            save_file(moved, target / SCALED)

    def _lay(self, version: int, payload: Payload, same: bool = False) -> Path:
        """Write the folder of a version with its marker, and return it. same: the folder has the
        same weights in other files."""
        noise = None
        if self.noise is not None:
            drawn = self.noise.at(version)
            noise = {"seed": drawn.seed, "sigma": drawn.sigma}
        said = {"broadcast": FORMAT, "version": version, "kind": payload.kind, "noise": noise}
        meta = {**payload.meta, **said}
        dest = self.folder / folder_name(version)
        if not dest.exists():
            publish_folder(dest, payload.write, meta)
        elif self._replace(dest, payload.write, meta, same) and not same:
            log.warning("%s: written again with other bytes, by attempt %d", dest, self.attempt)
        if payload.parcel is not None:
            self._offer(version, dest, payload)  # who sees the marker may ask at once
        if not _is_stable(dest):
            marker = encode_marker(
                version, self.attempt, payload.kind, manifest_digest(dest), noise
            )
            write_file(dest / STABLE, marker)
        return dest

    def _replace(
        self, dest: Path, write: Callable[[Path], None], meta: dict[str, Any], same: bool
    ) -> bool:
        """Publish beside a folder that is there, and put that in its place where their bytes
        differ."""
        candidate = self.folder / f"{_CANDIDATE}{dest.name}"
        publish_folder(candidate, write, meta)
        faultpoint("broadcast.candidate")
        if _is_same(dest, candidate):
            shutil.rmtree(candidate)
            return False
        if not same:
            self._forget_after(meta["version"])
        self._retire(dest)
        os.rename(candidate, dest)
        sync_folder(self.folder)
        faultpoint("broadcast.replaced")
        return True

    def _retire(self, path: Path) -> None:
        """Rename a folder out of the readers' sight; one that reads in it continues, and learns of
        it at the end."""
        taken = len(list(self.folder.glob(f"{_RETIRED}{path.name}-*")))
        while (target := self.folder / f"{_RETIRED}{path.name}-{taken}").exists():
            taken += 1
        os.rename(path, target)
        sync_folder(self.folder)
        faultpoint(f"broadcast.retired/{path.name}")

    def _forget_after(self, version: int) -> None:
        for path in sorted(self.folder.iterdir(), reverse=True):
            number = number_of(path.name)
            if number is not None and number > version and not path.is_symlink():
                log.warning("%s: of a future that the run does not have any more; retired", path)
                self._retire(path)

    def _retain(self, newest: int) -> None:
        """Retire what no engine asks for any more. A disk that refuses costs space, not the run."""
        needed = self._needed(newest)
        try:
            for path in sorted(self.folder.iterdir()):
                number = number_of(path.name)
                if number is None or number >= newest or number in needed or path.is_symlink():
                    continue
                if path.name == folder_name(number) and not _is_read(path):
                    self._retire(path)
            self._clean()
        except OSError as error:
            log.warning("old weights could not be removed, the next version tries again: %s", error)

    def _needed(self, newest: int) -> set[int]:
        """Return the last `keep` versions, and those that they are changes of."""
        needed: set[int] = set()
        for version in range(newest, newest - self.keep, -1):
            step: int | None = version
            while step is not None and step not in needed:
                found = self.broadcasts.at(step)
                needed.add(step)
                step = None if found is None else found.since
        return needed

    def _clean(self) -> None:
        """Remove what was retired and is not read, and what a dead attempt left."""
        remove_leftovers(self.folder)
        for path in sorted(self.folder.iterdir()):
            name = path.name
            if name.startswith((_CANDIDATE, _RETIRED)) and not path.is_symlink():
                if not _is_read(path):
                    shutil.rmtree(path)
                    faultpoint(f"broadcast.removed/{name}")


def exact_adapter(folder: Path, input_scale: float) -> tuple[float, dict[str, Tensor]]:
    """Return (alpha, tensors) of a broadcast adapter, bit for bit those of the learner. ValueError
    as `lora.stored` says, or for exact tensors that are no tensors of the adapter."""
    alpha, tensors = lora.stored(folder, input_scale)
    if (folder / SCALED).is_file():
        exact = load_file(folder / SCALED)
        if not exact.keys() <= tensors.keys():
            raise ValueError(f"{folder / SCALED}: it has tensors that the adapter has not")
        tensors |= exact
    return alpha, tensors


def stored_changes(folder: Path, meta: Mapping[str, Any]) -> tuple[Changes, dict[str, Tensor]]:
    """Read a broadcast of kind codes. ValueError for a manifest that does not say what it
    changes."""
    since, before, after = (meta.get(name) for name in ("since", "before", "after"))
    if type(since) is not int or not isinstance(before, str) or not isinstance(after, str):
        raise ValueError(f"{folder}: since, before, after: not said")
    return Changes(since, before, after), load_file(folder / CHANGES)


def stored_layout(folder: Path) -> Layout:
    """Return where the tensors of a broadcast lie in what is sent. ValueError names the file."""
    try:
        return Layout.from_json(json.loads((folder / LAYOUT).read_bytes()))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{folder / LAYOUT}: {error}") from None


def adapter_files(folder: Path) -> list[str]:
    """Return the files of a broadcast adapter that are read, by name."""
    optional = [name for name in (bases.FILE, SCALED) if (folder / name).exists()]
    return ["adapter_config.json", "adapter_model.safetensors", *optional]


def _is_stable(folder: Path) -> bool:
    try:
        read_broadcast(folder)
    except (ValueError, OSError):
        return False
    return True


def _is_same(old: Path, new: Path) -> bool:
    """Return whether a folder holds, undamaged, the bytes of a new one: their manifests are
    equal."""
    try:
        verify_folder(old)
        return (old / MANIFEST).read_bytes() == (new / MANIFEST).read_bytes()
    except (DamagedError, OSError):
        return False


def _is_read(folder: Path) -> bool:
    """Return whether a process is in `reading` of the folder."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
