"""Which functions of the package each test reaches, and how long it takes: `mutants.py` asks.

Calls are followed, also in the processes that a test starts. What a fixture of a module or session
reaches counts for every test that uses it, and caches of functions are empty before each test.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import inspect
import json
import os
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from mutations import Mutant

PREFERRED = 5  # tests of a file that imports what is changed count as so many times faster


def follow(package: str, calls: str) -> None:
    """Write each function under the folder `package` that is called from here on as a line of
    `calls`, once."""
    seen = set()

    def trace(frame: Any, event: str, arg: Any) -> None:
        code = frame.f_code
        if code in seen:
            return
        seen.add(code)
        if code.co_filename.startswith(package):
            function = code.co_qualname.split(".<locals>")[0]
            with open(calls, "a") as file:
                file.write(f"{code.co_filename[len(package) + 1 :]}::{function}\n")

    threading.settrace(trace)
    sys.settrace(trace)


class Survey:
    """A plugin of pytest that stores what it sees in `folder`, a file of JSON for a file of
    tests."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.root, self.folder, self.calls = root, folder, folder / "calls"
        self.passed = True
        self.shared: dict[str, tuple[float, set[str]]] = {}  # of fixtures that outlive a test
        self.found: dict[str, tuple[float, set[str]]] = {}
        self.caches: list[Any] = []

    def follow(self) -> None:
        self.calls.write_text("")
        follow(str(self.root / "lowroll"), str(self.calls))

    def called(self) -> set[str]:
        return set(self.calls.read_text().split("\n")) - {""}

    def pytest_collection_finish(self) -> None:
        """What the started processes find first on their path lets them be followed too."""
        self.caches = [
            found
            for found in gc.get_objects()
            if isinstance(found, functools._lru_cache_wrapper)
            and found.__module__.startswith("lowroll")
        ]
        (self.folder / "sitecustomize.py").write_text(
            f"import sys, threading\nfrom typing import Any\n{inspect.getsource(follow)}\n"
            f"follow({str(self.root / 'lowroll')!r}, {str(self.calls)!r})\n"
        )
        os.environ["PYTHONPATH"] = f"{self.root}:{self.folder}"

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Generator[None, Any, Any]:
        self.passed, began = True, time.perf_counter()
        for cache in self.caches:
            cache.cache_clear()
        own = set(self.shared)
        self.follow()
        done = yield
        sys.settrace(None)
        seconds, functions = time.perf_counter() - began, self.called()
        for fixture in self.shared.keys() & getattr(item, "fixturenames", ()):
            seconds += self.shared[fixture][0] if fixture in own else 0
            functions |= self.shared[fixture][1]
        if self.passed:
            self.found[item.nodeid] = seconds, functions
        file = item.nodeid.split("::")[0]
        if nextitem is None or nextitem.nodeid.split("::")[0] != file:
            self.store(file)
        return done

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, Any, Any]:
        if fixturedef.scope == "function":
            return (yield)
        before, began = self.called(), time.perf_counter()
        self.follow()
        try:
            return (yield)
        finally:
            self.shared[fixturedef.argname] = time.perf_counter() - began, self.called()
            with self.calls.open("a") as file:
                file.writelines(f"{line}\n" for line in before)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.passed &= report.passed

    def store(self, file: str) -> None:
        tests = {
            test: [round(seconds, 3), sorted(functions)]
            for test, (seconds, functions) in self.found.items()
        }
        entry = {"digest": digest(self.root / file), "tests": tests}
        (self.folder / f"{Path(file).stem}.json").write_text(json.dumps(entry))
        self.found, self.shared = {}, {}


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


class Reach:
    """The table that `Survey` stored: tests by the function that they reach."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.root = root
        self.seconds: dict[str, float] = {}
        self.by_function: dict[str, set[str]] = defaultdict(set)
        self.missing: list[str] = []  # test files that are new or changed
        for path in sorted((root / "tests").glob("test_*.py")):
            stored = folder / f"{path.stem}.json"
            entry = (
                json.loads(stored.read_text()) if stored.exists() else {"digest": "", "tests": {}}
            )
            if entry["digest"] != digest(path):
                self.missing.append(f"tests/{path.name}")
            for test, (seconds, functions) in entry["tests"].items():
                self.seconds[test] = seconds
                for function in functions:
                    self.by_function[function].add(test)

    def tests(self, mutant: Mutant, most_seconds: float) -> list[str]:
        """Those that reach the mutant's function, fastest first, up to so many seconds; a file that
        imports the module or room counts as faster, the k-th set of parameters of a test as k times
        slower. For what runs at import, or is never reached, those that reach its file, or its
        room."""
        file = mutant.file.removeprefix("lowroll/")
        reaching = (
            self.by_function.get(f"{file}::{mutant.function}", set()) if mutant.function else set()
        )
        for part in (f"{file}::", f"{file.split('/')[0]}/"):
            reaching = reaching or {
                test
                for function, tests in self.by_function.items()
                if function.startswith(part)
                for test in tests
            }
        module = file.removesuffix(".py").replace("/", ".")
        imports = tuple(f"from lowroll.{name} import " for name in (module, module.split(".")[0]))
        near = {
            name
            for name in {test.split("::")[0] for test in reaching}
            if any(line in (self.root / name).read_text() for line in imports)
        }
        cost = {
            test: self.seconds[test] / (PREFERRED if test.split("::")[0] in near else 1)
            for test in reaching
        }
        seen: Counter[str] = Counter()
        turns = {}
        for test in sorted(cost, key=lambda test: (cost[test], test)):
            seen[test.split("[")[0]] += 1
            turns[test] = seen[test.split("[")[0]] * cost[test]
        chosen, total = [], 0.0
        for test in sorted(turns, key=turns.__getitem__):
            total += self.seconds[test]
            if chosen and total > most_seconds:
                break
            chosen.append(test)
        return chosen

    def reaches(self, mutant: Mutant) -> bool:
        return f"{mutant.file.removeprefix('lowroll/')}::{mutant.function}" in self.by_function
