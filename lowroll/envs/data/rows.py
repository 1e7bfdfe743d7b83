"""The rows of a data set: files (JSON lines, JSON, CSV, parquet; patterns such as
`data/train-*.parquet`), a folder saved by `datasets`, a folder of data files, or a hub data set.

    read("rows.jsonl")
    read({"path": "openai/gsm8k", "subset": "main", "split": "test", "streaming": True})

Loading scripts are not run.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from itertools import islice
from pathlib import Path
from typing import Any

from lowroll.envs.data.files import NEEDS_DATASETS, READERS, Located
from lowroll.types import HUB_NAME

TEST_SPLITS = ("test", "validation", "valid", "val", "dev", "eval")


@dataclass(frozen=True)
class DataSource:
    """A split of a data set. A file is one split."""

    path: str  # a file, a pattern of files, a folder or a hub id
    split: str = "train"
    subset: str | None = None  # of the hub's data set, such as "main"
    revision: str | None = None  # of the hub's data set: a branch, tag or commit
    streaming: bool = False  # without a copy on disk
    rows: int | None = None  # only the first rows; None: all

    def __post_init__(self) -> None:
        if self.rows is not None and self.rows < 1:
            raise ValueError(f"rows: must be at least 1, is {self.rows}")


def read(spec: str | Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Return a split's rows. spec: a path, or the fields of a `DataSource`; other keys are ignored.
    ValueError names the invalid file and row, or the unreadable data set."""
    keys = [field.name for field in fields(DataSource)]
    settings: Mapping[str, Any] = {"path": spec} if isinstance(spec, str) else spec
    source = DataSource(**{key: settings[key] for key in keys if settings.get(key) is not None})
    return (row for _, row in located(source))


def located(source: DataSource) -> Iterator[Located]:
    return islice(_read_all(source), source.rows)


def missing(path: str) -> str:
    """Explain why a path has no data; "" if it may."""
    kinds = ", ".join(READERS)
    if is_hub_id(path) or Path(path).is_dir():
        return ""
    files = _files(path)
    if not files:
        return f"is neither a file nor a hub id (looked at {Path(path).absolute()})"
    if unknown_files := [file for file in files if Path(file).suffix not in READERS]:
        return f"is of no known kind ({Path(unknown_files[0]).name}; known: {kinds}, a folder, a hub id)"
    return ""


def is_hub_id(path: str) -> bool:
    """Return whether a path is a hub id `owner/name` and not a local path."""
    return (
        re.fullmatch(HUB_NAME, path) is not None
        and not path.endswith(tuple(READERS))
        and not Path(path).exists()
    )


def splits(source: DataSource) -> list[str]:
    """Return a data set's splits; [] for files."""
    if not is_hub_id(source.path) and not Path(source.path).is_dir():
        return []
    if (Path(source.path) / "state.json").is_file():
        return []
    with _datasets_package(source.path) as datasets:
        if (Path(source.path) / "dataset_dict.json").is_file():
            return list(datasets.load_from_disk(source.path))
        return list(
            datasets.get_dataset_split_names(source.path, source.subset, revision=source.revision)
        )


def test_split(source: DataSource) -> str | None:
    """Return the data set's evaluation split other than the given one, or None."""
    names = splits(source)
    return next((name for name in TEST_SPLITS if name in names and name != source.split), None)


def _read_all(source: DataSource) -> Iterator[Located]:
    path = Path(source.path)
    if is_hub_id(source.path) or path.is_dir():
        yield from _read_with_datasets(source)
        return
    if reason := missing(source.path):
        raise ValueError(f"{source.path!r} {reason}")
    for file in _files(source.path):
        yield from READERS[Path(file).suffix](file)


def _files(path: str) -> list[str]:
    return [path] if Path(path).is_file() else sorted(glob.glob(path, recursive=True))


def _read_with_datasets(source: DataSource) -> Iterator[Located]:
    where = f"{source.path}[{source.split}]"
    with _datasets_package(where) as datasets:
        if (Path(source.path) / "state.json").is_file():
            rows, where = datasets.load_from_disk(source.path), source.path
        elif (Path(source.path) / "dataset_dict.json").is_file():
            rows = _select_split(datasets.load_from_disk(source.path), source)
        else:
            rows = datasets.load_dataset(
                source.path,
                source.subset,
                split=source.split,
                revision=source.revision,
                streaming=source.streaming,
            )
    for number, row in enumerate(rows):
        yield f"{where}[{number}]", dict(row)


def _select_split(parts: Mapping[str, Any], source: DataSource) -> Any:
    if source.split not in parts:
        raise ValueError(f"{source.path}: has no split {source.split!r}; it has {', '.join(parts)}")
    return parts[source.split]


@contextmanager
def _datasets_package(where: str) -> Iterator[Any]:
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            f"{where}: this data set {NEEDS_DATASETS}, or give a .jsonl, .json or .csv file"
        ) from error
    try:
        yield datasets
    except (ValueError, OSError, RuntimeError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        message = lines[0] if lines[0].startswith(where) else f"{where}: {lines[0]}"
        raise ValueError(message) from error
