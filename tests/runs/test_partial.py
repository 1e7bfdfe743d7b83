"""Whole runs in one process whose batches take the groups that end first: what is left over is dropped,
kept or replayed. The native engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from lowroll.metrics.record import read
from tests.fixtures.runs import copy_stopped_after, fingerprint, settings, train

SIX = {"max_steps": 6, "learning_rate": 1e-3}


def test_oversampling_at_level_0_repeats_itself_bit_for_bit_over_a_restart(
    model: Path, tmp_path: Path
) -> None:
    def tree(name: str) -> dict:
        changes = {"asynchrony": {"oversampling_factor": 1.5}, "train": SIX}
        return settings(model, tmp_path / name, **changes)

    whole = train(tree("whole")).folder
    for record in read(whole):
        assert record["rollout/num_groups"] == 2 and record["rollout/dropped_oversampled"] == 1
        assert record["rollout/staleness_0"] == 1 and record["rollout/open_groups"] == 0
    copy_stopped_after(whole, 3, tmp_path / "again")
    again = train(tree("again"), resume=True).folder
    assert fingerprint(again) == fingerprint(whole)


@pytest.mark.parametrize("partial", ["keep", "replay"])
def test_what_is_unfinished_goes_on_under_the_next_weights(
    model: Path, tmp_path: Path, partial: str
) -> None:
    asynchrony = {"oversampling_factor": 2.0, "partial": partial}
    rollout = {"max_tokens": 40, "cache_tokens": 4096}
    tree = settings(model, tmp_path / "run", asynchrony=asynchrony, rollout=rollout, train=SIX)
    records = read(train(tree).folder)
    assert len(records) == 6
    assert all(record["rollout/open_groups"] == 2 for record in records)
    assert all(record["rollout/dropped_groups"] == 0 for record in records)
    assert sum(record["rollout/carried_groups"] for record in records) > 0
    old = sum(
        value
        for record in records
        for name, value in record.items()
        if name.startswith("rollout/staleness_") and not name.endswith("_0")
    )
    assert old > 0 or partial == "replay"
    copy_stopped_after(tmp_path / "run", 3, tmp_path / "again")
    again = read(train({**tree, "output_dir": str(tmp_path / "again")}, resume=True).folder)
    assert len(again) == 6 and again[5]["rollout/open_groups"] == 2
