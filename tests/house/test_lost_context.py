"""A test that loses the CUDA context fails alone where workers run the tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = """
import pytest, torch
pytestmark = pytest.mark.gpu

def lost():
    raise RuntimeError("CUDA error: unspecified launch failure")

def test_first(): pass
def test_that_traps(monkeypatch):
    torch.cuda.synchronize = lost
    assert False, "the kernel was wrong"
def test_last(): torch.cuda.synchronize is lost and lost()
"""


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_kernels.py").write_text(TESTS)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = gpu: needs a CUDA device\n")
    command = [sys.executable, "-m", "pytest", "-p", "tests.fixtures.lost_context", *options]
    return subprocess.run(
        [*command, "--rootdir", folder, "-c", folder / "pytest.ini", folder / "test_kernels.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.long
def test_tests_after_a_lost_context_run_in_another_worker(tmp_path: Path) -> None:
    done = run(tmp_path, "--numprocesses", "1", "--max-worker-restart", "2")
    assert "1 failed, 2 passed" in done.stdout, done.stdout + done.stderr
    assert "test_that_traps" in done.stdout and "the kernel was wrong" in done.stderr


def test_without_workers_the_session_ends_and_says_what_to_run(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.returncode == 1 and "test_last" not in done.stdout
    assert "test_that_traps lost the CUDA context" in done.stdout + done.stderr
    assert "make test-gpu" in done.stdout + done.stderr
