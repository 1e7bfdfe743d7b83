"""Gemma 3, text: windows in five of six layers with a base of their own, four norms of 1 + w a
block, GELU, and embeddings scaled by the root of the hidden size."""

from __future__ import annotations

from typing import Any

from lowroll.model.config_values import flag, integer, positive
from lowroll.model.families.base import (
    LayerSpec,
    Values,
    biases,
    head_dim,
    ropes_by_type,
    sliding_layers,
    windowed,
)

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
    sliding = sliding_layers(values)
    windows = windowed(values, sliding) or (LayerSpec(),) * len(sliding)
    return {
        **biases(values),
        "norms": NORMS,
        "norm_offset": 1.0,
        "qk_norm": "head",
        "activation": "gelu_tanh",
        "embedding_scale": integer(values, "hidden_size") ** 0.5,
        "query_scale": (head_dim(values) / positive(values, "query_pre_attn_scalar")) ** 0.5,
        "ropes": ropes_by_type(values),
        "layers": tuple(
            LayerSpec(rope=int(is_sliding), window=layer.window)  # full layers' rope is the first
            for is_sliding, layer in zip(sliding, windows, strict=True)
        ),
    }
