"""A whole run whose rollouts have bounded caches."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from lowroll import Engine
from lowroll.kv.policy.base import CachePolicy
from lowroll.kv.policy.table import make
from lowroll.runs.build import engines
from lowroll.transport.rollout_log import read_rollouts
from tests.fixtures.policies import Parity
from tests.fixtures.runs import copy_stopped_after, fingerprint, settings, train

POLICIES = [
    Parity(4, 2),
    make("streaming", budget=4, buffer=2, sinks=1),
    make("h2o", budget=4, buffer=2),
    make("snapkv", budget=4, buffer=2, window=2, kernel=3),
    make("rkv", budget=4, buffer=2, window=2, kernel=3),
]


@pytest.fixture(scope="module")
def dense(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Digests of the run without a policy."""
    folder = tmp_path_factory.mktemp("dense") / "run"
    return fingerprint(train(settings(model, folder, train={"max_steps": 4})).folder)


@pytest.mark.slow
@pytest.mark.parametrize(("kv", "step"), [*zip(POLICIES, (1, 2, 3, 1, 2), strict=True)])
def test_resume_is_bitwise_the_uninterrupted_run(
    model: Path,
    dense: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kv: CachePolicy,
    step: int,
) -> None:
    """A policy's state lives as long as its samples: nothing of it is in a checkpoint."""
    monkeypatch.setattr(engines, "NativeEngine", partial(Engine, kv=kv))
    tree = settings(model, tmp_path / "whole", train={"max_steps": 4})
    result = train(tree)
    whole = fingerprint(result.folder)
    assert whole["final"] != dense["final"]
    rollouts = read_rollouts(result.folder / "rollouts" / "step_000001.jsonl")
    assert {s.rollout.behavior.kv_policy for s in rollouts.samples} == {kv.name}
    assert {s.rollout.behavior.kv_budget for s in rollouts.samples} == {4}
    copy_stopped_after(result.folder, step, tmp_path / "cut")
    resumed = train({**tree, "output_dir": str(tmp_path / "cut")}, resume=True)
    assert fingerprint(resumed.folder) == whole
