"""`vllm serve` as a child with dummy weights of exact shapes, on a port of this machine.

Its settings are its best for this work: CUDA graphs of every size that may run, prefix caching, the
cache of ours in bytes, no log of requests; the rest are vLLM's own defaults for a server. Every wait
has a deadline, and an error carries the log's last words.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any
from urllib.request import ProxyHandler, build_opener

from bench.peer import PeerFailed, vllm_environment, vllm_python
from bench.vllm_worker import config
from lowroll.checkpoint.logfile import last_error
from lowroll.runs.roles.local import reserve_port

START_S = 300.0
END_S = 20.0
_OPENER = build_opener(ProxyHandler({}))  # for our own child, whatever http_proxy says


class VllmServer:
    """Started when it is made; `wait` until it answers; `close` ends it and its children."""

    def __init__(self, settings: dict[str, Any]) -> None:
        """settings: folder (with a tokenizer), name, shape, format, batch, length, cache_bytes,
        memory_fraction, device."""
        folder = Path(settings["folder"])
        (folder / "config.json").write_text(
            json.dumps(config(settings["shape"], settings["format"]))
        )
        # held until the server has ended: nobody else gets its port
        self._held = reserve_port("127.0.0.1")
        port = self._held.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.log = folder / "vllm.log"
        self._began = time.perf_counter()
        command = [vllm_python(), "-P", "-m", "vllm.entrypoints.openai.api_server"]
        command += arguments(settings, port)
        env = environment(settings["device"])
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, env=env, start_new_session=True
            )

    def wait(self, deadline_s: float = START_S) -> float:
        """Wait until it answers; return the seconds since its start. PeerFailed."""
        until = time.monotonic() + deadline_s
        while time.monotonic() < until:
            if self._process.poll() is not None:
                raise PeerFailed(
                    f"it ended with {self._process.returncode}; {last_error(self.log)}"
                )
            try:
                self._get("/health")
                return time.perf_counter() - self._began
            except (OSError, http.client.HTTPException):
                time.sleep(0.2)
        raise PeerFailed(f"no answer within {deadline_s:g} s of its start; {last_error(self.log)}")

    @property
    def version(self) -> str:
        return str(json.loads(self._get("/version"))["version"])

    def _get(self, path: str) -> bytes:
        with _OPENER.open(f"{self.url}{path}", timeout=5.0) as answer:
            return bytes(answer.read())

    def close(self) -> None:
        self._held.close()
        for number, patience in ((signal.SIGTERM, END_S), (signal.SIGKILL, END_S)):
            if self._process.poll() is None or number == signal.SIGKILL:
                try:
                    os.killpg(self._process.pid, number)
                except ProcessLookupError:
                    return  # all of them have ended
            try:
                self._process.wait(patience)
            except subprocess.TimeoutExpired:
                continue


def arguments(settings: dict[str, Any], port: int) -> list[str]:
    """Return the arguments of `vllm serve`, and of the module behind it, which needs no installed
    script."""
    said = [
        *("--model", settings["folder"], "--host", "127.0.0.1", "--port", str(port)),
        *("--served-model-name", settings["name"], "--load-format", "dummy"),
        *("--dtype", "bfloat16", "--max-model-len", str(settings["length"])),
        *("--max-num-seqs", str(settings["batch"]), "--generation-config", "vllm"),
        *("--enable-prefix-caching", "--disable-uvicorn-access-log"),
    ]
    if settings["device"] == "cuda":
        said += ["--gpu-memory-utilization", f"{settings['memory_fraction']:.3f}"]
        said += ["--kv-cache-memory-bytes", str(settings["cache_bytes"])]
        said += [
            "--compilation-config",
            json.dumps({"max_cudagraph_capture_size": settings["batch"]}),
        ]
    return said


def environment(device: str) -> dict[str, str]:
    """Return the environment of its process. On a CPU its cache has one GB."""
    on_cpu = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    said = vllm_environment(**on_cpu)
    if device == "cpu" and not os.environ.get("LOWROLL_VLLM_PATH"):
        said.pop("PYTHONPATH", None)
    return said
