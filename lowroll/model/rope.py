"""Rotary position embeddings, half-rotation layout (Su et al. 2021), with Llama 3's frequency
scaling.

Pair i of a head turns by pos * theta^(-2i/d). Llama 3 slows the pairs whose wavelength exceeds the
original context by `factor`, keeps the fast ones, and blends in between.

Legend: T tokens, H heads, d head size.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lowroll.model.spec import ModelSpec


def inverse_frequencies(spec: ModelSpec) -> Tensor:
    """Return radians a position of the d/2 pairs, float32."""
    freqs = 1.0 / spec.rope_theta ** (
        torch.arange(0, spec.head_dim, 2, dtype=torch.float32) / spec.head_dim
    )
    scaling = spec.rope_scaling
    if scaling is None:
        return freqs
    wavelength = 2 * math.pi / freqs
    blend = (scaling.original_max_position / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blend = blend.clamp(0, 1)
    return blend * freqs + (1 - blend) * freqs / scaling.factor


def rotations(pos_T: Tensor, freqs: Tensor) -> tuple[Tensor, Tensor]:
    """Return (cos, sin) of every token's angles, each [T, 1, d/2] float32."""
    angles = pos_T.float()[:, None, None] * freqs
    return angles.cos(), angles.sin()
