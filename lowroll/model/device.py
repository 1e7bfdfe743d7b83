"""The device that a model is computed on: which one is meant, the dtype there, and its memory."""

from __future__ import annotations

import torch

from lowroll import machine


def pick_device(device: str | torch.device = "auto") -> torch.device:
    """`auto` is CUDA when there is one; a CUDA device always has its index, as a tensor's has, and
    becomes the current one, on which kernels are launched: before a model is loaded or quantized
    there.

    ValueError when CUDA is asked for and missing.
    """
    if str(device) == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    found = torch.device(device)
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device: {device} was asked for, and torch sees no CUDA device")
    if found.type == "cuda":
        if found.index is None:
            found = torch.device("cuda", torch.cuda.current_device())
        torch.cuda.set_device(found)
    return found


def dtype_on(device: torch.device) -> torch.dtype:
    """Return the default dtype that an engine computes in."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def free_memory(device: torch.device) -> int | None:
    """Return the bytes that the device (the machine, for a CPU) could give now; None where the
    system does not say."""
    if device.type == "cuda":
        # what torch holds and nobody uses
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + kept
    return machine.free_memory()


def total_memory(device: torch.device | str) -> int | None:
    """Return the bytes of memory that the device has (that this process may use, for a CPU); None
    where the system does not say."""
    place = torch.device(device)
    if place.type == "cuda":
        return int(torch.cuda.mem_get_info(place)[1])
    return machine.total_memory() if place.type == "cpu" else None
