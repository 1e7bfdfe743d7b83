"""Another engine or learner as a child process that takes turns with ours; `bench.worker` is its end.

Every wait for the child's next line has a deadline, says in its error what it waited for, and ends
early when the child does; the error has the child's last words.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

ROOT = str(Path(__file__).parents[1])
START_S = 420.0  # seconds to import, make the weights, compile and capture the graphs
CALL_S = 180.0
CLOSE_S = 20.0
# flashinfer's sampler is off because flashinfer may be missing
VLLM = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}


class PeerFailed(RuntimeError):
    """The other engine could not be started, died, or did not answer in time."""


class Peer:
    """A running worker. `ready` is its first answer. One thread at a time uses it."""

    def __init__(
        self,
        settings: Mapping[str, Any],
        command: Sequence[str],
        environment: Mapping[str, str] = {},
        start_s: float = START_S,
    ) -> None:
        """Start a worker. environment: variables beside those of this process."""
        env = {**os.environ, **environment}
        paths = (env.get("PYTHONPATH"), ROOT)
        env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        self._errors = tempfile.TemporaryFile()
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env=env,
            )
        except OSError as error:
            raise PeerFailed(f"{command[0]}: {error}") from None
        self._answers: queue.Queue[bytes | None] = queue.Queue()
        self.failed = False  # once it has, its answers are out of step: it is not asked again
        threading.Thread(target=self._listen, daemon=True).start()
        try:
            self.ready = self.ask(settings, "being ready", start_s)
        except BaseException:
            self.close()
            raise

    def generate(
        self,
        prompts: list[list[int]],
        copies: int,
        new_tokens: int,
        asked: Mapping[str, Any] = {},
        deadline_s: float = CALL_S,
    ) -> float:
        """Return the seconds of one call that makes `new_tokens` tokens for every copy of every
        prompt. asked: fields of the requests, beside a temperature of 1 and lengths that are
        fixed."""
        answer = self.ask(
            {
                "prompts": prompts,
                "copies": copies,
                "new_tokens": new_tokens,
                "asked": dict(asked),
            },
            f"{copies * len(prompts)} responses of {new_tokens} tokens",
            deadline_s,
        )
        if answer["tokens"] != copies * len(prompts) * new_tokens:
            self.failed = True
            raise PeerFailed(
                f"it made {answer['tokens']} tokens instead of {copies * len(prompts)} x "
                f"{new_tokens}"
            )
        return float(answer["seconds"])

    def close(self) -> None:
        """End the worker; its memory on the GPU is free afterwards."""
        if self._process.stdin is not None:
            try:
                self._process.stdin.close()
            except BrokenPipeError:
                pass  # it ended before
        try:
            self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(CLOSE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, order: Mapping[str, Any], awaited: str, deadline_s: float) -> dict[str, Any]:
        """Return the worker's answer to an order. awaited: what the error says when none comes."""
        self.send(order, awaited)
        return self.next(awaited, deadline_s)

    def send(self, order: Mapping[str, Any], awaited: str) -> None:
        """Give the worker an order, and leave its answer for `next`."""
        assert self._process.stdin is not None
        if self.failed:
            raise PeerFailed(f"it had failed before it was asked for {awaited}")
        try:
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # its end arrives as the next answer

    def next(self, awaited: str, deadline_s: float) -> dict[str, Any]:
        """Return the worker's next answer."""
        try:
            line = self._answers.get(timeout=deadline_s)
        except queue.Empty:
            self.failed = True
            self._process.kill()
            raise PeerFailed(
                f"no answer within {deadline_s:g} s, waiting for {awaited}; {self._last_words()}"
            ) from None
        if line is None:
            self.failed = True
            code = self._process.wait(CLOSE_S)
            raise PeerFailed(f"it ended with {code}, waiting for {awaited}; {self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put(None)

    def _last_words(self) -> str:
        self._errors.seek(0)
        text = self._errors.read().decode(errors="replace")
        lines = [line for line in text.splitlines() if line.strip()]
        if not lines:
            return "it said nothing"
        causes = [line for line in lines[:-4] if "out of memory" in line.lower()]
        return "its last words: " + " | ".join(line[:300] for line in causes[-1:] + lines[-4:])


def start_vllm(settings: Mapping[str, Any], *words: str, **variables: str) -> Peer:
    """Start `bench.vllm_worker` with the Python that has vLLM. variables: of its environment."""
    return Peer(settings, [*vllm_command(), *words], {**vllm_environment(), **variables})


def vllm_command() -> list[str]:
    return [vllm_python(), "-P", "-m", "bench.vllm_worker"]


def vllm_python() -> str:
    """Return the Python of LOWROLL_VLLM_PYTHON, or this one."""
    return os.environ.get("LOWROLL_VLLM_PYTHON") or sys.executable


def vllm_environment(**more: str) -> dict[str, str]:
    """Return the environment of a vLLM that is installed, or unpacked in the folder
    LOWROLL_VLLM_PATH: offline and silent. What this process's environment says stays."""
    path = os.environ.get("LOWROLL_VLLM_PATH")
    return {**VLLM, **more, **os.environ, **({"PYTHONPATH": path} if path else {})}


def share_of_gpu(num_bytes: float, most: float = 0.95) -> float:
    """Return the part of the GPU's memory that vLLM may take for so many bytes; `most` on a CPU."""
    import torch

    if not torch.cuda.is_available():
        return most
    return min(most, num_bytes / torch.cuda.mem_get_info()[1])
