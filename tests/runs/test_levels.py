"""Asynchronous runs whose roles are processes: of which weights a batch's tokens are, what becomes
of what is too old, of what is in flight at an update, and of an engine that is lost."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from lowroll.metrics.record import Record, read
from lowroll.orchestrator import ledger_check
from lowroll.transport.rollout_log import read_rollouts
from lowroll.types import Rollout
from tests.fixtures.processes import eventually
from tests.fixtures.roles import by_hand, heart, started, write
from tests.fixtures.runs import settings

LORA = {"lora": True, "lora_rank": 4}
ZMQ = {"type": "zmq", "host": "127.0.0.1", "port": 0}
DIRECT = {"type": "nccl", "host": "127.0.0.1", "port": 0}


def tree(model: Path, run: Path, level: dict[str, Any], **changes: Any) -> dict[str, Any]:
    given: dict[str, Any] = {
        "asynchrony": level,
        "rollout": {"max_tokens": 16, "cache_tokens": 2048},
        "train": {"max_steps": 6, "learning_rate": 1e-2, "minibatches": 2},
    }
    for key, value in changes.items():
        given[key] = {**given.get(key, {}), **value}
    return settings(model, run, **given)


def learnt(run: Path) -> dict[int, list[Rollout]]:
    """What each step learnt from."""
    found = {}
    for path in sorted((run / "rollouts").glob("step_*.jsonl")):
        batch = read_rollouts(path)
        found[batch.step] = [sample.rollout for sample in batch.samples if sample.group >= 0]
    return found


def is_of_level(run: Path, level: int, strict: bool = False) -> None:
    """Every token of batch n is of weights n - 1 - level to n - 1; the first of them, in a strict
    run, of the oldest."""
    for step, rollouts in learnt(run).items():
        oldest = max(0, step - 1 - level)
        for rollout in rollouts:
            versions = [span.version for span in rollout.behavior.policy]
            assert versions == sorted(versions)
            assert all(oldest <= version <= step - 1 for version in versions), (step, versions)
            assert not strict or set(versions) == {oldest}, (step, versions)
    assert ledger_check.check(run / "orchestrator" / "ledger.jsonl", None) == []


def tells_all(records: list[Record]) -> None:
    """What the roles say of their pace."""
    for record in records:
        assert record["perf/engines_healthy"] >= 1
        assert 0 <= record["perf/orchestrator_idle_fraction"] <= 1
        assert 0 <= record["perf/trainer_idle_fraction"] <= 1
        assert record["time/wait_batch"] >= 0 and record["time/wait_weights"] >= 0
        shares = [v for name, v in record.items() if name.startswith("rollout/staleness_")]
        assert sum(shares) == pytest.approx(1.0)


def test_level_one_is_at_most_one_step_behind(model: Path, tmp_path: Path) -> None:
    """With weights that go from device to device, by gloo on a CPU."""
    run = tmp_path / "run"
    asked = tree(model, run, {"max_async_level": 1}, weight_broadcast=DIRECT)
    by_hand(write(asked, tmp_path / "run.yaml"), tmp_path)
    is_of_level(run, 1)
    records = read(run)
    size = (run / "final" / "model.safetensors").stat().st_size
    assert all(record["perf/broadcast_bytes"] < size / 2 for record in records), "as files"
    tells_all(records)
    assert len(records) == 6 and max(record["rollout/staleness"] for record in records) == 1
    assert any("mismatch/staleness_1/logp_diff_mean" in record for record in records)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {"rollout_transport": ZMQ},
        {"train": LORA},
        {"weight_broadcast": DIRECT, "rollout_transport": ZMQ},
    ],
    ids=["full-zmq", "lora", "direct"],
)
def test_levels(
    model: Path, tmp_path: Path, level: int, strict: bool, changes: dict[str, Any]
) -> None:
    run = tmp_path / "run"
    asked = {"max_async_level": level, "strict_async_level": strict}
    by_hand(write(tree(model, run, asked, **changes), tmp_path / "run.yaml"), tmp_path)
    is_of_level(run, level, strict)
    tells_all(read(run))


@pytest.mark.slow
def test_what_is_too_old_is_dropped(model: Path, tmp_path: Path) -> None:
    """Twice as many groups are open as a batch takes, and an engine draws two of them at a time:
    the others wait, or are there, until they are too old."""
    run = tmp_path / "run"
    asked = {"max_async_level": 1, "max_off_policy_steps": 1, "oversampling_factor": 6.0}
    busy = {"max_tokens": 64, "max_batch": 8}
    by_hand(write(tree(model, run, asked, rollout=busy), tmp_path / "run.yaml"), tmp_path)
    records = read(run)
    assert sum(record["rollout/dropped_stale"] for record in records) > 0
    assert max(record["rollout/staleness"] for record in records) <= 1
    assert ledger_check.check(run / "orchestrator" / "ledger.jsonl", None) == []


@pytest.mark.slow
def test_engines_of_roles_replay_what_is_in_flight(model: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    asked = {"partial": "replay", "oversampling_factor": 2.0}
    busy = {"max_tokens": 48, "max_batch": 6}
    by_hand(write(tree(model, run, asked, rollout=busy), tmp_path / "run.yaml"), tmp_path)
    records = read(run)
    assert sum(record.get("rollout/replay_samples", 0) for record in records) > 0
    assert {len(r.behavior.policy) for batch in learnt(run).values() for r in batch} == {1}
    assert ledger_check.check(run / "orchestrator" / "ledger.jsonl", None) == []


@pytest.mark.slow
@pytest.mark.long
def test_a_run_goes_on_when_one_of_two_engines_is_lost(model: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    asked = tree(model, run, {"max_async_level": 1}, train={"max_steps": 12})
    file = write(asked, tmp_path / "run.yaml")
    with ExitStack() as stack:

        def start(name: str, *words: str) -> Any:
            return stack.enter_context(
                started(tmp_path / f"{name}.log", *words, LOWROLL_SILENT_S="6")
            )

        engines = [start(f"engine-{i}", "serve", str(file), "serve.port=0") for i in (0, 1)]
        assert eventually(lambda: all(heart(run, f"engine-{i}").get("url") for i in (0, 1)), 200)
        urls = [heart(run, f"engine-{i}")["url"] for i in (0, 1)]
        named = write({**asked, "client": {"base_url": urls}}, tmp_path / "named.yaml")
        orchestrator = start("orchestrator", "orchestrate", str(named))
        trainer = start("trainer", "train", str(named))
        assert eventually(lambda: heart(run, "trainer").get("step", 0) >= 4, 200)
        engines[0].kill()
        assert trainer.wait(timeout=300) == 0, (tmp_path / "trainer.log").read_text()
        assert orchestrator.wait(timeout=60) == 0
    records = read(run)
    assert len(records) == 12 and records[-1]["perf/engines_healthy"] == 1
    assert records[-1]["perf/engine_fenced"] >= 1
    is_of_level(run, 1)
