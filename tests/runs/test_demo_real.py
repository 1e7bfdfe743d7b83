"""`lowroll demo --real`, with a tiny untrained model in the place of the real one: all of it runs, and
says that nothing was learnt."""

from __future__ import annotations

import io
import time
from pathlib import Path

import pytest
from huggingface_hub import constants
from rich.console import Console

from lowroll.cli.main import main
from lowroll.metrics.record import read
from lowroll.runs import demo, demo_real


def test_a_model_that_was_not_fetched_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    assert main(["demo", "--real"]) == 2
    assert "`lowroll fetch smollm2`" in capsys.readouterr().err
    assert not (tmp_path / "outputs").exists()


@pytest.mark.slow
def test_a_model_that_learns_nothing_fails(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(demo_real, "MODEL", str(model))
    small = {"batch_size": 8, "eval": {"num_examples": 4}, "score": {"workers": 1}}
    train = {**demo_real.SETTINGS["train"], "max_steps": 2, "warmup_steps": 0}
    monkeypatch.setattr(demo_real, "SETTINGS", {**demo_real.SETTINGS, **small, "train": train})
    out = tmp_path / "demo"
    assert main(["demo", "--real", "--output-dir", str(out), "--device", "cpu"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "held-out reward, 4 prompts, sampled at T = 1" in said
    assert "Answers to held-out prompts, sampled at T = 1" in said
    assert "rose by 0.000 as sampled and by 0.000 greedily" in said
    records = list(read(out / "run"))
    assert len(records) == 2 and all(record["mismatch/kl_k3"] > 0 for record in records)
    assert (out / "run" / "final" / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize(
    ("sampled", "greedy", "code"), [(0.3, 0.2, 0), (0.1, 0.2, 1), (0.3, 0.05, 1)]
)
def test_the_exit_code_says_whether_it_learnt(sampled: float, greedy: float, code: int) -> None:
    console = Console(file=io.StringIO())
    before, after = (
        {"sampled": 0.5, "greedy": 0.5},
        {"sampled": 0.5 + sampled, "greedy": 0.5 + greedy},
    )
    limits = demo_real.MIN_GAIN, demo_real.MIN_GREEDY_GAIN
    assert demo.verdict(console, before, after, *limits, time.monotonic()) == code
