"""The blocks of docs/vllm.md, run as they stand but for the model's path and the port."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import torch

from lowroll.model import hf
from lowroll.model.spec import spec_from_config
from lowroll.model.transformer import Transformer
from tests.fixtures.served import CONFIG
from tests.fixtures.vllm_docs import CPU, MINUTES, PYTHON, ROOT, block, free_port, listens


def program(text: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", text],
        capture_output=True,
        text=True,
        timeout=MINUTES,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def model_folder(folder: Path) -> Path:
    torch.manual_seed(0)
    model = Transformer(spec_from_config(CONFIG))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape) * 0.1)
    return hf.save(model, folder)


def test_a_server_that_is_started(tmp_path: Path) -> None:
    said = program(block("python", 0, model_folder(tmp_path / "model"), 0))
    assert said.endswith("now at version 1\n")


def test_a_server_that_runs_already(tmp_path: Path) -> None:
    model, port = model_folder(tmp_path / "model"), free_port()
    words = shlex.split(block("bash", 0, model, port).replace("\\\n", " "))
    cut = words.index("vllm")
    settings = dict(word.split("=", 1) for word in words[:cut])
    assert words[cut + 1 : cut + 3] == ["serve", str(model)]
    command = [PYTHON, "-P", "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen(
            [*command, *words[cut + 3 :], *CPU],
            stdout=log,
            stderr=log,
            env=environment | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"} | settings,
            cwd=tmp_path,
        )
        try:
            end = time.monotonic() + MINUTES
            while not listens(port):
                assert server.poll() is None and time.monotonic() < end
                time.sleep(0.2)
            said = program(block("python", 1, model, port))
            assert re.match(r"vLLM \d+\.\d+\S* True BehaviorTag\(", said)
        finally:
            server.terminate()
            server.wait(timeout=60)
