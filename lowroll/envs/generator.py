"""Items of one reasoning-gym generator by number, and their scores: in this process, or in a child.

A generator is a list of items that its seed determines. An item's number is (split, draw, index): block `index //
BLOCK` of the list seeded by (seed, split, draw, block). Some generators walk over sets of strings, so their items also
depend on Python's hash seed, which is random in most processes: those (`HASH_ORDERED`) live in a child process whose
hash seed is 0, as it is in the scoring workers.

Some of the scorers evaluate the response as Python or sympy source. For those the answer must be a sentence of a small
language (`LANGUAGES`) in which nothing but the task's own functions can be called; anything else is wrong, unread.
"""
from __future__ import annotations

import json
import re
import select
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import lru_cache
from random import Random
from typing import Any, Protocol

from lowroll.envs import child
from lowroll.envs.table import nearest

BLOCK = 256                # items of one list: some generators prepare data for each item at construction
CHILD_LIMIT = 60.0         # seconds for a child to answer

LISTS = re.compile(r"[\w\s,'\"\[\]-]*")
SUMS = re.compile(r"[\d\s()+*/.-]*")
FUNCTIONS = "exp|log|sqrt|sin|cos|tan|cot|sec|csc|asin|acos|atan|sinh|cosh|tanh|erf|Abs|pi"
FORMULAS = re.compile(rf"(?>\d++(?:\.\d*+)?|\b(?:{FUNCTIONS}|[A-Za-z])\b|[\s()+*/^-])*+")
LANGUAGES = {              # generators whose scorer evaluates the answer, and what it may consist of
    "string_insertion": LISTS, "spiral_matrix": LISTS, "binary_matrix": LISTS, "n_queens": LISTS,
    "countdown": SUMS, "puzzle24": SUMS,
    "simple_integration": FORMULAS, "intermediate_integration": FORMULAS, "polynomial_multiplication": FORMULAS,
}
HASH_ORDERED = {"isomorphic_strings", "list_functions", "polynomial_multiplication", "ransom_note", "word_ladder"}


def _same_numbers(answer: str, item: dict[str, Any]) -> bool:
    return sorted(map(int, re.findall(r"\d{1,18}", answer))) == sorted(item["metadata"]["numbers"])


DEMANDS: dict[str, Callable[[str, dict[str, Any]], bool]] = {    # what a scorer of version 0.1.25 forgets to ask
    "game_of_life_halting": lambda answer, item: answer == item["answer"],   # it takes bool("False") for True
    "puzzle24": _same_numbers,         # it takes 24 out of any four numbers
}


class ItemSource(Protocol):
    """What both kinds offer."""

    def item(self, split: str, draw: int, index: int) -> tuple[str, str | None]:
        """(question, stored answer) of an item."""

    def score(self, split: str, draw: int, index: int, answer: str) -> float:
        """The generator's reward for an answer to it."""


def source(name: str, options: dict[str, Any], seed: int) -> ItemSource:
    """The items of generator `name`. ValueError for an unknown generator or option, or a missing package."""
    parts = options.get("datasets")
    names = {name, *(part.get("name") for part in parts if isinstance(part, dict))} if isinstance(parts, list) else {name}
    remote = bool(sys.flags.hash_randomization) and not names.isdisjoint(HASH_ORDERED)
    return GeneratorProcess(name, options, seed) if remote else Generator(name, options, seed)


class Generator:
    """A generator in this process."""

    def __init__(self, name: str, options: dict[str, Any], seed: int) -> None:
        self.name, self.options, self.seed = name, _checked(name, options), seed
        self._list = lru_cache(maxsize=8)(self._make_list)
        self._item = lru_cache(maxsize=64)(self._make_item)    # a group's responses are scored in a row
        try:
            self._list("train", 0, 0)
        except (AssertionError, TypeError, ValueError) as error:
            raise ValueError(f"reasoning-gym/{name} refused the options: {error}") from error

    def _make_list(self, split: str, draw: int, block: int) -> Any:
        from reasoning_gym import create_dataset

        seed = Random(f"{self.seed}/{split}/{draw}/{block}").getrandbits(31)   # numpy takes no larger one
        return create_dataset(self.name, seed=seed, size=BLOCK, **self.options)

    def _make_item(self, split: str, draw: int, index: int) -> dict[str, Any]:
        return self._list(split, draw, index // BLOCK)[index % BLOCK]

    def item(self, split: str, draw: int, index: int) -> tuple[str, str | None]:
        """(question, stored answer) of an item."""
        item = self._item(split, draw, index)
        return item["question"], item["answer"]

    def score(self, split: str, draw: int, index: int, answer: str) -> float:
        """The generator's reward, and 0 for an answer outside of its language or its task."""
        item = self._item(split, draw, index)
        maker = item["metadata"].get("source_dataset", self.name)      # a composite tells whose item it is
        language, demand = LANGUAGES.get(maker), DEMANDS.get(maker)
        if answer != item["answer"] and (language is not None and language.fullmatch(answer) is None
                                         or demand is not None and not demand(answer, item)):
            return 0.0
        return float(self._list(split, draw, index // BLOCK).score_answer(answer, item))


class GeneratorProcess:
    """A generator in a child process with a fixed hash seed; the child ends with its input, that is with us."""

    def __init__(self, name: str, options: dict[str, Any], seed: int) -> None:
        self.name = name
        self._child = child.start("lowroll.envs.generator", stderr=subprocess.DEVNULL)
        self._request(name, options, seed)

    def item(self, split: str, draw: int, index: int) -> tuple[str, str | None]:
        """(question, stored answer) of an item."""
        question, answer = self._request("item", split, draw, index)
        return question, answer

    def score(self, split: str, draw: int, index: int, answer: str) -> float:
        """The generator's reward."""
        return float(self._request("score", split, draw, index, answer))

    def __del__(self) -> None:
        if hasattr(self, "_child"):
            self._child.kill()
            self._child.communicate()

    def _request(self, *words: Any) -> Any:
        """Ask and wait. ValueError with the child's reason, TimeoutError after `CHILD_LIMIT` seconds."""
        stdin, stdout = self._child.stdin, self._child.stdout
        assert stdin is not None and stdout is not None
        deadline = time.monotonic() + CHILD_LIMIT
        line = b""
        try:
            stdin.write(json.dumps(words).encode() + b"\n")
            while not line.endswith(b"\n"):
                if not select.select([stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
                    raise TimeoutError(f"the process of reasoning-gym/{self.name} did not answer in {CHILD_LIMIT:g} s")
                line += (piece := stdout.read(1 << 16))
                if not piece:
                    raise BrokenPipeError
        except BrokenPipeError as error:
            raise RuntimeError(f"the process of reasoning-gym/{self.name} ended by itself") from error
        reply = json.loads(line)
        if "failed" in reply:
            raise ValueError(reply["failed"])
        return reply["result"]


def _checked(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """The options as the generator's configuration takes them."""
    try:
        from reasoning_gym.composite import DatasetSpec
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ValueError(f"reasoning-gym/{name} needs the package 'reasoning-gym' "
                         "(pip install 'lowroll[envs]')") from error
    if name not in DATASETS:
        raise ValueError(f"reasoning-gym has no generator {name!r}{nearest(name, list(DATASETS))}")
    config = DATASETS[name][1]
    known = [field.name for field in fields(config) if field.name not in ("seed", "size")] if is_dataclass(config) else []
    for key in options:
        if key not in known:
            raise ValueError(f"reasoning-gym/{name} has no option {key!r}{nearest(key, known)}; known: {', '.join(known)}")
    if name == "composite":
        parts = options.get("datasets")
        if not isinstance(parts, list) or not all(isinstance(part, dict) and "name" in part for part in parts):
            raise ValueError("reasoning-gym/composite needs datasets: [{name, weight, config}, ...]")
        return options | {"datasets": [DatasetSpec(**{"weight": 1.0, "config": {}} | part) for part in parts]}
    return options


def main() -> None:
    """The child: first a line [name, options, seed], then ["item" or "score", arguments...]; one reply line each."""
    generator: Generator | None = None
    for line in sys.stdin:
        words = json.loads(line)
        try:
            if generator is None:
                generator, result = Generator(*words), None
            else:
                result = generator.item(*words[1:]) if words[0] == "item" else generator.score(*words[1:])
            reply = {"result": result}
        except Exception as error:     # the other side raises it
            reply = {"failed": f"{error}" if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
