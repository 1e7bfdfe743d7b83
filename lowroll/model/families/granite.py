"""Granite 3 and 4, dense: a Llama whose embeddings, scores, updates and logits are scaled by
constants of the configuration."""

from __future__ import annotations

from typing import Any

from lowroll.model.config_values import flag, positive
from lowroll.model.families.base import Values, biases, head_dim

KEYS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")


def granite(values: Values) -> dict[str, Any]:
    return {
        **biases(values),
        "mlp_bias": flag(values, "mlp_bias"),
        "embedding_scale": positive(values, "embedding_multiplier"),
        "query_scale": positive(values, "attention_multiplier") * head_dim(values) ** 0.5,
        "update_scale": positive(values, "residual_multiplier"),
        "hidden_scale": 1 / positive(values, "logits_scaling"),
    }
