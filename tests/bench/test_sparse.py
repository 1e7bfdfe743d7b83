"""The experiment of bounded caches: an arm changes what its name says, runs are merged and not made
twice, and the sums are right."""

from __future__ import annotations

import argparse
import json
import math
import re
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import experiment, sparse
from bench.experiment import Place, ending_by, spread, store
from bench.harness import merged
from lowroll.runs.demo import build_model
from tests.fixtures.runs import TINY

SMALL: dict[str, Any] = {
    "env": [
        {
            "id": "chain",
            "args": {"template": "{text}", "entries": 2, "max_rounds": 2, "min_rounds": 1},
        }
    ],
    "batch_size": 8,
    "rollouts_per_example": 4,
    "rollout": {"max_tokens": 24, "max_batch": 8, "cache_tokens": 2048},
    "train": {"warmup_steps": 0},
    "sft": {"steps": 1, "batch_size": 2, "num_examples": 2, "warmup_steps": 0},
}


def made(variant: str, seed: int, **curves: list[float | None]) -> dict[str, Any]:
    plain = {name: [0.0] for name in sparse.CURVES}
    return {
        "variant": variant,
        "seed": seed,
        "before": {"own": 0.1 + seed / 10},
        "after": {"dense": 0.5 + seed / 10, "greedy": 0.6, "own": 0.25},
        "curves": {**plain, **{name.replace("__", "/"): curve for name, curve in curves.items()}},
    }


@pytest.mark.parametrize("arm", sparse.ARMS)
def test_an_arm_changes_the_cache_and_its_price_alone(arm: str, tmp_path: Path) -> None:
    place = Place(40, tmp_path, "cpu", {"train": {"learning_rate": 1e-6}})
    cfg = sparse.EXPERIMENT.config(arm, 3, place)
    plain = sparse.EXPERIMENT.config("dense", 3, place)
    same = ("seed", "env", "batch_size", "sft", "dtype", "model", "rollouts_per_example")
    assert [getattr(cfg, name) for name in same] == [getattr(plain, name) for name in same]
    assert (cfg.train.learning_rate, cfg.train.max_steps) == (1e-6, 40)
    assert (cfg.output_dir != plain.output_dir) == (arm != "dense")
    if "naive" in arm:
        assert cfg.correction == "none"
    if "sparse-rl" in arm or "repair" in arm:
        assert cfg.correction == "sparse"


def test_demonstrations_slip_as_often_as_said_and_carry_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = {"sft": {"num_examples": 60, "steps": 20}}
    cfg = sparse.EXPERIMENT.config("dense", 0, Place(10, tmp_path, "cpu", count))
    args = cfg.env[0].args

    def slips(path: Path) -> list[int]:
        """Offsets between neighbouring sums that are not the amount that the prompt says."""
        found = []
        for line in path.read_text().splitlines():
            user, assistant = json.loads(line)["messages"]
            *amounts, now, _modulus, _rounds = map(int, re.findall(r"\d+", user["content"]))
            sums = [int(number) for number in re.findall(r"[a-z](\d)", assistant["content"])]
            assert len(sums) == args["entries"] * args["max_rounds"]
            assert assistant["content"].endswith(f"#### {sums[-1]}")
            for i, number in enumerate(sums):
                found.append((number - now - amounts[i % len(amounts)]) % 10)
                now = number
        return found

    off = slips(sparse.demonstrated(cfg, tmp_path / "slips.jsonl"))
    share = sum(one > 0 for one in off) / len(off)
    assert abs(share - sparse.SLIP) < 4 * (sparse.SLIP / len(off)) ** 0.5
    monkeypatch.setattr(sparse, "SLIP", 0.0)
    assert not any(slips(sparse.demonstrated(cfg, tmp_path / "gold.jsonl")))
    monkeypatch.setattr(sparse, "SLIP", 1.0)
    assert set(slips(sparse.demonstrated(cfg, tmp_path / "wrong.jsonl"))) == set(range(1, 10))


def test_the_summary_is_that_of_hand_worked_runs() -> None:
    runs = [
        made("rkv naive", 0, reward__mean=[1.0] + [0.5] * 10, mismatch__kl_k3=[1e-3] * 11),
        made("rkv naive", 1, reward__mean=[1.0] + [0.25] * 10, mismatch__kl_k3=[3e-3] * 11),
    ]
    for run, shares in zip(runs, ([0.0, None], [0.5, 1.0]), strict=True):
        run["curves"][sparse.REJECTED] = shares
        run["curves"]["policy/entropy"] = [None, None]
    (row,) = sparse.summary(runs)
    assert row == (
        "rkv naive",
        "2",
        "0.375 (0.250 to 0.500)",
        "0.550 (0.500 to 0.600)",
        "0.150",
        "0.250",
        "0.375",
        "2.0e-03",
        "2.0e-03",
        "-",
        "-",
    )


def test_runs_of_other_settings_are_left_out(tmp_path: Path) -> None:
    path, about = tmp_path / "sparse.json", {"steps": 4, "settings": {"a": 1}}
    experiment = sparse.EXPERIMENT
    assert experiment.stored(path, about) == []
    run = {**made("dense", 0), "arm": sparse.ARMS["dense"]}
    changed = {**made("rkv naive", 0), "arm": {"correction": "tis"}}
    store(path, about, [changed, run], sparse.ARMS)
    assert experiment.stored(path, about) == [run]  # the other arm says something else today
    assert experiment.stored(path, about | {"steps": 5}) == []
    assert experiment.stored(path, about | {"settings": {}}) == []


def test_a_folder_with_a_model_of_other_settings_is_refused(tmp_path: Path) -> None:
    asked: list[Mapping[str, Any]] = []

    def warm_start(place: Place) -> dict[str, Any]:
        asked.append(place.change)
        return {"sft_steps": 3}

    one = replace(sparse.EXPERIMENT, warm_start=warm_start)
    place = Place(1, tmp_path, "cpu", {"sft": {"steps": 3}})
    for _ in range(2):
        assert one.warm_started(place) == {"sft_steps": 3}
    with pytest.raises(ValueError, match="--work: .* has a model that other settings made"):
        one.warm_started(replace(place, change={}))
    assert len(asked) == 1


def test_a_spread_is_a_range_only_where_there_is_one() -> None:
    assert spread([1.0, 3.0]) == "2.000 (1.000 to 3.000)"
    assert spread([2.0]) == "2.000" and spread([]) == "-"
    assert spread([1000, 3000], ",.0f") == "2,000 (1,000 to 3,000)"


def waits_or_ends(name: str, seed: int, gpu: int, *, folder: Path) -> dict[str, Any]:
    """A job; the one named `waits` ends after `ends` of seed 1."""
    deadline = time.monotonic() + 120
    while name == "waits" and not (folder / "ends-1").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    (folder / f"{name}-{seed}").touch()
    if name == "fails":
        raise ValueError("on purpose")
    return {"name": name, "seed": seed, "gpu": gpu}


@pytest.mark.slow
def test_a_job_takes_the_gpu_that_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    work = partial(waits_or_ends, folder=tmp_path)
    jobs = [("waits", 0), ("fails", 0), ("ends", 1)]
    made = []
    with pytest.raises(ValueError, match="on purpose"):
        for one in experiment.side_by_side(work, jobs, 2):
            made.append((one["name"], one["gpu"]))
    assert made == [("ends", 1), ("waits", 0)]


def test_no_run_begins_after_the_end(tmp_path: Path) -> None:
    work = partial(waits_or_ends, folder=tmp_path)
    assert list(experiment.side_by_side(work, [("ends", 1)], 2, until=time.time())) == []
    assert not list(tmp_path.iterdir())


def test_a_run_that_ends_in_time_is_left_alone() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with ending_by(time.time() + 60):
        pass
    assert signal.getsignal(signal.SIGTERM) is before
    assert not any(isinstance(thread, threading.Timer) for thread in threading.enumerate())


@pytest.mark.slow
@pytest.mark.parametrize(
    "arm",
    [
        pytest.param(arm, marks=() if arm in ("rkv replay", "fp8 cache") else pytest.mark.long)
        for arm in sparse.ARMS
    ],
)
def test_an_arm_runs(arm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of each on a tiny model, with caches so small that they are compacted."""
    cache = sparse.ARMS[arm].get("rollout", {}).get("kv", {"policy": "dense"})
    bounded = cache["policy"] != "dense"
    if bounded:
        tight = {"rollout": {"kv": {"budget": 36, "buffer": 4}}}
        monkeypatch.setitem(sparse.ARMS, arm, merged(sparse.ARMS[arm], tight))
    monkeypatch.setattr(sparse, "HELD_OUT", 4)
    build_model(tmp_path / "model", 0, {**TINY, "max_position_embeddings": 256})
    made = sparse.EXPERIMENT.train(arm, 0, 0, place=Place(1, tmp_path, "cpu", SMALL))
    assert set(made["after"]) == {"dense", "greedy", "own"}
    (saved,) = made["curves"].get(sparse.SAVED, [0.0])
    assert saved > 0.1 if bounded else not saved
    assert len(sparse.summary([made])) == 1


@pytest.mark.slow
def test_a_stopped_command_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole, on a tiny model: warm start, a run, and a second command that makes the missing run
    alone."""
    monkeypatch.setattr(sparse, "MODEL", {**TINY, "max_position_embeddings": 256})
    monkeypatch.setattr(sparse, "HELD_OUT", 4)
    asked: list[tuple[str, int]] = []

    def in_turn(work: Any, jobs: Any, *_: object) -> Any:
        asked.extend(jobs)
        return (work(*job, 0) for job in jobs)

    monkeypatch.setattr(experiment, "side_by_side", in_turn)
    args = argparse.Namespace(
        steps=2,
        seeds=1,
        first_seed=0,
        jobs=1,
        device="cpu",
        only=["dense"],
        seconds=math.inf,
        out=tmp_path,
        work=tmp_path / "work",
        change=json.dumps(SMALL),
    )
    work = args.work
    first = sparse.EXPERIMENT.main(args)
    warm = (work / "model" / "model.safetensors").stat().st_mtime_ns
    args.seeds = 2
    both = sparse.EXPERIMENT.main(args)
    assert asked == [("dense", 0), ("dense", 1)] and both[0] == first[0]
    assert {one["device"] for one in both} == {"cpu"}
    assert (work / "model" / "model.safetensors").stat().st_mtime_ns == warm
    stored = json.loads((tmp_path / "sparse.json").read_text())
    assert stored["runs"] == both
    assert all(one["warm_start"]["sft_steps"] == 1 for one in both)
    assert all(len(run["curves"]["reward/mean"]) == 2 for run in both)
    assert set(both[1]["after"]) == {"dense", "greedy", "own"}
    args.first_seed = args.seeds = 1  # seed 1 alone, which is there
    assert sparse.EXPERIMENT.main(args) == both and len(asked) == 2
