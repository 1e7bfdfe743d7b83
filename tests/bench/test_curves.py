"""The experiment on a pretrained model: an arm changes what its name says, problems are sound, and
verdicts follow from intervals."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from bench import claims, curves, subject
from bench.claims import CLAIMS, Claim
from bench.experiment import NoStep, Place, is_whole

CORRECTIONS = {
    "naive": "is",
    "decoupled": "decoupled",
    "tis": "tis",
    "acr": "acr",
    "tbpo": "tbpo",
    "noise": "acr",
    "aipo": "aipo",
}
LORA_CORRECTIONS = {"bf16 lora": "none", "nvfp4 lora": "tis", "nvfp4 lora noise": "acr"}


@pytest.mark.parametrize("arm", curves.ARMS)
def test_an_arm_changes_what_its_name_says_and_nothing_else(arm: str, tmp_path: Path) -> None:
    place = Place(150, tmp_path, "cpu", {"train": {"warmup_steps": 1}})
    cfg = curves.EXPERIMENT.config(arm, 3, place)
    format, *words = arm.split()
    assert cfg.rollout.weights == format and (cfg.noise is not None) == ("noise" in words)
    forward = "aligned" if "aligned" in words else "fp8" if "learner" in words else "dense"
    assert cfg.train.forward == forward and (cfg.train.backward == "fp8") == ("learner" in words)
    lag = int(words[words.index("stale") + 1]) if "stale" in words else 0
    assert cfg.asynchrony.max_async_level == lag
    assert (cfg.asynchrony.strict_async_level, cfg.launcher) == (
        (True, "local") if lag else (False, "none")
    )
    others = {"ppo": "ppo", "dapo": "dapo", "aipo": "grpo_no_std"}
    assert cfg.algorithm == next((others[word] for word in words if word in others), "grpo")
    teacher = str(tmp_path / curves.TEACHER_FOLDER / "model") if "teacher" in words else None
    assert cfg.train.teacher == teacher and (cfg.loss.aipo.teacher_tau > 0) == bool(teacher)
    assert cfg.train.optimizer == ("muon" if "muon" in words else "adamw")
    assert bool(cfg.rollout.exact) == ("exact" in words)
    if "tbpo" in words:
        assert cfg.loss.eps_low == (3e-4 if "narrow" in words else 0.03)
    assert cfg.train.uaq_scale == (1.5 if "uaq" in words else None)
    assert cfg.train.lora == ("lora" in words)
    wanted = [CORRECTIONS[word] for word in words if word in CORRECTIONS] or ["none"]
    assert cfg.correction == LORA_CORRECTIONS.get(arm, wanted[0])
    plain = curves.EXPERIMENT.config("bf16", 3, place)
    same = ("seed", "env", "batch_size", "rollouts_per_example", "sft", "dtype", "model")
    assert [getattr(cfg, name) for name in same] == [getattr(plain, name) for name in same]
    assert cfg.train.warmup_steps == 1 and cfg.train.minibatches >= 2


def test_problems_are_sound_different_and_the_same_each_time(tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym")
    subject.write_problems(tmp_path, {"test": 8, "train": 8})
    rows = [
        json.loads(line)
        for name in ("test", "train")
        for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()
    ]
    assert rows == list(islice(subject.problems(), 16))
    assert len({row["question"] for row in rows}) == 16
    for row in rows:
        assert subject.is_small(row["question"] + row["answer"])
        assert subject.is_sound(row["answer"], row["answer"].rpartition("#### ")[2])


@pytest.mark.parametrize(
    "worked, answer, sound",
    [
        ("3 + 4*2 = 11 pens\n#### 11", "11", True),
        ("half of 9 is 9/2=4\n#### 4", "4", False),  # an equation does not hold
        ("2 + 2 = 4\n#### 4", "5", False),
        ("2 + 2 = 4", "4", False),
        ("5/0 = 1\n#### 1", "1", False),
        ("$8-$3 is $5, 10-5-3=$2\n#### 2", "2", True),
    ],
)
def test_a_worked_solution_is_checked(worked: str, answer: str, sound: bool) -> None:
    assert subject.is_sound(worked, answer) is sound


def test_small_numbers_are_whole_and_bounded() -> None:
    assert subject.is_small("7 pens of 100") and not subject.is_small("101 pens")
    assert not subject.is_small("2.5 pens")


def made(arm: str, seed: int, score: float, warm: str = "a") -> dict[str, Any]:
    return {
        "variant": arm,
        "seed": seed,
        "warm_start": {"sha256": warm},
        "after": {"greedy": score, "own": score, "sampled": score, "pass@8": score},
        "curves": {name: [score] for name in curves.CURVES},
    }


def test_pairs_share_a_seed_and_a_warm_start() -> None:
    claim = Claim("", "", "x", "y")
    runs = [
        made("x", 0, 0.5),
        made("y", 0, 0.25),
        made("x", 1, 0.5),
        made("y", 2, 0.1),
        made("x", 3, 0.5, "a"),
        made("y", 3, 0.1, "b"),
    ]
    (pair,) = claims.pairs(claim, runs)
    assert pair == (runs[0], runs[1])
    assert claims.held_out(claim, pair) == claims.drawn(pair) == 0.25
    assert claims.held_out(claim, (runs[0], {**runs[1], "after": {}})) is None


def test_rollouts_are_compared_over_steps_that_both_runs_have() -> None:
    long, short = made("x", 0, 0.0), made("y", 0, 0.0)
    long["curves"]["reward/mean"] = [0.0] * 5 + [1.0] * 10 + [9.0] * 5
    short["curves"]["reward/mean"] = [9.0] * 5 + [0.25] * 10
    assert claims.drawn((long, short)) == 0.75


def test_intervals_are_students() -> None:
    low, high = claims.interval([1.0, 2.0, 3.0])  # s = 1, t = 4.303
    assert (low, high) == pytest.approx((2 - 4.303 / math.sqrt(3), 2 + 4.303 / math.sqrt(3)))
    assert claims.interval([1.0]) == (-math.inf, math.inf)
    with pytest.raises(ValueError, match="pairs: 12 of a claim"):
        claims.interval([0.0] * 12)


@pytest.mark.parametrize(
    "within, low, high, expected",
    [
        (None, 0.01, 0.2, "seen"),
        (None, -0.01, 0.2, "not seen"),
        (None, -0.2, -0.01, "contradicted"),
        (0.03, -0.02, 0.03, "seen"),
        (0.03, -0.02, 0.04, "open"),
        (0.03, 0.04, 0.05, "contradicted"),
        (0.03, -0.05, -0.04, "contradicted"),
    ],
)
def test_a_verdict_follows_from_the_interval(
    within: float | None, low: float, high: float, expected: str
) -> None:
    assert claims.verdict(Claim("", "", "x", "y", within=within), low, high) == expected


def test_every_claim_compares_arms_that_exist_and_is_listed_when_not_run() -> None:
    assert all({claim.better, claim.worse} <= set(curves.ARMS) for claim in CLAIMS)
    rows = claims.table([made("bf16", 0, 0.5), made("int8 naive", 0, 0.25)])
    assert len(rows) == len(CLAIMS) and {len(row) for row in rows} == {len(claims.HEAD)}
    size = "+0.250 (-inf to +inf)"
    assert rows[0][4:] == ("1", size, "not seen", "greedy", size, "not seen")
    assert {row[-1] for row in rows[2:]} == {row[6] for row in rows[2:]} == {"not run"}


def test_an_arm_has_a_line_of_means() -> None:
    runs = [made("bf16", 0, 0.25), made("bf16", 1, 0.75), {**made("bf16", 2, 1.0), "after": {}}]
    (line,) = curves.summary(runs)
    assert line[:5] == ("bf16", "3", "1 to 1", "0.500 (0.250 to 0.750)", "0.500")
    (line,) = curves.summary(runs[2:])
    assert line[2:5] == ("1 to 1", "-", "-")
    assert len(line) == len(curves.HEAD)


@pytest.mark.slow
@pytest.mark.real_model
def test_the_whole_experiment_runs_at_a_reduced_scale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, smollm2: Path
) -> None:
    """Warm start of the real model, one run of one step, its scores and what is stored."""
    pytest.importorskip("reasoning_gym")
    monkeypatch.setattr(curves, "HELD_OUT", 2)
    monkeypatch.setattr(curves, "SAMPLED", 1)
    monkeypatch.setattr(curves, "TEACHER", {"sft": {"steps": 2}})
    monkeypatch.setattr(subject, "SIZES", {"test": 4, "sft": 4, "train": 8})
    change = {
        "batch_size": 4,
        "rollouts_per_example": 2,
        "rollout": {"max_tokens": 8, "max_batch": 8, "cache_tokens": 8192},
        "train": {"minibatches": 1, "warmup_steps": 0},
        "sft": {"steps": 1, "batch_size": 1, "num_examples": 1, "warmup_steps": 0},
    }
    place = Place(1, tmp_path, "cpu", change)
    before = curves.EXPERIMENT.warm_started(place)
    assert len(before["sha256"]) == 16 and before["sft_steps"] == 1
    assert curves.EXPERIMENT.warm_started(place) == before
    assert curves.teacher(place)["sft_steps"] == 2
    make = curves.EXPERIMENT.train
    long = replace(place, steps=10_000)
    one = make("int8 aipo teacher", 0, 0, place=place)
    assert set(one["after"]) == {"greedy", "own", "sampled", "pass@8"}
    assert len(one["curves"]["mismatch/kl_k3"]) == 1 and is_whole(one, 1)
    assert not is_whole(one, 2)
    with pytest.raises(NoStep, match="before the first step"):
        make("bf16", 0, 0, place=place, until=time.time())
    cut = make("bf16", 1, 0, place=long, until=time.time() + 20)
    assert 0 < len(cut["curves"]["reward/mean"]) < 10_000 and not is_whole(cut, 10_000)
    assert cut["after"] == {}
