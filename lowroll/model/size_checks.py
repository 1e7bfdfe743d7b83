"""Checks of a config.json's sizes against the weight files, the memory and the kernels, before any
allocation: a hundred bytes can claim a billion layers.
"""

from __future__ import annotations

from pathlib import Path

import torch

from lowroll.model.config_values import expert_count_key
from lowroll.model.device import total_memory
from lowroll.model.flash import WIDEST
from lowroll.model.spec import ModelSpec

LEAST_BITS = 4  # of a stored weight
# the least bytes of names and objects
LAYER_NAMES = 10_000
EXPERT_NAMES = 100


def check_files(path: Path, spec: ModelSpec, tensors: int, stored: int) -> None:
    """Raise ValueError for the key of `path` that exceeds the weight files, with both numbers.
    tensors, stored: their number and bytes."""
    # an expert has a tensor or more, unless experts are stacked
    num_experts = 0 if spec.stored_stacked else spec.layers_with_experts * spec.mixture.num_experts
    for key, least_tensors in (
        ("num_hidden_layers", spec.num_layers),
        ("num_experts", num_experts),
    ):
        if least_tensors > tensors:
            name = expert_count_key(spec.config) if key == "num_experts" else key
            raise ValueError(
                f"{path}: {name}: {_sizes(spec)[key]:,} need {least_tensors:,} tensors or more, "
                f"and the weight files hold {tensors:,}"
            )
    least_bytes = spec.num_parameters * LEAST_BITS // 8
    if least_bytes > stored:
        raise ValueError(
            f"{path}: {_describe_model(spec)}, at least {least_bytes:,} bytes, and the weight "
            f"files hold {stored:,}"
        )


def check_memory(path: Path, spec: ModelSpec, bits: float, device: torch.device | str) -> None:
    """Raise ValueError for the key of `path` that exceeds the device's memory, with both numbers.
    bits: of a parameter."""
    name_bytes = spec.num_layers * (LAYER_NAMES + spec.mixture.num_experts * EXPERT_NAMES)
    needed_bytes, memory = int(spec.num_parameters * bits / 8) + name_bytes, total_memory(device)
    if memory is not None and needed_bytes > memory:
        raise ValueError(
            f"{path}: {_describe_model(spec)}, at least {needed_bytes / 1e9:,.1f} GB in memory, and {device} has "
            f"{memory / 1e9:,.1f} GB"
        )


def check_heads(path: Path, spec: ModelSpec, device: torch.device | str) -> None:
    """Raise ValueError for heads of latent attention that are too wide for CUDA's kernels."""
    latent = spec.latent
    if latent is None or torch.device(device).type != "cuda" or latent.head_dim <= WIDEST:
        return
    raise ValueError(
        f"{path}: qk_nope_head_dim + qk_rope_head_dim: {latent.nope_dim} + {latent.rope_dim}; on CUDA "
        f"attention takes heads of up to {WIDEST} numbers"
    )


def _describe_model(spec: ModelSpec) -> str:
    sizes = _sizes(spec)
    largest = max(sizes, key=lambda key: sizes[key])
    return f"{largest}: {sizes[largest]:,} makes a model of {spec.num_parameters:,} parameters"


def _sizes(spec: ModelSpec) -> dict[str, int]:
    latent: dict[str, int] = {}
    if spec.latent is not None:
        latent = {
            "q_lora_rank": spec.latent.query_rank,
            "kv_lora_rank": spec.latent.kv_rank,
            "qk_nope_head_dim": spec.latent.nope_dim,
            "qk_rope_head_dim": spec.latent.rope_dim,
            "v_head_dim": spec.latent.value_dim,
        }
    return {
        **latent,
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": 0 if latent else spec.head_dim,
        "num_experts": spec.mixture.num_experts,
        "moe_intermediate_size": spec.mixture.expert_size,
    }
