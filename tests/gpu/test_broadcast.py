"""On CUDA devices: weights go from a learner's GPU to an engine of another process, by CUDA IPC and
by NCCL, and are the bits that files would bring."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lowroll.model import hf
from lowroll.model.transformer import Transformer
from lowroll.weights import aligned_forward
from lowroll.weights.publish import digest, rollout_copy
from lowroll.weights.sync.base import read_broadcast
from lowroll.weights.sync.changes import Shadow, apply
from lowroll.weights.sync.server import WeightServer
from tests.fixtures.broadcasts import broadcaster
from tests.fixtures.masters import nudge
from tests.fixtures.tiny import hf_folder

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("built")]

ROOT = Path(__file__).resolve().parents[2]
ENGINE = """
import sys
from pathlib import Path
import torch
from lowroll.engine.native import NativeEngine
from lowroll.server.weight_store import WeightStore
from lowroll.weights.sync.client import WeightClient
model, folder, port, device = sys.argv[1:]
device = torch.device(device)
engine = NativeEngine(Path(model), "int8", device=device, cache_tokens=1024)
shelf = WeightStore(folder, Path(model), WeightClient("127.0.0.1", int(port), device, 60.0))
print("ready", flush=True)
for line in sys.stdin:
    now = engine.behavior
    _, updates = shelf.load(line.strip(), 0, engine.capabilities, now.weights)
    for one, update in updates:
        engine.update_weights(update)
        shelf.current = one
    print(engine.behavior.policy[0].digest, flush=True)
"""


@pytest.mark.parametrize("way", ["cuda_ipc", "nccl"])
def test_a_direct_way_brings_the_bits_of_files(tmp_path: Path, way: str) -> None:
    if way == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("NCCL goes between two GPUs")
    model = hf_folder(tmp_path / "model")
    learner = hf.load(model, "cuda:0").requires_grad_(True)
    shelf, last = tmp_path / "shelf", torch.cuda.device_count() - 1
    server = WeightServer(way, torch.device("cuda", 0), timeout_s=60.0)
    at = broadcaster(shelf, learner, server=server)
    child = subprocess.Popen(
        [sys.executable, "-c", ENGINE, str(model), str(shelf), str(server.port), f"cuda:{last}"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdin is not None and child.stdout is not None
    try:
        assert child.stdout.readline() == "ready\n"
        for version in (1, 2, 3):
            at.publish(version_of(learner, version))
            assert read_broadcast(shelf / f"step_{version:06d}").way == way
            wanted = digest(rollout_copy(learner, "int8", torch.bfloat16))
            child.stdin.write(f"step_{version}\n")
            child.stdin.flush()
            assert child.stdout.readline().strip() == wanted
        assert not server.broken
    finally:
        child.stdin.close()
        child.kill()
        child.wait(30)
        child.stdout.close()
        server.close()


def version_of(learner: Transformer, version: int) -> int:
    nudge(learner, version)
    return version


def test_changed_codes_are_found_and_written_on_the_device(tmp_path: Path) -> None:
    learner = hf.load(hf_folder(tmp_path / "model"), "cuda:0").requires_grad_(True)
    aligned_forward.align(learner, "int8")
    rollout = rollout_copy(learner, "int8", torch.bfloat16)
    shadow = Shadow(learner, "int8", torch.bfloat16)
    shadow.renew(0)
    for version in (1, 2, 3):
        nudge(learner, version, 1e-3)
        aligned_forward.refresh(learner)
        stream, changes = shadow.changes()
        norms = apply(rollout, {n: t.cuda() for n, t in stream.items()}, changes)
        with torch.no_grad():
            for name, norm in norms.items():
                dict(rollout.named_parameters())[name].copy_(norm)
        shadow.renew(version)
        assert digest(rollout) == digest(rollout_copy(learner, "int8", torch.bfloat16))
