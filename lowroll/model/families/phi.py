"""Phi-3 and Phi-4: a Llama whose q, k and v are one matrix in checkpoints, as are gate and up; heads
may be rotated in part. The `longrope` scaling of their long contexts is not supported."""

from __future__ import annotations

from typing import Any

from lowroll.model.families.base import Values, rope_of, same_window


def phi3(values: Values) -> dict[str, Any]:
    return {
        "fused": ("qkv", "gate_up"),
        "ropes": (rope_of(values, partial=True),),
        "layers": same_window(values),
    }
