"""GLM-4, dense: half of a head is rotated, in pairs of neighbours, and gate and up are one matrix in
checkpoints. GLM-4-0414 (`glm4`) has norms on both sides of attention and MLP."""

from __future__ import annotations

from typing import Any

from lowroll.model.config_values import flag
from lowroll.model.families.base import Values, rope_of

NORMS = (
    ("input_norm", "input_layernorm"),
    ("attention_out_norm", "post_self_attn_layernorm"),
    ("post_attention_norm", "post_attention_layernorm"),
    ("mlp_out_norm", "post_mlp_layernorm"),
)


def glm(values: Values) -> dict[str, Any]:
    return {
        "qkv_bias": flag(values, "attention_bias"),
        "fused": ("gate_up",),
        "ropes": (rope_of(values, partial=True, interleaved=True),),
    }


def glm4(values: Values) -> dict[str, Any]:
    return {**glm(values), "norms": NORMS}
