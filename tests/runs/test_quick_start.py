"""The three files of the document's quick start as they stand, but for the model's path and the
run's sizes: in one process, as processes of one command, and by hand in any order."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from lowroll.metrics.record import read
from lowroll.orchestrator import ledger_check
from lowroll.runs.roles.local import reserve_port
from tests.fixtures.quick_start import INFER, ORCH, TRAIN
from tests.fixtures.roles import DEADLINE_S, started

STEPS = 3
SMALL = [f"train.max_steps={STEPS}", "batch_size=8", "rollouts_per_example=4"]
SMALL += ["rollout.max_tokens=8"]
GRPO = ["grpo", "--train", "train.yaml", "--infer", "infer.yaml", "--orch", "orch.yaml"]
WAYS = ["filesystem", "zmq"]


@pytest.fixture
def home(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the three files, where the commands are given."""
    for name, text in (("train", TRAIN), ("infer", INFER), ("orch", ORCH)):
        (tmp_path / f"{name}.yaml").write_text(text.replace("Qwen/Qwen3-0.6B", str(model)))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def is_whole(home: Path, steps: int = STEPS) -> None:
    run = home / "outputs" / "run_default"
    assert [record["step"] for record in read(run)] == list(range(1, steps + 1))
    assert (run / "final" / "adapter_model.safetensors").is_file()
    ledger = run / "orchestrator" / "ledger.jsonl"
    assert not ledger.exists() or ledger_check.check(ledger, None) == []


def by_hand(home: Path, order: Sequence[str], *orchestrate: str, gap_s: float = 0.0) -> None:
    """The three commands in an order, until the run has ended."""
    held = reserve_port("127.0.0.1")
    port = held.getsockname()[1]
    words = {
        "infer": ["infer.yaml", f"serve.port={port}"],
        "orch": ["orch.yaml", f'client.base_url=["http://localhost:{port}/v1"]', *orchestrate],
        "train": ["train.yaml"],
    }
    with held, ExitStack() as stack:
        roles: dict[str, subprocess.Popen[bytes]] = {}
        for role in order:
            log = home / f"{role}.log"
            roles[role] = stack.enter_context(started(log, f"grpo-{role}", *words[role]))
            time.sleep(gap_s)
        end = time.monotonic() + DEADLINE_S
        for role in ("train", "orch"):
            code = roles[role].wait(timeout=end - time.monotonic())
            assert code == 0, (home / f"{role}.log").read_text()
        roles["infer"].send_signal(signal.SIGTERM)
        assert roles["infer"].wait(timeout=60) == 128 + signal.SIGTERM


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "lowroll", *words],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )


def test_one_process(home: Path) -> None:
    done = command(*GRPO, *SMALL)
    assert done.returncode == 0, done.stderr
    is_whole(home)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["filesystem", pytest.param("zmq", marks=pytest.mark.long)])
def test_one_command(home: Path, way: str) -> None:
    done = command(
        *GRPO, *SMALL, "launcher=local", f"rollout_transport.type={way}", "rollout_transport.port=0"
    )
    assert done.returncode == 0, done.stderr
    is_whole(home)


def test_by_hand(home: Path) -> None:
    """The trainer starts first, and says what it waits for. The engine's slot is of rank 32."""
    transport = ["rollout_transport.type=zmq", "rollout_transport.port=0"]
    by_hand(home, ["train", "orch", "infer"], *SMALL, *transport)
    is_whole(home)
    assert "waiting for lowroll orchestrate" in (home / "train.log").read_text()


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "order", [["infer", "orch", "train"], ["orch", "train", "infer"], ["orch", "infer", "train"]]
)
def test_by_hand_in_any_order(home: Path, order: list[str], way: str) -> None:
    transport = [f"rollout_transport.type={way}", "rollout_transport.port=0"]
    by_hand(home, order, *SMALL, *transport, gap_s=3.0)
    is_whole(home)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
def test_by_hand_in_full(home: Path, way: str) -> None:
    """40 steps of 128 rollouts."""
    transport = [f"rollout_transport.type={way}", "rollout_transport.port=0"]
    by_hand(home, ["infer", "orch", "train"], *transport)
    is_whole(home, 40)


def test_a_port_that_is_taken_is_named(home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        done = command("grpo-infer", "infer.yaml", f"serve.port={port}")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert str(port) in line and "in use" in line
