"""A vLLM as the engine of the document's quick start: one that was started by hand as docs/vllm.md
says, and one that lowroll starts, in one process, as processes of one command and by hand."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from lowroll.metrics.record import Record, read
from lowroll.runs import demo
from tests.fixtures.quick_start import INFER, ORCH, TRAIN
from tests.fixtures.roles import started
from tests.fixtures.runs import TINY
from tests.fixtures.vllm_docs import CPU, MINUTES, PYTHON, block, free_port, listens

STEPS = 3
SIZES = [f"train.max_steps={STEPS}", "batch_size=8", "rollouts_per_example=4"]
SIZES += ["rollout.max_tokens=8"]
VLLM = ["rollout.engine=vllm", "rollout.weights=dense"]
FILES = ["--train", "train.yaml", "--infer", "infer.yaml", "--orch", "orch.yaml"]
HEAD = 32  # vLLM on a CPU takes no heads of 16

pytestmark = pytest.mark.timeout(3 * MINUTES)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return demo.build_model(
        tmp_path_factory.mktemp("vllm") / "model", 0, {**TINY, "head_dim": HEAD}
    )


@pytest.fixture
def home(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the three files, where the commands are given."""
    for name, text in (("train", TRAIN), ("infer", INFER), ("orch", ORCH)):
        (tmp_path / f"{name}.yaml").write_text(text.replace("Qwen/Qwen3-0.6B", str(model)))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[tuple[int, Path]]:
    """(port, log) of one that was started by hand."""
    port, log = free_port(), model.parent / "vllm.log"
    words = block("bash", 0, model, port).replace("\\\n", " ").replace("rank 8", "rank 16").split()
    cut = words.index("vllm")
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    clean |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    clean |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    clean |= dict(word.split("=", 1) for word in words[:cut])
    command = [PYTHON, "-P", "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, *words[cut + 3 :], *CPU], stdout=out, stderr=out, env=clean, cwd=log.parent
        )
    try:
        end = time.monotonic() + MINUTES
        while not listens(port):
            assert process.poll() is None and time.monotonic() < end, log.read_text()
            time.sleep(0.2)
        yield port, log
    finally:
        process.terminate()
        process.wait(timeout=60)


def records(home: Path) -> list[Record]:
    """Return the records of a whole run, whose rollouts are the learner's."""
    run = home / "outputs" / "run_default"
    found = read(run)
    assert [record["step"] for record in found] == list(range(1, STEPS + 1))
    assert all(abs(record["mismatch/kl_k3"]) < 1e-3 for record in found)
    assert (run / "final" / "adapter_model.safetensors").is_file()
    return found


def ends(child: subprocess.Popen[bytes], log: Path) -> None:
    assert child.wait(timeout=MINUTES) == 0, log.read_text()


@pytest.mark.parametrize("level", [0, 1])
def test_versions_reach_one_that_was_started_by_hand(
    home: Path, server: tuple[int, Path], level: int
) -> None:
    port, log = server
    before = log.read_text().count('load_lora_adapter HTTP/1.1" 200')
    more = [f'client.base_url=["http://127.0.0.1:{port}/v1"]', *SIZES]
    more += [f"asynchrony.max_async_level={level}"]
    with (
        started(home / "orch.log", "grpo-orch", "orch.yaml", *more) as orchestrator,
        started(home / "train.log", "grpo-train", "train.yaml") as trainer,
    ):
        ends(trainer, home / "train.log")
        ends(orchestrator, home / "orch.log")
    assert max(record["rollout/staleness"] for record in records(home)) == level
    loaded = log.read_text().count('load_lora_adapter HTTP/1.1" 200') - before
    assert loaded >= 1, "no version has reached the server"


def test_one_process(home: Path) -> None:
    with started(home / "log", "grpo", *FILES, *VLLM, *SIZES) as run:
        ends(run, home / "log")
    records(home)


def test_one_command(home: Path) -> None:
    """It ends with the run, and so do the processes that it began."""
    words = ["launcher=local", "asynchrony.max_async_level=1", *VLLM, *SIZES]
    with started(home / "log", "grpo", *FILES, *words) as run:
        ends(run, home / "log")
    records(home)
    logs = home / "outputs" / "run_default" / "logs"
    assert "vLLM has ended with status" in (logs / "engine-0-vllm.log").read_text()


def test_by_hand(home: Path) -> None:
    """The engine is found by the run's folder, since it listens on no port."""
    words = {
        "infer": ["infer.yaml", "output_dir=outputs/run_default", *VLLM],
        "orch": ["orch.yaml", "client.base_url=[]", *SIZES],
        "train": ["train.yaml"],
    }
    with ExitStack() as stack:
        roles = {
            role: stack.enter_context(started(home / f"{role}.log", f"grpo-{role}", *given))
            for role, given in words.items()
        }
        for role in ("train", "orch"):
            ends(roles[role], home / f"{role}.log")
        roles["infer"].send_signal(signal.SIGTERM)
        assert roles["infer"].wait(timeout=60) == 128 + signal.SIGTERM
    records(home)
