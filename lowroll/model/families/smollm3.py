"""SmolLM3: a Llama of which every fourth layer has no positions."""

from __future__ import annotations

from typing import Any

from lowroll.model.config_values import flag, integer, layer_list
from lowroll.model.families.base import LayerSpec, Values, biases, sliding_layers, windowed

KEYS = ("no_rope_layers", "no_rope_layer_interval")


def smollm3(values: Values) -> dict[str, Any]:
    count = integer(values, "num_hidden_layers")
    rotated = layer_list(values, "no_rope_layers", {0, 1}, count)  # despite its name: 1 has one
    windows = windowed(values, sliding_layers(values)) or (LayerSpec(),) * count
    return {
        **biases(values),
        "mlp_bias": flag(values, "mlp_bias"),
        "layers": tuple(
            LayerSpec(rope=0 if has_rope else None, window=layer.window)
            for has_rope, layer in zip(rotated, windows, strict=True)
        ),
    }
