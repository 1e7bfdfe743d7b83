"""A whole run whose rollouts have bounded caches."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from lowroll import Engine
from lowroll.runs.build import engines
from lowroll.transport.rollout_log import read_rollouts
from tests.fixtures.policies import Parity
from tests.fixtures.runs import copy_stopped_after, fingerprint, settings, train


@pytest.mark.slow
def test_resume_is_bitwise_the_uninterrupted_run(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = settings(model, tmp_path / "dense", train={"max_steps": 4})
    dense = fingerprint(train(tree).folder)
    monkeypatch.setattr(engines, "NativeEngine", partial(Engine, kv=Parity(4, 2)))
    tree["output_dir"] = str(tmp_path / "whole")
    result = train(tree)
    whole = fingerprint(result.folder)
    assert whole != dense
    rollouts = read_rollouts(result.folder / "rollouts" / "step_000001.jsonl")
    assert {s.rollout.behavior.kv_policy for s in rollouts.samples} == {"parity"}
    assert {s.rollout.behavior.kv_budget for s in rollouts.samples} == {4}
    for step in (1, 2, 3):
        copy_stopped_after(result.folder, step, tmp_path / f"cut{step}")
        resumed = train({**tree, "output_dir": str(tmp_path / f"cut{step}")}, resume=True)
        assert fingerprint(resumed.folder) == whole, f"resumed after step {step}"
