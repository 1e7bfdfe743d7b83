"""Whole runs whose learner attends to what the rollouts' caches held."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lowroll.config import from_mapping
from lowroll.metrics.record import read
from lowroll.runs.assembly.capabilities import check as check_capabilities
from lowroll.runs.folder import RunFolder
from lowroll.transport.codec import encode_batch
from lowroll.transport.rollout_log import read_rollouts
from lowroll.types import Batch, Evictions
from tests.fixtures.runs import copy_stopped_after, fingerprint, settings, train
from tests.fixtures.samples import sample

KV = {"policy": "rkv", "budget": 5, "buffer": 2, "window": 2, "kernel": 3}


def tree_of(model: Path, out: Path, replay: bool = True, **rollout: Any) -> dict[str, Any]:
    return settings(
        model,
        out,
        rollout={"weights": "dense", "kv": KV, "max_tokens": 16, **rollout},
        train={"max_steps": 3, "replay_kv": replay},
    )


@pytest.mark.slow
def test_the_learner_scores_the_sparse_policy_and_resumes_bitwise(
    model: Path, tmp_path: Path
) -> None:
    tree = tree_of(model, tmp_path / "whole")
    result = train(tree)
    whole = fingerprint(result.folder)
    records = read(result.folder)
    assert all(record["mismatch/kl_k3"] < 1e-9 for record in records)
    dense = train({**tree_of(model, tmp_path / "dense", replay=False), "correction": "sparse"})
    assert all(record["mismatch/kl_k3"] > 1e-6 for record in read(dense.folder))
    for path in (result.folder / "rollouts").iterdir():
        assert b'"evictions":' not in path.read_bytes()
        assert all(s.rollout.behavior.kv_budget == 5 for s in read_rollouts(path).samples)
    copy_stopped_after(result.folder, 1, tmp_path / "cut")
    resumed = train({**tree, "output_dir": str(tmp_path / "cut")}, resume=True)
    assert fingerprint(resumed.folder) == whole


@pytest.mark.slow
def test_an_aligned_learner_with_an_adapter_and_a_reference_replays(
    model: Path, tmp_path: Path
) -> None:
    """Codes may flip where a cache is read in other pieces; little is left of the mismatch."""
    found = {}
    for replay in (True, False):
        tree = tree_of(model, tmp_path / str(replay), replay, weights="int8")
        tree |= {"correction": "tbpo", "loss": {"kl_coef": 0.01}}
        tree["train"] |= {"forward": "aligned", "lora": True, "lora_rank": 2, "max_steps": 2}
        found[replay] = [record["mismatch/kl_k3"] for record in read(train(tree).folder)]
    assert max(found[True]) < 0.1 * min(found[False])


def test_auto_takes_a_replayed_cache_for_a_dense_one(tmp_path: Path) -> None:
    plain = from_mapping(tree_of(tmp_path, tmp_path, replay=False))
    replayed = from_mapping(tree_of(tmp_path, tmp_path))
    assert (plain.correction, replayed.correction) == ("sparse", "none")
    assert any("a cache that rkv bounds and the learner replays" in note for note in replayed.notes)
    assert not any("warning" in note for note in replayed.notes)
    both = from_mapping(tree_of(tmp_path, tmp_path, weights="int8"))
    assert both.correction == "acr"


def test_replay_without_a_bounded_cache_has_no_effect_and_says_so(tmp_path: Path) -> None:
    note = "train.replay_kv: no effect without a rollout.kv.policy that drops keys"
    assert note in from_mapping(tree_of(tmp_path, tmp_path, kv=None)).notes
    assert note not in from_mapping(tree_of(tmp_path, tmp_path)).notes


def test_an_engine_that_does_not_record_is_refused(tmp_path: Path) -> None:
    from lowroll.engine.base import Capabilities
    from lowroll.kv.policy.table import make
    from lowroll.types import Request

    able: dict[str, Any] = dict.fromkeys(
        ("updates_in_flight", "noise", "scores", "exact_logprobs"), True
    )
    able |= {
        "context_length": 64,
        "updates": frozenset(),
        "sampler": frozenset(Request.__dataclass_fields__),
        "kv": make("rkv"),
    }
    cfg = from_mapping(tree_of(tmp_path, tmp_path))
    with pytest.raises(ValueError, match=r"train\.replay_kv: this engine does not say which keys"):
        check_capabilities(cfg, Capabilities(**able))
    check_capabilities(cfg, Capabilities(**able, records_evictions=True))
    check_capabilities(from_mapping(tree_of(tmp_path, tmp_path, False)), Capabilities(**able))


def test_an_offending_batch_is_kept_whole(tmp_path: Path) -> None:
    """The log of every step leaves out what caches dropped."""
    home = RunFolder(from_mapping(tree_of(tmp_path, tmp_path / "run")).resolved(), "grpo")
    batch = Batch(1, [sample([3, 4], [5, 6])], 1.0)
    batch.samples[0].rollout.evictions = Evictions(1, 1, (1,), b"abc")
    offending = read_rollouts(home.keep_batch("offending", batch))
    assert encode_batch(offending) == encode_batch(batch)
    assert offending.samples[0].rollout.evictions == Evictions(1, 1, (1,), b"abc")
    logged = read_rollouts(home.keep_batch("rollouts", batch))
    assert logged.samples[0].rollout.evictions is None


def test_repair_without_a_veto_is_refused(tmp_path: Path) -> None:
    loss = {"sparse": {"repair": "mask", "veto": None}}
    with pytest.raises(ValueError, match=r"loss\.sparse\.repair.*nothing to repair"):
        from_mapping(tree_of(tmp_path, tmp_path, False) | {"loss": loss})
    loss["sparse"]["veto"] = 1e-4
    cfg = from_mapping(tree_of(tmp_path, tmp_path, False) | {"loss": loss})
    assert cfg.objective_options["repair"] == "mask"
