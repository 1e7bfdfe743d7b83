"""A vLLM that was started by hand, as docs/vllm.md says, as the engine of the document's quick start
by hand: `lowroll grpo-orch` and `lowroll grpo-train` with LoRA."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lowroll.runs import demo
from tests.fixtures.quick_start import ORCH, TRAIN
from tests.fixtures.roles import started
from tests.fixtures.runs import TINY
from tests.fixtures.vllm_docs import CPU, MINUTES, PYTHON, block, free_port, listens

SIZES = ["train.max_steps=3", "batch_size=8", "rollouts_per_example=4", "rollout.max_tokens=8"]
HEAD = 32  # vLLM on a CPU takes no heads of 16


def test_versions_reach_a_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, port = demo.build_model(tmp_path / "model", 0, {**TINY, "head_dim": HEAD}), free_port()
    for name, text in (("train", TRAIN), ("orch", ORCH)):
        (tmp_path / f"{name}.yaml").write_text(text.replace("Qwen/Qwen3-0.6B", str(model)))
    words = block("bash", 0, model, port).replace("\\\n", " ").replace("rank 8", "rank 16").split()
    cut = words.index("vllm")
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    clean |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    clean |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    clean |= dict(word.split("=", 1) for word in words[:cut])
    command = [PYTHON, "-P", "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    with (tmp_path / "vllm.log").open("wb") as log:
        server = subprocess.Popen(
            [*command, *words[cut + 3 :], *CPU], stdout=log, stderr=log, env=clean, cwd=tmp_path
        )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.chdir(tmp_path)
    try:
        end = time.monotonic() + MINUTES
        while not listens(port):
            assert server.poll() is None and time.monotonic() < end
            time.sleep(0.2)
        url = f'client.base_url=["http://127.0.0.1:{port}/v1"]'
        with (
            started(tmp_path / "orch.log", "grpo-orch", "orch.yaml", url, *SIZES) as orchestrator,
            started(tmp_path / "train.log", "grpo-train", "train.yaml") as trainer,
        ):
            for role, log_name in ((trainer, "train.log"), (orchestrator, "orch.log")):
                assert role.wait(timeout=MINUTES) == 0, (tmp_path / log_name).read_text()
    finally:
        server.terminate()
        server.wait(timeout=60)
    run = tmp_path / "outputs" / "run_default"
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(records) == 3 and all(abs(one["mismatch/kl_k3"]) < 1e-3 for one in records)
    loaded = (tmp_path / "vllm.log").read_text().count('load_lora_adapter HTTP/1.1" 200')
    assert loaded >= 1, "no version has reached the server"
