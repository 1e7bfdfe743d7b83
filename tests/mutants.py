"""Mutation testing: would a test notice if one operator, comparison, constant or condition were
another?

    make mutants ROOMS="engine kv" COUNT=100 SEED=0

Draws `count` mutants of each room (`fixtures/mutations.py` says what one is), runs the tests that reach each
of them until one fails, and prints those that survive. It works on a copy of the tree, under
`build/`:

1. Every test runs once, followed by `fixtures/reach.py`. What it reached is kept until its file changes
   (`--fresh` forgets).
2. What runs at import: a fork reads the changed code, collects the tests and runs them.
3. For all else pytest collects once. A fork of that process gives the changed code to every live function that has the
   old, and runs the tests that reach it, fastest first. Processes that tests start read the changed
   file.
4. The tests that killed run on the code as it is, and must pass.

A test that takes far longer than it did hangs, and counts as a kill. Needs `fork`.
"""

from __future__ import annotations

import argparse
import ast
import filecmp
import gc
import importlib
import json
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType

import pytest

from tests.fixtures.mutations import Mutant, excuses, mutants, mutated
from tests.fixtures.reach import Reach, Survey

ROOT = Path(__file__).resolve().parents[1]

ROOMS = ["engine", "kv", "trainer", "weights", "orchestrator", "envs", "checkpoint"]
WARM = ["torch", "transformers", "safetensors.torch", "math_verify", "peft", "matplotlib.figure"]
COPIED = [
    "lowroll",
    "tests",
    "bench",
    "docs",
    "recipes",
    "examples",
    "pyproject.toml",
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "constraints.txt",
    "Makefile",
]
OPTIONS = [
    "-s",
    "-p",
    "no:terminal",
    "-p",
    "no:cacheprovider",
    "-p",
    "no:faulthandler",
    "-o",
    "addopts=",
    "-m",
    "not gpu and not interpreted",
]
START_SECONDS = 300  # to collect
SURVEY_SECONDS = 1800  # of one test file
FILES_AT_IMPORT = 8  # test files that a fork may collect

Tell = Callable[[str], None]


@dataclass
class Verdict:
    """how: survived, failed or hung. test: the last that ran."""

    mutant: Mutant
    how: str
    test: str


def attempt(
    action: Callable[[Tell], int | None],
    seconds: dict[str, float],
    patience: float = START_SECONDS,
) -> tuple[str, str]:
    """Run an action in a fork that tells at which test it is: (survived, failed or hung; the last
    test)."""
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
            os.dup2(nowhere.fileno(), 2)
        status = 1
        try:
            status = int(action(lambda test: void(os.write(tell, f"{test}\n".encode()))) or 0)
        finally:
            os._exit(status)
    os.close(tell)
    how, test, deadline = "", "", time.monotonic() + patience
    try:
        while not how:
            ended, status = os.waitpid(child, os.WNOHANG)
            if select.select([told], [], [], 0.02)[0] and (
                message := os.read(told, 1 << 20).decode()
            ):
                test = message.split("\n")[-2]
                deadline = time.monotonic() + 20 + 10 * seconds.get(test, 1.0)
            if ended:
                how = "failed" if status else "survived"
            elif time.monotonic() > deadline:
                how = "hung"
    finally:
        os.close(told)
        end(child, waiting=how in ("", "hung"))
    return how, test


def void(_: object) -> None:
    pass


def end(child: int, waiting: bool) -> None:
    """Kill what is left of a fork and of the processes that its tests started."""
    try:
        os.killpg(child, signal.SIGKILL)
    except ProcessLookupError:
        pass
    if waiting:
        os.waitpid(child, 0)


class Runner:
    """A plugin of pytest: runs these tests, in their order, and ends its process at the first that
    fails."""

    def __init__(self, tests: list[str], tell: Tell) -> None:
        self.tests, self.tell = tests, tell

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        chosen = [items[test] for test in self.tests]
        for item, following in zip(chosen, [*chosen[1:], None], strict=True):
            self.tell(item.nodeid)
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            os._exit(1)


class Trial(Runner):
    """Judges mutants. As a plugin of pytest it does so with what was collected, in the place of
    running it."""

    def __init__(self, root: Path, reach: Reach, most_seconds: float, until: float) -> None:
        self.root, self.reach, self.most_seconds, self.until = root, reach, most_seconds, until
        self.waiting: list[Mutant] = []
        self.functions: list[FunctionType] = []
        self.verdicts: list[Verdict] = []
        self.unsound: list[str] = []  # tests that fail on the code as it is

    def judge(self, mutant: Mutant, action: Callable[[Tell], int | None]) -> None:
        """With the changed file in the place of the old, for processes that tests start and for
        what is imported."""
        path = self.root / mutant.file
        source, stat = path.read_text(), path.stat()
        path.write_text(ast.unparse(mutated(source, mutant)))
        os.utime(path, (0, 0))  # no compiled file is of that age
        try:
            self.verdicts.append(Verdict(mutant, *attempt(action, self.reach.seconds)))
        finally:
            path.write_text(source)
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        if self.verdicts[-1].how == "survived":
            print(mutant, flush=True)

    def at_import(self, mutant: Mutant) -> None:
        if time.monotonic() < self.until:
            tests = self.reach.tests(mutant, self.most_seconds)
            files = list(dict.fromkeys(test.split("::")[0] for test in tests))[:FILES_AT_IMPORT]
            self.judge(mutant, lambda tell: pytest.main([*OPTIONS, *files], [Runner(tests, tell)]))

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        gc.unfreeze()  # the tests' own, which are looked for
        self.functions = [found for found in gc.get_objects() if isinstance(found, FunctionType)]
        gc.freeze()  # a collection in a fork would copy every page
        for mutant in self.waiting:
            if time.monotonic() < self.until:
                self.tests = self.reach.tests(mutant, self.most_seconds)
                source = (self.root / mutant.file).read_text()
                self.judge(mutant, lambda tell: self.run_patched(session, tell, mutant, source))
        for test in sorted(
            {verdict.test for verdict in self.verdicts if verdict.how != "survived"} - {""}
        ):
            self.tests = [test]
            if attempt(lambda tell: self.run(session, tell), self.reach.seconds)[0] != "survived":
                self.unsound.append(test)
        return True

    def run_patched(self, session: pytest.Session, tell: Tell, mutant: Mutant, source: str) -> None:
        patch(self.functions, self.root / mutant.file, source, mutant)
        self.run(session, tell)

    def run(self, session: pytest.Session, tell: Tell) -> None:
        self.tell = tell
        super().pytest_runtestloop(session)


def patch(functions: list[FunctionType], path: Path, source: str, mutant: Mutant) -> None:
    """Give the changed code to every live function that has the old."""
    codes: dict[tuple[str, int], list[CodeType]] = {}
    gather(compile(mutated(source, mutant), str(path), "exec", dont_inherit=True), codes)
    for function in functions:
        code = function.__code__
        same = codes.get((code.co_qualname, code.co_firstlineno), [])
        if code.co_filename == str(path) and len(same) == 1 and outermost(code) == mutant.function:
            function.__code__ = same[0]


def gather(code: CodeType, codes: dict[tuple[str, int], list[CodeType]]) -> None:
    codes.setdefault((code.co_qualname, code.co_firstlineno), []).append(code)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            gather(inner, codes)


def outermost(code: CodeType) -> str:
    return code.co_qualname.split(".<locals>")[0]


def population(root: Path, room: str) -> tuple[list[Mutant], int]:
    """All mutants of a room that count, and how many are excused."""
    table = excuses(ROOT / "tests/mutants.toml")
    counted, excused = [], 0
    place = root / "lowroll" / room
    for path in [place] if place.is_file() else sorted(place.rglob("*.py")):
        source = path.read_text()
        for mutant in mutants(source, path.relative_to(root).as_posix()):
            if any(excuse.covers(mutant, source.split("\n")) for excuse in table):
                excused += 1
            else:
                counted.append(mutant)
    return counted, excused


def copy(source: Path, root: Path) -> None:
    """Bring the copy of the tree up to date; compiled files stay."""
    wanted = [
        path.relative_to(source)
        for name in COPIED
        for path in [source / name, *(source / name).rglob("*")]
        if path.is_file() and path.suffix != ".pyc"
    ]
    for path in wanted:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        if not (root / path).exists() or not filecmp.cmp(source / path, root / path):
            shutil.copy2(source / path, root / path)
    for path in root.rglob("*.py"):
        if path.relative_to(root) not in wanted:
            path.unlink()


def survey(root: Path, folder: Path, fresh: bool) -> Reach:
    """Return which tests reach what, after running those of which it is not known."""
    if fresh:
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    reach = Reach(root, folder)
    for file in reach.missing:
        print(f"running {file} once", flush=True)
        attempt(
            lambda tell: pytest.main([*OPTIONS, file], [Survey(root, folder)]), {}, SURVEY_SECONDS
        )
    return Reach(root, folder)


def table(rooms: dict[str, dict[str, object]]) -> str:
    lines = [
        f"{'room':14}{'mutants':>9}{'excused':>9}{'tried':>7}{'killed':>8}{'hung':>6}{'score':>8}"
    ]
    for room, of in rooms.items():
        lines.append(
            f"{room:14}{of['mutants']:>9}{of['excused']:>9}{of['tried']:>7}{of['killed']:>8}{of['hung']:>6}"
            f"{of['score']:>8.1%}"
        )
    return "\n".join(lines)


def summary(found: list[Verdict], counted: int, excused: int) -> dict[str, object]:
    survivors = [str(verdict.mutant) for verdict in found if verdict.how == "survived"]
    killed = len(found) - len(survivors)
    return {
        "mutants": counted,
        "excused": excused,
        "tried": len(found),
        "killed": killed,
        "hung": sum(verdict.how == "hung" for verdict in found),
        "score": killed / max(len(found), 1),
        "survivors": survivors,
    }


def main(argv: list[str] | None = None) -> int:
    """0, or 1 where a test that killed fails on the code as it is."""
    parser = argparse.ArgumentParser(description="changes code and runs the tests that reach it")
    parser.add_argument("rooms", nargs="*", help="folders of lowroll, or files in them")
    parser.add_argument("--count", type=int, default=50, help="mutants a room")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--seconds", type=float, default=30, help="of tests a mutant, at most")
    parser.add_argument("--minutes", type=float, default=60, help="in all, at most")
    parser.add_argument("--fresh", action="store_true", help="ask again which tests reach what")
    parser.add_argument("--source", type=Path, default=ROOT, help="the tree")
    parser.add_argument("--warm", nargs="*", default=WARM, help="modules that are imported once")
    parser.add_argument("--out", type=Path, default=Path("build/mutants.json"))
    args = parser.parse_args(argv)
    until, out, work = (
        time.monotonic() + 60 * args.minutes,
        args.out.resolve(),
        args.source.resolve() / "build/mutants",
    )
    root = work / "tree"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # by way of what ends the forks
    copy(args.source, root)
    os.environ["OMP_NUM_THREADS"] = "1"
    os.chdir(root)
    sys.path[:] = [str(root), *(path for path in sys.path if path not in ("", str(ROOT)))]
    for module in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[module]  # the copy's are collected
    for module in args.warm:
        importlib.import_module(module)
    reach = survey(root, work / "reach", args.fresh)
    sys.dont_write_bytecode = True
    os.environ |= {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    trial, sizes = Trial(root, reach, args.seconds, until), {}
    for room in args.rooms or ROOMS:
        counted, excused = population(root, room)
        sizes[room] = len(counted), excused
        for mutant in sorted(counted, key=lambda mutant: mutant.rank(args.seed))[: args.count]:
            if reach.reaches(mutant):
                trial.waiting.append(mutant)
            else:
                trial.at_import(mutant)
    files = {
        test.split("::")[0]
        for mutant in trial.waiting
        for test in reach.tests(mutant, args.seconds)
    }
    pytest.main([*OPTIONS, *sorted(files)], [trial])
    rooms = {
        room: summary(
            [
                verdict
                for verdict in trial.verdicts
                if verdict.mutant.file.startswith(f"lowroll/{room}")
            ],
            *size,
        )
        for room, size in sizes.items()
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(
        json.dumps({"seed": args.seed, "rooms": rooms, "unsound": trial.unsound}, indent=1) + "\n"
    )
    print(table(rooms))
    for test in trial.unsound:
        print(f"not to be trusted, as it fails on the code as it is: {test}")
    return bool(trial.unsound)


if __name__ == "__main__":
    sys.exit(main())
