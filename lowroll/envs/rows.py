"""Rows of a data set: a JSONL file, or a data set of the Hugging Face hub through the optional
package `datasets`.

The train split is read in a fresh seeded permutation each epoch, without end; the test split in
file order. Rows are read when first asked for. A bad line is an error that names file and line; a
row without a gold answer is skipped, counted and reported once.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any, Generic, TypeVar

T = TypeVar("T")
logger = logging.getLogger(__name__)

SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


class Rows(Generic[T]):
    """The rows of the train and test splits, each converted by `convert(row, where)`; None means:
    skip this row."""

    def __init__(
        self,
        name: str,
        convert: Callable[[dict[str, Any], str], T | None],
        *,
        path: str | None,
        test_path: str | None,
        subset: str | None = None,
        seed: int = 0,
    ) -> None:
        if path is None and test_path is None:
            raise ValueError(
                f"env {name!r}: needs 'path' (a .jsonl file or a hub id) or 'test_path'"
            )
        if test_path is None and path is not None and _is_hub_id(path):
            test_path = path  # a hub data set holds both splits
        for key, value in (("path", path), ("test_path", test_path)):
            if value is not None and not _is_hub_id(value) and not Path(value).is_file():
                raise ValueError(f"env {name!r}: {key} {value!r} is neither a file nor a hub id")
        self.name, self.convert, self.subset, self.seed = name, convert, subset, seed
        self.paths = {"train": path, "test": test_path}
        self.skipped = {"train": 0, "test": 0}
        self._order: tuple[int, list[int]] = (-1, [])

    @cached_property
    def train(self) -> list[T]:
        """The usable rows of the train split, in file order."""
        return self._load("train")

    @cached_property
    def test(self) -> list[T]:
        """The usable rows of the test split, in file order."""
        return self._load("test")

    def __getitem__(self, split: str) -> list[T]:
        return self.train if split == "train" else self.test

    def at(self, split: str, index: int) -> int:
        """The row number of task `index`: permuted anew in each epoch of the train split.
        ValueError if it is empty."""
        size = len(self[split])
        if size == 0:
            key = "path" if split == "train" else "test_path"
            raise ValueError(f"env {self.name!r}: has no {split} split; set '{key}'")
        if split == "test":
            return index % size
        epoch, position = divmod(index, size)
        if self._order[0] != epoch:
            order = list(range(size))
            Random(f"{self.seed}/{epoch}").shuffle(order)
            self._order = (epoch, order)
        return self._order[1][position]

    def _load(self, split: str) -> list[T]:
        path = self.paths[split]
        if path is None:
            return []
        if _is_hub_id(path):
            source = _read_hub(path, self.subset, split, self.name)
        else:
            source = read_jsonl(path)
        converted = [self.convert(row, where) for where, row in source]
        rows = [row for row in converted if row is not None]
        self.skipped[split] = len(converted) - len(rows)
        if not rows:
            raise ValueError(f"env {self.name!r}: {path} has no usable row")
        if self.skipped[split]:
            logger.warning(
                "env %s: skipped %d of %d rows of %s: no gold answer",
                self.name,
                self.skipped[split],
                len(converted),
                path,
            )
        return rows


def no_text(error: UnicodeEncodeError) -> str:
    """What is wrong with a string that UTF-8 cannot hold."""
    return f"a lone surrogate ({ascii(error.object[error.start])[1:-1]}) is no text"


def read_jsonl(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield ("file:line", object) for every non-empty line. ValueError names the line that is not a
    JSON object, or whose text is not Unicode."""
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                row = json.loads(text := line.decode())
                if SURROGATE.search(text):
                    json.dumps(row, ensure_ascii=False).encode()
            except UnicodeDecodeError as error:
                raise ValueError(f"{where}: not UTF-8 text (byte {error.start})") from None
            except UnicodeEncodeError as error:
                raise ValueError(f"{where}: {no_text(error)}") from None
            except json.JSONDecodeError as error:
                raise ValueError(f"{where}: not JSON: {error}") from error
            except RecursionError:
                raise ValueError(f"{where}: nested too deep") from None
            if not isinstance(row, dict):
                raise ValueError(f"{where}: expected a JSON object, got {type(row).__name__}")
            yield where, row


def _is_hub_id(path: str) -> bool:
    return (
        HUB_ID.fullmatch(path) is not None
        and not path.endswith((".json", ".jsonl"))
        and not Path(path).exists()
    )


def _read_hub(
    path: str, subset: str | None, split: str, name: str
) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            f"env {name!r}: the hub data set {path!r} needs the package 'datasets' (pip install "
            "'lowroll[data]'), or give a .jsonl file"
        ) from error
    for number, row in enumerate(datasets.load_dataset(path, subset, split=split)):
        yield f"{path}[{split}]:{number}", dict(row)
