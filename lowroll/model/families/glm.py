"""GLM-4, dense: half of a head is rotated, in pairs of neighbours, and gate and up are one matrix
in checkpoints. GLM-4-0414 (`glm4`) has norms on both sides of attention and MLP.

GLM-4.5 (`glm4_moe`) is a mixture of experts behind some dense layers, with experts that take every
token.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lowroll.model.config_values import count, flag, integer, positive
from lowroll.model.families.base import MixtureSpec, SigmoidScores, Values, rope_of
from lowroll.model.families.llama import experts

KEYS = (
    "n_routed_experts",
    "n_shared_experts",
    "n_group",
    "topk_group",
    "routed_scaling_factor",
    "first_k_dense_replace",
    "use_qk_norm",
    "num_nextn_predict_layers",
)
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


def glm4_moe(values: Values) -> dict[str, Any]:
    return {
        "mixture": corrected_mixture(values),
        "qkv_bias": flag(values, "attention_bias"),
        "qk_norm": "head" if flag(values, "use_qk_norm") else "",
        "ropes": (rope_of(values, partial=True),),
        "unused": layers_of_drafts(values),
    }


def corrected_mixture(values: Values) -> MixtureSpec:
    mixture = shared_mixture(values)
    scores = _scores(values, mixture.num_experts, mixture.experts_per_token)
    return replace(mixture, scores=scores)


def shared_mixture(values: Values) -> MixtureSpec:
    """Return the mixture of GLM-4.5, without its scores."""
    mixture = experts(values)
    layers = integer(values, "num_hidden_layers")
    dense = count(values, "first_k_dense_replace")
    if dense >= layers:
        raise ValueError(f"first_k_dense_replace: {dense} of {layers} layers leave none to experts")
    shared_size = integer(values, "n_shared_experts") * mixture.expert_size
    return replace(mixture, dense_layers=dense, shared_size=shared_size, shared_gate=False)


def layers_of_drafts(values: Values) -> tuple[str, ...]:
    """Return the prefixes of the tensors of layers that draft tokens, which are not read."""
    layers = integer(values, "num_hidden_layers")
    drafts = count(values, "num_nextn_predict_layers", 0)
    if drafts > layers:
        raise ValueError(f"num_nextn_predict_layers: {drafts} layers of drafts behind {layers}")
    return tuple(f"model.layers.{layers + i}." for i in range(drafts))


def _scores(values: Values, num_experts: int, choices: int) -> SigmoidScores:
    """Return the scores of the router. A group's score is the sum of its two best experts'."""
    groups, kept = integer(values, "n_group"), integer(values, "topk_group")
    if num_experts % groups or num_experts < 2 * groups:
        raise ValueError(f"n_group: {num_experts} experts do not make {groups} groups of 2 or more")
    if kept > groups:
        raise ValueError(f"topk_group: {kept} of {groups} groups (n_group) cannot be kept")
    if choices > kept * (num_experts // groups):
        raise ValueError(
            f"num_experts_per_tok: {choices} are more than the experts of {kept} groups (topk_group)"
        )
    scale = positive(values, "routed_scaling_factor")
    return SigmoidScores(groups=groups, groups_kept=kept, scale=scale)
