"""A little of `make torture`, and that what it writes is asked about at every point (python -m
tests.torture)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from lowroll.checkpoint.atomic_folders import verify_folder
from lowroll.checkpoint.fault_injection import VARIABLE, observers
from lowroll.runs import demo
from lowroll.runs.export import quantize_folder
from tests.fixtures import strike
from tests.fixtures.losses import ROLES
from tests.fixtures.points import Loss
from tests.fixtures.points import strike as strike_at
from tests.fixtures.processes import alive, eventually, parent
from tests.fixtures.ray_losses import HOWS, PHASES, phases
from tests.fixtures.runs import TINY

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_little_torture() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.torture",
            "--trials",
            "1",
            "--seed",
            "5",
            "--suites",
            "kills",
            "errors",
            "damage",
        ],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=ROOT,
    )
    assert done.returncode == 0 and done.stdout.count(": 1 trials, 0 problems") == 3, (
        done.stdout + done.stderr
    )


@pytest.mark.slow
def test_a_quantized_folder_is_whole_or_absent_at_every_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, out, points = demo.build_model(tmp_path / "model", 0, TINY), tmp_path / "out" / "q", []
    observers.append(points.append)
    quantize_folder(model, out, "int8")
    observers.remove(points.append)
    assert {"publish.begin", "publish.synced/model.safetensors", "publish.renamed"} <= set(points)
    for index, point in enumerate(points):
        for action in strike.ERRORS:
            target = tmp_path / f"{index}{action}" / "q"
            monkeypatch.setenv(VARIABLE, f"{point}:{action}")
            with pytest.raises(OSError, match="/q") as caught:
                quantize_folder(model, target, "int8")
            monkeypatch.delenv(VARIABLE)
            committed = index >= points.index("publish.renamed")
            assert ("is published" in str(caught.value)) == committed == target.exists()
            assert os.listdir(target.parent) == ["q"] * committed
            if committed:
                assert verify_folder(target) == verify_folder(out)


@pytest.mark.parametrize(
    ("how", "killed"), [("kill", "role"), ("actor", "actor"), ("node", "node")]
)
def test_a_loss_strikes_whom_it_names(how: str, killed: str, tmp_path: Path) -> None:
    """Of a process, its parent and the parent's, which is the node of a Ray cluster."""
    role = "sleep 100 & echo $!; wait"
    words = ["bash", "-c", f"bash -c '{role}' actor & wait", "raylet", "--node-id=n1"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=True) as node:
        assert node.stdout is not None
        pid = int(node.stdout.readline())
        processes = {"role": pid, "actor": parent(pid), "node": node.pid}
        try:
            strike_at(tmp_path, Loss("trainer", "train.learn", how, "trainer"), pid)
            assert eventually(lambda: not alive(processes[killed]), 10)
            below = list(processes)[: list(processes).index(killed)]
            assert all(alive(processes[name]) for name in below)  # what becomes of them is Ray's
            told = json.loads((tmp_path / "struck").read_text())
            assert told == {"pid": pid} | ({"node": "n1"} if how == "node" else {})
        finally:
            os.killpg(node.pid, signal.SIGKILL)


def test_losses_on_ray_are_of_each_kind_in_each_phase() -> None:
    """Each once for each role, in an order that the seed gives."""
    found, again = phases(Random(1)), phases(Random(1))
    assert found == again and found != phases(Random(2))
    at = Counter((loss.how, loss.victim, loss.point) for loss in found if loss.victim != "launcher")
    assert set(at.values()) == {1} and len(at) == len(HOWS) * len(ROLES) * (len(PHASES) + 1)
    assert sum(loss.victim == "launcher" for loss in found) == len(PHASES)
