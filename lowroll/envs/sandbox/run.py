"""The outer end of the sandbox's pipes, with the expected outputs.

A program at fault fails its cases. SandboxError means that the sandbox did not start or ended.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lowroll.envs.sandbox import filter
from lowroll.envs.sandbox.cases import Case, CaseResults, Result, SandboxLimits, Status, is_right

# a fixed order of sets; a writable home
ENV = {
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PATH": "/usr/bin:/bin",
    "PYTHONHASHSEED": "0",
    "PYTHONUTF8": "1",
}
START_LIMIT = 20.0  # seconds for the sandbox to start
SLACK = 5.0  # seconds for the sandbox's own work
MAX_SAID = 500  # characters


@dataclass(frozen=True)
class Isolation:
    """A kind of isolation, with the command that starts `inside` in it."""

    name: str
    command: Callable[[int], list[str]]  # by the size of /tmp in MB


class SandboxError(RuntimeError):
    """A failure of the sandbox, not of the program."""


def run_in(
    here: Isolation,
    source: str,
    cases: Sequence[Case],
    limits: SandboxLimits,
    stop_at_failure: bool = False,
) -> CaseResults:
    """Run the Python program `source` on every case, each in its own process, and compare.

    `stop_at_failure`: cases after the first failure are not run and count as wrong. ValueError
    without cases; SandboxError when the sandbox failed.
    """
    if not cases:
        raise ValueError("a program is judged by its cases, and there are none")
    results: list[Result] = []
    unrun_status: Status = "wrong"
    sandbox = _Sandbox(here, limits)
    try:
        sandbox.ask(source, cases)
        for case in cases:
            reply = sandbox.reply()
            if reply is None:
                unrun_status = "timeout"
                break
            result = _judged(case, reply)
            results.append(result)
            if result.status == "compile":
                unrun_status = "compile"
                break
            if stop_at_failure and result.status != "passed":
                break
    finally:
        sandbox.close()
    results += [Result(unrun_status)] * (len(cases) - len(results))
    return CaseResults(tuple(results))


def _judged(case: Case, reply: dict[str, Any]) -> Result:
    status, output = reply["status"], reply["output"]
    if status != "ended":
        return Result(status, reply["seconds"], reply["message"])
    value = None
    if case.fn_name is not None:
        try:
            value = json.loads(output)
        except (ValueError, RecursionError):
            return Result("wrong", reply["seconds"], "its result is no JSON")
    try:
        is_correct = is_right(case, output, value)
    except RecursionError:
        is_correct = False
    return Result("passed" if is_correct else "wrong", reply["seconds"], reply["message"])


class _Sandbox:
    def __init__(self, here: Isolation, limits: SandboxLimits) -> None:
        self.limits, self.name = limits, here.name
        try:
            self.process = subprocess.Popen(
                here.command(limits.disk_mb),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=ENV,
                cwd="/",
                start_new_session=True,
                bufsize=0,
            )
        except OSError as error:
            raise SandboxError(f"{self.name}: it cannot be started: {error}") from error
        assert self.process.stdin and self.process.stdout and self.process.stderr
        self.input, self.output = self.process.stdin, self.process.stdout
        self.errors = self.process.stderr
        self.lines = self._lines()
        self.deadline = time.monotonic() + START_LIMIT

    def ask(self, source: str, cases: Sequence[Case]) -> None:
        if next(self.lines, None) != {"ready": True}:
            raise SandboxError(f"{self.name}: {self._how_it_ended()}")
        lines = filter.program()
        assert lines is not None
        request = {
            "source": source,
            "cases": [{"input": case.input, "fn_name": case.fn_name} for case in cases],
            "limits": asdict(self.limits),
            "filter": lines.hex(),
        }
        unsent = memoryview(json.dumps(request).encode())
        self.deadline = time.monotonic() + START_LIMIT
        os.set_blocking(self.input.fileno(), False)
        while unsent:
            if not select.select([], [self.input], [], self._seconds())[1]:
                raise SandboxError(f"{self.name}: it did not take the program")
            try:
                unsent = unsent[self.input.write(unsent) or 0 :]
            except BrokenPipeError:
                raise SandboxError(f"{self.name}: {self._how_it_ended()}") from None
        self.input.close()
        self.end = time.monotonic() + self.limits.total_seconds

    def reply(self) -> dict[str, Any] | None:
        self.deadline = min(time.monotonic() + self.limits.wall_seconds + SLACK, self.end)
        reply = next(self.lines, None)
        if reply is None and time.monotonic() < self.end:
            raise SandboxError(f"{self.name}: it ended under the program: {self._how_it_ended()}")
        return reply

    def close(self) -> None:
        self.process.kill()
        self.process.wait(START_LIMIT)
        for pipe in (self.input, self.output, self.errors):
            pipe.close()

    def _lines(self) -> Iterator[dict[str, Any]]:
        data = bytearray()
        while select.select([self.output], [], [], self._seconds())[0]:
            piece = os.read(self.output.fileno(), 1 << 16)
            data += piece
            if not piece:
                return
            if b"\n" in piece:
                *lines, incomplete = data.split(b"\n")
                data = incomplete
                yield from map(json.loads, lines)

    def _seconds(self) -> float:
        return max(0.0, self.deadline - time.monotonic())

    def _how_it_ended(self) -> str:
        try:
            status = str(self.process.wait(0.5))
        except subprocess.TimeoutExpired:
            status = f"nothing after {START_LIMIT:g} s"
        os.set_blocking(self.errors.fileno(), False)
        stderr = (self.errors.read(1 << 16) or b"").decode(errors="replace").strip()
        last_line = stderr.splitlines()[-1] if stderr else "it said nothing"
        return f"{last_line[:MAX_SAID]} (exit status {status})"
