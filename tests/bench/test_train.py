"""The training benchmark at tiny sizes: both sides train on as many tokens, and the rows say what
they compare."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench import train
from tests.fixtures.shapes import TINY

ALONE = (train.PeerSetting(1, False),)


def job(lora: bool = False, checkpointing: bool | float = False) -> train.Job:
    return train.Job(
        "tiny",
        TINY,
        lora,
        rows=4,
        length=16,
        device="cpu",
        dtype=torch.float32,
        checkpointing=checkpointing,
    )


def test_every_token_is_fed_and_learned_from() -> None:
    batch = train.batch(job())
    assert [len(s.prompt_ids) + len(s.rollout.token_ids) - 1 for s in batch.samples] == [16] * 4
    assert all(s.advantage and sum(s.loss_mask) == 16 for s in batch.samples)
    assert {s.group for s in batch.samples} == {0}


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("lora", [True, False])
def test_a_step_of_ours_learns(lora: bool, fp8: bool) -> None:
    metrics = train.ours(replace(job(lora, 0.5), fp8=fp8))()
    assert (
        metrics["optim/grad_norm"] > 0
        and metrics["optim/update_norm"] > 0
        and metrics["optim/skipped"] == 0
    )


@pytest.mark.parametrize("setting", train.PEER_SETTINGS)
def test_a_step_of_the_peer_learns(setting: train.PeerSetting) -> None:
    torch.manual_seed(0)
    step = train.peer(job(), setting)
    model = next(
        cell.cell_contents
        for cell in step.__closure__ or ()
        if hasattr(cell.cell_contents, "lm_head")
    )
    before = model.lm_head.weight.detach().clone()
    step()
    assert not torch.equal(model.lm_head.weight, before) and model.lm_head.weight.grad is None
    assert sum(p.numel() for p in model.parameters()) == sum(
        p.numel() for p in train.random_model(TINY, "cpu").parameters()
    )


@pytest.mark.slow
def test_compare_takes_the_peers_fastest_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = train.compare(replace(job(), must=(1.3, 1.6)), rounds=2, steps=1)
    assert len(rows) == 2 and rows[0].must == 1.3 and rows[0].aim == 1.6
    assert rows[1].peer == rows[0].ours and rows[1].must is None
    assert (
        rows[0].ours and rows[0].peer and rows[0].spread and rows[0].spread[0] <= rows[0].spread[1]
    )
    turns = {
        setting: train.Turn(seconds, 10 * i + 10)
        for i, (setting, seconds) in enumerate(
            zip(train.PEER_SETTINGS, (3.0, 1.0, 2.0), strict=True)
        )
    }
    monkeypatch.setattr(train, "fitting", lambda job: turns)
    monkeypatch.setattr(train, "turn", lambda build, steps, on_cuda: train.Turn(0.5, 5))
    x = train.Job("x", TINY, False, must=(1.3, 1.6), must_fp8=(16384, 1e9))
    speed, fp8, memory, leanest = train.compare(x, 3)
    assert fp8.name == "x full, 16384 tokens: forward and input gradients in fp8 / bfloat16"
    assert fp8.met and not fp8.reaches(fp8.aim) and fp8.ours == x.tokens / 0.5
    assert "1 x rows/1, no checkpointing" in speed.name and speed.ratio == 1.0 and not speed.met
    assert memory.value == 0.25 and memory.met and memory.must == 0.6
    assert leanest.value == 0.5 and leanest.must is None


def test_without_a_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        train.main(["--models", "qwen2.5-1.5b"])
    assert (
        "error: device: cuda was asked for, and torch sees no CUDA device"
        in capsys.readouterr().err
    )


def test_ours_alone_needs_no_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "peer", None)
    (row,) = train.compare(replace(job(), must_fp8=(1e12, None)), 2, 1, with_peer=False)
    assert row.ours and row.peer and row.ratio and not row.met


@pytest.mark.slow
def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bounds = {"must": (0.0, 1.0), "must_fp8": (0.0, 1.0)}
    monkeypatch.setattr(train, "JOBS", {"tiny": replace(job(), **bounds)})
    monkeypatch.setattr(train, "PEER_SETTINGS", ALONE)
    words = f"--models tiny --rounds 1 --steps 1 --out {tmp_path}"
    assert train.main(words.split()) == 0
    fp8, row = json.loads((tmp_path / "train.json").read_text())["rows"]
    assert (
        row["name"] == "tiny full, 64 tokens: transformers (1 x rows/1, no checkpointing)"
        and row["ratio"] > 0
    )
    assert fp8["name"].endswith("fp8 / float32") and fp8["goal"] == "ours at least"
