"""Mutation testing itself: a toy package whose every mutant is known, what is changed, and what is
left out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fixtures.mutations import excuses, mutants

ROOT = Path(__file__).parents[2]

TOY = """
LIMIT = 10


def clip(x: int, most: int = LIMIT) -> int:
    if x > most:
        return most
    return x


class Far:
    def there(self, x: int) -> int:
        return (lambda y: x - y)(2)


def unseen(x: int) -> bool:
    return not x
"""
TESTS = """
import subprocess
import sys

import pytest
from lowroll.toy.sums import Far, clip


@pytest.fixture(scope="module")
def far():
    return Far().there(5)


def test_clip():
    assert clip(5) == 5 and clip(12) == 10


def test_first(far):
    assert far


def test_second(far):
    assert far > 2


def test_there():
    done = subprocess.run([sys.executable, "-c", "from lowroll.toy.sums import Far; print(Far().there(7))"],
                          capture_output=True, text=True)
    assert int(done.stdout) < 8
"""


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    for name, text in {
        "lowroll/__init__.py": "",
        "lowroll/toy/__init__.py": "",
        "lowroll/toy/sums.py": TOY,
        "tests/test_toy.py": TESTS,
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def run(toy: Path, *args: str) -> tuple[dict, str]:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.mutants",
            "toy",
            "--source",
            str(toy),
            "--warm",
            *args,
            "--out",
            str(toy / "out.json"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        env={key: value for key, value in os.environ.items() if key != "PYTEST_ADDOPTS"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((toy / "out.json").read_text())["rooms"]["toy"], done.stdout


@pytest.mark.slow
def test_every_mutant_of_a_toy_is_judged(toy: Path) -> None:
    """Killed: the constant of the file, `x <= most`, 3 for 2 (by a fixture's value), `x + y` (in
    another process)."""
    room, said = run(toy, "--count", "99")
    assert (room["mutants"], room["tried"], room["killed"]) == (6, 6, 4)
    assert sorted(room["survivors"]) == [
        "lowroll/toy/sums.py:17: return not x  ->  return not not x",
        "lowroll/toy/sums.py:6: if x > most  ->  if x >= most",
    ]
    assert all(survivor in said for survivor in room["survivors"])
    assert (toy / "lowroll/toy/sums.py").read_text() == (
        toy / "build/mutants/tree/lowroll/toy/sums.py"
    ).read_text()


def test_a_sample_is_its_seeds_and_stays_when_other_code_changes(toy: Path) -> None:
    def order(text: str, seed: int) -> list[str]:
        return [
            f"{mutant.before} {mutant.after}"
            for mutant in sorted(
                mutants(text, "lowroll/toy/sums.py"), key=lambda mutant: mutant.rank(seed)
            )
        ]

    later = [text for text in order("FIRST = 1\n" + TOY, 0) if not text.startswith("FIRST")]
    assert order(TOY, 0) == later != order(TOY, 1)


@pytest.mark.parametrize(
    ("code", "changed"),
    [
        ("x: int = 1", ["x: int = 2"]),
        ("x = True", ["x = False"]),
        ("x = 0.5", ["x = 1.0"]),
        ("x = 0.0", ["x = 1.0"]),
        ("y = -x", ["y = +x"]),
        ("y = a < b", ["y = a <= b", "y = a >= b"]),
        ("y = a and b", ["y = a or b"]),
        ("y = a if b else c", ["y = a if not b else c"]),
        ("y = [x for x in z if x]", ["y = [x for x in z if not x]"]),
        ("x += y", ["x -= y"]),
        ("y = x is None", ["y = x is not None"]),
        ("if x:\n    pass", ["if not x"]),
        ("raise ValueError(1 + x)", []),
        ("assert x > 1", []),
        ("x = f'{1 + y}'", []),
        ("log.warning(1 + x)", []),
        ("if TYPE_CHECKING:\n    x = 1", []),
        ("x = 'text'", []),
        ("y = zip(a, b, strict=True)", []),
        ("def f(a, b=1, *, c, d=-2):\n    return a", ["b=2", "d=+2", "d=-3"]),
        ("def f(x: 1) -> 2: ...", []),
    ],
)
def test_what_is_changed(code: str, changed: list[str]) -> None:
    assert [mutant.after for mutant in mutants(code, "file.py")] == changed


@pytest.mark.slow
def test_every_excuse_excuses_something_and_says_why() -> None:
    known = excuses(ROOT / "tests" / "mutants.toml")
    for file in {excuse.file for excuse in known}:
        source = (ROOT / file).read_text()
        found, lines = mutants(source, file), source.split("\n")
        for excuse in known:
            covers = excuse.file != file or any(excuse.covers(mutant, lines) for mutant in found)
            assert excuse.why and covers, excuse
