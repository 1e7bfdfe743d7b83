"""The tests' own plan: each room of the package has its folder, and no test imports another test.

What several tests need is a plain module of `tests/fixtures`, or a fixture of `tests/conftest.py`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
FILES = {
    path.relative_to(TESTS).as_posix(): path.read_text() for path in sorted(TESTS.rglob("*.py"))
}
BESIDE = {"bench", "docs", "fixtures", "gpu", "house", "parity"}  # no rooms of the package


def imported_tests(source: str) -> Iterator[str]:
    """The test modules that a file imports, inside functions too, and in programs that it holds as
    text."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module or ''}.{alias.name}" for alias in node.names]
        else:
            names = []
        yield from (name for name in names if names_a_test(name))
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from imported_by_text(node.value)


def names_a_test(name: str) -> bool:
    """Is it, or something in it, a module test_*? What a package beside the tests exports is not."""
    package, *inside = name.split(".")
    if package not in ("", "tests"):
        inside = []
    return any(part.startswith("test_") for part in [package, *inside])


def imported_by_text(text: str) -> Iterator[str]:
    """The same of a program that a test hands to a child."""
    if "import" not in text:
        return
    try:
        yield from imported_tests(text)
    except (SyntaxError, ValueError):  # prose
        return


@pytest.mark.parametrize("file", FILES)
def test_no_test_imports_another_test(file: str) -> None:
    imported = list(imported_tests(FILES[file]))
    assert imported == [] or file == "house/test_rooms.py"  # which quotes such lines


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("import test_run", ["test_run"]),
        ("from test_run import TINY", ["test_run.TINY"]),
        ("from tests.runs.test_run import TINY", ["tests.runs.test_run.TINY"]),
        ("from tests.runs import test_run", ["tests.runs.test_run"]),
        ("def f():\n    import tests.runs.test_run", ["tests.runs.test_run"]),
        ("CODE = 'import sys; from tests.runs.test_run import TINY'", ["tests.runs.test_run.TINY"]),
        ("from . import test_run", [".test_run"]),
        ("from .test_run import TINY", ["test_run.TINY"]),
        ("from tests.fixtures.runs import TINY", []),
        ("from tests import fuzz", []),
        ("from lowroll.envs import test_path", []),
    ],
)
def test_the_lint_sees(line: str, found: list[str]) -> None:
    source = f"LINE = {line!r}" if found else line
    assert list(imported_tests(line)) == found == list(imported_tests(source))


def test_each_room_has_its_tests() -> None:
    rooms = {path.parent.name for path in (ROOT / "lowroll").glob("*/__init__.py")}
    folders = {file.split("/")[0] for file in FILES if "/" in file}
    assert folders == rooms | BESIDE


def left_by_quick(source: str) -> set[str]:
    """The tests of a file without a mark that `make quick` leaves out."""
    left_out = {f"pytest.mark.{mark}" for mark in ("slow", "interpreted", "gpu")}
    return {
        node.name
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef)
        and node.name.startswith("test_")
        and not left_out & {ast.unparse(mark) for mark in node.decorator_list}
    }


@pytest.mark.parametrize(
    "room", sorted({file.split("/")[0] for file in FILES if "/test_" in file} - {"gpu"})
)
def test_quick_enters_every_room(room: str) -> None:
    kept = [left_by_quick(FILES[file]) for file in FILES if file.startswith(f"{room}/test_")]
    assert any(kept)
