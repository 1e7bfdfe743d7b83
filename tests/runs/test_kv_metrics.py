"""What a run with a bounded cache records: tokens saved, and whom the rejection hits; of a dense one,
nothing of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from lowroll.kv.policy import table
from lowroll.kv.tokens_saved import saving
from lowroll.metrics.report import write_report
from lowroll.transport.rollout_log import read_rollouts
from tests.fixtures.policies import Parity
from tests.fixtures.runs import settings, train

SAVED = {"kv/saving_peak", "kv/saving_final", "kv/saving_mean", "kv/evictions"}
REJECTED = {
    "mismatch/weight_mean",
    "correction/vetoed_fraction",
    "correction/rejected_length_ratio",
    "correction/rejected_reward_gap",
}


@pytest.mark.slow
def test_a_bounded_run_says_what_it_saves_and_rejects(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sparse = {
        "correction": "sparse",
        "loss": {"sparse": {"veto": 0.9999}},
        "guard": {"action": "warn"},
    }
    tree = settings(model, tmp_path / "dense", train={"max_steps": 2}, **sparse)
    dense = train(tree).records
    assert not (SAVED | REJECTED) & set[str]().union(*dense)

    row = table.CachePolicyRow("tests.fixtures.policies:Parity", table.BOUNDED)
    monkeypatch.setitem(table.POLICIES, "parity", row)
    kv = {"policy": "parity", "budget": 4, "buffer": 2}
    changed = {"output_dir": str(tmp_path / "bounded"), "rollout": {**tree["rollout"], "kv": kv}}
    bounded = train({**tree, **changed})
    for record in bounded.records:
        batch = read_rollouts(bounded.folder / "rollouts" / f"step_{record['step']:06}.jsonl")
        lengths = [(len(s.prompt_ids), len(s.rollout.token_ids)) for s in batch.samples]
        want = {f"kv/{name}": value for name, value in saving(Parity(4, 2), lengths).items()}
        assert {name: record[name] for name in SAVED} == want
        assert record["kv/saving_peak"] > 0.3 and record["kv/evictions"] >= 1
        assert REJECTED <= set(record) and record["correction/vetoed_fraction"] > 0
        assert set(record) - (SAVED | REJECTED) >= set(dense[record["step"] - 1]) - {
            "mismatch/pearson"
        }

    page = write_report(bounded.folder).read_text()
    for words in ("<b>KV tokens saved</b>", "<b>Importance weights</b>", "<b>Rejection</b>"):
        assert words in page
    assert "responses rejected" in page
    assert "<b>KV tokens saved</b>" not in write_report(tmp_path / "dense").read_text()
