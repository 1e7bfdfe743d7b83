"""Runs with `rollout.exact`: what was recorded is what the learner computes, in every step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lowroll.config import from_mapping
from lowroll.config.load import ConfigError
from lowroll.kernels.batch_invariant import rows
from lowroll.metrics.record import read
from lowroll.runs import demo
from lowroll.runs.diagnose import diagnose
from lowroll.runs.export import export_run, quantize_folder
from lowroll.runs.monitor import Monitor
from tests.fixtures.runs import ALWAYS, TINY, copy_stopped_after, fingerprint, settings, train

pytestmark = pytest.mark.skipif(
    not rows.supports_device(torch.device("cpu")), reason="needs a CPU with AVX2 and a C++ compiler"
)
SIZES = {**TINY, "head_dim": 16}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return demo.build_model(tmp_path_factory.mktemp("models") / "tiny", 0, SIZES)


def tree(model: Path, out: Path, weights: object, **train: Any) -> dict[str, Any]:
    made = settings(model, out)
    made["train"] = {**made["train"], "max_steps": 4, "minibatches": 1, **train}
    made["rollout"] = {**made["rollout"], "weights": weights, "exact": True}
    return made


def check(folder: Path, steps: int = 4) -> None:
    records = read(folder)
    assert len(records) == steps
    for record in records:
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
    notes = "".join(from_mapping(asked).resolved().notes)
    assert "nothing to correct" in notes and "not corrected" not in notes
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
    folder = train(tree(model, tmp_path / "run", "int8", minibatches=2)).folder
    check(folder)
    assert any(record["policy/ratio_max"] != 1 for record in read(folder))


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


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("weights", ["int4", "int8"])
def test_a_guard_that_falls_back_keeps_the_bits(
    model: Path, tmp_path: Path, weights: str, lora: bool
) -> None:
    """To eight bits and to dense rollouts, or at once to the dense ones of an adapter's base."""
    asked = tree(model, tmp_path / "run", weights, lora=lora, max_steps=6)
    asked |= {"guard": {**ALWAYS, "action": "fallback"}, "correction": "none"}
    folder = train(asked).folder
    assert read(folder)[-1]["guard/fallbacks"] >= 1
    check(folder, 6)


def test_bits_that_differ_are_told_once(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    watch = Monitor(from_mapping(tree(model, tmp_path / "run", "int8")).resolved())
    watch.look(1, {"mismatch/logp_diff_max": 0.0})
    assert not caplog.text
    for step in (2, 3):
        watch.look(step, {"mismatch/logp_diff_max": 1e-7})
    assert caplog.text.count("rollout.exact: step 2: a recorded log-prob is 1e-07 nats off") == 1
    assert "step 3" not in caplog.text


def test_a_merged_adapter_is_measured_against_the_dense_forward(
    model: Path, tmp_path: Path
) -> None:
    folder = train(tree(model, tmp_path / "run", "int8", lora=True)).folder
    gap = export_run(folder, tmp_path / "merged", "merged").gap
    assert gap is not None and gap.logp_diff < 1e-5


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_a_diagnosis_sees_exact_zeros(model: Path, tmp_path: Path, lora: bool) -> None:
    asked = tree(model, tmp_path / "run", "int8", lora=lora)
    folder = train(asked).folder
    found = diagnose(from_mapping(asked), folder, num_prompts=2, n=2)
    apart = {(part.start, part.stop): part.logp_diff_max for part in found.parts}
    assert apart["decode", "prefill"] == apart["prefill", "aligned"] == 0
    assert apart["aligned", "quantized"] > 0
    assert any("the run learns from `aligned`" in note for note in found.notes)


def test_what_cannot_be_exact_is_refused(model: Path, tmp_path: Path) -> None:
    asked = tree(model, tmp_path / "run", "int8")
    for changes, words in (
        ({"rollout": {"kv": {"policy": "rkv"}}}, r"needs rollout\.kv null"),
        ({"rollout": {"kv": {"dtype": "fp8"}}}, r"needs rollout\.kv null"),
        ({"rollout": {"engine": "vllm"}}, r"needs rollout\.engine native"),
        ({"rollout": {"large_batch_weights": "fp8"}}, r"needs rollout\.large_batch_weights null"),
        ({"train": {"forward": "fp8"}}, r"needs train\.forward aligned"),
        ({"dtype": "bfloat16", "device": "cpu"}, r"needs dtype float32 on a CPU"),
        ({"noise": {}}, r"needs noise null"),
    ):
        merged = {**asked, **{k: v for k, v in changes.items() if not isinstance(v, dict)}}
        for key, value in changes.items():
            if isinstance(value, dict):
                merged[key] = {**merged.get(key, {}), **value}
        with pytest.raises(ConfigError, match=words):
            from_mapping(merged)


def test_stored_codes_are_exact(model: Path, tmp_path: Path) -> None:
    low = quantize_folder(model, tmp_path / "low", "int8").folder
    check(train(tree(low, tmp_path / "stored", "stored", lora=True)).folder)
