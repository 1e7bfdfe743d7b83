"""OLMo 2 and 3: norms after attention and MLP alone, and one norm over all heads of q, and of k.
OLMo 3 has windows in three of four layers, and scales positions in the others alone."""

from __future__ import annotations

from typing import Any

from lowroll.model.families.base import (
    LayerSpec,
    Values,
    biases,
    ropes_by_type,
    sliding_layers,
    windowed,
)

NORMS = (
    ("attention_out_norm", "post_attention_layernorm"),
    ("mlp_out_norm", "post_feedforward_layernorm"),
)


def olmo2(values: Values) -> dict[str, Any]:
    return {**biases(values), "norms": NORMS, "qk_norm": "whole"}


def olmo3(values: Values) -> dict[str, Any]:
    sliding = sliding_layers(values)
    windows = windowed(values, sliding) or (LayerSpec(),) * len(sliding)
    return {
        **olmo2(values),
        "ropes": ropes_by_type(values),
        "layers": tuple(
            LayerSpec(int(is_sliding), layer.window)
            for is_sliding, layer in zip(sliding, windows, strict=True)
        ),
    }
