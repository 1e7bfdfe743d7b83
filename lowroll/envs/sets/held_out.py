"""A held-out set of the papers, for evaluation only."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from lowroll.envs.base import Environment
from lowroll.envs.data.files import Located
from lowroll.envs.rows import usable
from lowroll.envs.sets.rows import read
from lowroll.envs.sets.table import SETS
from lowroll.types import Prompt


@dataclass(frozen=True)
class HeldOutTask:
    """A usable row: the task, and its scorer's data."""

    text: str
    info: dict[str, Any] = field(default_factory=dict)
    solution: str = ""


class HeldOut(Environment):
    """A set of `lowroll.envs.sets.table`, from the hub or a file of its shape (`test_path`)."""

    exact = True

    def __init__(
        self,
        *,
        name: str,
        set: str,
        seed: int = 0,
        system: str | None = None,
        template: str | None = None,
        test_path: str | None = None,
        split: str | None = None,
        subset: str | None = None,
    ) -> None:
        self.row = SETS[set]
        super().__init__(
            name=name, seed=seed, system=system, template=template or self.row.template
        )
        self.test_path, self.split, self.subset = test_path, split, subset

    @abstractmethod
    def convert(self, row: dict[str, Any], where: str) -> HeldOutTask | None:
        """Read a row; None for an empty gold answer. ValueError names the fault."""

    @cached_property
    def tasks(self) -> list[HeldOutTask]:
        """The usable rows, in file order; ValueError without any."""
        origin = self.test_path or self.row.path
        return usable(self.name, self.located(), self.convert, origin)

    def located(self) -> Iterator[Located]:
        return read(self.row, self.test_path, self.split, self.subset)

    def size(self, split: str = "train") -> int:
        count = len(self.tasks)  # read now, so that bad data is an error for any split
        return count if split == "test" else 0

    def prompt(self, index: int, split: str = "train") -> Prompt:
        self.check_task(index, split)
        if split != "test":
            raise ValueError(f"env {self.name!r}: is held out: it has no {split} split")
        task = self.tasks[index % len(self.tasks)]
        return self.ask(task.text, index, split, {**task.info, "row": index % len(self.tasks)})
