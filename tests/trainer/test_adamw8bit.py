"""AdamW with 8-bit moments: near torch's own, small tensors exact, bitwise state, whole runs, and a
missing library."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lowroll.checkpoint.store import Store
from lowroll.runs import demo
from lowroll.trainer.optim import Optimizer, OptimSettings
from tests.fixtures.runs import TINY, copy_stopped_after, fingerprint, settings, train
from tests.fixtures.tensors import normal

RATE = 1e-3


def parameters(dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    return {
        "large": nn.Parameter(normal(70, 65).to(dtype)),
        "norm": nn.Parameter(normal(65).to(dtype)),
    }


def optimizer(
    name: str = "adamw8bit", dtype: torch.dtype = torch.float32, **changes: Any
) -> Optimizer:
    return Optimizer(
        parameters(dtype),
        OptimSettings(
            **{"learning_rate": RATE, "optimizer": name, "weight_decay": 0.5, "max_grad_norm": None}
            | changes
        ),
    )


def advance(it: Optimizer, steps: range) -> list[dict[str, float]]:
    found = []
    for k in steps:
        for i, p in enumerate(it.params.values()):
            p.backward((normal(*p.shape, seed=10 * k + i) + 0.5).to(p.dtype))
        it.begin_step()
        found.append(it.update())
    return found


@pytest.mark.slow
def test_updates_are_near_torchs_and_small_tensors_exact() -> None:
    ours, theirs = optimizer(), optimizer("adamw")
    start = parameters()
    mine, other = advance(ours, range(10)), advance(theirs, range(10))
    moved = (theirs.params["large"] - start["large"]).norm()
    assert 0 < (ours.params["large"] - theirs.params["large"]).norm() < 0.05 * moved
    torch.testing.assert_close(ours.params["norm"], theirs.params["norm"], rtol=0, atol=1e-6)
    for a, b in zip(mine, other, strict=True):
        assert a["optim/grad_norm"] == b["optim/grad_norm"]
        assert a["optim/update_norm"] == pytest.approx(b["optim/update_norm"], rel=0.05)
    assert mine[0]["optim/update_norm"] == pytest.approx(
        other[0]["optim/update_norm"], rel=1e-3
    )  # no moment yet


def test_the_moments_are_a_quarter_of_the_bytes() -> None:
    ours, theirs = optimizer(), optimizer("adamw")
    advance(ours, range(1)), advance(theirs, range(1))
    sizes = [{key: t.nbytes for key, t in it.state()[0].items()} for it in (ours, theirs)]
    assert sizes[0] == {
        "large.state1": 4550,
        "large.absmax1": 72,
        "large.state2": 4550,
        "large.absmax2": 72,
        "norm.state1": 260,
        "norm.state2": 260,
    }
    assert sizes[1] == {
        "large.exp_avg": 18200,
        "large.exp_avg_sq": 18200,
        "norm.exp_avg": 260,
        "norm.exp_avg_sq": 260,
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stop", [0, 3])
def test_restored_state_continues_bitwise(dtype: torch.dtype, stop: int) -> None:
    whole = optimizer(dtype=dtype)
    advance(whole, range(stop))
    tensors, state = whole.state()
    tensors = {key: t.clone() for key, t in tensors.items()}
    weights = {name: p.detach().clone() for name, p in whole.params.items()}
    advance(whole, range(stop, 6))
    resumed = optimizer(dtype=dtype)
    advance(resumed, range(2))  # leftovers that the restore must replace
    with torch.no_grad():
        for name, p in resumed.params.items():
            p.copy_(weights[name])
    resumed.restore(tensors, state)
    advance(resumed, range(stop, 6))
    assert all(torch.equal(resumed.params[name], p) for name, p in whole.params.items())
    assert resumed.state()[1] == whole.state()[1]
    assert all(torch.equal(t, whole.state()[0][key]) for key, t in resumed.state()[0].items())


def test_a_refused_update_changes_nothing() -> None:
    it = optimizer()
    advance(it, range(2))
    before = {key: t.clone() for key, t in it.state()[0].items()} | {
        n: p.detach().clone() for n, p in it.params.items()
    }
    it.params["large"].backward(torch.full((70, 65), float("nan")))
    assert it.update()["optim/skipped"] == 1
    after = it.state()[0] | it.params
    assert all(torch.equal(t, after[key]) for key, t in before.items())


def test_another_optimizers_state_is_refused() -> None:
    ours, theirs = optimizer(), optimizer("adamw")
    advance(ours, range(1)), advance(theirs, range(1))
    with pytest.raises(ValueError, match="large.absmax1 is missing"):
        ours.restore(*theirs.state())
    with pytest.raises(ValueError, match="unknown|missing"):
        theirs.restore(*ours.state())
    wrong, state = ours.state()
    with pytest.raises(ValueError, match=r"large.state1 is torch.float32 .*expected torch.uint8"):
        ours.restore(wrong | {"large.state1": torch.zeros(70, 65)}, state)


def test_a_missing_library_is_named_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    with pytest.raises(
        ValueError, match=r"adamw8bit needs bitsandbytes .*pip install 'lowroll\[bnb\]'"
    ):
        optimizer()
    optimizer("adamw")


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True])
def test_runs_resume_bitwise(tmp_path: Path, lora: bool) -> None:
    model = demo.build_model(
        tmp_path / "model", 0, {**TINY, "hidden_size": 64}
    )  # 64 x 64: the first 8-bit size
    tree = settings(
        model,
        tmp_path / "whole",
        train={"max_steps": 3, "optimizer": "adamw8bit", "lora": lora, "lora_rank": 64},
        loss={"kl_coef": 0.1},
        batch_size=32,
    )
    result = train(tree)
    assert sum(record["optim/update_norm"] > 0 for record in result.records) >= 2
    saved = Store(result.folder / "checkpoints").load().tensors["optimizer"]
    kinds = {t.dtype for t in saved.values()}
    assert kinds == {torch.uint8, torch.float32}
    copy_stopped_after(result.folder, 1, tmp_path / "cut")
    resumed = train({**tree, "output_dir": str(tmp_path / "cut")}, resume=True)
    final = "adapter_model.safetensors" if lora else "model.safetensors"
    assert (resumed.folder / "final" / final).read_bytes() == (
        result.folder / "final" / final
    ).read_bytes()
    if not lora:
        assert fingerprint(resumed.folder) == fingerprint(result.folder)
