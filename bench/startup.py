"""Seconds from `lowroll.Engine(folder)` to the first token of a folder that is in the page cache.

The engine starts in a new process (a worker of `bench.peer`), as a user's does: no kernel is loaded,
no graph captured, no context made. Kernels that were compiled before lie in the user's cache on disk. The folder holds
random weights and was just written, so its bytes are in memory. The clock starts at the call, after
the imports, whose seconds are a row of their own.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from pathlib import Path

import torch

from bench.harness import Row
from bench.peer import Peer
from bench.shapes import SHAPES, random_model
from bench.targets import first_token
from bench.worker import channel
from lowroll import Engine, Request
from lowroll.model import hf

DEADLINE_S = 180.0
SHARED = Path("/dev/shm")


def rows(model: str, format: str, device: torch.device) -> list[Row]:
    files = hf.contents(random_model(SHAPES[model], device))
    with tempfile.TemporaryDirectory(
        dir=_place(sum(tensor.nbytes for tensor in files[1].values()))
    ) as temporary:
        folder = Path(temporary)
        hf.write(files, folder, None)
        del files
        if device.type == "cuda":
            torch.cuda.empty_cache()
        settings = {"folder": str(folder), "format": format}
        command = [sys.executable, "-m", "bench.startup"]
        with Peer(settings, command, start_s=DEADLINE_S) as peer:
            found = peer.ready
    return [
        Row(first_token(model, format), "s", found["first_token"]),
        Row(f"{model} {format}: imports before it", "s", found["imports"]),
    ]


def main() -> None:
    """Say, in the new process, how long it took: the imports, and the first token."""
    imports = time.time() - _process_began()
    settings, say = channel()
    began = time.perf_counter()
    engine = Engine(
        settings["folder"], weights=settings["format"], cache_tokens=65536, max_batch=64
    )
    engine.generate([Request([5] * 16, max_tokens=1, ignore_eos=True)])
    say({"imports": imports, "first_token": time.perf_counter() - began})


def _process_began() -> float:
    """Return the Unix time at which this process was started."""
    ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    booted = next(
        int(line.split()[1])
        for line in Path("/proc/stat").read_text().splitlines()
        if line[:5] == "btime"
    )
    return booted + ticks / 100


def _place(num_bytes: int) -> Path:
    """Return memory, when the folder fits there twice; the temporary folder, and its page cache,
    otherwise."""
    fits = SHARED.is_dir() and shutil.disk_usage(SHARED).free > 2 * num_bytes
    return SHARED if fits else Path(tempfile.gettempdir())


if __name__ == "__main__":
    main()
