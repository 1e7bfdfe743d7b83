"""What the two sides of `bench.race` share: their channel to the race, and their peak of memory.

A side is a process. Its first line in is the settings, a JSON object. Its lines out are JSON objects
too:

    {"ready": true, "about": {...}}                  versions, and how it draws and learns
    {"step": 0, "score": 0.31}                       the score on held-out prompts before the first step
    {"step": 1, "seconds": 9.1, "tokens": 812,       a step: its seconds without evaluations, the tokens
     "reward": 0.4, "kl": 1e-4, "score": 0.33}       drawn for it, their mean reward; KL and score where known
    {"end": true, "peak_bytes": 3e9, "folder": "x"}  the model that it ends with, as a folder of transformers

It needs no lowroll but `lowroll.envs` and `lowroll.types`, so that a peer's environment is enough.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from bench.used_memory import on_gpu, resident

POLL_S = 0.1  # seconds between two looks at a GPU's memory
Say = Callable[[Mapping[str, Any]], None]


def channel() -> tuple[dict[str, Any], Say]:
    """Read the settings; return them and a function that writes a line.

    What libraries print goes to the error stream from here on, so that it cannot come between lines.
    The process ends with its input, as nobody would read its lines.
    """
    settings: dict[str, Any] = json.loads(sys.stdin.readline())

    def wait_for_end() -> None:
        while os.read(0, 4096):  # not sys.stdin, whose lock the end of the interpreter takes
            pass
        os._exit(1)

    threading.Thread(target=wait_for_end, daemon=True).start()
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(line: Mapping[str, Any]) -> None:
        print(json.dumps(line), file=out, flush=True)

    return settings, say


@contextmanager
def peak(device: str, before: int) -> Iterator[Callable[[], int]]:
    """Yield a call that returns the largest memory so far, in bytes.

    On a CPU it is the resident memory of this process. On a GPU it is what the device has in use, by
    whatever allocator, less `before`, the bytes in use when the side was started.
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
