"""The name that compressed-tensors has for a format, in the `quantization_config` of a folder.

A format states its Scheme; `layouts` writes it, and finds the format of a folder by it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Header = tuple[tuple[int, ...] | None, tuple[str, ...]]  # shape, None for any; safetensors dtypes


def arguments(num_bits: int, type: str, strategy: str, **more: Any) -> dict[str, Any]:
    """The arguments of weights or activations that decide what is computed."""
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
    """A format in compressed-tensors' words."""

    compression: str
    weights: dict[str, Any]
    inputs: dict[str, Any] | None = None  # activations; None: they are not quantized
    scale_dtype: str | None = None  # where it is not the model's
    unpacked: str | None = None  # another compression, with a byte a code: read, never written
    rotated: bool = False  # its features are (`quant.transforms`)
