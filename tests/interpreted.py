"""Tests marked `interpreted`: kernels in Triton's interpreter, on CPU tensors, in one process of
their own.

`pytest` with TRITON_INTERPRET=1 runs every chosen test of the mark in a child, which starts before
the first test and works beside the others. It writes each outcome as a line of JSON, and every test
reports its own. Within the child a marked test simply runs.

The interpreter's limits: products of bfloat16 are silently wrong and its bfloat16 rounding is not
the device's (test float16 and float32), inline assembly is missing, and loops over loaded bounds
need numpy < 2.4.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import pytest

REPORT = "LOWROLL_INTERPRETED_REPORT"  # where the child writes
SECONDS = 900
CHILD = pytest.StashKey["Child"]()


def unusable() -> str:
    """Why the interpreter cannot run here, or nothing."""
    if importlib.util.find_spec("triton") is None:
        return "needs triton, which this machine has not"
    if tuple(map(int, version("numpy").split(".")[:2])) >= (2, 4):
        return "Triton's interpreter needs numpy < 2.4"
    return ""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "interpreted: runs Triton kernels on CPU tensors, in a process of its own"
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("interpreted")]
    for item in marked:  # whichever comes first waits for the child
        item.add_marker(pytest.mark.timeout(SECONDS + 60))
    if marked and (reason := unusable()):
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_runtestloop(session: pytest.Session) -> None:
    """In the parent: the child begins."""
    chosen = [item for item in session.items if item.get_closest_marker("interpreted")]
    usable = any(item.get_closest_marker("skip") is None for item in chosen)
    if usable and REPORT not in os.environ and not session.config.option.collectonly:
        session.config.stash[CHILD] = Child.start(
            session.config.rootpath, [item.nodeid for item in chosen]
        )


def pytest_unconfigure(config: pytest.Config) -> None:
    if CHILD in config.stash:
        config.stash[CHILD].end()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """In the parent: the child's outcome stands for the call."""
    if REPORT in os.environ or pyfuncitem.get_closest_marker("interpreted") is None:
        return None
    outcomes = pyfuncitem.config.stash[CHILD].outcomes()
    failure = outcomes.get(pyfuncitem.nodeid, "the interpreting process did not get to this test")
    if failure:
        pytest.fail(f"in the interpreting process:\n{failure}", pytrace=False)
    return True


@dataclass
class Child:
    """The interpreting process."""

    folder: Path
    process: subprocess.Popen[bytes]
    found: dict[str, str] | None = None

    @classmethod
    def start(cls, root: Path, tests: list[str]) -> Child:
        folder = Path(tempfile.mkdtemp())
        (folder / "report.jsonl").touch()
        with (folder / "output").open("wb") as output:
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "pytest",
                    "-q",
                    "--tb=short",
                    "-p",
                    "no:cacheprovider",
                    *tests,
                ],
                cwd=root,
                env={**os.environ, "TRITON_INTERPRET": "1", REPORT: str(folder / "report.jsonl")},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        return cls(folder, process)

    def outcomes(self) -> dict[str, str]:
        """The failures by test, "" for one that passed. Waits for the process."""
        if self.found is None:
            self.process.wait(SECONDS)
            self.found = dict(
                json.loads(line) for line in (self.folder / "report.jsonl").read_text().splitlines()
            )
        if not self.found:
            told = (self.folder / "output").read_text(errors="replace")[-4000:]
            pytest.fail(f"the interpreting process ran no test:\n{told}", pytrace=False)
        return self.found

    def end(self) -> None:
        self.process.kill()
        self.process.wait(60)
        shutil.rmtree(self.folder, ignore_errors=True)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """In the child: a line for every test's call, or for the setup that failed before it."""
    if REPORT in os.environ and (report.when == "call" or report.failed):
        with open(os.environ[REPORT], "a") as file:
            file.write(
                json.dumps([report.nodeid, report.longreprtext if report.failed else ""]) + "\n"
            )
