"""Every rollout of a run on disk: `rollouts/step_000012.jsonl`, one file a step, in the codec's format.

A file appears whole or not at all (temporary file, fsync, rename). A resumed run writes its redone steps over the old
ones; in synchronous mode with the same bytes.
"""
from __future__ import annotations

import os
import re
from pathlib import Path

from lowroll.transport.codec import CodecError, decode_batch, encode_batch
from lowroll.types import Batch

_FILE = re.compile(r"step_([0-9]{6,})\.jsonl")


def write_rollouts(folder: Path, batch: Batch) -> Path:
    """Write `batch` to `folder/step_<step>.jsonl` atomically; return the path. CodecError before writing anything."""
    data = encode_batch(batch)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step_{batch.step:06d}.jsonl"
    tmp = folder / f".tmp-{path.name}"
    try:
        with tmp.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(tmp, path)
    except OSError:
        tmp.unlink(missing_ok=True)
        raise
    _sync_folder(folder)
    return path


def read_rollouts(path: Path) -> Batch:
    """The batch in `path`. CodecError naming file, line and field when it is not what `write_rollouts` wrote."""
    try:
        return decode_batch(Path(path).read_bytes())
    except CodecError as error:
        raise CodecError(f"{path}: {error}") from error


def rollout_files(folder: Path) -> list[tuple[int, Path]]:
    """(step, path) of every rollout file in `folder`, ascending by step."""
    found = ((_FILE.fullmatch(path.name), path) for path in Path(folder).glob("step_*.jsonl"))
    return sorted((int(match[1]), path) for match, path in found if match)


def truncate_rollouts(folder: Path, step: int) -> None:
    """Remove the files of steps after `step`: they belong to a future that a resumed run will not have."""
    for later, path in rollout_files(folder):
        if later > step:
            path.unlink()


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
