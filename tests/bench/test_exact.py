"""The command of exactness at tiny sizes: the cost beside a plain run, and a run whose bits agree."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import exact
from bench.exact import Sizes
from bench.work import Work
from lowroll.runs import demo
from tests.fixtures.runs import TINY


@pytest.mark.slow
def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = demo.build_model(tmp_path / "model", 0, TINY)
    work = Work(4, 6, 5, 2)
    monkeypatch.setitem(exact.SIZES, "cpu", Sizes((work,), work, 128, 0.0))
    monkeypatch.setattr(exact, "DECODE_MUST", 0.0)
    words = ["--model", str(model), "--env", "reverse-text", "--rounds", "1", "--steps", "2"]
    assert exact.main([*words, "--parts", "speed,bits", "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "exact.json").read_text())["rows"]
    found = {row["name"].rpartition(str(model))[2]: row for row in rows}
    bits = found.pop(" int8_rotated LoRA: steps with the same bits on both sides, of 2")
    assert bits["ours"] == bits["must"] == 2
    assert [name.rpartition("plain ")[2] for name in found] == ["B=4", "step", "update"]
    assert all(row["ratio"] > 0 for row in found.values())
