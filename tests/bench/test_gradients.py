"""The gradients of learners in low precision: the dense learner is itself, others turn away from it,
and the table is read back as it was stored."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench import gradients
from bench.gradients import DENSE, Gradient, Learner
from lowroll.runs import demo
from tests.fixtures.runs import TINY

CPU = torch.device("cpu")


def test_angles_and_errors_by_hand() -> None:
    truth = Gradient({"blocks.0.qkv.weight": torch.tensor([[3.0, 0.0]])}, torch.zeros(2).double())
    other = Gradient(
        {"blocks.0.qkv.weight": torch.tensor([[3.0, 4.0]])}, torch.tensor([0.1, 0.0]).double()
    )
    found = other.beside(truth)
    assert found["cosine"] == found["worst"] == pytest.approx(0.6)
    assert found["error"] == pytest.approx(4 / 3)
    assert found["KL"] == pytest.approx((torch.e**0.1 - 1.1) / 2)


def test_every_learner_is_measured_and_read_back(tmp_path: Path) -> None:
    folder = demo.build_model(tmp_path / "model", 0, TINY)
    options = ["--model", str(folder), "--out", str(tmp_path), "--samples", "2"]
    chosen = ["bf16", "fp8 forward", "fp8 backward"]
    assert gradients.main([*options, "--learners", *chosen]) == 0
    record = json.loads((tmp_path / "gradients.json").read_text())
    lines = gradients.read_table(record)
    assert {line[0] for line in lines} == set(chosen)
    assert {len(line) for line in lines} == {len(gradients.HEAD)}
    values = {row["name"].split(" ", 1)[1]: row["ours"] for row in record["rows"]}
    assert all(0.9 < values[f"{name}: cosine"] < 1 for name in chosen)
    assert values["fp8 backward: KL"] == 0 < values["fp8 forward: KL"]
    assert set(gradients.DEFAULT) <= set(gradients.LEARNERS)


def test_the_dense_learner_is_itself(tmp_path: Path) -> None:
    folder = demo.build_model(tmp_path / "model", 0, TINY)
    samples = gradients.drawn(folder, CPU, 2)
    dense, again = (gradients.gradient(DENSE.load(folder, CPU), samples) for _ in range(2))
    assert again.beside(dense) == pytest.approx({"cosine": 1, "error": 0, "worst": 1, "KL": 0})
    low = gradients.gradient(Learner("int4").load(folder, CPU), samples)
    assert low.beside(dense)["cosine"] < 0.999
