"""The pass over prompts, at sizes that take no time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import prompts
from bench.prompts import Turns
from bench.shapes import SHAPES
from tests.fixtures.engines import engine_of
from tests.fixtures.shapes import TINY
from tests.fixtures.tiny import hf_folder


def test_a_turn_runs_its_prompts_beside_the_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "CONTEXT", 8)
    engine = engine_of(hf_folder(tmp_path / "m"), lookahead=1, one_pass=True)
    turns = Turns(engine, prompt=4)
    turns.stand(3, 20)
    before = engine.stats().tokens
    seconds, host = turns.turn(12)
    assert 0 < host < seconds
    assert engine.stats().tokens == before + 3 + 3
    turns.stand(0, 1)
    assert not engine.has_work


@pytest.mark.slow
def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    monkeypatch.setattr(prompts, "CONTEXT", 8)
    sizes = ["--tokens", "8,16", "--rows", "0,3", "--prompt", "8", "--turns", "1"]
    options = ["--model", "tiny", "--device", "cpu", "--out", str(tmp_path)]
    assert prompts.main([*sizes, *options]) == 0
    rows = json.loads((tmp_path / "prompts.json").read_text())["rows"]
    assert len(rows) == 2 * (2 + 4) and all(row["ours"] > 0 for row in rows)
