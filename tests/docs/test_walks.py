"""The walks of docs/architecture.md are true: every function that they name is there, and the file
of an earlier one speaks of it."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/architecture.md").read_text()
DOTTED = re.compile(r"`([a-z_]+(?:\.\w+)+)`")


def walks() -> dict[str, list[str]]:
    """The names of each walk, in order."""
    section = PAGE.partition("\n## Four walks\n")[2].partition("\n## ")[0]
    _, *parts = re.split(r"^### ", section, flags=re.MULTILINE)
    return {part.partition("\n")[0]: DOTTED.findall(part) for part in parts}


def parts(name: str) -> tuple[ModuleType, list[str]]:
    """The module that a dotted name begins with, and what follows."""
    words = name.split(".")
    for end in range(len(words), 0, -1):
        try:
            return importlib.import_module(".".join(["lowroll", *words[:end]])), words[end:]
        except ModuleNotFoundError:
            continue
    raise AssertionError(f"{name}: no such module")


def resolve(name: str) -> object:
    """Return the object of a dotted name. AssertionError when there is none."""
    found, rest = parts(name)
    for word in rest:
        assert hasattr(found, word), f"{name}: there is no {word}"
        found = getattr(found, word)
    return found


def sources(names: list[str]) -> Iterator[tuple[str, str]]:
    """Each name with the text of the files of those before it."""
    before = ""
    for name in names:
        yield name, before
        before += inspect.getsource(parts(name)[0])


def test_there_are_four_and_they_are_long() -> None:
    assert len(walks()) == 4
    assert all(len(names) > 12 for names in walks().values())


@pytest.mark.parametrize("title", walks())
def test_every_name_is_there_and_called(title: str) -> None:
    for name, before in sources(walks()[title]):
        resolve(name)
        leaf = name.rpartition(".")[2].lstrip("_")
        assert not before or re.search(rf"\b_?{leaf}\b", before), (
            f"{name}: no file of an earlier step speaks of it"
        )


@pytest.mark.parametrize("name", sorted(set(DOTTED.findall(PAGE))))
def test_other_names_of_the_page_are_there(name: str) -> None:
    if not name.endswith((".py", ".md")):
        resolve(name)


def test_a_wrong_name_would_be_noticed() -> None:
    with pytest.raises(AssertionError, match="there is no trayn"):
        resolve("trainer.step.trayn")
    with pytest.raises(AssertionError, match="no such module"):
        resolve("nowhere.at_all")
