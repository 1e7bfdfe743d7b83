"""Faults that are injected into tiny runs: each is named in the first step, and none is seen where there
is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import faults
from bench.faults import FAULTS, said, table
from lowroll.model import hf
from lowroll.runs import demo
from tests.fixtures.runs import TINY

SMALL: dict[str, Any] = {
    "env": [
        {
            "id": "reverse-text",
            "args": {"template": "{text}", "max_words": 3, "min_len": 4, "max_len": 8},
        }
    ],
    "batch_size": 64,
    "rollout": {"max_tokens": 16, "cache_tokens": 4096},
    "train": {"learning_rate": 1e-3},
}
UNTRAINED = "first batch: tokenizer"  # a random model finds every text as unlikely


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with large weights, so that positions and rounding matter, and with a large
    embedding, so that its distributions are far from uniform."""
    config = {**TINY, "rope_theta": 1e5}
    folder = demo.build_model(tmp_path_factory.mktemp("faults") / "model", 0, config)
    rough = hf.load(folder)
    with torch.no_grad():
        for _, linear in rough.linears():
            linear.weight.mul_(6)
        rough.embedding.mul_(20)
    return hf.save(rough, folder.parent / "rough", tokenizer_from=folder)


@pytest.mark.parametrize("name", [name for name in FAULTS if FAULTS[name].named])
def test_a_fault_is_named_in_the_first_step(name: str, model: Path) -> None:
    found = said(FAULTS[name], str(model), SMALL)
    assert found["named"], found["said"]


@pytest.mark.parametrize("name", [name for name in FAULTS if not FAULTS[name].named])
def test_nothing_is_said_of_a_run_without_a_fault(name: str, model: Path) -> None:
    found = said(FAULTS[name], str(model), SMALL)
    lines = [line for line in found["said"] if not line.startswith(UNTRAINED)]
    assert [line for line in lines if not line.startswith("guard")] == []


def test_the_command_stores_what_was_said(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change = json.dumps(SMALL)
    words = ["--model", str(model), "--out", str(tmp_path), "--change", change]
    faults.main([*words, "--only", "stale weights"])
    record = json.loads((tmp_path / "faults.json").read_text())
    (run,) = record["runs"]
    assert run["ended"] and run["named"]
    (row,) = table(record["runs"])
    assert row[0] == FAULTS["stale weights"].what and "older weights" in row[2]
    assert "new weights never reach the engine" in capsys.readouterr().out
