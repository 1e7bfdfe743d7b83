"""The worker's end of `bench.peer`: JSON objects, a line each, in and out; and the memory in use.

The first line in is the settings, the first line out says that the worker is ready. It needs no
lowroll, so that the environment of another engine is enough.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

POLL_S = 0.1  # seconds between two looks at a GPU's memory
Say = Callable[[Mapping[str, Any]], None]
Answer = Callable[[dict[str, Any]], Mapping[str, Any]]


def channel() -> tuple[dict[str, Any], Say]:
    """Read the settings; return them and a function that writes a line.

    From here on, what libraries print goes to the error stream, so that it cannot come between lines.
    """
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    settings: dict[str, Any] = json.loads(sys.stdin.readline())

    def say(line: Mapping[str, Any]) -> None:
        print(json.dumps(line), file=out, flush=True)

    return settings, say


def orders() -> Iterator[dict[str, Any]]:
    return map(json.loads, sys.stdin)


def serve(make: Callable[[dict[str, Any]], tuple[Mapping[str, Any], Answer]]) -> None:
    """Make a worker of the settings, say what it says of itself, and answer every order."""
    settings, say = channel()
    ready, answer = make(settings)
    say(ready)
    for order in orders():
        say(answer(order))


def end_with_input() -> None:
    """End this process when its input ends, for a worker that reads no orders."""

    def wait() -> None:
        while os.read(0, 4096):  # not sys.stdin, whose lock the end of the interpreter takes
            pass
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def timed(run: Callable[[], object]) -> dict[str, float]:
    """Return the seconds of a call, by the clock and by the processor."""
    began, spent = time.perf_counter(), time.process_time()
    run()
    return {"seconds": time.perf_counter() - began, "cpu": time.process_time() - spent}


def resident(field: str, pid: int | str = "self") -> int:
    """Return the bytes of a memory field of /proc/PID/status, such as VmHWM."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def on_gpu() -> int:
    """Return the bytes of the current GPU that are in use, by whatever process and allocator."""
    import torch

    free, total = torch.cuda.mem_get_info()
    return total - free


@contextmanager
def peak(device: str, before: int) -> Iterator[Callable[[], int]]:
    """Yield a call that returns the largest memory so far, in bytes.

    On a CPU it is the resident memory of this process, on a GPU what the device has in use less
    `before`, the bytes in use when the worker was started.
    """
    if device == "cpu":
        yield partial(resident, "VmHWM")
        return
    most, done = [0], threading.Event()

    def look() -> None:
        while not done.wait(POLL_S):
            most[0] = max(most[0], on_gpu() - before)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield lambda: most[0]
    finally:
        done.set()
        thread.join(10 * POLL_S)
