"""The table of formats on a real model: every format is in it, its numbers are what they say, and it
is read back as it was stored."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench import fidelity
from lowroll.model import hf
from lowroll.model.transformer import Transformer
from lowroll.quant.table import low_bit
from lowroll.runs import demo
from tests.fixtures.runs import TINY


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose distributions are far from uniform."""
    folder = demo.build_model(tmp_path_factory.mktemp("fidelity") / "model", 0, TINY)
    rough = hf.load(folder)
    with torch.no_grad():
        for _, linear in rough.linears():
            linear.weight.mul_(8)
    return hf.save(rough, folder.parent / "rough", tokenizer_from=folder)


def run(folder: Path, out: Path, *formats: str) -> dict[str, dict[str, float]]:
    """The stored values, by way and column."""
    options = ["--model", str(folder), "--out", str(out), "--tokens", "64", "--formats", *formats]
    assert fidelity.main(options) == 0
    found: dict[str, dict[str, float]] = {}
    for row in json.loads((out / "fidelity.json").read_text())["rows"]:
        name, column = row["name"].split(" ", 1)[1].rsplit(": ", 1)
        found.setdefault(name, {})[column] = row["ours"]
    return found


def test_every_low_bit_format_is_a_way() -> None:
    assert set(low_bit()) <= set(fidelity.WAYS) and "bf16" in fidelity.WAYS
    assert set(fidelity.MUST) <= set(fidelity.WAYS)


def test_the_values_of_a_way(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fidelity, "TEXTS", tuple((q[:20], a[:20]) for q, a in fidelity.TEXTS))

    def exact(model: Transformer, bench: fidelity.Bench) -> str:
        assert len(bench.calibration) == fidelity.SAMPLES * len(fidelity.CALIBRATION)
        assert all(bench.calibration)
        return fidelity.plain("fp32", model, bench)

    monkeypatch.setitem(fidelity.WAYS, "exact", exact)
    found = run(folder, tmp_path, "int8", "int4", "exact")
    assert all(abs(value) < 1e-6 for name, value in found["exact"].items() if "->" in name)
    assert found["exact"]["bits"] == 32 and found["exact"]["ESS"] == pytest.approx(1)
    assert found["exact"]["weights"] < 1e-9 and found["exact"]["cut"] == 0
    int8, int4 = found["int8"], found["int4"]
    assert 4 < int4["bits"] < 5 < 8 < int8["bits"] < 10
    linears = [linear.weight.numel() for _, linear in hf.load(folder).linears()]
    assert int8["bytes"] * 1e6 == pytest.approx(sum(linears) * int8["bits"] / 8)
    assert int4["weights"] > 10 * int8["weights"] > 0
    assert int8["with activations"] > int8["weights"]  # rounded too; int4 leaves them alone
    assert int4["with activations"] == pytest.approx(int4["weights"], rel=1e-3)
    assert int8["decode -> base"] > 1e-7 > int4["decode -> base"]
    assert int4["decode -> learner"] > int8["decode -> learner"] > 0
    again = run(folder, tmp_path, "int8")  # kept beside what was stored; and the same
    for name, value in found["int8"].items():
        assert "speed" in name or again["int8"][name] == value
    lines = fidelity.read_table(json.loads((tmp_path / "fidelity.json").read_text()))
    assert [line[0].split()[-1] for line in lines] == ["int8", "int4", "exact"]
    assert {len(line) for line in lines} == {len(fidelity.HEAD)}


def test_a_text_begins_with_its_prompt(folder: Path) -> None:
    texts, prompts = fidelity.work(fidelity.ChatTokenizer(fidelity.load_tokenizer(folder)))
    assert len(prompts) == len(fidelity.TEXTS)
    for text, ids in zip(texts, prompts, strict=True):
        assert text == (ids + text[len(ids) :])[: fidelity.LONGEST]


def test_a_must_is_of_the_real_model_alone() -> None:
    values = dict.fromkeys(fidelity.COLUMNS, 1.0)
    speed = {1: [1.0], 16: [1.0]}
    for model, must in (("smollm2", 2.5e-2), ("other", None)):
        rows = fidelity.rows_of(model, "fp8_block", values, speed)
        (row,) = (row for row in rows if row.name.endswith("with activations"))
        assert row.must == must and row.met == (must is None)
        assert bool(row.note) == (must is not None)


@pytest.mark.slow
def test_care_and_a_budget_are_ways_too(folder: Path, tmp_path: Path) -> None:
    found = run(folder, tmp_path, "int8", "nvfp4", "nvfp4 gptq", "max_bits=5 gptq")
    assert found["nvfp4 gptq"]["bits"] == found["nvfp4"]["bits"]
    assert found["nvfp4 gptq"]["weights"] < found["nvfp4"]["weights"]
    assert found["max_bits=5 gptq"]["bits"] <= 5.05
