"""Requests that come one by one, at sizes that take no time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import arrivals
from bench.arrivals import Closed
from bench.shapes import SHAPES
from tests.fixtures.engines import engine_of
from tests.fixtures.shapes import TINY
from tests.fixtures.tiny import hf_folder


def test_every_client_has_its_requests_answered(tmp_path: Path) -> None:
    engine = engine_of(hf_folder(tmp_path / "m"), lookahead=4)
    side = Closed(engine, clients=3, prompt=5, response=6)
    assert side.run(4) > 0
    assert [client.served for client in side.clients] == [4, 4, 4]
    for client in side.clients:
        assert len(client.to_first) == len(client.between) == 3
        assert min(client.to_first) > 0 and min(client.between) > 0
    assert engine.stats().tokens == 3 * 4 * 6 and not engine.has_work


@pytest.mark.slow
def test_the_command_measures_each_lookahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    sizes = ["--clients", "1,3", "--lookaheads", "1,4", "--prompt", "6", "--response", "5"]
    options = ["--models", "tiny", "--formats", "bf16", "--device", "cpu", "--out", str(tmp_path)]
    assert arrivals.main([*sizes, *options, "--requests", "2"]) == 0
    rows = json.loads((tmp_path / "arrivals.json").read_text())["rows"]
    assert all(row["ours"] > 0 for row in rows)
    names = {row["name"] for row in rows}
    assert len(names) == len(rows) == 2 * 3 * 5 + 2 * 2
    assert "tiny bf16 C=3 lookahead=4 gather=3: to the first token, median" in names
    assert "tiny bf16 B=3 lookahead=4: decode" in names
    with pytest.raises(SystemExit):
        arrivals.main([*sizes, *options, "--requests", "1"])
