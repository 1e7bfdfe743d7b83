"""Numbered items and scores of a reasoning-gym generator, in this process or a child.

An item's number is (split, draw, index): block `index // BLOCK` of the list seeded by (seed, split,
draw, block). Some items depend on Python's hash seed: a child process with a fixed one makes them,
unless this process is such a child (a scoring worker). `curriculum_level` is a level of
reasoning-gym's own curriculum, without those whose options are refused.

Some scorers evaluate the response as Python or sympy source: answers outside a small language
(`LANGUAGES`) are wrong, and are not evaluated.
"""

from __future__ import annotations

import atexit
import json
import random
import re
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from functools import lru_cache
from typing import Any

from lowroll.envs import child
from lowroll.types import nearest

LEVEL = "curriculum_level"
BLOCK = 256  # items of a list, which some generators prepare at construction
CHILD_LIMIT = 60.0  # seconds for a child to answer
KILL_LIMIT = 5.0  # seconds for the kernel to reap a killed child

LISTS = re.compile(r"[\w\s,'\"\[\]-]*")
SUMS = re.compile(r"[\d\s()+*/.-]*")
FUNCTIONS = "exp|log|sqrt|sin|cos|tan|cot|sec|csc|asin|acos|atan|sinh|cosh|tanh|erf|Abs|pi"
FORMULAS = re.compile(rf"(?>\d++(?:\.\d*+)?|\b(?:{FUNCTIONS}|[A-Za-z])\b|[\s()+*/^-])*+")
LANGUAGES = {  # allowed parts of answers that a scorer evaluates
    "string_insertion": LISTS,
    "spiral_matrix": LISTS,
    "binary_matrix": LISTS,
    "n_queens": LISTS,
    "countdown": SUMS,
    "puzzle24": SUMS,
    "simple_integration": FORMULAS,
    "intermediate_integration": FORMULAS,
    "polynomial_multiplication": FORMULAS,
}


def _same_numbers(answer: str, item: dict[str, Any]) -> bool:
    return sorted(map(int, re.findall(r"\d{1,18}", answer))) == sorted(item["metadata"]["numbers"])


# checks that scorers of version 0.1.25 lack
DEMANDS: dict[str, Callable[[str, dict[str, Any]], bool]] = {
    # its scorer uses bool("False"), which is True
    "game_of_life_halting": lambda answer, item: answer == item["answer"],
    "puzzle24": _same_numbers,  # its scorer accepts 24 from any four numbers
}


def levels(name: str, options: dict[str, Any]) -> int:
    """Return the levels of a generator's curriculum. ValueError without one."""
    if sys.flags.hash_randomization:
        return int(server.ask(name, options, 0, "levels"))
    return _num_levels(name, options)


def source(name: str, options: dict[str, Any], seed: int) -> Generator | RemoteGenerator:
    """Return a generator's items. ValueError for an unknown generator or option, or a missing
    package."""
    if sys.flags.hash_randomization:
        return RemoteGenerator(name, options, seed)
    return Generator(name, options, seed)


class Generator:
    """A generator in this process."""

    def __init__(self, name: str, options: dict[str, Any], seed: int) -> None:
        self.name, self.options, self.seed = name, _check_options(name, options), seed
        self._list = lru_cache(maxsize=8)(self._make_list)
        # a group's responses are scored consecutively
        self._item = lru_cache(maxsize=64)(self._make_item)
        try:
            self._list("train", 0, 0)
        except (AssertionError, TypeError, ValueError) as error:
            raise ValueError(f"reasoning-gym/{name} refused the options: {error}") from error

    def _make_list(self, split: str, draw: int, block: int) -> Any:
        from reasoning_gym import create_dataset

        # numpy's limit
        seed = random.Random(f"{self.seed}/{split}/{draw}/{block}").getrandbits(31)
        return create_dataset(self.name, seed=seed, size=BLOCK, **self.options)

    def _make_item(self, split: str, draw: int, index: int) -> dict[str, Any]:
        state = random.getstate()
        # a few generators use the global stream
        random.seed(f"{self.seed}/{split}/{draw}/{index}")
        try:
            return self._list(split, draw, index // BLOCK)[index % BLOCK]
        finally:
            random.setstate(state)

    def item(self, split: str, draw: int, index: int) -> tuple[str, str | None]:
        """Return (question, stored answer)."""
        item = self._item(split, draw, index)
        return item["question"], item["answer"]

    def score(self, split: str, draw: int, index: int, answer: str) -> float:
        """Return the generator's reward; 0 for an answer outside its language or task."""
        item = self._item(split, draw, index)
        # an item of a composite names its own generator
        item_generator = item["metadata"].get("source_dataset", self.name)
        if answer != item["answer"] and not _is_admissible(answer, item, item_generator):
            return 0.0
        return float(self._list(split, draw, index // BLOCK).score_answer(answer, item))


def _is_admissible(answer: str, item: dict[str, Any], generator: str) -> bool:
    language, demand = LANGUAGES.get(generator), DEMANDS.get(generator)
    if language is not None and language.fullmatch(answer) is None:
        return False
    return demand is None or demand(answer, item)


class RemoteGenerator:
    """A generator in the shared child process."""

    def __init__(self, name: str, options: dict[str, Any], seed: int) -> None:
        self.key = (name, options, seed)
        server.ask(*self.key, "check")

    def item(self, split: str, draw: int, index: int) -> tuple[str, str | None]:
        question, answer = server.ask(*self.key, "item", split, draw, index)
        return question, answer

    def score(self, split: str, draw: int, index: int, answer: str) -> float:
        return float(server.ask(*self.key, "score", split, draw, index, answer))


class _Server:
    """The child process, started on demand."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None
        # a thread that outlives every call: the child dies with its starting thread
        self.starter = ThreadPoolExecutor(1, thread_name_prefix="generator-starter")

    def ask(self, *request: Any) -> Any:
        """Send a request (see `main`) and return its result. ValueError with the child's reason;
        TimeoutError after `CHILD_LIMIT`."""
        with self.lock:
            if self.process is None:
                self.process = self.starter.submit(
                    child.start, "lowroll.envs.generator", subprocess.DEVNULL
                ).result(CHILD_LIMIT)
            line = json.dumps(request).encode() + b"\n"
            try:
                reply = self._exchange(self.process, line, request[0])
            except BaseException:  # a late reply must not answer a later request
                self.stop()
                raise
        if "failed" in reply:
            raise ValueError(reply["failed"])
        return reply["result"]

    @staticmethod
    def _exchange(process: subprocess.Popen[bytes], request: bytes, name: str) -> dict[str, Any]:
        assert process.stdin is not None and process.stdout is not None
        deadline = time.monotonic() + CHILD_LIMIT
        line = b""
        try:
            process.stdin.write(request)
            while not line.endswith(b"\n"):
                seconds_left = max(0.0, deadline - time.monotonic())
                readable, _, _ = select.select([process.stdout], [], [], seconds_left)
                if not readable:
                    raise TimeoutError(f"reasoning-gym/{name} made no item in {CHILD_LIMIT:g} s")
                piece = process.stdout.read(1 << 16)
                if not piece:
                    raise BrokenPipeError
                line += piece
        except BrokenPipeError as error:
            raise RuntimeError(f"the process of reasoning-gym/{name} ended by itself") from error
        return json.loads(line)

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate(timeout=KILL_LIMIT)
            self.process = None


server = _Server()
atexit.register(server.stop)


def _check_options(name: str, options: dict[str, Any]) -> dict[str, Any]:
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ValueError(
            f"reasoning-gym/{name} needs the package 'reasoning-gym' (pip install 'lowroll[envs]')"
        ) from error
    if name not in DATASETS:
        raise ValueError(f"reasoning-gym has no generator {name!r}{nearest(name, DATASETS, repr)}")
    if LEVEL in options:
        options = _options_at_level(name, options, options[LEVEL])
    config = DATASETS[name][1]
    option_names = [field.name for field in fields(config) if field.name not in ("seed", "size")]
    for key in options:
        if key not in option_names:
            raise ValueError(
                f"reasoning-gym/{name} has no option {key!r}{nearest(key, option_names, repr)}; known: "
                f"{', '.join(option_names)}"
            )
    return _composite_options(options) if name == "composite" else options


def _composite_options(options: dict[str, Any]) -> dict[str, Any]:
    from reasoning_gym.composite import DatasetSpec

    datasets = options.get("datasets")
    if not isinstance(datasets, list) or not all(
        isinstance(dataset, dict) and "name" in dataset for dataset in datasets
    ):
        raise ValueError("reasoning-gym/composite needs datasets: [{name, weight, config}, ...]")
    specs = [DatasetSpec(**{"weight": 1.0, "config": {}} | dataset) for dataset in datasets]
    return options | {"datasets": specs}


def _num_levels(name: str, options: dict[str, Any]) -> int:
    if name == "composite":
        _check_options(name, options)
        return max(len(_level_options(dataset["name"])) for dataset in options["datasets"])
    num_levels = len(_level_options(name))
    _check_options(name, _options_at_level(name, options, num_levels - 1))
    return num_levels


def _options_at_level(name: str, options: dict[str, Any], level: int) -> dict[str, Any]:
    base_options = {key: value for key, value in options.items() if key != LEVEL}
    if name == "composite":
        datasets = []
        for dataset in base_options["datasets"]:
            config = _options_at_level(dataset["name"], dataset.get("config", {}), level)
            datasets.append(dataset | {"config": config})
        return base_options | {"datasets": datasets}
    options_by_level = _level_options(name)
    level_options = options_by_level[min(level, len(options_by_level) - 1)]
    if conflicting := sorted(level_options.keys() & base_options.keys()):
        raise ValueError(
            f"reasoning-gym/{name}: {', '.join(conflicting)} is moved by the curriculum; leave it out, or "
            "the curriculum"
        )
    return base_options | level_options


@lru_cache(maxsize=128)
def _level_options(name: str) -> list[dict[str, Any]]:
    from reasoning_gym.factory import CURRICULA, DATASETS, create_curriculum

    if name not in DATASETS:
        raise ValueError(f"reasoning-gym has no generator {name!r}{nearest(name, DATASETS, repr)}")
    if name not in CURRICULA:
        raise ValueError(f"reasoning-gym/{name} has no curriculum")
    curriculum = create_curriculum(name)
    num_levels = max(len(attribute.levels) for attribute in curriculum.attributes.values())
    defaults = vars(DATASETS[name][1]())
    options_by_level = []
    for level in range(num_levels):
        curriculum.set_global_level(level)
        try:
            config = curriculum.generate_configuration()
            if hasattr(config, "validate"):
                config.validate()
        except (AssertionError, ValueError):
            continue
        level_options = {}
        for key, value in vars(config).items():
            is_set = _is_curriculum_field(curriculum, key)
            if key not in ("seed", "size") and (value != defaults[key] or is_set):
                level_options[key] = value
        options_by_level.append(level_options)
    return options_by_level


def _is_curriculum_field(curriculum: Any, key: str) -> bool:
    names = ("field_name", "lower_field_name", "upper_field_name")
    return any(
        key == getattr(attribute, name, None)
        for attribute in curriculum.attributes.values()
        for name in names
    )


@lru_cache(maxsize=128)
def _generator(key: str) -> Generator:
    return Generator(*json.loads(key))


def main() -> None:
    """Run the child: each request line [name, options, seed, verb, arguments...] has one reply,
    {"result"} or {"result": null, "failed"}."""
    child.die_with(int(sys.argv[1]))
    requests, replies = child.private_streams()
    for line in requests:
        name, options, seed, verb, *arguments = json.loads(line)
        reply: dict[str, Any] = {"result": None}
        try:
            reply["result"] = _result(name, options, seed, verb, arguments)
        except ValueError as error:
            reply["failed"] = str(error)
        except Exception as error:
            reply["failed"] = f"{type(error).__name__}: {error}"
        replies.write(json.dumps(reply).encode() + b"\n")


def _result(name: str, options: dict[str, Any], seed: int, verb: str, arguments: list[Any]) -> Any:
    if verb == "levels":
        return _num_levels(name, options)
    generator = _generator(json.dumps([name, options, seed]))
    if verb == "check":
        return None
    return generator.item(*arguments) if verb == "item" else generator.score(*arguments)


if __name__ == "__main__":
    main()
