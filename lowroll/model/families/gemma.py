"""Gemma 3, text: windows in five of six layers with a base of their own, four norms of 1 + w a
block, GELU, and embeddings scaled by the root of the hidden size."""

from __future__ import annotations

from typing import Any

from lowroll.model.config_values import flag, integer, positive
from lowroll.model.families.base import Values, biases, head_dim, sliding_ropes

NORMS = (
    ("input_norm", "input_layernorm"),
    ("attention_out_norm", "post_attention_layernorm"),
    ("post_attention_norm", "pre_feedforward_layernorm"),
    ("mlp_out_norm", "post_feedforward_layernorm"),
)
KEYS = (
    "hidden_activation",
    "query_pre_attn_scalar",
    "final_logit_softcapping",
    "attn_logit_softcapping",
    "use_bidirectional_attention",
    "rope_local_base_freq",
    "sliding_window_pattern",
)


def gemma3_text(values: Values) -> dict[str, Any]:
    for key in ("final_logit_softcapping", "attn_logit_softcapping"):
        if values.get(key) is not None:
            raise ValueError(f"{key}: softcapping is not supported; Gemma 3 has none")
    if flag(values, "use_bidirectional_attention"):
        raise ValueError("use_bidirectional_attention: only causal attention is supported")
    return {
        **biases(values),
        **sliding_ropes(values),
        "norms": NORMS,
        "norm_offset": 1.0,
        "qk_norm": "head",
        "activation": "gelu_tanh",
        "embedding_scale": integer(values, "hidden_size") ** 0.5,
        "query_scale": (head_dim(values) / positive(values, "query_pre_attn_scalar")) ** 0.5,
    }
