"""What a folder's config.json promises, against the bytes of its weight files and the memory that would hold them.

A config of a hundred bytes can ask for a billion layers. Counting comes first: nothing is expanded into names or
allocated before the numbers fit each other.
"""
from __future__ import annotations

import os
from pathlib import Path

import torch

from lowroll.model.spec import ModelSpec

LEAST_BITS = 4             # of a stored weight, whatever the format
_SIZES = {"vocab_size": "vocab_size", "hidden_size": "hidden_size", "intermediate_size": "intermediate_size",
          "num_hidden_layers": "num_layers", "num_attention_heads": "num_heads", "num_key_value_heads": "num_kv_heads",
          "head_dim": "head_dim", "num_experts": "num_experts", "moe_intermediate_size": "moe_intermediate_size"}


def check(path: Path, spec: ModelSpec, tensors: int, stored: int, bits: float, device: torch.device | str) -> None:
    """ValueError names the key of `path`, a config.json, that promises more than there is, with both numbers.

    tensors, stored: how many the weight files hold, and their bytes. bits: of a parameter on the device, at least.
    """
    for key, least in (("num_hidden_layers", spec.num_layers), ("num_experts", spec.num_layers * spec.num_experts)):
        if least > tensors:
            name = "num_local_experts" if key == "num_experts" and "num_local_experts" in spec.config else key
            raise ValueError(f"{path}: {name}: {getattr(spec, _SIZES[key]):,} need {least:,} tensors or more, and the "
                             f"weight files hold {tensors:,}")
    largest = max(_SIZES, key=lambda key: getattr(spec, _SIZES[key]))
    asks = f"{path}: {largest}: {getattr(spec, _SIZES[largest]):,} makes a model of {spec.num_parameters:,} parameters"
    least = spec.num_parameters * LEAST_BITS // 8
    if least > stored:
        raise ValueError(f"{asks}, at least {least:,} bytes, and the weight files hold {stored:,}")
    needed, memory = int(spec.num_parameters * bits / 8), total_memory(device)
    if memory is not None and needed > memory:
        raise ValueError(f"{asks}, at least {needed / 1e9:,.1f} GB in memory, and {device} has {memory / 1e9:,.1f} GB")


def total_memory(device: torch.device | str) -> int | None:
    """Bytes of memory that the device has (this process may use, for a CPU); None where the system does not say."""
    place = torch.device(device)
    if place.type == "cuda":
        return int(torch.cuda.mem_get_info(place)[1])
    if place.type != "cpu":
        return None
    try:
        found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    except (OSError, ValueError):
        return None
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.is_file() and (text := limit.read_text().strip()).isdigit():
        found.append(int(text))
    return min(found)
