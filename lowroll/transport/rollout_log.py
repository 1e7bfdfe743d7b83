"""Every rollout of a run on disk: `rollouts/step_000012.jsonl`, one file a step, in the codec's
format.

A file is written atomically, and each line ends with its checksum (`checkpoint.line_checksum`,
seeded with the line's number). A resumed run overwrites the steps that it repeats.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from lowroll.checkpoint.atomic_files import read_file, write_file
from lowroll.checkpoint.line_checksum import seal, unseal_lines
from lowroll.transport.codec import CodecError, decode_batch, encode_batch
from lowroll.types import Batch

_FILE_NAME = re.compile(r"step_([0-9]{6,})\.jsonl")
_FIRST_BYTES = b'{"kind":"batch",'


def write_rollouts(folder: Path, batch: Batch) -> Path:
    """Write the file of a batch; return its path. CodecError before any write."""
    lines = encode_batch(batch).removesuffix(b"\n").split(b"\n")
    folder.mkdir(parents=True, exist_ok=True)
    path = rollouts_path(folder, batch.step)
    write_file(path, b"".join(seal(line, number) + b"\n" for number, line in enumerate(lines, 1)))
    return path


def rollouts_path(folder: Path, step: int) -> Path:
    return folder / f"step_{step:06d}.jsonl"


def without_evictions(batch: Batch) -> Batch:
    """Return the batch without its evictions."""
    if all(sample.rollout.evictions is None for sample in batch.samples):
        return batch
    samples = [
        replace(sample, rollout=replace(sample.rollout, evictions=None)) for sample in batch.samples
    ]
    return replace(batch, samples=samples)


def read_rollouts(path: Path) -> Batch:
    """Return the batch in a file. CodecError names file, line and field."""
    try:
        batch = decode_batch(unseal_lines(read_file(path)))
    except ValueError as error:  # includes CodecError
        raise CodecError(f"{path}: {error}") from error
    name_match = _FILE_NAME.fullmatch(path.name)
    if name_match and int(name_match[1]) != batch.step:
        raise CodecError(f"{path}: holds the rollouts of step {batch.step}")
    return batch


def rollout_files(folder: Path) -> list[tuple[int, Path]]:
    matches = ((_FILE_NAME.fullmatch(path.name), path) for path in folder.glob("step_*.jsonl"))
    return sorted((int(match[1]), path) for match, path in matches if match)


def is_rollouts(path: Path) -> bool:
    """Return whether a file begins as `write_rollouts` writes it."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(_FIRST_BYTES)) == _FIRST_BYTES


def truncate_rollouts(folder: Path, step: int) -> None:
    """Remove the files of steps after `step`. Other files with such a name stay."""
    for file_step, path in rollout_files(folder):
        if file_step > step and is_rollouts(path):
            path.unlink()
