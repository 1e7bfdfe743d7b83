"""Seconds from `lowroll.Engine(folder)` to the first token of a folder that is in the page cache.

The engine starts in a new process, as a user's does: no kernel is loaded, no graph captured, no
context made. Kernels that were compiled before lie in the user's cache on disk. The folder holds
random weights and was just written, so its bytes are in memory. The clock starts at the call, after
the imports, whose seconds are a row of their own.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from pathlib import Path

import torch

from bench.harness import Row, in_new_process
from bench.shapes import SHAPES, random_model
from bench.targets import first_token
from lowroll.model import hf

DEADLINE_S = 180.0
SHARED = Path("/dev/shm")


def rows(model: str, format: str, device: torch.device) -> list[Row]:
    """Return both rows, of a folder that is deleted afterwards."""
    files = hf.contents(random_model(SHAPES[model], device))
    with tempfile.TemporaryDirectory(
        dir=_place(sum(tensor.nbytes for tensor in files[1].values()))
    ) as temporary:
        folder = Path(temporary)
        hf.write(files, folder, None)
        del files
        if device.type == "cuda":
            torch.cuda.empty_cache()
        found = in_new_process("bench.decode", ["--first-token", folder, format], DEADLINE_S)
    return [
        Row(first_token(model, format), "s", found["first_token"]),
        Row(f"{model} {format}: imports before it", "s", found["imports"]),
    ]


def report(folder: str, format: str) -> int:
    """Print, in the new process, the seconds."""
    from lowroll import Engine, Request

    # Everything before this line: the interpreter, torch and lowroll.
    imports = time.time() - _process_began()
    began = time.perf_counter()
    engine = Engine(folder, weights=format, cache_tokens=65536, max_batch=64)
    engine.generate([Request([5] * 16, max_tokens=1, ignore_eos=True)])
    print(json.dumps({"imports": imports, "first_token": time.perf_counter() - began}))
    return 0


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
