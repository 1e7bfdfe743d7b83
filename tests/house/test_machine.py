"""Cores that the process may use: those of its mask, and no more than a container's share of
time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lowroll import machine


@pytest.mark.parametrize(
    ("bound", "cores"),
    [(None, 8), ("max 100000", 8), ("250000 100000", 3), ("900000 100000", 8), ("10000 100000", 1)],
)
def test_a_containers_share_counts_as_cores(
    bound: str | None, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(machine, "GROUP", tmp_path)
    if bound is not None:
        (tmp_path / "cpu.max").write_text(f"{bound}\n")
    assert machine.usable_cores() == cores


FILES = """
import resource
from lowroll.machine import raise_file_limit
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 96))
print(raise_file_limit(), *resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def test_as_many_files_may_be_open_as_the_system_allows() -> None:
    told = subprocess.run(
        [sys.executable, "-c", FILES], capture_output=True, text=True, timeout=60, check=True
    )
    assert told.stdout.split() == ["96", "96", "96"]
