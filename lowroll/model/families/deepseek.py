"""DeepSeek-V2 and V3, GLM-4.7-Flash (`glm4_moe_lite`): multi-head latent attention, and a mixture
as in GLM-4.5 (`families.glm`). Moonlight and R1 are `deepseek_v3`.
"""

from __future__ import annotations

from typing import Any

from lowroll.model.config_values import count, flag, integer, layer_list, positive
from lowroll.model.families.base import LatentSpec, Values, rope_of, yarn_magnitude
from lowroll.model.families.glm import KEYS as GLM_KEYS
from lowroll.model.families.glm import corrected_mixture, layers_of_drafts, shared_mixture

KEYS = (
    *GLM_KEYS,
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "rope_interleave",
    "mlp_layer_types",
    "scoring_func",
    "topk_method",
    "moe_layer_freq",
)


def deepseek_v2(values: Values) -> dict[str, Any]:
    _only(values, "scoring_func", "softmax")
    _only(values, "topk_method", "greedy")
    if positive(values, "routed_scaling_factor") != 1 or flag(values, "norm_topk_prob"):
        raise ValueError(
            "routed_scaling_factor, norm_topk_prob: DeepSeek-V2 with 1 and false is supported"
        )
    return {**_latent(values, interleaved=True), "mixture": shared_mixture(values)}


def deepseek_v3(values: Values) -> dict[str, Any]:
    _only(values, "scoring_func", "sigmoid")
    _only(values, "topk_method", "noaux_tc")
    return {
        **_latent(values, flag(values, "rope_interleave")),
        "mixture": corrected_mixture(values),
        "unused": layers_of_drafts(values),
    }


def glm4_moe_lite(values: Values) -> dict[str, Any]:
    layers = integer(values, "num_hidden_layers")
    kinds = layer_list(values, "mlp_layer_types", {"dense", "sparse"}, layers)
    dense = kinds.index("sparse") if "sparse" in kinds else layers
    if "dense" in kinds[dense:] or count(values, "first_k_dense_replace", dense) != dense:
        raise ValueError(
            "mlp_layer_types, first_k_dense_replace: expected the same dense layers, all in front of "
            "the others"
        )
    return deepseek_v3({**values, "first_k_dense_replace": dense})


def _only(values: Values, key: str, supported: str) -> None:
    if values.get(key) not in (None, supported):
        raise ValueError(f"{key}: {values[key]!r} is not supported; supported: {supported}")


def _latent(values: Values, interleaved: bool) -> dict[str, Any]:
    heads = integer(values, "num_attention_heads")
    if integer(values, "num_key_value_heads", heads) != heads:
        raise ValueError("num_key_value_heads: latent attention has keys of every query head")
    if flag(values, "attention_bias"):
        raise ValueError("attention_bias: only latent attention without biases is supported")
    if values.get("moe_layer_freq") not in (None, 1):
        raise ValueError("moe_layer_freq: experts in every layer are supported, not in some")
    latent = LatentSpec(
        query_rank=0 if values["q_lora_rank"] is None else integer(values, "q_lora_rank"),
        kv_rank=integer(values, "kv_lora_rank"),
        nope_dim=integer(values, "qk_nope_head_dim"),
        rope_dim=integer(values, "qk_rope_head_dim"),
        value_dim=integer(values, "v_head_dim"),
    )
    if latent.nope_dim % 2 or latent.rope_dim % 2:
        raise ValueError(
            f"qk_nope_head_dim, qk_rope_head_dim: {latent.nope_dim} and {latent.rope_dim}; heads are "
            "made of pairs"
        )
    if latent.value_dim > latent.head_dim:
        raise ValueError(
            f"v_head_dim: {latent.value_dim} are more than the {latent.head_dim} of a head's keys"
        )
    rotated = {**values, "head_dim": latent.rope_dim}
    return {
        "latent": latent,
        "ropes": (rope_of(rotated, interleaved=interleaved),),
        "query_scale": _query_scale(values["rope_parameters"]),
    }


def _query_scale(rope: Values) -> float:
    """Return the factor of scores beside 1 / sqrt(head_dim), as transformers."""
    if rope["rope_type"] == "default" or not rope.get("mscale_all_dim"):
        return 1.0
    weight = positive(rope, "mscale_all_dim")
    return yarn_magnitude(positive(rope, "factor"), weight) ** 2
