"""Qwen3-Next and Qwen3.5, text: three of four layers are gated delta nets, the others gated
attention; a quarter of each head is rotated, norms multiply by 1 + w, and mixtures have an expert
that takes every token.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lowroll.model.config_values import flag, integer, layer_list
from lowroll.model.families.base import (
    FULL,
    DeltaSpec,
    LayerSpec,
    MixtureSpec,
    Values,
    biases,
    rope_of,
)
from lowroll.model.families.llama import experts

KEYS = (
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "full_attention_interval",
    "attn_output_gate",
    "output_gate_type",
    "shared_expert_intermediate_size",
)
LINEAR = "linear_attention"


def qwen3_5(values: Values) -> dict[str, Any]:
    if "attn_output_gate" in values and not flag(values, "attn_output_gate"):
        raise ValueError("attn_output_gate: only attention with a gate is supported")
    if values.get("output_gate_type") not in (None, "swish"):
        raise ValueError("output_gate_type: only swish is supported")
    return _hybrid(values, grouped=False)


def qwen3_5_moe(values: Values) -> dict[str, Any]:
    return {**qwen3_5(values), "mixture": _mixture(values)}


def qwen3_next(values: Values) -> dict[str, Any]:
    return {**_hybrid(values, grouped=True), "mixture": _mixture(values)}


def _mixture(values: Values) -> MixtureSpec:
    size = integer(values, "shared_expert_intermediate_size")
    if size != integer(values, "moe_intermediate_size"):
        raise ValueError(
            f"shared_expert_intermediate_size: {size}; only that of the other experts is supported"
        )
    return replace(experts(values), shared_size=size)


def _hybrid(values: Values, grouped: bool) -> dict[str, Any]:
    kinds = layer_list(values, "layer_types", {LINEAR, FULL}, integer(values, "num_hidden_layers"))
    return {
        **biases(values),
        "norm_offset": 1.0,
        "qk_norm": "head",
        "attention_gate": True,
        "ropes": (rope_of(values, partial=True),),
        "delta": DeltaSpec(
            key_heads=integer(values, "linear_num_key_heads"),
            value_heads=integer(values, "linear_num_value_heads"),
            key_dim=integer(values, "linear_key_head_dim"),
            value_dim=integer(values, "linear_value_head_dim"),
            taps=integer(values, "linear_conv_kernel_dim"),
            grouped=grouped,
        ),
        "layers": tuple(
            LayerSpec(mixer="delta" if kind == LINEAR else "attention") for kind in kinds
        ),
    }
