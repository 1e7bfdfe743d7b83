"""Runs with `rollout.exact`: what was recorded is what the learner computes, in every step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lowroll.config import from_mapping
from lowroll.config.load import ConfigError
from lowroll.kernels.invariant import rows
from lowroll.metrics.record import read
from lowroll.runs import demo
from lowroll.runs.diagnose import diagnose
from lowroll.runs.export import quantize_folder
from tests.fixtures.runs import TINY, copy_stopped_after, fingerprint, settings, train

pytestmark = pytest.mark.skipif(
    not rows.supports_device(torch.device("cpu")), reason="needs a CPU with AVX2 and a C++ compiler"
)
torch.set_num_threads(1)
SIZES = {**TINY, "head_dim": 16}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return demo.build_model(tmp_path_factory.mktemp("models") / "tiny", 0, SIZES)


def tree(model: Path, out: Path, weights: object, **train: Any) -> dict[str, Any]:
    made = settings(model, out)
    made["train"] = {**made["train"], "max_steps": 4, "minibatches": 1, **train}
    made["rollout"] = {**made["rollout"], "weights": weights, "exact": True}
    return made


def check(folder: Path) -> None:
    for record in read(folder):
        assert record["mismatch/logp_diff_max"] == 0 and record["mismatch/weight_max"] == 1
        assert record["mismatch/weight_min"] == 1 and record["mismatch/kl_k3"] == 0


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize(
    "weights",
    [
        "int8",
        "int8_rotated",
        "fp8",
        "nvfp4",
        "dense",
        {"max_bits": 12, "formats": ["int8", "dense"]},
    ],
)
def test_every_step_has_no_mismatch_and_is_resumed(
    model: Path, tmp_path: Path, weights: object, lora: bool
) -> None:
    asked = tree(model, tmp_path / "whole", weights, lora=lora, tokens_per_microbatch=40)
    whole = train(asked)
    check(whole.folder)
    assert "nothing to correct" in "".join(from_mapping(asked).resolved().notes)
    assert from_mapping(asked).resolved().correction == "none"
    cut = tmp_path / "cut"
    copy_stopped_after(whole.folder, 2, cut)
    again = train(asked | {"output_dir": str(cut)}, resume=True).folder
    assert fingerprint(again) == fingerprint(whole.folder)


@pytest.mark.parametrize(
    "rollout",
    [
        {"temperature": 0.7, "prefill_chunk": 2},
        {"max_batch": 3, "cache_tokens": 96, "page_size": 4},
        {"turn_caching": True, "prefix_caching": False},
    ],
    ids=str,
)
def test_however_rollouts_are_drawn(model: Path, tmp_path: Path, rollout: dict[str, Any]) -> None:
    asked = tree(model, tmp_path / "run", "int8", activation_checkpointing=True)
    asked["rollout"] |= rollout
    check(train(asked).folder)


def test_the_second_update_of_a_batch_moves(model: Path, tmp_path: Path) -> None:
    """Against the proximal policy of the batch; the mismatch is of the first one."""
    check(train(tree(model, tmp_path / "run", "int8", minibatches=2)).folder)


def test_a_step_is_that_of_the_plain_run_up_to_rounding(model: Path, tmp_path: Path) -> None:
    """Dense rollouts without a correction: the same tokens, and nearly the same weights."""
    asked = tree(model, tmp_path / "a", "dense", max_steps=1, warmup_steps=0) | {
        "correction": "none"
    }
    mine = read(train(asked).folder)[0]
    asked["rollout"]["exact"] = False
    theirs = read(train(asked | {"output_dir": str(tmp_path / "b")}).folder)[0]
    assert mine["reward/mean"] == theirs["reward/mean"]
    for name in ("optim/grad_norm", "policy/entropy"):
        assert mine[name] == pytest.approx(theirs[name], rel=1e-4)


def test_a_diagnosis_sees_exact_zeros(model: Path, tmp_path: Path) -> None:
    asked = tree(model, tmp_path / "run", "int8")
    folder = train(asked).folder
    found = diagnose(from_mapping(asked), folder, num_prompts=2, n=2)
    apart = {(part.start, part.stop): part.logp_diff_max for part in found.parts}
    assert apart["decode", "prefill"] == apart["prefill", "aligned"] == 0
    assert any("the run learns from `aligned`" in note for note in found.notes)


def test_what_cannot_be_exact_is_refused(model: Path, tmp_path: Path) -> None:
    asked = tree(model, tmp_path / "run", "int8")
    for changes, words in (
        ({"rollout": {"kv": {"policy": "rkv"}}}, r"needs rollout\.kv null"),
        ({"rollout": {"kv": {"dtype": "fp8"}}}, r"needs rollout\.kv null"),
        ({"rollout": {"engine": "vllm"}}, r"needs rollout\.engine native"),
        ({"rollout": {"large_batch_weights": "fp8"}}, r"needs rollout\.large_batch_weights null"),
        ({"train": {"forward": "fp8"}}, r"needs train\.forward aligned"),
        ({"dtype": "bfloat16"}, r"needs dtype float32"),
        ({"device": "cuda"}, r"needs device cpu"),
        ({"noise": {}}, r"needs noise null"),
    ):
        merged = {**asked, **{k: v for k, v in changes.items() if not isinstance(v, dict)}}
        for key, value in changes.items():
            if isinstance(value, dict):
                merged[key] = {**merged.get(key, {}), **value}
        with pytest.raises(ConfigError, match=words):
            from_mapping(merged)
    low = quantize_folder(model, tmp_path / "low", "int8").folder
    check(train(tree(low, tmp_path / "stored", "stored", lora=True)).folder)
