"""The benchmark of learner ranks: what its rows say of what its sides found, and one side whole."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench import learners
from bench.learners import JOBS, Found, rows_of, side

TINY = replace(JOBS["tiny"], device="cpu")


def found(seconds: float, **more: float) -> Found:
    more = {"bytes": 0, "gather_s": 0.5, "write_s": 0.25, "published_bytes": 100} | more
    return {"seconds": seconds, **more}


def test_rows_hold_ranks_against_one_and_against_the_peer() -> None:
    ours = {1: found(2.0), 2: found(1.0, bytes=3 << 30)}
    peers = {1: {"failed": "rank 0: out of memory"}, 2: {"seconds": 4.0, "bytes": 6 << 30}}
    rows = {row.name: row for row in rows_of(replace(TINY, device="cuda"), ours, peers)}
    two = f"{TINY.title}, 2 GPUs"
    assert rows[f"{two}: over one GPU"].ratio == 2.0 and rows[f"{two}: over one GPU"].met
    assert rows[f"{two}: accelerate"].ratio == 4.0
    assert rows[f"{two}: peak memory"].ours == 3.0 and rows[f"{two}: peak memory"].peer == 6.0
    assert "out of memory" in rows[f"{TINY.title}, 1 GPU: accelerate"].note
    (lost,) = rows_of(TINY, {2: {"failed": "rank 1: killed"}}, {})
    assert lost.ours is None and "rank 1: killed" in lost.note


@pytest.mark.slow
def test_two_ranks_learn_and_publish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learners, "DEADLINE_S", 300.0)
    args = argparse.Namespace(steps=1, cpu=True)
    made = side("tiny", "ours", 2, 0, args, tmp_path)
    assert made.keys() >= {"seconds", "gather_s", "write_s"} and made["published_bytes"] > 1e6, made
    assert json.loads((tmp_path / "tiny-ours-2").read_text()) == made
    lost = side("tiny", "neither", 1, 0, args, tmp_path)
    assert lost["failed"].startswith("rank 0: ")
