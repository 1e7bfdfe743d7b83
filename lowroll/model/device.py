"""The device of a model, its dtype, and its memory."""

from __future__ import annotations

import torch

from lowroll import machine


def pick_device(device: str | torch.device = "auto") -> torch.device:
    """Return the device; `auto` is CUDA when there is one. A CUDA device becomes the current one,
    on which kernels are launched: call this first. ValueError when CUDA is missing."""
    if str(device) == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    picked = torch.device(device)
    if picked.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device: {device} was asked for, and torch sees no CUDA device")
    if picked.type == "cuda":
        if picked.index is None:
            picked = torch.device("cuda", torch.cuda.current_device())
        torch.cuda.set_device(picked)
    return picked


def dtype_on(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def free_memory(device: torch.device) -> int | None:
    """Return the bytes that the device, or a CPU's machine, could give now; None if unknown."""
    if device.type == "cuda":
        unused_cache = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused_cache
    return machine.free_memory()


def total_memory(device: torch.device | str) -> int | None:
    """Return the device's total memory in bytes, for a CPU what this process may use; None if
    unknown."""
    torch_device = torch.device(device)
    if torch_device.type == "cuda":
        return int(torch.cuda.mem_get_info(torch_device)[1])
    return machine.total_memory() if torch_device.type == "cpu" else None
