"""GPT-OSS: windows in every other layer, attention sinks, biases everywhere, and experts whose
SwiGLU is clamped, stored as one tensor each in bfloat16 or MXFP4.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lowroll.model.config_values import positive
from lowroll.model.families.base import ClampedGate, Values, biases, sliding_layers, windowed
from lowroll.model.families.llama import experts

KEYS = ("swiglu_alpha", "swiglu_limit")  # older transformers has these as constants


def gpt_oss(values: Values) -> dict[str, Any]:
    # the softmax over the chosen experts is that over all, normalized
    mixture = experts({**values, "moe_intermediate_size": values["intermediate_size"]})
    return {
        **biases(values),
        "mixture": replace(
            mixture,
            renormalize=True,
            has_biases=True,
            clamped_gate=ClampedGate(
                positive(values, "swiglu_limit", 7.0), positive(values, "swiglu_alpha", 1.702)
            ),
            stacked=True,
        ),
        "attention_sinks": True,
        "layers": windowed(values, sliding_layers(values)),
    }
