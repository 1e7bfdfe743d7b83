"""Memory that a process and a GPU have in use. It needs torch alone, so that a peer's environment is
enough."""

from __future__ import annotations

from pathlib import Path

import torch


def resident(field: str, pid: int | str = "self") -> int:
    """Return the bytes of a memory field of /proc/PID/status, such as VmHWM."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def on_gpu() -> int:
    """Return the bytes of the current GPU that are in use, by whatever process and allocator."""
    free, total = torch.cuda.mem_get_info()
    return total - free
