"""What tests start ends with them (tests/fixtures/leash.py)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fixtures import leash
from tests.fixtures.processes import alive, eventually

ROOT = Path(__file__).parents[2]
# a session of its own whose parent has ended
START = """
import subprocess, sys, time
from tests.fixtures import leash
leash.hold()
subprocess.run(["sh", "-c", "setsid sleep 600 >&2 & echo $!"])
time.sleep(600)
"""


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs a kernel that tells of an end")
def test_a_stray_ends_when_those_who_started_it_are_killed() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", START], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert child.stdout is not None
    stray = int(child.stdout.readline())
    assert alive(stray)
    child.kill()
    child.wait(30.0)
    assert eventually(lambda: not alive(stray))


def test_all_of_this_run_is_marked() -> None:
    child = subprocess.Popen(["sleep", "600"])
    try:
        assert child.pid in leash.started_with(os.environ[leash.MARK])
    finally:
        child.kill()
        child.wait(30.0)
