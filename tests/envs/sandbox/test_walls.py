"""Walls are proven before a program runs behind them. Nothing here can send a signal to everybody:
`inside` runs with `os.kill` replaced wherever it is not isolated."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from lowroll.envs.sandbox import Case, SandboxError, SandboxMissing, inside, isolation, jail, run
from lowroll.envs.sandbox.cases import SandboxLimits
from tests.fixtures.sandbox import missing

isolated = pytest.mark.skipif(bool(missing()), reason=missing() or "there is a sandbox")
# `inside` with no walls around it, in which a kill ends nothing but itself
BARE = f"""
import os, runpy
def kill(pid, number):
    os.write(2, f"os.kill({{pid}}, {{number}}) was reached".encode())
    os._exit(9)
os.kill = kill
runpy.run_path({str(isolation.INSIDE)!r}, run_name="__main__")
"""
NOTHING = run.Isolation("nothing", lambda size: [sys.executable, "-c", BARE])


@pytest.fixture
def kills(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Kills that were asked for; none is sent."""
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: asked.append((pid, number)))
    return asked


def test_walls_that_isolate_nothing_are_refused_before_they_take_a_program() -> None:
    with pytest.raises(SandboxError) as refused:
        run.run_in(NOTHING, "print(1)", [Case("", "1")], SandboxLimits())
    said = str(refused.value)
    assert said.startswith("nothing: it isolates nothing, so no program is run: it is process ")
    assert "/proc/self" in said and "isolation.py" in said and "os.kill" not in said


def test_a_machine_whose_walls_isolate_nothing_has_no_sandbox(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(isolation, "NAMESPACES", NOTHING)
    isolation.found.cache_clear()
    try:
        with pytest.raises(SandboxMissing, match="none is run: nothing: it isolates nothing"):
            isolation.found()
    finally:
        isolation.found.cache_clear()


def test_a_bwrap_on_the_path_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark, fake = tmp_path / "started", tmp_path / "bwrap"
    fake.write_text(f"#!/bin/sh\ntouch {mark}\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    isolation.found.cache_clear()
    try:
        missing()
    finally:
        isolation.found.cache_clear()
    assert not mark.exists()


def test_this_process_is_known_not_to_be_isolated(kills: list[tuple[int, int]]) -> None:
    said = "; ".join(inside.missing_walls())
    assert f"it is process {os.getpid()}, not process 1" in said
    assert "isolation.py" in said and "/proc/self" in said
    assert not kills


def test_inside_ends_before_it_reads_anything(kills: list[tuple[int, int]]) -> None:
    with pytest.raises(SystemExit, match="it isolates nothing, so no program is run"):
        inside.main()
    assert not kills


def test_only_process_1_kills_all_others(kills: list[tuple[int, int]]) -> None:
    with pytest.raises(RuntimeError, match="only process 1 of a namespace"):
        inside.end_all(os.getpid())
    assert not kills


def test_process_1_of_a_container_is_refused_too(
    kills: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Process 1 with other processes beside it: signal 0 reaches them, and is all that is asked."""
    monkeypatch.setattr(os, "getpid", lambda: 1)
    monkeypatch.setattr(os, "getppid", lambda: 0)
    assert inside.missing_walls()[0] == "there are other processes in its namespace"
    assert kills == [(-1, 0)]


@isolated
def test_each_namespace_is_another_than_the_machine_s() -> None:
    own = {name: os.readlink(f"/proc/self/ns/{name}") for name in isolation.NAMES}
    for name, link in own.items():
        with pytest.raises(OSError, match=f"the {name} namespace is the machine's own"):
            jail.check_namespaces({name: link})
    jail.check_namespaces(dict.fromkeys(own, "another"))


@isolated
def test_a_program_that_sees_the_machine_is_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation, "PROOF", "input()\nprint('True 1 1000 False')")
    assert str(isolation._try(isolation.NAMESPACES)).startswith(
        "namespaces: a program in it was not isol"
    )
