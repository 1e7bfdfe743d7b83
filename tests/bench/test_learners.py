"""The benchmark of learner ranks: what its rows say of what its sides found, and one side whole."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench import learners
from bench.learners import ENGINES, JOBS, Found, rows_of, side, until_held
from lowroll.transport.broadcasts import read_broadcast

TINY = replace(JOBS["tiny"], device="cpu")
SMALL = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 256}
SMALLEST = replace(
    TINY,
    config={**TINY.config, **SMALL, "num_attention_heads": 1, "num_hidden_layers": 1},
    length=8,
)


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


@pytest.mark.slow
def test_engines_of_each_format_are_sent_what_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without processes: what a version holds, and that a learner in fp8 sends changed codes."""
    sent: list[tuple[str, str, int]] = []

    class Engine:
        def __init__(self, folder: Path, shelf: Path, format: str, place: str) -> None:
            self.shelf, self.format = shelf, format

        def __enter__(self) -> Engine:
            return self

        def __exit__(self, *_: object) -> None: ...

        def ready(self) -> None: ...

        def ask(self, version: int) -> None:
            sent.append(
                (self.format, read_broadcast(self.shelf / f"step_{version:06}").kind, version)
            )

        def answer(self) -> dict[str, str]:
            return {"digest": "one" if odd is None else f"{next(odd)}"}

    odd = None
    monkeypatch.setattr(learners, "Reader", Engine)
    dense = learners.ours(SMALLEST, 0, 1, 0, steps=1)["published"]
    assert [*dense] == ["bf16", "fp8"]
    assert dense["bf16"]["published_bytes"] == dense["fp8"]["published_bytes"]  # engines quantize
    two = ENGINES * [1], ENGINES * [2]
    wanted = [(f, "full", v) for f in ("bf16", "fp8") for versions in two for v in versions]
    assert sent == wanted
    sent.clear()
    codes = learners.ours(replace(SMALLEST, fp8=True), 0, 1, 0, steps=1)["published"]
    assert [*codes] == ["fp8"] and sent[ENGINES:] == ENGINES * [("fp8", "codes", 2)]
    assert codes["fp8"]["published_bytes"] < dense["fp8"]["published_bytes"] / 2
    odd = iter(range(9))
    with pytest.raises(RuntimeError, match="different weights of version 1"):
        learners.ours(SMALLEST, 0, 1, 0, steps=1)


@pytest.mark.slow
def test_two_ranks_learn_and_publish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = two_ranks(tmp_path, monkeypatch, "tiny-lora")
    assert made["published"]["bf16"].keys() == {"gather_s", "write_s", "published_bytes"}
    args = argparse.Namespace(steps=1, cpu=True)
    lost = side("tiny", "neither", 1, 0, args, tmp_path)
    assert lost["failed"].startswith("rank 0: ")


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_two_ranks_publish_to_two_fp8_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = two_ranks(tmp_path, monkeypatch, "tiny-fp8")
    assert made["published"]["fp8"].keys() >= {"gather_s", "write_s", "engines_s"}, made
    assert made["published"]["fp8"]["published_bytes"] > 1e6


def two_ranks(folder: Path, monkeypatch: pytest.MonkeyPatch, job: str) -> Found:
    """What ours found, in processes."""
    monkeypatch.setattr(learners, "DEADLINE_S", 1000.0)
    made = side(job, "ours", 2, 0, argparse.Namespace(steps=1, cpu=True), folder)
    assert "seconds" in made, made
    assert json.loads((folder / f"{job}-ours-2").read_text()) == made
    return made
