"""Train and test rows of a data set (`lowroll.envs.data.rows`), read on demand.

The train split is endless, with a seeded permutation each epoch; the test split is in file order.
Without test rows, a share `held_out` of the train rows is chosen by digests, so that equal rows are
on the same side.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cached_property
from random import Random
from typing import Any, Generic, TypeVar

from lowroll.envs.data.files import Located
from lowroll.envs.data.rows import DataSource, located, missing, test_split

T = TypeVar("T")
logger = logging.getLogger(__name__)


class SplitRows(Generic[T]):
    """Train and test rows converted by `convert(row, where)`, which skips a row by None. more:
    fields of both sources (`subset`, `revision`, `streaming`, `rows`)."""

    def __init__(
        self,
        name: str,
        convert: Callable[[dict[str, Any], str], T | None],
        *,
        path: str | None,
        test_path: str | None,
        seed: int = 0,
        split: str = "train",
        test_split: str | None = None,
        held_out: float = 0.0,
        **more: Any,
    ) -> None:
        if path is None and test_path is None:
            raise ValueError(
                f"env {name!r}: needs 'path' (a .jsonl, .json, .csv or .parquet file, a folder or a "
                "hub id) or 'test_path'"
            )
        for key, value in (("path", path), ("test_path", test_path)):
            if value is not None and (reason := missing(value)):
                raise ValueError(f"env {name!r}: {key} {value!r} {reason}")
        if not 0 <= held_out < 1:
            raise ValueError(
                f"env {name!r}: held_out must be a share from 0 to below 1, got {held_out}"
            )
        self.name, self.convert, self.seed, self.held_out = name, convert, seed, held_out
        self.test_split = test_split
        self.sources: dict[str, DataSource | None] = {"train": None, "test": None}
        if path is not None:
            self.sources["train"] = DataSource(path, split, **more)
        if test_path is not None:
            self.sources["test"] = DataSource(test_path, test_split or "test", **more)
        self._epoch = -1
        self._epoch_order: list[int] = []

    @cached_property
    def train(self) -> list[T]:
        return self._parts[0]

    @cached_property
    def test(self) -> list[T]:
        source = self._test_source
        if source is None:
            return self._parts[1]
        rows = self._load(source)
        self._tell_shared(rows, source.path)
        return rows

    @property
    def is_held_out(self) -> bool:
        return self.held_out > 0 and self._test_source is None

    def __getitem__(self, split: str) -> list[T]:
        return self.train if split == "train" else self.test

    def at(self, split: str, index: int) -> int:
        """Return the row number of task `index`. ValueError if the split is empty."""
        size = len(self[split])
        if size == 0:
            key = "path" if split == "train" else "test_path"
            raise ValueError(f"env {self.name!r}: has no {split} split; set '{key}'")
        if split == "test":
            return index % size
        epoch, position = divmod(index, size)
        if self._epoch != epoch:
            order = list(range(size))
            Random(f"{self.seed}/{epoch}").shuffle(order)
            self._epoch_order, self._epoch = order, epoch
        return self._epoch_order[position]

    @cached_property
    def _test_source(self) -> DataSource | None:
        train, test = self.sources["train"], self.sources["test"]
        if test is not None or train is None:
            return test
        name = self.test_split or test_split(train)
        return None if name is None else replace(train, split=name, rows=None)

    @cached_property
    def _parts(self) -> tuple[list[T], list[T]]:
        """Return the usable rows of the train split, and the held-out ones. ValueError when equal
        rows leave nothing to hold out."""
        source = self.sources["train"]
        if source is None:
            return [], []
        rows = self._load(source)
        if not self.is_held_out:
            return rows, []
        digests = [_digest(row) for row in rows]
        distinct_digests = sorted(set(digests))
        if len(distinct_digests) < 2:
            times = f" ({len(rows)} times)" if len(rows) > 1 else ""
            raise ValueError(
                f"env {self.name!r}: {source.path} has one row{times}, and none can be held out; "
                "write held_out: 0, or a 'test_path'"
            )
        num_held_out = max(1, round(self.held_out * len(distinct_digests)))
        held_out_digests = set(distinct_digests[:num_held_out])
        train_rows: list[T] = []
        held_out_rows: list[T] = []
        for row, digest in zip(rows, digests, strict=True):
            part = held_out_rows if digest in held_out_digests else train_rows
            part.append(row)
        logger.warning(
            "env %s: %s has no test split: %d of its %d rows are held out for evaluation (held_out: "
            "0 trains on all)",
            self.name,
            source.path,
            len(held_out_rows),
            len(rows),
        )
        return train_rows, held_out_rows

    def _tell_shared(self, rows: list[T], origin: str) -> None:
        train_rows_are_read = "_parts" in self.__dict__  # cached_property keeps its value there
        if not train_rows_are_read:  # an evaluation needs none
            return
        test = set(map(_task_text, rows))
        shared = test.intersection(map(_task_text, self.train))
        if shared:
            logger.warning(
                "env %s: %d of the %d different prompts of %s are trained on too: what is measured on "
                "them may be memory",
                self.name,
                len(shared),
                len(test),
                origin,
            )

    def _load(self, source: DataSource) -> list[T]:
        return usable(self.name, located(source), self.convert, source.path)


def usable(
    name: str,
    rows: Iterable[Located],
    convert: Callable[[dict[str, Any], str], T | None],
    origin: str,
) -> list[T]:
    """Return the converted rows, and log how many are skipped. ValueError when none is left."""
    converted = [convert(row, where) for where, row in rows]
    kept_rows = [row for row in converted if row is not None]
    if not kept_rows:
        raise ValueError(f"env {name!r}: {origin} has no usable row")
    num_skipped = len(converted) - len(kept_rows)
    if num_skipped:
        logger.warning(
            "env %s: skipped %d of %d rows of %s: no gold answer",
            name,
            num_skipped,
            len(converted),
            origin,
        )
    return kept_rows


def _task_text(row: object) -> str:
    task = getattr(row, "question", getattr(row, "prompt", row))
    return task if isinstance(task, str) else json.dumps(task, default=vars)


def _digest(row: object) -> bytes:
    return hashlib.sha256(json.dumps(row, sort_keys=True, default=vars).encode()).digest()
