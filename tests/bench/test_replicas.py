"""The benchmark of several engines at tiny sizes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import replicas


@pytest.mark.slow
def test_two_engines_are_measured_over_one(tmp_path: Path) -> None:
    words = "tiny --cpu --weights fp32 --requests 4 --samples 2 --tokens 4 --prompt 5 --batch 8"
    words += f" --cache 1024 --rounds 1 --out {tmp_path}"
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


def test_no_round_asks_what_another_did() -> None:
    args = replicas.arguments("tiny --cpu --requests 9 --tokens 40 --prompt 3".split())
    one, other = (replicas.requests(args, seed) for seed in (1, 2))
    assert {r.max_tokens for r in one + other} == {40} and len({r.id for r in one + other}) == 18
    assert not {tuple(r.prompt_ids) for r in one} & {tuple(r.prompt_ids) for r in other}
