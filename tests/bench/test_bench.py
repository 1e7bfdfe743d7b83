"""The benchmarks measure what they say: forced lengths, paired ratios, and two sides that compute
the same thing."""

from __future__ import annotations

import json
import statistics
from datetime import date
from pathlib import Path

import pytest
import torch

from bench import harness
from bench.engine import MODELS, STOP, Targets, compare, ours
from bench.lengths import Lengths
from lowroll import Engine
from lowroll.model import initialize
from lowroll.model.spec import spec_from_config
from lowroll.model.transformer import Transformer

TINY = {
    **MODELS["demo"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 61,
}
WORK = Lengths([[5, 6, 7, 8, 9], [9, 8, 7, 6, 5]], [[1, 7], [4, 2]])


def test_lengths_are_lognormal_and_seeded() -> None:
    work = Lengths.drawn(1000, 48, 1.0, 384, rollouts=4000, prompt=3)
    lengths = [length for row in work.tokens for length in row]
    assert len(work.prompts) == len(work.tokens) == 500 and {len(row) for row in work.tokens} == {8}
    assert 45 < statistics.median(lengths) < 51 and min(lengths) >= 1
    assert max(lengths) == work.longest == 384 and work.total == sum(lengths)
    quarter, three_quarters = statistics.quantiles(lengths, n=4)[::2]
    # exp(2 * 0.6745 * sigma), sigma = 1
    assert three_quarters / quarter == pytest.approx(3.85, rel=0.1)
    assert all(STOP < token < 1000 for prompt in work.prompts for token in prompt)
    assert work == Lengths.drawn(1000, 48, 1.0, 384, rollouts=4000, prompt=3)


@pytest.mark.slow
@pytest.mark.parametrize("share", [True, False])
def test_every_sample_keeps_to_its_length(share: bool) -> None:
    engine = Engine(
        initialize(Transformer(spec_from_config(TINY)), 0), "fp32", device="cpu", cache_tokens=256
    )
    fed = []
    engine.model.register_forward_hook(lambda _, inputs, __: fed.append(len(inputs[0])))
    run = ours(engine, WORK, share)
    for _ in range(2):  # the second round prefills its prompts again
        fed.clear()
        run()
        # each prompt token once a group or once a sample, and of each response all but the last
        # token
        assert sum(fed) == (10 if share else 20) + WORK.total - 4


@pytest.mark.slow
def test_compare_at_tiny_sizes() -> None:
    targets = Targets(int8=1.5, four=(1.8, 2.5), held=7.0)
    rows = compare("tiny", TINY, WORK, rounds=2, targets=targets)
    assert [row.must for row in rows] == [2.0, None, None, 1.5, None, 1.8, 1.8, 7.0, 7.0]
    assert [row.aim for row in rows[4:7]] == [None, 2.5, 2.5]
    *speeds, int4, nvfp4 = rows
    for row in (int4, nvfp4):  # small matrices are kept as floats too
        assert row.peer < row.ours < 2 * row.peer and row.ratio * row.ours == pytest.approx(
            row.peer
        )
    for row in speeds:
        assert row.ours > 0 and row.peer > 0 and row.spread[0] <= row.ratio <= row.spread[1]


def test_a_ratio_is_the_median_of_the_rounds() -> None:
    row = harness.speed_row("x", 12.0, "t/s", [1.0, 2.0, 4.0], [4.0, 2.0, 6.0], must=1.4)
    assert (row.ours, row.peer, row.ratio, row.spread, row.met) == (6.0, 3.0, 1.5, (1.0, 4.0), True)
    assert not harness.speed_row("x", 12.0, "t/s", [1.0], [1.39], must=1.4).met


def test_what_is_missed_is_shown_and_stored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        harness.Row("one", "t/s", 3, 2, 1.5, (1.4, 1.6), 1.5),
        harness.Row("two", "t/s", 3, 2, 1.5, (1, 2), 1.6),
    ]
    assert harness.show("title", rows[:1]) and not harness.show("title", rows)
    assert "1.6 NOT met" in capsys.readouterr().out
    stored = json.loads(harness.merge("name", rows, tmp_path / "new", rounds=1).read_text())
    assert stored["rows"][1] == {
        "name": "two",
        "unit": "t/s",
        "ours": 3,
        "peer": 2,
        "ratio": 1.5,
        "spread": [1, 2],
        "must": 1.6,
        "aim": None,
        "goal": "ratio at least",
        "note": "",
        "against": "",
        "date": date.today().isoformat(),
    }
    assert stored["machine"]["torch"] == torch.__version__ and stored["settings"] == {"rounds": 1}
