"""The plan of the tests: each package has its folder, and no test imports another test.

What several tests need is a plain module of `tests/fixtures`, or a fixture of `tests/conftest.py`.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
FILES = {
    path.relative_to(TESTS).as_posix(): path.read_text() for path in sorted(TESTS.rglob("*.py"))
}
BESIDE = {"bench", "docs", "fixtures", "gpu", "house", "parity"}  # no packages of lowroll
# an import of a module test_* of the tests, also in a program that a test holds as text
IMPORTED_TEST = re.compile(
    r"\bfrom (?:tests(?:\.\w+)*)?\.?test_\w+ import"
    r"|\bfrom (?:tests(?:\.\w+)*|\.) import test_\w+"
    r"|(?:^|[;'\"])\s*import (?:tests\.(?:\w+\.)*)?test_\w+",
    re.MULTILINE,
)


def test_no_test_imports_another_test() -> None:
    found = {file: IMPORTED_TEST.findall(source) for file, source in FILES.items()}
    assert {file for file, lines in found.items() if lines} <= {"house/test_rooms.py"}


@pytest.mark.parametrize(
    ("line", "seen"),
    [
        ("import test_run", True),
        ("def f():\n    import tests.runs.test_run", True),
        ("from tests.runs.test_run import TINY", True),
        ("from tests.runs import test_run", True),
        ("CODE = 'import sys; from tests.runs.test_run import TINY'", True),
        ("from . import test_run", True),
        ("from .test_run import TINY", True),
        ("from tests.fixtures.runs import TINY", False),
        ("from lowroll.envs import test_path", False),
    ],
)
def test_an_import_of_a_test_is_seen(line: str, seen: bool) -> None:
    assert bool(IMPORTED_TEST.search(line)) is seen


def test_each_package_has_its_tests() -> None:
    packages = {path.parent.name for path in (ROOT / "lowroll").glob("*/__init__.py")}
    folders = {file.split("/")[0] for file in FILES if "/" in file}
    assert folders == packages | BESIDE
