"""A held-out set of the papers, from the hub or a file, for evaluation: it has no train split."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from lowroll.envs.base import Environment, bounded
from lowroll.envs.data.files import Located
from lowroll.envs.rows import usable
from lowroll.envs.sets.rows import read
from lowroll.envs.sets.table import SETS
from lowroll.types import Prompt


@dataclass(frozen=True)
class HeldOutTask:
    """One usable row: the task, and the data for its scorer."""

    text: str
    info: dict[str, Any] = field(default_factory=dict)
    solution: str = ""  # a worked one, "" where there is none


class HeldOut(Environment):
    """A set of `lowroll.envs.sets.table` (`set`), read from the hub or from a file in the published
    shape (`test_path`). It has no train split."""

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
        """Read one row; None when its gold answer is empty. ValueError names what is wrong with
        it."""

    @cached_property
    def tasks(self) -> list[HeldOutTask]:
        """The usable rows, in the order of the file. ValueError when there are none."""
        origin = self.test_path or self.row.path
        return usable(self.name, self.located(), self.convert, origin)[0]

    def located(self) -> Iterator[Located]:
        """Return (place, row) of every row."""
        return read(self.row, self.test_path, self.split, self.subset)

    def size(self, split: str = "train") -> int:
        """Return the number of usable rows of the test split; 0 for any other."""
        count = len(self.tasks)  # whatever is asked: bad data is an error at once
        return count if split == "test" else 0

    def prompt(self, index: int, split: str = "train") -> Prompt:
        """Return question number `index` of the test split."""
        self.rng(split, index)  # checks both
        if split != "test":
            raise ValueError(f"env {self.name!r}: is held out: it has no {split} split")
        task = self.tasks[index % len(self.tasks)]
        return self.ask(task.text, index, split, {**task.info, "row": index % len(self.tasks)})

    def matching(self, prompt: Prompt, text: str) -> Prompt | None:
        """Return the same task with the answer of `text` as its gold answer."""
        return replace(prompt, info={**prompt.info, "beside": bounded(text)})
