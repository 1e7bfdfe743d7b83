"""OLMo 2 and 3: norms after attention and MLP alone, and one norm over all heads of q, and of k.
OLMo 3 has windows in three of four layers, and scales positions in the others alone.
"""

from __future__ import annotations

from typing import Any

from lowroll.model.families.base import Values, biases, sliding_ropes

NORMS = (
    ("attention_out_norm", "post_attention_layernorm"),
    ("mlp_out_norm", "post_feedforward_layernorm"),
)


def olmo2(values: Values) -> dict[str, Any]:
    return {**biases(values), "norms": NORMS, "qk_norm": "whole"}


def olmo3(values: Values) -> dict[str, Any]:
    return {**olmo2(values), **sliding_ropes(values)}
