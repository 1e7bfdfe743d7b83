"""The names of formats in compressed-tensors' `quantization_config`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Header = tuple[tuple[int, ...] | None, tuple[str, ...]]  # shape, None for any; safetensors dtypes


def arguments(num_bits: int, type: str, strategy: str, **more: Any) -> dict[str, Any]:
    """Return the arguments of weights or activations that change the computation."""
    return {
        "num_bits": num_bits,
        "type": type,
        "strategy": strategy,
        "symmetric": True,
        "dynamic": False,
        "group_size": None,
        "block_structure": None,
        **more,
    }


INT8_TOKENS = arguments(8, "int", "token", dynamic=True)


@dataclass(frozen=True)
class Scheme:
    compression: str
    weights: dict[str, Any]
    inputs: dict[str, Any] | None = None  # of activations
    scale_dtype: str | None = None  # if not the model's
    unpacked: str | None = None  # another compression, a byte a code, read only
    rotated: bool = False  # see `quant.transforms`
