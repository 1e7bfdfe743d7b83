"""Top-k, top-p and min-p by a search instead of a sort.

A row's logits x are ordered by size, equal ones by lower id. In turn,

    top-k  keeps the first k
    top-p  keeps x if the mass before it is less than p of what is left, with masses exp(x / T)
    min-p  keeps x >= max + T log(min_p)

so a threshold describes the result: x > floor, and of those equal to it ids up to `last`. Logits
are ordered before the division by T, whose rounding could make unequal ones equal.

On CUDA one program a row reads only blocks that can hold the threshold. The maxima of blocks bound
the k-th largest logit, and their masses the floor of top-p. Passes over blocks above the bound
divide the interval by four until at most NEAR numbers are left, which are searched in registers
(`threshold_search`).

Legend: `kernels.sampling`; L blocks of a row, R rows with filters.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lowroll.kernels.launch import after_others, block, early_start, jit, tl, triton_supports
from lowroll.kernels.sampling.threshold_search import (
    LOWEST,
    key_of,
    list_blocks,
    mass_of,
    reaching,
    search,
    value_of,
    weigh,
)
from lowroll.kernels.sampling.tile_statistics import (
    BLOCK,
    TILE,
    TileScores,
    is_distribution,
    row_of,
    shift_of,
    temperature_of,
    tiles_of,
)

GROUP = 16  # blocks read at a time
NEAR = 1024  # numbers searched in registers
AT_ONCE = 64  # blocks expected to hold at most NEAR numbers
WARPS = 16


@dataclass(frozen=True)
class Filters:
    """Filter settings of B rows. top_k_B: int64, V or more is off. top_p_B: float64, 1 is off.
    log_min_p_B: float64, -inf is off."""

    top_k_B: Tensor
    top_p_B: Tensor
    log_min_p_B: Tensor

    def first(self, rows: int) -> Filters:
        return Filters(self.top_k_B[:rows], self.top_p_B[:rows], self.log_min_p_B[:rows])


@dataclass(frozen=True)
class Kept:
    """Thresholds of B rows: floor_B float32, last_B int64."""

    floor_B: Tensor
    last_B: Tensor

    def mask(self, logits_BV: Tensor) -> Tensor:
        """Return which logits stay, bool [B, V]. NaN does."""
        ids_V = torch.arange(logits_BV.shape[1], device=logits_BV.device)
        floor_B1, last_B1 = self.floor_B[:, None], self.last_B[:, None]
        return ~((logits_BV < floor_B1) | ((logits_BV == floor_B1) & (ids_V > last_B1)))


def keep(
    logits_BV: Tensor,
    filters: Filters,
    temperature_B: Tensor | None = None,
    greedy_B: Tensor | None = None,
    tiles: TileScores | None = None,
) -> Kept:
    """Filter each row; a greedy row, or one without a distribution, keeps all.

    logits_BV: rows contiguous or expanded. temperature_B: float32, None is 1. tiles: of these
    logits, with blocks; on CUDA their masses become those of what stays.
    """
    if not triton_supports(logits_BV):
        return _plain(logits_BV, filters, temperature_B, greedy_B)
    if logits_BV.stride(1) != 1:
        logits_BV = logits_BV.contiguous()
    if tiles is None:
        tiles = tiles_of(logits_BV, temperature_B, greedy_B, blocks=True)
    rows, tokens = logits_BV.shape
    assert tiles.peaks_BL is not None and tiles.parts_BL is not None
    blocks, device = tiles.peaks_BL.shape[1], logits_BV.device
    floor_B = torch.empty(rows, dtype=torch.float32, device=device)
    last_B = torch.empty(rows, dtype=torch.int64, device=device)
    _keep_kernel[(rows,)](
        logits_BV,
        temperature_B,
        greedy_B,
        filters.top_k_B,
        filters.top_p_B,
        filters.log_min_p_B,
        tiles.largest_BC,
        tiles.mass_BC,
        tiles.peaks_BL,
        torch.empty((rows, blocks), dtype=torch.int32, device=device),
        torch.empty((rows, NEAR), dtype=torch.float32, device=device),
        tiles.parts_BL,
        floor_B,
        last_B,
        tokens,
        tiles.mass_BC.shape[1],
        logits_BV.stride(0),
        TILES=max(16, block(tiles.mass_BC.shape[1])),
        EACH=TILE // BLOCK,
        BLOCK=BLOCK,
        GROUP=GROUP,
        NEAR=NEAR,
        AT_ONCE=AT_ONCE,
        num_warps=WARPS,
        **early_start(),
    )
    return Kept(floor_B, last_B)


def _plain(
    logits_BV: Tensor, filters: Filters, temperature_B: Tensor | None, greedy_B: Tensor | None
) -> Kept:
    rows, tokens = logits_BV.shape
    is_ranked_B = (filters.top_k_B < tokens) | (filters.top_p_B < 1)
    if greedy_B is not None:
        is_ranked_B = is_ranked_B & ~greedy_B
    if is_ranked_B.is_cuda:  # finding the rows with filters would wait
        rows_R = torch.arange(rows, device=is_ranked_B.device)
    else:
        rows_R = is_ranked_B.nonzero()[:, 0]
    floor_B = logits_BV.new_full((rows,), -torch.inf, dtype=torch.float32)
    last_B = torch.full_like(filters.top_k_B, tokens)
    floor_R, last_R = _rank_threshold(
        logits_BV[rows_R].float(),
        filters.top_k_B[rows_R],
        filters.top_p_B[rows_R],
        None if temperature_B is None else temperature_B[rows_R],
    )
    is_ranked_R = is_ranked_B[rows_R]
    floor_B[rows_R] = torch.where(is_ranked_R, floor_R, floor_B[rows_R])
    last_B[rows_R] = torch.where(is_ranked_R, last_R, last_B[rows_R])
    largest_B = logits_BV.amax(-1).float()
    scale_B = 1.0 if temperature_B is None else temperature_B.double()
    min_p_floor_B = (largest_B.double() + scale_B * filters.log_min_p_B).float()
    uses_min_p_B = min_p_floor_B > floor_B
    if greedy_B is not None:
        uses_min_p_B = uses_min_p_B & ~greedy_B
    floor_B = torch.where(uses_min_p_B, min_p_floor_B, floor_B)
    return Kept(floor_B, last_B.masked_fill(uses_min_p_B, tokens))


def _rank_threshold(
    logits_RV: Tensor, top_k_R: Tensor, top_p_R: Tensor, temperature_R: Tensor | None
) -> tuple[Tensor, Tensor]:
    sorted_RV, ids_RV = logits_RV.sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(logits_RV.shape[-1], device=logits_RV.device)
    in_top_k_RV = rank_V < top_k_R[:, None]
    exponent_RV = sorted_RV.double() - sorted_RV[:, :1].double()
    if temperature_R is not None:
        exponent_RV = exponent_RV / temperature_R[:, None].double()
    mass_RV = exponent_RV.exp().masked_fill(~in_top_k_RV, 0)
    mass_before_RV = mass_RV.cumsum(-1) - mass_RV
    needed_R = top_p_R * mass_RV.sum(-1)
    # p = 1 is off: rounding of the sum must not drop a tail
    keep_RV = in_top_k_RV & ((mass_before_RV < needed_R[:, None]) | (top_p_R[:, None] >= 1))
    last_R1 = keep_RV.sum(-1, keepdim=True).clamp(min=1) - 1
    return sorted_RV.gather(-1, last_R1)[:, 0], ids_RV.gather(-1, last_R1)[:, 0]


# -- Triton ----------------------------------------------------------------------------------------


@jit
def _keep_kernel(
    logits_ptr,
    temperature_ptr,
    greedy_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    largest_ptr,
    mass_ptr,
    peaks_ptr,
    list_ptr,
    near_ptr,
    part_ptr,
    floor_ptr,
    last_ptr,
    tokens,
    tiles,
    stride,
    TILES: tl.constexpr,
    EACH: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    NEAR: tl.constexpr,
    AT_ONCE: tl.constexpr,
    EARLY: tl.constexpr,
):
    after_others(EARLY)
    row = tl.program_id(0)
    top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    log_min_p = tl.load(min_p_ptr + row)
    temperature = temperature_of(temperature_ptr, greedy_ptr, row)
    factor = 1.4426950408889634 / temperature
    _, peak, shift, mass_c = row_of(largest_ptr, mass_ptr, row, tiles, factor, TILES)
    total = tl.sum(mass_c, 0)
    has_filters = (top_k < tokens) | (top_p < 1) | (log_min_p > float("-inf"))
    if greedy_ptr is not None:
        has_filters = has_filters & (tl.load(greedy_ptr + row) == 0)
    tl.store(floor_ptr + row, float("-inf"))
    tl.store(last_ptr + row, tokens)
    if has_filters & is_distribution(peak, total):
        blocks = tiles * EACH
        logits_ptr += row.to(tl.int64) * stride
        largest_ptr += row * tiles
        mass_ptr += row * tiles
        peaks_ptr += row * blocks
        list_ptr += row * blocks
        part_ptr += row * blocks
        near_ptr += row * NEAR
        floor, last = _find_floor(
            logits_ptr, largest_ptr, peaks_ptr, list_ptr, near_ptr, part_ptr, top_k, top_p, log_min_p,
            temperature, factor, peak, shift, total, tokens, blocks,
            TILES, EACH, NEAR, AT_ONCE, GROUP, BLOCK,
        )  # fmt: skip
        _update_masses(
            logits_ptr, largest_ptr, mass_ptr, peaks_ptr, list_ptr, part_ptr, floor, last, factor,
            peak, shift, tokens, tiles, TILES, EACH, GROUP, BLOCK,
        )  # fmt: skip
        tl.store(floor_ptr + row, floor)
        tl.store(last_ptr + row, last)


@jit
def _find_floor(
    logits_ptr,
    largest_ptr,
    peaks_ptr,
    list_ptr,
    near_ptr,
    part_ptr,
    top_k,
    top_p,
    log_min_p,
    temperature,
    factor,
    peak,
    shift,
    total,
    tokens,
    blocks,
    TILES: tl.constexpr,
    EACH: tl.constexpr,
    NEAR: tl.constexpr,
    AT_ONCE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    floor = peak * 0.0 + float("-inf")
    last = tokens
    num_ids = tokens
    if top_k < tokens:
        num_ids = top_k.to(tl.int32)
        low = _top_k_bound(peaks_ptr, blocks, num_ids, TILES * EACH)
        count = list_blocks(list_ptr, peaks_ptr, blocks, low, TILES * EACH)
        target = num_ids.to(tl.float64)
        if low == LOWEST:  # too few blocks that are not -inf
            num_live, _, _, _, _, _, _, low, _ = weigh(
                logits_ptr, list_ptr, count, low, peak, peak, peak, float("inf"), floor, last,
                factor, shift, tokens, True, GROUP, BLOCK,
            )  # fmt: skip
            target = tl.minimum(target, num_live.to(tl.float64))
        floor, last = search(
            logits_ptr, list_ptr, near_ptr, count, low, peak, target, floor, last, factor, shift,
            tokens, True, NEAR, AT_ONCE, GROUP, BLOCK,
        )  # fmt: skip
        if top_p < 1:
            total = mass_of(
                logits_ptr, list_ptr, part_ptr, count, floor, last, factor, shift, tokens, GROUP,
                BLOCK,
            ).to(tl.float64)  # fmt: skip
    if top_p < 1:
        # below the bound lies less mass than 1 - p; a thousandth is for rounding
        log_tail = tl.log((1 - top_p) * total / num_ids) - 1e-3
        low = tl.maximum((peak + temperature * log_tail).to(tl.float32), tl.maximum(floor, LOWEST))
        if top_k >= tokens:
            low = _raise_bound(
                largest_ptr, peaks_ptr, part_ptr, low, peak, factor, shift, (1 - top_p) * total,
                total, blocks // EACH, TILES, EACH, BLOCK,
            )  # fmt: skip
        count = list_blocks(list_ptr, peaks_ptr, blocks, low, TILES * EACH)
        # float32 would round a tiny p to 0; the first alone has a mass of about 1
        floor, last = search(
            logits_ptr, list_ptr, near_ptr, count, low, peak, tl.maximum(top_p * total, 1e-30), floor,
            last, factor, shift, tokens, False, NEAR, AT_ONCE, GROUP, BLOCK,
        )  # fmt: skip
    min_p_floor = (peak.to(tl.float64) + temperature * log_min_p).to(tl.float32)
    last = tl.where(min_p_floor > floor, tokens, last)
    return tl.maximum(floor, min_p_floor), last


@jit
def _raise_bound(
    largest_ptr,
    peaks_ptr,
    part_ptr,
    low,
    peak,
    factor,
    shift,
    allowed,
    total,
    tiles,
    TILES: tl.constexpr,
    EACH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Raise `low`, a bound of top-p's floor, while less than the allowed mass lies below it."""
    offs_c = tl.arange(0, TILES)
    offs_cl = offs_c[:, None] * EACH + tl.arange(0, EACH)[None, :]
    live_cl = offs_cl < tiles * EACH
    max_c = tl.load(largest_ptr + offs_c, mask=offs_c < tiles, other=float("-inf"))
    scale_c = tl.exp2(shift_of(max_c, factor) - shift)
    peak_cl = tl.load(peaks_ptr + offs_cl, mask=live_cl, other=float("-inf"))
    part_cl = tl.load(part_ptr + offs_cl, mask=live_cl, other=0.0)
    part_cl = tl.where(part_cl == 0, 0.0, part_cl * scale_c[:, None])
    limit = (allowed * 0.999 - 1e-6 * total).to(tl.float32)  # rounding of sums
    high = peak
    for _ in range(12):
        middle = low * 0.5 + high * 0.5
        max_part = BLOCK * tl.exp2(tl.fma(middle, factor, -shift))
        below_cl = tl.where(peak_cl < middle, part_cl, tl.minimum(part_cl, max_part))
        fits = tl.sum(tl.sum(below_cl, 1), 0) <= limit
        low = tl.where(fits, middle, low)
        high = tl.where(fits, high, middle)
    return low


@jit
def _top_k_bound(peaks_ptr, blocks, ids, BLOCKS: tl.constexpr):
    offs_l = tl.arange(0, BLOCKS)
    live_l = offs_l < blocks
    peak_l = tl.load(peaks_ptr + offs_l, mask=live_l, other=float("-inf"))
    bound = tl.full([], LOWEST, tl.float32)
    if ids <= blocks:
        bound = value_of(
            reaching(key_of(peak_l), live_l.to(tl.float32), live_l, ids.to(tl.float32))
        )
    return tl.maximum(bound, LOWEST)


@jit
def _update_masses(
    logits_ptr,
    largest_ptr,
    mass_ptr,
    peaks_ptr,
    list_ptr,
    part_ptr,
    floor,
    last,
    factor,
    peak,
    shift,
    tokens,
    tiles,
    TILES: tl.constexpr,
    EACH: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    blocks = tiles * EACH
    offs_l = tl.arange(0, TILES * EACH)
    tl.debug_barrier()
    tl.store(part_ptr + offs_l, tl.zeros([TILES * EACH], tl.float32), mask=offs_l < blocks)
    count = list_blocks(list_ptr, peaks_ptr, blocks, floor, TILES * EACH)
    mass_of(logits_ptr, list_ptr, part_ptr, count, floor, last, factor, shift, tokens, GROUP, BLOCK)
    tl.debug_barrier()
    offs_c = tl.arange(0, TILES)
    offs_cl = offs_c[:, None] * EACH + tl.arange(0, EACH)[None, :]
    part_cl = tl.load(part_ptr + offs_cl, mask=offs_cl < blocks, other=0.0)
    tl.store(mass_ptr + offs_c, tl.sum(part_cl, 1), mask=offs_c < tiles)
    tl.store(largest_ptr + offs_c, tl.zeros([TILES], tl.float32) + peak, mask=offs_c < tiles)
