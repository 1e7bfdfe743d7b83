"""Tests in the interpreting process: each has its own outcome, whatever becomes of those before it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fixtures.interpreted import unusable

ROOT = Path(__file__).parents[2]
TESTS = """\
import os
import time

import pytest

pytestmark = pytest.mark.interpreted


def test_is_interpreted():
    assert os.environ["TRITON_INTERPRET"] == "1"

def test_fails():
    assert 1 == 2

@pytest.fixture
def broken():
    if "TRITON_INTERPRET" in os.environ:
        raise ValueError("in the fixture")

def test_setup_fails(broken):
    pass

@pytest.mark.timeout(2)
def test_hangs():
    time.sleep(60)

def test_dies():
    os._exit(3)

def test_after_them():
    pass
"""


@pytest.mark.slow
@pytest.mark.skipif(bool(unusable()), reason=unusable())
def test_every_test_has_its_own_outcome(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["tests.fixtures.interpreted"]\n')
    (tmp_path / "test_kernels.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-v", "--tb=short", "-p", "no:cacheprovider"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    lines = [line.split("::")[1].split()[:2] for line in done.stdout.splitlines() if "%]" in line]
    assert dict(lines) == {
        "test_is_interpreted": "PASSED",
        "test_fails": "FAILED",
        "test_setup_fails": "FAILED",
        "test_hangs": "FAILED",
        "test_dies": "FAILED",
        "test_after_them": "PASSED",
    }, done.stdout
    for reason in ("assert 1 == 2", "ValueError: in the fixture", "Timeout", "it ended with 3"):
        assert reason in done.stdout
