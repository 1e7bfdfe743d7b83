"""Whole runs whose environment answers."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from lowroll.config import from_mapping
from lowroll.metrics.record import read
from lowroll.runs import demo
from lowroll.runs.sft import warm_start
from lowroll.transport.rollout_log import read_rollouts
from lowroll.types import Score
from tests.fixtures.roles import by_hand, outcome, write
from tests.fixtures.runs import TINY, copy_stopped_after, fingerprint, settings, train

GUESS = {"id": "guess", "args": {"most": 2, "width": 2, "max_turns": 2}}
RANGES = {"id": "guess", "args": {"most": 9, "width": 2, "max_turns": 2}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that says numbers now and then."""
    folder = tmp_path_factory.mktemp("guess")
    demo.build_model(folder / "raw", 0, TINY)
    sft = {
        "steps": 20,
        "batch_size": 16,
        "learning_rate": 1e-2,
        "warmup_steps": 5,
        "num_examples": 512,
    }
    tree = settings(folder / "raw", folder / "out", env=[GUESS], sft=sft)
    warm_start(from_mapping(tree).resolved(), folder / "raw", folder / "warm")
    return folder / "warm"


def tree(model: Path, out: Path, **changes: Any) -> dict[str, Any]:
    given: dict[str, Any] = {
        "env": [GUESS],
        "batch_size": 16,
        "rollouts_per_example": 8,
        "rollout": {"weights": "int8", "max_tokens": 2, "cache_tokens": 8192, "max_batch": 96},
        "train": {
            "max_steps": 3,
            "learning_rate": 1e-2,
            "minibatches": 1,
            "warmup_steps": 2,
            "lr_scheduler_type": "constant",
        },
    }
    for key, value in changes.items():
        given[key] = {**given[key], **value} if isinstance(given.get(key), dict) else value
    return settings(model, out, **given)


@pytest.mark.slow
def test_a_small_model_learns_to_use_its_second_turn_from_int8_rollouts(
    model: Path, tmp_path: Path
) -> None:
    train(
        tree(model, tmp_path / "r", batch_size=96, train={"max_steps": 18}, ckpt={"interval": 99})
    )
    records = read(tmp_path / "r")
    rewards = [record["reward/mean"] for record in records]
    assert fmean(rewards[-4:]) > fmean(rewards[:4]) + 0.2
    last = records[-1]
    assert 1 < last["rollout/turns_mean"] < last["rollout/turns_max"] == 2
    assert last["reward/after_2_turns"] > records[0]["reward/after_2_turns"] + 0.1
    assert abs(last["mismatch/kl_k1"]) < 1e-2


@pytest.mark.slow
def test_a_run_with_conversations_goes_on_where_it_stopped(model: Path, tmp_path: Path) -> None:
    whole, stopped = tree(model, tmp_path / "whole"), tree(model, tmp_path / "stopped")
    train(whole)
    copy_stopped_after(tmp_path / "whole", 1, tmp_path / "stopped")
    train(stopped, resume=True)
    assert fingerprint(tmp_path / "stopped") == fingerprint(tmp_path / "whole")
    samples = read_rollouts(tmp_path / "whole/rollouts/step_000003.jsonl").samples
    assert {len(sample.rollout.turns) for sample in samples} == {1, 2}
    for sample in samples:
        assert isinstance(sample.score, Score) and sample.messages
        assert sample.loss_mask == sample.rollout.drawn
        assert [p != 0.0 for p in sample.rollout.logprobs] == [m == 1 for m in sample.loss_mask]


@pytest.mark.parametrize(
    "changes",
    [
        {"asynchrony": {"oversampling_factor": 1.5, "partial": "keep"}},
        {"asynchrony": {"oversampling_factor": 1.5, "partial": "replay"}},
        {"algorithm": "dapo", "dapo": {"max_rounds": 2, "no_signal": "go_on"}},
        {"algorithm": "ppo"},
        {"rollout": {"kv": {"policy": "rkv", "budget": 16}}, "correction": "sparse"},
    ],
    ids=["keep", "replay", "dapo", "ppo", "bounded"],
)
@pytest.mark.slow
def test_everything_goes_with_conversations(model: Path, tmp_path: Path, changes) -> None:
    train(tree(model, tmp_path / "r", **changes))
    records = read(tmp_path / "r")
    assert len(records) == 3 and all(r["rollout/turns_max"] == 2 for r in records)


def test_replayed_caches_do_not_go_with_conversations(model: Path, tmp_path: Path) -> None:
    given = tree(model, tmp_path / "r", rollout={"kv": {"policy": "rkv", "budget": 16}})
    given["train"]["replay_kv"] = True
    with pytest.raises(ValueError, match="train.replay_kv"):
        train(given)


def test_a_limit_of_one_turn_is_an_environment_that_is_not_asked(
    model: Path, tmp_path: Path
) -> None:
    one = {"id": "guess", "args": {**GUESS["args"], "max_turns": 1}}
    train(tree(model, tmp_path / "r", env=[one], train={"max_steps": 1, "warmup_steps": 0}))
    line = (tmp_path / "r/rollouts/step_000001.jsonl").read_text()
    assert '"turns"' not in line and '"messages":null' not in line
    assert "rollout/turns_mean" not in read(tmp_path / "r")[0]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(
    "changes",
    [
        {"env": [RANGES], "eval": {"interval": 2, "num_examples": 4, "temperature": 1.0}},
        {"rollout_transport": {"type": "zmq", "port": 0}, "algorithm": "ppo"},
    ],
    ids=["evaluated", "zmq-ppo"],
)
def test_roles_hold_the_conversations_that_one_process_holds(
    model: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    train(tree(model, tmp_path / "one", **changes))
    file = write(tree(model, tmp_path / "roles", **changes), tmp_path / "run.yaml")
    assert not by_hand(file, tmp_path), "the orchestrator has loaded torch"
    assert outcome(tmp_path / "roles") == outcome(tmp_path / "one")
    assert read(tmp_path / "one")[0]["rollout/turns_max"] == 2
