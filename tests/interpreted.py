"""Tests marked `interpreted`: kernels in Triton's interpreter, on CPU tensors, in one process of their own.

The first such test starts `pytest` with TRITON_INTERPRET=1 on every collected test of the mark; the child writes each
outcome as a line of JSON, and every test reports its own. Within the child a marked test simply runs.

The interpreter's limits: products of bfloat16 are silently wrong and its bfloat16 rounding is not the device's (test
float16 and float32), inline assembly is missing, and loops over loaded bounds need numpy < 2.4.
"""
from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import pytest

REPORT = "LOWROLL_INTERPRETED_REPORT"       # where the child writes
SECONDS = 900
OUTCOMES = pytest.StashKey[dict[str, str]]()
MARKED = pytest.StashKey[list[str]]()


def unusable() -> str:
    """Why the interpreter cannot run here, or nothing."""
    if importlib.util.find_spec("triton") is None:
        return "needs triton, which this machine has not"
    if tuple(map(int, version("numpy").split(".")[:2])) >= (2, 4):
        return "Triton's interpreter needs numpy < 2.4"
    return ""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "interpreted: runs Triton kernels on CPU tensors, in a process of its own")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("interpreted")]
    config.stash[MARKED] = [item.nodeid for item in marked]
    for item in marked:                     # whichever comes first waits for the child
        item.add_marker(pytest.mark.timeout(SECONDS + 60))
    if marked and (reason := unusable()):
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """In the parent: the child's outcome stands for the call."""
    if REPORT in os.environ or pyfuncitem.get_closest_marker("interpreted") is None:
        return None
    config = pyfuncitem.config
    if OUTCOMES not in config.stash:
        config.stash[OUTCOMES] = outcomes(config.rootpath, config.stash[MARKED])
    failure = config.stash[OUTCOMES].get(pyfuncitem.nodeid, "the interpreting process did not get to this test")
    if failure:
        pytest.fail(f"in the interpreting process:\n{failure}", pytrace=False)
    return True


def outcomes(root: Path, tests: list[str]) -> dict[str, str]:
    """The child's failures by test, "" for one that passed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.jsonl"
        report.touch()
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", *tests], cwd=root,
            env={**os.environ, "TRITON_INTERPRET": "1", REPORT: str(report)}, capture_output=True, text=True,
            timeout=SECONDS)
        lines = [json.loads(line) for line in report.read_text().splitlines()]
    if not lines:
        pytest.fail(f"the interpreting process ran no test:\n{done.stdout[-2000:]}{done.stderr[-2000:]}", pytrace=False)
    return dict(lines)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """In the child: a line for every test's call, or for the setup that failed before it."""
    if REPORT in os.environ and (report.when == "call" or report.failed):
        with open(os.environ[REPORT], "a") as file:
            file.write(json.dumps([report.nodeid, report.longreprtext if report.failed else ""]) + "\n")
