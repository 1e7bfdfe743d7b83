"""The benchmark beside llama.cpp, at a small scale: without it, and with a child in its place."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bench import llama, peer
from lowroll.model import hf, initialize
from lowroll.model.spec import spec_from_config
from lowroll.model.transformer import Transformer
from lowroll.runs.demo import CONFIG

FAKE = """
import sys
from bench.worker import channel, orders
settings, answer = channel()
answer({"vocab_size": 261})
for order in orders():
    if settings["quantize"]: sys.exit("no such bits")
    assert len(order["prompts"]) == settings["rows"]
    answer({"seconds": 1e6, "cpu": 2e6})
"""


def rows_of(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *words: str
) -> dict[str, dict[str, object]]:
    """Run the command on a tiny model; return the rows that it stores."""
    config = {**CONFIG, "vocab_size": 261, "head_dim": 32}
    model = folder / "model"
    hf.save(initialize(Transformer(spec_from_config(config)), seed=0), model)
    said = (
        f"llama --gguf tiny.gguf --model {model} --rows 1,2 --prompt 4 --new 3 --rounds 2".split()
    )
    monkeypatch.setattr(sys, "argv", [*said, "--threads", "1", "--out", str(folder), *words])
    assert llama.main() == 0
    stored = json.loads((folder / "llama.json").read_text())
    return {row["name"]: row for row in stored["rows"]}


def test_without_llama_cpp_ours_stands_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOWROLL_LLAMA_PYTHON", raising=False)
    rows = rows_of(tmp_path, monkeypatch, "--formats", "int8")
    assert len(rows) == 4
    for row in rows.values():
        assert row["ours"] and row["peer"] is row["ratio"] is None
        assert "LOWROLL_LLAMA_PYTHON" in str(row["note"])


def test_both_sides_take_turns_and_a_peer_that_dies_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "worker.py"
    script.write_text(FAKE)
    monkeypatch.setenv("LOWROLL_LLAMA_PYTHON", sys.executable)
    start = peer.Peer.__init__

    def with_script(self: peer.Peer, settings: object, command: object) -> None:
        start(self, settings, [sys.executable, str(script)])  # type: ignore[arg-type]

    monkeypatch.setattr(peer.Peer, "__init__", with_script)
    rows = rows_of(tmp_path, monkeypatch, "--formats", "q4_1", "q8_0")
    clock = rows["tiny q4_1 over llama.cpp (the file's own), 2 rows: clock"]
    assert clock["peer"] == 2 * 2 / 1e6 and float(str(clock["ratio"])) > 1e3
    dead = rows["tiny q8_0 over llama.cpp (Q8_0), 1 rows: processor"]
    assert dead["ours"] is None or dead["peer"] is None
    assert "it ended with 1" in str(dead["note"]) and "no such bits" in str(dead["note"])
