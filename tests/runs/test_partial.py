"""Partial rollouts in one process: what goes on over an update, what a resumed run has in common
with the run that was not stopped, and what is taken back."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from lowroll.metrics.record import read
from lowroll.transport.rollout_log import read_rollouts
from lowroll.types import Rollout
from tests.fixtures.runs import copy_stopped_after, fingerprint, run_session, settings, train


def tree(model: Path, out: Path, partial: str, **changes: Any) -> dict[str, Any]:
    """Of a run whose engine has room for two groups, with four open."""
    given: dict[str, Any] = {
        "asynchrony": {"partial": partial, "oversampling_factor": 2.0},
        "rollout": {"max_tokens": 24, "cache_tokens": 2048, "max_batch": 6},
        "train": {"max_steps": 4, "learning_rate": 1e-2},
    }
    for key, value in changes.items():
        given[key] = {**given.get(key, {}), **value}
    return settings(model, out, **given)


def learnt(run: Path) -> dict[int, dict[str, Rollout]]:
    """What each step learnt from, by request and place in its group."""
    found: dict[int, dict[str, Rollout]] = {}
    for path in sorted((run / "rollouts").glob("step_*.jsonl")):
        batch = read_rollouts(path)
        samples = [sample for sample in batch.samples if sample.group >= 0]
        seen: Counter[str] = Counter()
        found[batch.step] = {}
        for sample in samples:
            name = f"{sample.prompt.env}/{sample.prompt.id}"
            found[batch.step][f"{name}/{seen[name]}"] = sample.rollout
            seen[name] += 1
    return found


def spans(run: Path) -> list[list[int]]:
    return [
        [span.version for span in rollout.behavior.policy]
        for batch in learnt(run).values()
        for rollout in batch.values()
    ]


@pytest.mark.parametrize("release", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_what_is_unfinished_is_replayed(model: Path, tmp_path: Path, release: bool) -> None:
    run = tmp_path / "run"
    train(tree(model, run, "replay", rollout={"release_cache": release}))
    records = read(run)
    assert sum(record.get("rollout/replay_samples", 0) for record in records) > 0
    assert all(record["rollout/in_flight_groups"] > 0 for record in records)
    assert {len(versions) for versions in spans(run)} == {1}


def test_what_is_unfinished_is_kept(model: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(tree(model, run, "keep", eval={"interval": 2, "num_examples": 2, "temperature": 1.0}))
    assert max(len(versions) for versions in spans(run)) > 1
    assert not any("rollout/replay_samples" in record for record in read(run))
    records = read(run)
    aged = [name for name in records[-1] if name.startswith("mismatch/staleness_")]
    assert len(aged) >= 4, "the gap of log-probs by staleness"


@pytest.mark.parametrize("partial", [pytest.param("keep", marks=pytest.mark.slow), "replay"])
def test_a_resumed_run_draws_what_was_open_again(model: Path, tmp_path: Path, partial: str) -> None:
    """Batches are not those of the run that was not stopped: what had begun begins anew, and ends
    later. What holds: nothing is learnt from twice or left out, the first batch is of the newest
    weights, and under the same weights the same request has the same tokens."""
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    still = {"learning_rate": 1e-30, "weight_decay": 0.0}  # changes no weight
    train(tree(model, whole, partial, train=still))
    copy_stopped_after(whole, 2, stopped)
    train(tree(model, stopped, partial, train=still), resume=True)
    one, other = learnt(whole), learnt(stopped)
    first = {versions.behavior.policy[0].version for versions in other[3].values()}
    assert first == {2}
    flat = [name for batch in other.values() for name in batch]
    assert len(flat) == len(set(flat)), "learnt from twice"
    every = {name: rollout for batch in one.values() for name, rollout in batch.items()}
    again = {name: rollout for step in (3, 4) for name, rollout in other[step].items()}
    shared = every.keys() & again.keys()
    assert len(shared) >= 8
    for name in shared:
        assert again[name].token_ids == every[name].token_ids


def test_another_engine_gets_what_was_in_flight(model: Path, tmp_path: Path) -> None:
    with ExitStack() as stack:
        run = run_session(tree(model, tmp_path / "run", "keep"), stack)
        rollout_buffer = run.batches.orchestrator.rollout_buffer
        assert rollout_buffer.in_flight > 0
        run.rollouts.change_format("bf16")
        assert rollout_buffer.in_flight == 0
        record = run.step(3)
        assert record["rollout/num_groups"] == 2


@pytest.mark.parametrize("cancel", [False, True])
def test_an_evaluation_may_have_the_engine_alone(model: Path, tmp_path: Path, cancel: bool) -> None:
    asked = {"interval": 1, "num_examples": 2, "cancel_inflight_rollouts_on_eval": cancel}
    with ExitStack() as stack:
        run = run_session(tree(model, tmp_path / "run", "keep", eval=asked), stack, steps=1)
        assert (run.batches.orchestrator.rollout_buffer.in_flight == 0) == cancel


def test_oversampling_at_level_0_repeats_itself_bit_for_bit_over_a_restart(
    model: Path, tmp_path: Path
) -> None:
    def tree(name: str) -> dict:
        changes = {
            "asynchrony": {"oversampling_factor": 1.5},
            "train": {"max_steps": 6, "learning_rate": 1e-3},
        }
        return settings(model, tmp_path / name, **changes)

    whole = train(tree("whole")).folder
    for record in read(whole):
        assert record["rollout/num_groups"] == 2 and record["rollout/dropped_oversampled"] == 1
        assert record["rollout/staleness_0"] == 1 and record["rollout/open_groups"] == 0
    copy_stopped_after(whole, 3, tmp_path / "again")
    again = train(tree("again"), resume=True).folder
    assert fingerprint(again) == fingerprint(whole)
