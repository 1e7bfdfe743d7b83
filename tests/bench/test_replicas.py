"""The benchmarks of several engines at tiny sizes: two servers over one, and how evenly work is
dealt."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from bench import deal, replicas


@pytest.mark.slow
def test_two_engines_are_measured_over_one(tmp_path: Path) -> None:
    words = "tiny --cpu --weights fp32 --requests 4 --samples 2 --tokens 4 --prompt 5 --batch 8"
    words += f" --cache 1024 --rounds 1 --spread --out {tmp_path}"
    with pytest.raises(SystemExit) as ended:
        replicas.main(words.split())
    assert not ended.value.code
    rows = json.loads((tmp_path / "replicas.json").read_text())["rows"]
    assert [row["name"] for row in rows] == [
        "tiny fp32: 2 engines over one, each by itself",
        "tiny fp32: 2 engines over one, in parts",
    ]
    for row in rows:
        assert row["unit"] == "rollouts/s" and row["ours"] > 0
        assert row["ratio"] == pytest.approx(row["ours"] / row["peer"])


def test_engines_that_are_not_there_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert replicas.arguments(["tiny"]).engines == 2
    for words, said in ((["--engines", "3"], "3 need a GPU each, and 2 are here"),
                        (["--engines", "1"], "two at least")):  # fmt: skip
        with pytest.raises(SystemExit):
            replicas.arguments(["tiny", *words])
        assert said in capsys.readouterr().err


def test_every_round_draws_as_many_tokens() -> None:
    args = replicas.arguments("tiny --cpu --requests 9 --tokens 40 --prompt 3 --spread".split())
    one, other = (replicas.requests(args, seed) for seed in (1, 2))
    assert [r.max_tokens for r in one] == [r.max_tokens for r in other]
    assert len({r.max_tokens for r in one}) > 4 and min(r.max_tokens for r in one) >= 4
    assert not {r.id for r in one} & {r.id for r in other}
    assert {r.max_tokens for r in replicas.requests(replicas.arguments(["m", "--cpu"]), 0)} == {512}


def test_dealing_evens_out_an_engine_that_is_slow() -> None:
    args = argparse.Namespace(requests=12, groups=4, tokens=64, rows=8, cached=32, slow=3.0)
    turns, ours = (deal.simulate(kind, 2, args, 0) for kind in (deal.InTurns, deal.Dealt))
    assert turns[0] > 1.4 > 1.2 > ours[0] >= 1 and ours[1] < 0.8 * turns[1]
    args.slow = 1.0
    turns, ours = (deal.simulate(kind, 2, args, 0) for kind in (deal.InTurns, deal.Dealt))
    assert ours[1] < 1.05 * turns[1]
