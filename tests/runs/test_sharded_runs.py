"""Whole runs whose ranks hold the model in parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from lowroll.checkpoint.store import Store
from lowroll.metrics.record import read
from lowroll.weights.sync.base import read_broadcast
from tests.fixtures.roles import forked, started, write
from tests.fixtures.runs import copy_stopped_after, settings, train

BOUND = 2e-6  # reordered sums, as in tests/runs/test_ranks.py


def weights(run: Path, step: int) -> dict[str, Any]:
    """Whole weights of a checkpoint, in as many parts as there are."""
    tensors = Store(run / "checkpoints").load(step, only=("model",)).tensors["model"]
    return {name: tensor[:] for name, tensor in tensors.items()}


def far(mine: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest difference."""
    assert mine.keys() == other.keys()
    return max((mine[name] - other[name]).abs().max().item() for name in mine)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_in_parts_is_that_of_one_process_and_goes_on_there(
    model: Path, tmp_path: Path
) -> None:
    """A checkpoint of one process goes on in two parts, whose own goes on in one process."""
    steps = {"max_steps": 3, "warmup_steps": 1}
    one = train(settings(model, tmp_path / "one", train=steps)).folder
    parts = tmp_path / "parts"
    copy_stopped_after(one, 1, parts)
    tree = settings(model, parts, train=steps | {"gpus": 2, "sharding": "full"})
    file = write(tree, tmp_path / "run.yaml")
    with forked(tmp_path / "log", "grpo", str(file), "launcher=local", "--resume") as launcher:
        assert launcher.wait(timeout=600) == 0, (tmp_path / "log").read_text()
    names = {path.name for path in (parts / "checkpoints" / "step_000002").iterdir()}
    assert {"model.1of2.safetensors", "optimizer.2of2.safetensors"} <= names
    assert 0 <= far(weights(parts, 2), weights(one, 2)) < BOUND
    assert far(load_file(parts / "final" / "model.safetensors"), hf_final(one)) < 1e-4
    assert [record["step"] for record in read(parts)] == [1, 2, 3]
    copy_stopped_after(parts, 2, tmp_path / "back")
    back = train(settings(model, tmp_path / "back", train=steps), resume=True).folder
    assert 0 <= far(weights(back, 3), weights(parts, 3)) < BOUND


def launched(tree: dict[str, Any], home: Path) -> Path:
    """The folder of a run by `launcher=local`."""
    file, log = write(tree, home / "run.yaml"), home / "log"
    with started(log, "grpo", str(file), "launcher=local") as launcher:
        assert launcher.wait(timeout=800) == 0, log.read_text()
    return Path(tree["output_dir"])


@pytest.mark.long
@pytest.mark.timeout(900)
def test_four_ranks_of_the_launcher_learn_what_one_process_learns(
    model: Path, tmp_path: Path
) -> None:
    steps = {"max_steps": 2, "warmup_steps": 1}
    one = train(settings(model, tmp_path / "one", train=steps)).folder
    four = launched(settings(model, tmp_path / "four", train=steps | {"gpus": 4}), tmp_path)
    assert {path.name for path in (four / "roles").glob("trainer*.json")} == {
        "trainer.json",
        *(f"trainer-rank{rank}.json" for rank in range(1, 4)),
    }
    names = {path.name for path in (four / "checkpoints" / "step_000002").iterdir()}
    assert {f"model.{part}of4.safetensors" for part in range(1, 5)} <= names
    assert 0 < far(weights(four, 1), weights(one, 1)) < BOUND
    assert [record["step"] for record in read(four)] == [1, 2]


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("sharding", ["none", "full"])
def test_two_ranks_with_an_aligned_forward_publish_the_codes_that_changed(
    model: Path, tmp_path: Path, sharding: str
) -> None:
    """Rank 0 compares codes made of its mirror; the engine holds what it reads against the digest of
    the whole."""
    steps = {"max_steps": 3, "warmup_steps": 1, "forward": "aligned"}
    one = launched(settings(model, tmp_path / "one", train=steps), tmp_path)
    more = {"gpus": 2, "sharding": sharding}
    two = launched(settings(model, tmp_path / "two", train=steps | more), tmp_path)
    assert kinds(one) == kinds(two) and kinds(two)[-1] == "codes"
    assert 0 < far(weights(two, 1), weights(one, 1)) < 1e-4  # codes of activations round, too
    assert [record["step"] for record in read(two)] == [1, 2, 3]


def kinds(run: Path) -> list[str]:
    """Of the broadcasts that are kept, in order."""
    folders = sorted((run / "broadcasts").glob("step_*"))
    return [read_broadcast(folder).kind for folder in folders]


def hf_final(run: Path) -> dict[str, Any]:
    return dict(load_file(run / "final" / "model.safetensors"))
