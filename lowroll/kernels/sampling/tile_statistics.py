"""The first pass over the logits: maximum and mass of each tile and block, and a tile's winner.

    mass = sum exp((x - maximum of the tile) / T)
    winner = argmax x / T + noise       `gumbel_noise`; of a greedy row argmax x

Legend: `kernels.sampling`; C = ceil(V / TILE) tiles, L = C * TILE / BLOCK blocks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lowroll.kernels.launch import after_others, early_start, jit, tl
from lowroll.kernels.sampling.gumbel_noise import best_of

TILE = 2048
BLOCK = 128
WARPS = 4


class TileScores(NamedTuple):
    """Scores of tiles and blocks, float32. winner_BC: int32, the id of best_BC; both None without
    noise. peaks_BL, parts_BL: each block's maximum (-inf beyond the vocabulary) and part of the
    tile's mass; None unless asked for."""

    largest_BC: Tensor
    mass_BC: Tensor
    best_BC: Tensor | None
    winner_BC: Tensor | None
    peaks_BL: Tensor | None
    parts_BL: Tensor | None


def tiles_of(
    logits_BV: Tensor,
    temperature_B: Tensor | None,
    greedy_B: Tensor | None,
    blocks: bool,
    noise: tuple[Tensor, Tensor] | None = None,
) -> TileScores:
    """Run the pass. logits_BV: rows contiguous or expanded. noise: int64 keys and positions, for
    winners."""
    rows, tokens = logits_BV.shape
    aligned = tokens % 16 == 0
    if aligned and (logits_BV.stride(0) % 16 or logits_BV.data_ptr() % 16):
        logits_BV = logits_BV.clone(memory_format=torch.contiguous_format)
    tiles = -(-tokens // TILE)
    largest_BC = torch.empty((rows, tiles), dtype=torch.float32, device=logits_BV.device)
    mass_BC = torch.empty_like(largest_BC)
    best_BC = None if noise is None else torch.empty_like(largest_BC)
    winner_BC = None if noise is None else torch.empty_like(largest_BC, dtype=torch.int32)
    keys_B, positions_B = noise or (None, None)
    peaks_BL = largest_BC.new_empty((rows, tiles * TILE // BLOCK)) if blocks else None
    parts_BL = None if peaks_BL is None else torch.empty_like(peaks_BL)
    _masses_kernel[(rows * tiles,)](
        logits_BV,
        temperature_B,
        greedy_B,
        keys_B,
        positions_B,
        largest_BC,
        mass_BC,
        best_BC,
        winner_BC,
        peaks_BL,
        parts_BL,
        tokens,
        tiles,
        logits_BV.stride(0),
        TILE=TILE,
        BLOCK=BLOCK,
        ALIGNED=aligned,
        num_warps=WARPS,
        enable_fp_fusion=True,
        **early_start(),
    )
    return TileScores(largest_BC, mass_BC, best_BC, winner_BC, peaks_BL, parts_BL)


# -- Triton ----------------------------------------------------------------------------------------


@jit
def shift_of(largest, factor):
    """Return the exponent of 2 that a tile's masses leave out, rounded once."""
    return tl.where(largest == float("-inf"), 0.0, largest * factor)


@jit
def temperature_of(temperature_ptr, greedy_ptr, row):
    """Load a row's temperature; 1 for a greedy row."""
    temperature = 1.0
    if temperature_ptr is not None:
        temperature = tl.load(temperature_ptr + row)
    if greedy_ptr is not None:
        temperature = tl.where(tl.load(greedy_ptr + row) != 0, 1.0, temperature)
    return temperature


@jit
def row_of(largest_ptr, mass_ptr, row, tiles, factor, TILES: tl.constexpr):
    """Return a row's tile maxima, maximum and shift, and tiles' float64 masses under that shift."""
    offs_c = tl.arange(0, TILES)
    max_c = tl.load(largest_ptr + row * tiles + offs_c, mask=offs_c < tiles, other=float("-inf"))
    mass_c = tl.load(mass_ptr + row * tiles + offs_c, mask=offs_c < tiles, other=0.0).to(tl.float64)
    largest = tl.max(max_c, 0)
    shift = shift_of(largest, factor)
    mass_c = tl.where(mass_c == 0, 0.0, mass_c * tl.exp2(shift_of(max_c, factor) - shift))
    return max_c, largest, shift, mass_c


@jit
def is_distribution(largest, total):
    return (
        (total > 0) & (total < float("inf")) & (largest > float("-inf")) & (largest < float("inf"))
    )


# The compiler picks a layout, and so the order of sums, by the stride, which is 0 for an expanded
# row.
@jit(do_not_specialize=["stride"])
def _masses_kernel(
    logits_ptr,
    temperature_ptr,
    greedy_ptr,
    keys_ptr,
    positions_ptr,
    largest_ptr,
    mass_ptr,
    best_ptr,
    winner_ptr,
    peaks_ptr,
    parts_ptr,
    tokens,
    tiles,
    stride,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr,
    EARLY: tl.constexpr,
):
    after_others(EARLY)
    row, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    factor = 1.4426950408889634 / temperature_of(temperature_ptr, greedy_ptr, row)
    row_start = row.to(tl.int64) * stride
    if ALIGNED:
        row_start = tl.multiple_of(row_start, 16)
    logits_ptr += row_start
    offs_n = tile * TILE + tl.arange(0, TILE)
    x_n = tl.load(logits_ptr + offs_n, mask=offs_n < tokens, other=float("-inf")).to(tl.float32)
    largest = tl.max(x_n, 0)
    p_n = tl.exp2(tl.fma(x_n, factor, -shift_of(largest, factor)))
    tl.store(largest_ptr + row * tiles + tile, largest)
    tl.store(mass_ptr + row * tiles + tile, tl.sum(p_n, 0))
    if best_ptr is not None:
        greedy = row < 0
        if greedy_ptr is not None:
            greedy = tl.load(greedy_ptr + row) != 0
        best, winner = best_of(
            logits_ptr, tile, tokens, factor, greedy,
            tl.load(keys_ptr + row), tl.load(positions_ptr + row), 0.0, 0, False, TILE,
        )  # fmt: skip
        tl.store(best_ptr + row * tiles + tile, best)
        tl.store(winner_ptr + row * tiles + tile, winner)
    if peaks_ptr is not None:
        offs_l = (row * tiles + tile) * (TILE // BLOCK) + tl.arange(0, TILE // BLOCK)
        tl.store(peaks_ptr + offs_l, tl.max(tl.reshape(x_n, [TILE // BLOCK, BLOCK]), 1))
        tl.store(parts_ptr + offs_l, tl.sum(tl.reshape(p_n, [TILE // BLOCK, BLOCK]), 1))
