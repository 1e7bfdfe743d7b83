"""The benchmark of learner ranks: what its rows say of what its sides found, and one side whole."""

from __future__ import annotations

import argparse
from dataclasses import replace

import pytest

from bench import learners
from bench.learners import JOBS, Found, rows_of, side, until_held

TINY = replace(JOBS["tiny"], device="cpu")


SENT = {"gather_s": 0.5, "write_s": 0.25, "published_bytes": 100}


def found(seconds: float, **more: object) -> Found:
    published = {"bf16": {**SENT, "engines_s": 1.0}, "fp8": {**SENT, "engines_s": 2.0}}
    return {"seconds": seconds, "bytes": 0, "published": published, **more}


def test_rows_hold_ranks_against_one_and_against_the_peer() -> None:
    ours = {1: found(2.0), 2: found(1.0, bytes=3 << 30)}
    peers = {1: {"failed": "rank 0: out of memory"}, 2: {"seconds": 4.0, "bytes": 6 << 30}}
    rows = {row.name: row for row in rows_of(replace(TINY, device="cuda"), ours, peers)}
    two = f"{TINY.title}, 2 GPUs"
    assert rows[f"{two}: over one GPU"].ratio == 2.0 and rows[f"{two}: over one GPU"].met
    assert rows[f"{two}: accelerate"].ratio == 4.0
    assert rows[f"{two}: peak memory"].ours == 3.0 and rows[f"{two}: peak memory"].peer == 6.0
    assert "out of memory" in rows[f"{TINY.title}, 1 GPU: accelerate"].note
    assert (
        rows[f"{two}: gathering the weights"].ours == 0.5 and rows[f"{two}: a version"].ours == 100
    )
    assert [rows[f"{two}: {until_held(f)}"].ours for f in ("bf16", "fp8")] == [1.75, 2.75]
    adapter = {row.name for row in rows_of(TINY, {1: found(2.0, published={"bf16": SENT})}, {})}
    assert not any("engines" in name for name in adapter) and len(adapter) == 4
    (lost,) = rows_of(TINY, {2: {"failed": "rank 1: killed"}}, {})
    assert lost.ours is None and "rank 1: killed" in lost.note


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_two_ranks_publish_to_two_fp8_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learners, "DEADLINE_S", 1000.0)
    made = side("tiny-fp8", "ours", 2, 0, argparse.Namespace(steps=1, cpu=True))
    assert "seconds" in made, made
    assert made["published"]["fp8"].keys() >= {"gather_s", "write_s", "engines_s"}, made
    assert made["published"]["fp8"]["published_bytes"] > 1e6


@pytest.mark.slow
def test_a_rank_that_ends_early_is_named() -> None:
    none_meets = argparse.Namespace(steps="none", cpu=True)
    assert "its last words" in side("tiny", "ours", 1, 0, none_meets)["failed"]
