"""The experiments of docs/results.md: every variant is a run that can be made, and the sums are
right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import curves, pictures
from bench.harness import RESULTS


@pytest.mark.parametrize("variant", curves.VARIANTS)
def test_a_variant_changes_what_its_name_says_and_nothing_else(
    variant: str, tmp_path: Path
) -> None:
    cfg = curves.settings(variant, 3, 150, tmp_path, "cpu", {"train": {"learning_rate": 1e-6}})
    format, *words = variant.split()
    assert cfg.rollout.weights == format and (cfg.noise is not None) == ("noise" in words)
    assert (cfg.train.forward == "aligned") == ("aligned" in words)
    assert cfg.train.uaq_scale == (1.5 if "uaq" in words else None)
    wanted = {"naive": "is", "uncorrected": "none", "tis": "tis", "acr": "acr", "tbpo": "tbpo"}
    assert cfg.correction == next(
        (wanted[word] for word in words if word in wanted), "none" if variant == "bf16" else "acr"
    )
    plain = curves.settings("bf16", 3, 150, tmp_path, "cpu", {"train": {"learning_rate": 1e-6}})
    assert (cfg.seed, cfg.env, cfg.batch_size, cfg.sft) == (
        plain.seed,
        plain.env,
        plain.batch_size,
        plain.sft,
    )
    assert cfg.train.learning_rate == 1e-6 and cfg.train.minibatches >= 2


def test_merging_replaces_leaves() -> None:
    assert curves.merged({"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"b": 5}, "e": {"f": 6}}) == {
        "a": {"b": 5, "c": 2},
        "d": 3,
        "e": {"f": 6},
    }


def test_the_running_mean_leaves_out_what_is_missing() -> None:
    assert pictures.smooth([1.0, None, 4.0]) == [1.0, 1.0, 2.5]
    assert pictures.smooth([float(i) for i in range(12)])[-1] == pytest.approx(6.5)  # of 2..11


@pytest.mark.slow
def test_every_picture_is_drawn_from_what_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = {path.name for path in pictures.FOLDER.glob("*.png")}
    kept -= {name for name in kept if name.startswith("report_")}  # of a run, by `lowroll report`
    monkeypatch.setattr(pictures, "FOLDER", tmp_path)
    pictures.main()
    assert {path.name for path in tmp_path.iterdir()} == kept


def test_the_stored_curves_are_complete() -> None:
    record = json.loads((RESULTS / "curves.json").read_text())
    assert {(run["variant"], run["seed"]) for run in record["runs"]} == {
        (variant, seed) for variant in curves.VARIANTS for seed in range(3)
    }
    assert all(
        len(run["curves"]["reward/mean"]) == record["steps"] >= 150 for run in record["runs"]
    )
