"""The benchmark of memory at a size that takes no time: the run's parts are made and used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import memory


@pytest.mark.slow
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    memory.main(f"--cases tiny --device cpu --out {tmp_path}".split())
    rows = json.loads((tmp_path / "memory.json").read_text())["rows"]
    phases = ["generate", "learn", "publish"]
    assert [row["name"] for row in rows] == [f"tiny: {p}, planned / measured" for p in phases]
    marks = [line.split(":")[0] for line in capsys.readouterr().err.splitlines() if "GB" in line]
    assert set(marks) == {"load", "make", *phases}
