"""Whole runs with every switch of the corridor: two steps, exact resume, identity limits,
refusals."""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import lowroll
from lowroll.checkpoint.store import Store
from lowroll.metrics.record import reproducible
from lowroll.model import hf, scaling
from lowroll.transport.rollout_log import read_rollouts
from lowroll.weights.exploration_noise import Noise
from lowroll.weights.publish import rollout_copy
from lowroll.weights.sync.update import WeightUpdate
from tests.fixtures.runs import copy_stopped_after, fingerprint, settings, train

NOISE = {"sigma_start": 0.1, "sigma_end": 0.01, "num_stages": 3}
TWO = {"max_steps": 2, "lr_scheduler_type": "constant"}


def sigmas(folder: Path, step: int) -> set[float]:
    batch = read_rollouts(folder / "rollouts" / f"step_{step:06d}.jsonl")
    return {sample.rollout.behavior.noise_sigma for sample in batch.samples}


SWITCHES: dict[str, dict[str, Any]] = {
    "scaled": {"train": {"uaq_scale": 1.5}},
    "muon": {"train": {"optimizer": "muon"}},
    "aligned": {"train": {"forward": "aligned"}},
    "noise": {"noise": NOISE},
    "shared noise": {"noise": {**NOISE, "learner": "shared"}},
    "all": {"train": {"uaq_scale": 1.5, "optimizer": "muon", "forward": "aligned"}, "noise": NOISE},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("switch", "lora"),
    [("scaled", False), ("aligned", True), ("shared noise", True), ("all", False), ("all", True)],
)
def test_two_steps(model: Path, tmp_path: Path, switch: str, lora: bool) -> None:
    changes = SWITCHES[switch]
    more = {**TWO, **changes.get("train", {}), "lora": lora, "lora_rank": 4}
    result = train(
        settings(model, tmp_path / "run", **{**changes, "train": more}, loss={"kl_coef": 0.01})
    )
    for record in result.records:
        assert record["optim/skipped"] == 0 and abs(record["mismatch/kl_k1"]) < 0.5
        assert ("weights/codes_flipped_fraction" in record) == (not lora)
        assert record["weights/normalized_update"] > 0
        assert lora or (
            record["weights/codes_flipped_fraction"] > 0
            and record["weights/normalized_update"] > 0
            and 0 < record["weights/normalized_quant_error"] < 1e-3
        )
        assert ("rollout/noise_sigma" in record) == ("noise" in changes)
    tuned = lowroll.score(result.folder / "final", [[6, 7, 8]], [1])[0]
    assert not torch.equal(tuned, lowroll.score(model, [[6, 7, 8]], [1])[0])


@pytest.mark.slow
@pytest.mark.parametrize(("switch", "steps"), [("shared noise", [3]), ("all", [1, 2, 3])])
def test_resume_is_bitwise(model: Path, tmp_path: Path, switch: str, steps: list[int]) -> None:
    changes = SWITCHES[switch]
    tree = settings(
        model,
        tmp_path / "whole",
        **{
            **changes,
            "train": {"max_steps": 4, "lr_scheduler_type": "linear", **changes.get("train", {})},
        },
        eval={"interval": 2, "num_examples": 2},
    )
    whole = fingerprint(train(tree).folder)
    for step in steps:
        copy_stopped_after(tmp_path / "whole", step, tmp_path / f"cut{step}")
        resumed = train({**tree, "output_dir": str(tmp_path / f"cut{step}")}, resume=True)
        assert fingerprint(resumed.folder) == whole, f"resumed after step {step}"


def records_of(model: Path, out: Path, **changes: Any) -> list[dict[str, Any]]:
    return [
        {
            name: value
            for name, value in reproducible(record).items()
            if name != "rollout/noise_sigma"
        }
        for record in train(settings(model, out, **changes)).records
    ]


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["int8", "fp32"])
def test_settings_that_are_the_baseline(model: Path, tmp_path: Path, weights: str) -> None:
    """sigma 0, scale 1, and in float32 the aligned forward: the records are those of the plain
    run."""
    rollout, three = {"weights": weights}, {"max_steps": 3, "lr_scheduler_type": "constant"}
    fixed = {"rollout": rollout, "correction": "tis"}
    plain = records_of(model, tmp_path / "plain", **fixed, train=three)
    silent = {"sigma_start": 0.0, "sigma_end": 0.0}
    for name, changes in {
        "silent": {"noise": silent},
        "shared": {"noise": {**silent, "learner": "shared"}},
        "one": {"train": {"uaq_scale": 1.0}},
        **({"aligned": {"train": {"forward": "aligned"}}} if weights == "fp32" else {}),
    }.items():
        changes = {**changes, "train": three | changes.get("train", {})}
        assert records_of(model, tmp_path / name, **fixed, **changes) == plain, name


@pytest.mark.slow
def test_noise_follows_its_schedule_and_the_tags_replay_it(model: Path, tmp_path: Path) -> None:
    tree = settings(
        model,
        tmp_path / "run",
        noise=NOISE,
        train={"max_steps": 6, "lr_scheduler_type": "constant"},
        eval={"interval": 4, "num_examples": 2},
    )
    result = train(tree)
    want = [0, 0, 0.1, 0.1, 0.01, 0.01]  # 3 intervals of 2 steps, the first one silent
    assert [record["rollout/noise_sigma"] for record in result.records] == pytest.approx(want)
    assert [sigmas(result.folder, step) for step in range(1, 7)] == [
        {sigma} for sigma in [r["rollout/noise_sigma"] for r in result.records]
    ]
    batch = read_rollouts(result.folder / "rollouts" / "step_000004.jsonl")
    tag = batch.samples[0].rollout.behavior
    saved = Store(result.folder / "checkpoints")
    weights = load_file(saved.folder / "step_000003" / "model.safetensors")
    master = hf.load(model)
    with torch.no_grad():
        for name, p in master.named_parameters():
            p.copy_(weights[name])
    engine = lowroll.Engine(master, weights="int8", device="cpu", cache_tokens=1024, noisy=True)
    again = engine.update_weights(
        WeightUpdate.local(master, 3, Noise(tag.noise_seed, tag.noise_sigma))
    )
    assert again.policy[0].digest == tag.policy[0].digest
    assert (
        engine.update_weights(WeightUpdate.local(master, 3)).policy[0].digest
        != tag.policy[0].digest
    )


@pytest.mark.slow
def test_evaluation_is_of_clean_norms_and_leaves_the_run_alone(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluation_of_a_run = importlib.import_module("lowroll.runs.evaluations")
    seen, evaluate = [], evaluation_of_a_run.evaluate_env

    def spy(env: Any, rollouts: Any, *args: Any, **more: Any) -> dict[str, float]:
        clean = rollout_copy(hf.load(model), "int8", torch.float32).get_parameter(
            "blocks.0.input_norm.weight"
        )
        engine = rollouts.engine.engine  # behind the conversations and the run's own
        seen.append(
            (
                engine.behavior.policy[0].version,
                engine.behavior.noise_sigma,
                float((engine.model.blocks[0].input_norm.weight - clean).abs().max()),
            )
        )
        return evaluate(env, rollouts, *args, **more)

    monkeypatch.setattr(evaluation_of_a_run, "evaluate_env", spy)
    noise = {"sigma_start": 0.5, "sigma_end": 0.5, "num_stages": 2}
    rows = {}
    for name, evaluation in (
        ("with", {"interval": 1, "num_examples": 4, "temperature": 1.0}),
        ("without", {}),
    ):
        tree = settings(model, tmp_path / name, noise=noise, train=TWO, eval=evaluation)
        rows[name] = train(tree)
    assert [
        {k: v for k, v in reproducible(r).items() if not k.startswith("eval/")}
        for r in rows["with"].records
    ] == [reproducible(r) for r in rows["without"].records]
    assert [row[:2] for row in seen] == [(0, 0.0), (1, 0.0), (2, 0.0)]
    assert all(moved < 0.05 for *_, moved in seen)  # two updates at 0.01, and no noise
    assert rows["with"].records[-1]["rollout/noise_sigma"] == 0.5


@pytest.mark.slow
def test_a_shared_noise_leaves_the_mismatch_of_the_format_alone(
    model: Path, tmp_path: Path
) -> None:
    noise = {"sigma_start": 0.3, "sigma_end": 0.3, "num_stages": 2}
    kl = {}
    for learner in ("clean", "shared"):
        result = train(
            settings(
                model,
                tmp_path / learner,
                noise={**noise, "learner": learner},
                rollout={"weights": "fp32"},
                train={**TWO, "learning_rate": 1e-4},
            )
        )
        kl[learner] = result.records[-1]["mismatch/kl_k3"]
    assert kl["shared"] < 1e-9 < 1e-6 < kl["clean"]


@pytest.mark.slow
def test_the_reference_under_a_shared_noise_is_the_base_without_it(
    model: Path, tmp_path: Path
) -> None:
    """Nothing is learnt, so the KL is the noise's alone; with the noise on both sides it would be
    0."""
    noise = {"sigma_start": 0.3, "sigma_end": 0.3, "num_stages": 2, "learner": "shared"}
    kl = {}
    for lora in (False, True):
        result = train(
            settings(
                model,
                tmp_path / f"run{lora}",
                noise=noise,
                rollout={"weights": "fp32"},
                loss={"kl_coef": 0.01},
                train={**TWO, "learning_rate": 1e-12, "lora": lora},
            )
        )
        assert abs(result.records[0]["policy/kl_reference"]) < 1e-9  # the first stage is silent
        kl[lora] = result.records[1]["policy/kl_reference"]
    assert kl[True] > 1e-5 and kl[True] == pytest.approx(kl[False], rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["int8", "nvfp4"])
def test_an_aligned_run_has_no_mismatch_but_the_kernels(
    model: Path, tmp_path: Path, weights: str
) -> None:
    kl = {}
    for forward in ("dense", "aligned"):
        result = train(
            settings(
                model,
                tmp_path / forward,
                rollout={"weights": weights},
                train={**TWO, "forward": forward},
            )
        )
        assert all(record["weights/codes_flipped_fraction"] > 0 for record in result.records)
        kl[forward] = max(record["mismatch/kl_k3"] for record in result.records)
    assert kl["aligned"] < 1e-3 * kl["dense"]


@pytest.mark.slow
def test_a_scaled_run_is_exported_folded_and_never_scaled_again(
    model: Path, tmp_path: Path
) -> None:
    scaled = {**TWO, "uaq_scale": 1.5}
    result = train(settings(model, tmp_path / "full", train=scaled))
    final = hf.load(result.folder / "final")
    assert scaling.applied(final) == 1.5
    saved = load_file(result.folder / "checkpoints" / "step_000002" / "model.safetensors")
    assert all(torch.equal(p, saved[name]) for name, p in final.named_parameters())
    with pytest.raises(ValueError, match=r"scaled by 1\.5 before"):
        train(settings(result.folder / "final", tmp_path / "next", train=scaled))
    train(settings(result.folder / "final", tmp_path / "after", train=TWO))
    with pytest.raises(ValueError, match=r"train\.uaq_scale was 1\.5 and is 2\.0"):
        train(settings(model, tmp_path / "full", train={**scaled, "uaq_scale": 2.0}), resume=True)


def test_a_scaled_lora_run_fits_its_base(model: Path, tmp_path: Path) -> None:
    """The adapter in final/ on the base as it was == the learner (a scaled base with the adapter of
    the checkpoint)."""
    from lowroll.model import lora

    result = train(
        settings(
            model,
            tmp_path / "run",
            rollout={"weights": "fp32"},
            train={**TWO, "uaq_scale": 1.5, "lora": True, "lora_rank": 4},
        )
    )
    saved = load_file(result.folder / "checkpoints" / "step_000002" / "model.safetensors")
    learner = lora.attach(scaling.scale(hf.load(model), 1.5), 4, 32.0)
    with torch.no_grad():
        for name, p in learner.trainable_parameters().items():
            p.copy_(saved[name])
    ids = [[6, 7, 8, 9, 10]]
    torch.testing.assert_close(
        lowroll.score(result.folder / "final", ids, [1])[0],
        lowroll.score(learner, ids, [1])[0],
        rtol=0,
        atol=1e-5,
    )
    assert (
        lowroll.score(model, ids, [1])[0] - lowroll.score(learner, ids, [1])[0]
    ).abs().max() > 1e-3


def test_a_noisy_run_cannot_be_lengthened(model: Path, tmp_path: Path) -> None:
    tree = settings(model, tmp_path / "run", noise=NOISE, train=TWO)
    train(tree)
    with pytest.raises(ValueError, match=r"train\.max_steps was 2 and is 4"):
        train({**tree, "train": {**tree["train"], "max_steps": 4}}, resume=True)


def test_the_warm_start_is_neither_scaled_nor_aligned(model: Path, tmp_path: Path) -> None:
    from lowroll.config import from_mapping
    from lowroll.runs.sft import run_sft

    tree = settings(model, tmp_path / "sft", sft={"steps": 2, "num_examples": 8, "batch_size": 4})
    plain = load_file(run_sft(from_mapping(tree)).folder / "final" / "model.safetensors")
    shutil.rmtree(tmp_path / "sft")
    tree["train"] |= {"uaq_scale": 1.5, "forward": "aligned"}
    again = run_sft(from_mapping(tree)).folder / "final"
    assert all(
        torch.equal(t, plain[name]) for name, t in load_file(again / "model.safetensors").items()
    )
    assert scaling.applied(hf.load(again)) is None


def test_what_auto_and_the_notes_say_about_noise(model: Path, tmp_path: Path) -> None:
    from lowroll.config import ConfigError, from_mapping

    def cfg(**changes: Any) -> Any:
        return from_mapping(settings(model, tmp_path / "run", **changes)).resolved()

    dense = {"weights": "dense"}
    assert cfg(rollout=dense).correction == "none"
    noisy = cfg(rollout=dense, noise=NOISE)
    assert noisy.correction == "acr" and any("carry noise" in note for note in noisy.notes)
    assert not any("almost nothing to correct" in note for note in noisy.notes)
    assert cfg(rollout=dense, noise={**NOISE, "learner": "shared"}).correction == "none"
    assert cfg(noise=NOISE).correction == cfg().correction == "acr"
    forced = cfg(noise=NOISE, correction="none", force=True)
    assert any("warning: noise with correction none" in note for note in forced.notes)
    assert any(
        "no low-bit arithmetic" in n for n in cfg(rollout=dense, train={"forward": "aligned"}).notes
    )
    with pytest.raises(ConfigError, match="an exponential never reaches or leaves 0"):
        cfg(noise={"sigma_end": 0.0})
    assert cfg(noise={"sigma_end": 0.0, "schedule": "linear"}).noise.sigma_end == 0
    with pytest.raises(ConfigError, match=r"train\.optimizer"):
        cfg(train={"optimizer": "lion"})
    with pytest.raises(ConfigError, match=r"train\.uaq_scale"):
        cfg(train={"uaq_scale": 0.0})
