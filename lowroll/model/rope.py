"""Rotary position embeddings (Su et al. 2021), with linear, Llama 3's and YaRN's scaling.

Pair i of a head turns by pos * theta^(-2i/d). Llama 3 slows the pairs whose wavelength exceeds the
original context by `factor`, keeps the fast ones, and blends in between; YaRN (Peng et al. 2023,
arXiv 2309.00071) blends by the turns of a pair within the original context.

Legend: `model`; R ropes.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lowroll.model.families.base import Rope, RopeScaling
from lowroll.model.spec import ModelSpec


def inverse_frequencies(spec: ModelSpec) -> Tensor:
    """Return radians a position of each rope's d/2 pairs, and at last for layers without positions:
    [R + 1, d/2] float32. Pairs that are not rotated have zeros."""
    rows = [torch.zeros(spec.head_dim // 2) for _ in (*spec.ropes, None)]
    for row, rope in zip(rows, spec.ropes, strict=False):
        row[: rope.dims // 2] = _frequencies(rope)
    return torch.stack(rows)


def magnitudes(spec: ModelSpec) -> Tensor | None:
    """Return the factors of cos and sin, [R + 1, 1, 1, d/2], or None if all are 1."""
    sizes = torch.ones(len(spec.ropes) + 1, 1, 1, spec.head_dim // 2)
    for row, rope in zip(sizes, spec.ropes, strict=False):
        row[..., : rope.dims // 2] = 1.0 if rope.scaling is None else rope.scaling.magnitude
    return None if bool((sizes == 1).all()) else sizes


def _frequencies(rope: Rope) -> Tensor:
    freqs = 1.0 / rope.theta ** (torch.arange(0, rope.dims, 2, dtype=torch.float32) / rope.dims)
    scaling = rope.scaling
    if scaling is None:
        return freqs
    if scaling.kind == "linear":
        return freqs / scaling.factor
    kept = _kept_llama3(freqs, scaling) if scaling.kind == "llama3" else _kept_yarn(rope, scaling)
    return kept * freqs + (1 - kept) * freqs / scaling.factor


def _kept_llama3(freqs: Tensor, scaling: RopeScaling) -> Tensor:
    wavelength = 2 * math.pi / freqs
    kept = (scaling.original_max_position / wavelength - scaling.low) / (scaling.high - scaling.low)
    return kept.clamp(0, 1)


def _kept_yarn(rope: Rope, scaling: RopeScaling) -> Tensor:
    """Return the kept share of each pair's frequency: all from `high` turns, none up to `low`."""

    def pair_of(turns: float) -> float:
        context = scaling.original_max_position
        return rope.dims * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    first, last = pair_of(scaling.high), pair_of(scaling.low)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rope.dims - 1)
    pairs = torch.arange(rope.dims // 2, dtype=torch.float32)
    return 1 - ((pairs - first) / max(last - first, 0.001)).clamp(0, 1)


def head_order(spec: ModelSpec) -> Tensor | None:
    """Return the order in which kernels need a head's numbers, int64 [d], or None for their own:
    they rotate number i with number i + d/2. ValueError where layers differ."""
    orders = {_order(rope, spec.head_dim) for rope in spec.ropes}
    if len(orders) > 1:
        raise ValueError("rope_parameters: all layers must rotate the same numbers of a head")
    (order,) = orders
    return None if order == tuple(range(spec.head_dim)) else torch.tensor(order)


def _order(rope: Rope, head_dim: int) -> tuple[int, ...]:
    """Return the firsts of all pairs, then the seconds. Unrotated numbers make pairs."""
    if rope.interleaved:
        firsts, seconds = range(0, rope.dims, 2), range(1, rope.dims, 2)
    else:
        firsts, seconds = range(rope.dims // 2), range(rope.dims // 2, rope.dims)
    unrotated = range(rope.dims, head_dim)
    middle = len(unrotated) // 2
    return (*firsts, *unrotated[:middle], *seconds, *unrotated[middle:])


def rotations(pos_T: Tensor, freqs: Tensor) -> tuple[Tensor, Tensor]:
    """Return (cos, sin) of every token's angles, float32 [T, 1, d/2], or [R, T, 1, d/2] of
    frequencies [R, d/2]."""
    angles = pos_T.float()[:, None, None] * freqs[..., None, None, :]
    return angles.cos(), angles.sin()
