"""One token a row by Gumbel-max, with its log-prob, in one pass over the logits.

    token = argmax over the ids that stay of x / T + noise(key, position, id)

with the probability of softmax(x / T) (docs/algorithms.md). Of equal scores the lower id wins; a
logit of -inf never does.

On CUDA one kernel reads each tile of the vocabulary once (`tile_statistics`), another filters, and the last
compares winners and sums masses in float64. If filters drop a tile's winner, the tile is read again
only if that score reaches the best remaining winner. A row's bits are the same in every batch.
Devices' logarithms differ in last bits, so tokens may differ where scores are within 1e-5.

Greedy rows take the argmax and the log-prob at temperature 1. A row without a distribution (NaN,
+inf, or nothing but -inf) gets token 0 and log-prob NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowroll.kernels.launch import after_others, block, early_start, jit, tl, triton_supports
from lowroll.kernels.sampling import avx2
from lowroll.kernels.sampling.filters import Filters, Kept, keep
from lowroll.kernels.sampling.gumbel_noise import STREAM, best_of, gumbel
from lowroll.kernels.sampling.tile_statistics import (
    TILE,
    WARPS,
    is_distribution,
    row_of,
    temperature_of,
    tiles_of,
)
from lowroll.kernels.sampling.token_logprobs import log_prob

NOISE_ROWS = 16  # noise rows that plain torch makes at once


def draw(
    logits_BV: Tensor,
    keys_B: Tensor,
    positions_B: Tensor,
    temperature_B: Tensor | None = None,
    greedy_B: Tensor | None = None,
    filters: Filters | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw one token a row: ids int64 [B] and log-probs float32 [B].

    logits_BV: rows contiguous or expanded, left unchanged. keys_B, positions_B: int64, the noise.
    temperature_B: float32 (None is 1). greedy_B: bool (None is all False).
    """
    if not triton_supports(logits_BV):
        return _plain(logits_BV, keys_B, positions_B, temperature_B, greedy_B, filters)
    rows, tokens = logits_BV.shape
    if logits_BV.stride(1) != 1:
        logits_BV = logits_BV.contiguous()
    noise = keys_B, positions_B
    tiles = tiles_of(logits_BV, temperature_B, greedy_B, filters is not None, noise)
    kept: Kept | None = None
    if filters is not None:
        kept = keep(logits_BV, filters, temperature_B, greedy_B, tiles)
    num_tiles = tiles.mass_BC.shape[1]
    tokens_B = torch.empty(rows, dtype=torch.int64, device=logits_BV.device)
    logprobs_B = torch.empty(rows, dtype=torch.float32, device=logits_BV.device)
    _pick_kernel[(rows,)](
        logits_BV,
        keys_B,
        positions_B,
        temperature_B,
        greedy_B,
        None if kept is None else kept.floor_B,
        None if kept is None else kept.last_B,
        tiles.largest_BC,
        tiles.mass_BC,
        tiles.best_BC,
        tiles.winner_BC,
        tokens_B,
        logprobs_B,
        tokens,
        num_tiles,
        logits_BV.stride(0),
        TILE=TILE,
        TILES=max(16, block(num_tiles)),
        num_warps=WARPS,
        enable_fp_fusion=True,
        **early_start(),
    )
    return tokens_B, logprobs_B


def _plain(
    logits_BV: Tensor,
    keys_B: Tensor,
    positions_B: Tensor,
    temperature_B: Tensor | None,
    greedy_B: Tensor | None,
    filters: Filters | None,
) -> tuple[Tensor, Tensor]:
    scaled_BV = _scale_and_filter(logits_BV, temperature_B, greedy_B, filters)
    logp_BV = torch.log_softmax(scaled_BV, dim=-1)
    if avx2.supports_device(scaled_BV.device):
        tokens_B = avx2.winners(scaled_BV, keys_B, positions_B, greedy_B, STREAM)
    else:
        tokens_B = winners(scaled_BV, keys_B, positions_B, greedy_B)
    logprobs_B = logp_BV.gather(-1, tokens_B[:, None])[:, 0]
    return tokens_B.masked_fill(logprobs_B.isnan(), 0), logprobs_B


def winners(
    scaled_BV: Tensor, keys_B: Tensor, positions_B: Tensor, greedy_B: Tensor | None
) -> Tensor:
    """Return the winning id of each row in plain torch, int64 [B]."""
    winner_parts = []
    columns = (scaled_BV, keys_B, positions_B)
    for scaled_RV, keys_R, positions_R in zip(*(c.split(NOISE_ROWS) for c in columns), strict=True):
        noise_RV = gumbel(keys_R, positions_R, scaled_RV.shape[1])
        winner_parts.append((scaled_RV + noise_RV).argmax(-1))
    tokens_B = torch.cat(winner_parts)
    if greedy_B is not None:
        tokens_B = torch.where(greedy_B, scaled_BV.argmax(-1), tokens_B)
    return tokens_B


def distribution(
    logits_BV: Tensor,
    temperature_B: Tensor | None,
    greedy_B: Tensor | None,
    filters: Filters | None,
) -> Tensor:
    """Return the log-probs, float32 [B, V], that `draw` draws from, or records for greedy rows;
    -inf where filters drop."""
    return torch.log_softmax(_scale_and_filter(logits_BV, temperature_B, greedy_B, filters), dim=-1)


def _scale_and_filter(
    logits_BV: Tensor,
    temperature_B: Tensor | None,
    greedy_B: Tensor | None,
    filters: Filters | None,
) -> Tensor:
    logits_BV = logits_BV.float()
    kept_BV = None
    if filters is not None:
        kept_BV = keep(logits_BV, filters, temperature_B, greedy_B).mask(logits_BV)
    if temperature_B is not None:
        if greedy_B is not None:
            temperature_B = torch.where(greedy_B, 1.0, temperature_B)
        logits_BV = logits_BV / temperature_B[:, None]
    if kept_BV is not None:
        logits_BV = logits_BV.masked_fill(~kept_BV, -torch.inf)
    return logits_BV


# -- Triton ----------------------------------------------------------------------------------------


@jit
def _pick_kernel(
    logits_ptr,
    keys_ptr,
    positions_ptr,
    temperature_ptr,
    greedy_ptr,
    floor_ptr,
    last_ptr,
    largest_ptr,
    mass_ptr,
    best_ptr,
    winner_ptr,
    token_ptr,
    logp_ptr,
    tokens,
    tiles,
    stride,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    EARLY: tl.constexpr,
):
    after_others(EARLY)
    row = tl.program_id(0)
    logits_ptr += row.to(tl.int64) * stride
    temperature = temperature_of(temperature_ptr, greedy_ptr, row)
    factor = 1.4426950408889634 / temperature
    _, largest, shift, mass_c = row_of(largest_ptr, mass_ptr, row, tiles, factor, TILES)
    total = tl.sum(mass_c, 0)

    offs_c = tl.arange(0, TILES)
    live_c = offs_c < tiles
    best_c = tl.load(best_ptr + row * tiles + offs_c, mask=live_c, other=float("-inf"))
    winner_c = tl.load(winner_ptr + row * tiles + offs_c, mask=live_c, other=2147483647)
    stays_c = live_c
    if floor_ptr is not None:
        floor, last = tl.load(floor_ptr + row), tl.load(last_ptr + row)
        x_c = tl.load(logits_ptr + winner_c, mask=live_c, other=float("-inf")).to(tl.float32)
        stays_c = (x_c > floor) | ((x_c == floor) & (winner_c <= last))
    score = tl.max(tl.where(stays_c, best_c, float("-inf")), 0)
    token = tl.min(tl.where(stays_c & (best_c == score), winner_c, 2147483647), 0)
    if floor_ptr is not None:
        key, position = tl.load(keys_ptr + row), tl.load(positions_ptr + row)
        # a tile without mass cannot win
        bound_c = tl.where(stays_c | (mass_c == 0), float("-inf"), best_c)
        bound = tl.max(bound_c, 0)
        while (bound >= score) & (bound > float("-inf")):
            tile = tl.min(tl.where(bound_c == bound, offs_c, TILES - 1), 0)
            best, winner = best_of(
                logits_ptr, tile, tokens, factor, False, key, position, floor, last, True, TILE
            )
            token = tl.where(best == score, tl.minimum(winner, token), token)
            token = tl.where(best > score, winner, token)
            score = tl.maximum(best, score)
            bound_c = tl.where(offs_c == tile, float("-inf"), bound_c)
            bound = tl.max(bound_c, 0)

    finite = is_distribution(largest, total)
    token = tl.where(finite, token, 0)
    chosen = tl.load(logits_ptr + token).to(tl.float32)
    logp = log_prob(chosen, largest, shift, total, factor, temperature)
    tl.store(token_ptr + row, token.to(tl.int64))
    tl.store(logp_ptr + row, tl.where(finite, logp, float("nan")).to(tl.float32))
