"""Llama 2 and 3, Mistral, Qwen2 and 2.5, Qwen3 and Qwen3-MoE, Seed-OSS: pre-norms, SwiGLU,
half-rotation."""

from __future__ import annotations

from typing import Any

from lowroll.model.config_values import expert_count_key, flag, integer
from lowroll.model.families.base import (
    MixtureSpec,
    Values,
    biases,
    same_window,
    sliding_layers,
    windowed,
)


def llama(values: Values) -> dict[str, Any]:
    return {**biases(values), "mlp_bias": flag(values, "mlp_bias")}


def mistral(values: Values) -> dict[str, Any]:
    return {"layers": same_window(values)}


def qwen2(values: Values) -> dict[str, Any]:
    return {"qkv_bias": True, "layers": windowed(values, sliding_layers(values))}


def qwen3(values: Values) -> dict[str, Any]:
    return {
        **biases(values),
        "qk_norm": "head",
        "layers": windowed(values, sliding_layers(values)),
    }


def qwen3_moe(values: Values) -> dict[str, Any]:
    return {
        **biases(values),
        "qk_norm": "head",
        "layers": same_window(values),
        "mixture": experts(values),
    }


def seed_oss(values: Values) -> dict[str, Any]:
    return {
        "qkv_bias": flag(values, "attention_bias"),
        "o_bias": flag(values, "attention_out_bias"),
        "mlp_bias": flag(values, "mlp_bias"),
    }


def experts(values: Values) -> MixtureSpec:
    if values.get("mlp_only_layers") or values.get("decoder_sparse_step", 1) != 1:
        raise ValueError(
            "mlp_only_layers, decoder_sparse_step: experts in every layer are supported, not in "
            "some"
        )
    count = integer(values, expert_count_key(values))
    choices = integer(values, "num_experts_per_tok")
    if choices > count:
        raise ValueError(f"num_experts_per_tok: a token cannot have {choices} of {count} experts")
    return MixtureSpec(
        num_experts=count,
        experts_per_token=choices,
        expert_size=integer(values, "moe_intermediate_size"),
        # Qwen3.5 has no such key, and always does
        renormalize=flag({"norm_topk_prob": True, **values}, "norm_topk_prob"),
    )
