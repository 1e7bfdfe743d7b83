"""Top-k, top-p and min-p: which logits of a row may be drawn, found without a sort.

A row's logits x are in order: the larger first, equal ones lower id first. Of them, in turn,

    top-k  the first k
    top-p  of what is left, as many of the first as have a mass of p and more together, where the mass
           of x is exp(x / T): x stays if the mass before it is less than p of the whole
    min-p  x >= max + T log(min_p)

so what stays is a beginning of the order: x > floor, and of those that equal it ids up to `last`.
The order is that of the logits before the temperature, whose rounding could make equal what is not.

On CUDA one program a row looks for the threshold, and reads only the blocks of the row that can hold
it: `tiles.tiles_of` leaves maximum and mass of each. The k-th largest of these maxima is no larger
than the k-th largest logit; and what is smaller than max + T log((1 - p) mass / ids) is, all of it,
less than 1 - p of the mass, a bound that the blocks' masses raise where few have most. Of the blocks
that reach such a bound, passes cut the interval in four until NEAR numbers at most are in it, which
is often before the first pass; those are written side by side and searched in registers, a bit a
turn. Sums are taken in one order: a row has the same threshold in every batch. Then the masses of
the tiles are made those of what stays, for the draw.

Shapes: B rows, V vocabulary, L blocks of a row, R rows with filters.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lowroll.kernels.launch import (
    after_others,
    block,
    constexpr,
    early_start,
    jit,
    tl,
    triton_supports,
)
from lowroll.kernels.sampling.tiles import (
    BLOCK,
    TILE,
    Tiles,
    is_distribution,
    row_of,
    shift_of,
    temperature_of,
    tiles_of,
)

GROUP = 16  # blocks that are read at a time
NEAR = 1024  # numbers that are searched in registers
AT_ONCE = 64  # blocks of which no more numbers than that are hoped for
WARPS = 16


@dataclass(frozen=True)
class Filters:
    """What each of B rows asks for. top_k_B: int64, V or more where off. top_p_B: float64, 1 where
    off. log_min_p_B: float64, -inf where off."""

    top_k_B: Tensor
    top_p_B: Tensor
    log_min_p_B: Tensor

    def first(self, rows: int) -> Filters:
        """Of the first rows."""
        return Filters(self.top_k_B[:rows], self.top_p_B[:rows], self.log_min_p_B[:rows])


@dataclass(frozen=True)
class Kept:
    """What stays of B rows: floor_B float32, last_B int64."""

    floor_B: Tensor
    last_B: Tensor

    def mask(self, logits_BV: Tensor) -> Tensor:
        """Whether each logit stays, bool [B, V]. NaN does."""
        ids_V = torch.arange(logits_BV.shape[1], device=logits_BV.device)
        floor_B1, last_B1 = self.floor_B[:, None], self.last_B[:, None]
        return ~((logits_BV < floor_B1) | ((logits_BV == floor_B1) & (ids_V > last_B1)))


def keep(
    logits_BV: Tensor,
    filters: Filters,
    temperature_B: Tensor | None = None,
    greedy_B: Tensor | None = None,
    tiles: Tiles | None = None,
) -> Kept:
    """What the filters leave of each row; a greedy row, and one without a distribution, keeps all.

    logits_BV: any float dtype, rows contiguous or expanded. temperature_B: float32, None is 1.
    greedy_B: bool. tiles: of the same logits, with blocks, where they are made already: the masses
    become those of what stays (CUDA).
    """
    if not triton_supports(logits_BV):
        return _plain(logits_BV, filters, temperature_B, greedy_B)
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
    """By a sort: on a CPU of the rows that have filters alone."""
    rows, tokens = logits_BV.shape
    ranks_B = (filters.top_k_B < tokens) | (filters.top_p_B < 1)
    if greedy_B is not None:
        ranks_B = ranks_B & ~greedy_B
    # which rows those are, nobody on a GPU can be asked without waiting
    rows_R = (
        torch.arange(rows, device=ranks_B.device) if ranks_B.is_cuda else ranks_B.nonzero()[:, 0]
    )
    floor_B = logits_BV.new_full((rows,), -torch.inf, dtype=torch.float32)
    last_B = torch.full_like(filters.top_k_B, tokens)
    floor_R, last_R = _ranked(
        logits_BV[rows_R].float(),
        filters.top_k_B[rows_R],
        filters.top_p_B[rows_R],
        None if temperature_B is None else temperature_B[rows_R],
    )
    ranks_R = ranks_B[rows_R]
    floor_B[rows_R] = torch.where(ranks_R, floor_R, floor_B[rows_R])
    last_B[rows_R] = torch.where(ranks_R, last_R, last_B[rows_R])
    largest_B = logits_BV.amax(-1).float()
    wide_B = 1.0 if temperature_B is None else temperature_B.double()
    least_B = (largest_B.double() + wide_B * filters.log_min_p_B).float()
    raised_B = least_B > floor_B
    if greedy_B is not None:
        raised_B = raised_B & ~greedy_B
    return Kept(torch.where(raised_B, least_B, floor_B), last_B.masked_fill(raised_B, tokens))


def _ranked(
    logits_RV: Tensor, top_k_R: Tensor, top_p_R: Tensor, temperature_R: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The last of the order that stays, its logit and its id."""
    sorted_RV, ids_RV = logits_RV.sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(logits_RV.shape[-1], device=logits_RV.device)
    first_RV = rank_V < top_k_R[:, None]
    less_RV = sorted_RV.double() - sorted_RV[:, :1].double()
    if temperature_R is not None:
        less_RV = less_RV / temperature_R[:, None].double()
    mass_RV = less_RV.exp().masked_fill(~first_RV, 0)
    before_RV = mass_RV.cumsum(-1) - mass_RV
    needed_R = top_p_R * mass_RV.sum(-1)
    # p = 1 is off: there, rounding of the sum must not drop a tail
    keep_RV = first_RV & ((before_RV < needed_R[:, None]) | (top_p_R[:, None] >= 1))
    last_R1 = keep_RV.sum(-1, keepdim=True).clamp(min=1) - 1
    return sorted_RV.gather(-1, last_R1)[:, 0], ids_RV.gather(-1, last_R1)[:, 0]


# -- Triton ----------------------------------------------------------------------------------------

_LOWEST = constexpr(-3.4028234663852886e38)
_BY_VALUE = constexpr(16)  # turns


@jit
def _key(x):
    """An integer in the order of the float."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@jit
def _value(key):
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@jit
def _reaching(key_n, weight_n, live_n, target):
    """The largest of the living keys that has, with those above it, at least the target's weight:
    the smallest, where none has."""
    low = tl.min(tl.where(live_n, key_n, 2147483647), 0)
    high = tl.max(tl.where(live_n, key_n, -2147483648), 0)
    # bits from the first on in which two can differ, of keys without a sign
    top = tl.full([], 0x80000000, tl.uint32)
    plain_n = key_n.to(tl.uint32, bitcast=True) ^ top
    found = high.to(tl.uint32, bitcast=True) ^ top
    differ = found ^ low.to(tl.uint32, bitcast=True) ^ top
    bit = top
    while bit > differ:
        bit = bit >> 1
    found = found & ~((bit << 1) - 1)
    while bit > 0:
        tried = found | bit
        weight = tl.sum(tl.where(plain_n >= tried, weight_n, 0.0), 0)
        found = tl.where(weight >= target, tried, found)
        bit = bit >> 1
    return tl.maximum((found ^ top).to(tl.int32, bitcast=True), low)


@jit
def _list(list_ptr, peaks_ptr, blocks, least, BLOCKS: tl.constexpr):
    """Write down the blocks that reach `least`, in order; their number."""
    offs_l = tl.arange(0, BLOCKS)
    peak_l = tl.load(peaks_ptr + offs_l, mask=offs_l < blocks, other=float("-inf"))
    reaches_l = ((peak_l >= least) & (offs_l < blocks)).to(tl.int32)
    tl.debug_barrier()
    tl.store(list_ptr + tl.cumsum(reaches_l, 0) - 1, offs_l, mask=reaches_l > 0)
    tl.debug_barrier()
    return tl.sum(reaches_l, 0)


@jit
def _read(
    logits_ptr,
    list_ptr,
    start,
    count,
    floor,
    last,
    tokens,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Ids and logits of a group of listed blocks, -inf for what does not stay."""
    at_g = start + tl.arange(0, GROUP)
    block_g = tl.load(list_ptr + at_g, mask=at_g < count, other=0)
    ids_gn = block_g[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    live_gn = (at_g < count)[:, None] & (ids_gn < tokens)
    x_gn = tl.load(logits_ptr + ids_gn, mask=live_gn, other=float("-inf")).to(tl.float32)
    drops_gn = (x_gn < floor) | ((x_gn == floor) & (ids_gn > last))
    return ids_gn, tl.where(drops_gn, float("-inf"), x_gn)


@jit
def _weigh(
    logits_ptr,
    list_ptr,
    count,
    low,
    q1,
    q2,
    q3,
    high,
    floor,
    last,
    factor,
    shift,
    tokens,
    COUNTS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Numbers from `low` and from each pivot on, their weights from each pivot on, and the smallest
    and largest of [low, high)."""
    n0 = tl.zeros([GROUP, BLOCK], tl.float32)
    n1, n2, n3, w1, w2, w3 = n0, n0, n0, n0, n0, n0
    bottom_gn = n0 + float("inf")
    top_gn = n0 + float("-inf")
    for start in range(0, count, GROUP):
        _, x_gn = _read(logits_ptr, list_ptr, start, count, floor, last, tokens, GROUP, BLOCK)
        n0 += tl.where(x_gn >= low, 1.0, 0.0)
        n1 += tl.where(x_gn >= q1, 1.0, 0.0)
        n2 += tl.where(x_gn >= q2, 1.0, 0.0)
        n3 += tl.where(x_gn >= q3, 1.0, 0.0)
        if not COUNTS:
            p_gn = tl.exp2(tl.fma(x_gn, factor, -shift))
            w1 += tl.where(x_gn >= q1, p_gn, 0.0)
            w2 += tl.where(x_gn >= q2, p_gn, 0.0)
            w3 += tl.where(x_gn >= q3, p_gn, 0.0)
        within_gn = (x_gn >= low) & (x_gn < high)
        bottom_gn = tl.minimum(bottom_gn, tl.where(within_gn, x_gn, float("inf")))
        top_gn = tl.maximum(top_gn, tl.where(within_gn, x_gn, float("-inf")))
    if COUNTS:
        w1, w2, w3 = n1, n2, n3
    return (
        tl.sum(tl.sum(n0, 1), 0),
        tl.sum(tl.sum(n1, 1), 0),
        tl.sum(tl.sum(n2, 1), 0),
        tl.sum(tl.sum(n3, 1), 0),
        tl.sum(tl.sum(w1, 1), 0),
        tl.sum(tl.sum(w2, 1), 0),
        tl.sum(tl.sum(w3, 1), 0),
        tl.min(tl.min(bottom_gn, 1), 0),
        tl.max(tl.max(top_gn, 1), 0),
    )


@jit
def _pivot(low, high, quarter: tl.constexpr, by_value):
    """Within [low, high]: evenly in value, or in bits, which comes to an end with any numbers."""
    first, last = _key(low).to(tl.int64), _key(high).to(tl.int64)
    at = _value((first + (last - first) * quarter // 4).to(tl.int32))
    between = low * (1 - quarter / 4) + high * (quarter / 4)
    return tl.minimum(tl.maximum(tl.where(by_value, between, at), low), high)


@jit
def _narrow(
    logits_ptr,
    list_ptr,
    count,
    low,
    peak,
    target,
    floor,
    last,
    factor,
    shift,
    tokens,
    COUNTS: tl.constexpr,
    NEAR: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """An interval [low, high) with the threshold, of NEAR numbers at most or of equal ones alone, and
    what lies above it: their weight."""
    high = _value(_key(peak) + 1)
    above = target * 0.0
    more = target * 0.0
    turn = 0
    wide = count > 0
    while wide:
        by_value = turn < _BY_VALUE
        q1 = _pivot(low, high, 1, by_value)
        q2 = _pivot(low, high, 2, by_value)
        q3 = _pivot(low, high, 3, by_value)
        n0, n1, n2, n3, w1, w2, w3, bottom, top = _weigh(
            logits_ptr, list_ptr, count, low, q1, q2, q3, high, floor, last, factor, shift,
            tokens, COUNTS, GROUP, BLOCK,
        )  # fmt: skip
        up1, up2, up3 = w1 >= target, w2 >= target, w3 >= target
        least = tl.where(up3, n3, tl.where(up2, n2, tl.where(up1, n1, n0)))
        more = tl.where(up3, more, tl.where(up2, n3, tl.where(up1, n2, n1)))
        above = tl.where(up3, above, tl.where(up2, w3, tl.where(up1, w2, w1)))
        high = tl.where(up3, high, tl.where(up2, q3, tl.where(up1, q2, q1)))
        low = tl.where(up3, q3, tl.where(up2, q2, tl.where(up1, q1, low)))
        wide = (least - more > NEAR) & (bottom < top)
        turn += 1
    return low, high, above


@jit
def _gather(
    logits_ptr,
    list_ptr,
    near_ptr,
    count,
    low,
    high,
    floor,
    last,
    tokens,
    NEAR: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the numbers of [low, high) side by side; how many there are, of which NEAR are
    written."""
    tl.debug_barrier()
    found = count * 0
    for start in range(0, count, GROUP):
        _, x_gn = _read(logits_ptr, list_ptr, start, count, floor, last, tokens, GROUP, BLOCK)
        x_n = tl.reshape(x_gn, [GROUP * BLOCK])
        within_n = ((x_n >= low) & (x_n < high)).to(tl.int32)
        at_n = found + tl.cumsum(within_n, 0) - 1
        tl.store(near_ptr + at_n, x_n, mask=(within_n > 0) & (at_n < NEAR))
        found += tl.sum(within_n, 0)
    tl.debug_barrier()
    return found


@jit
def _cut(
    logits_ptr,
    list_ptr,
    count,
    value,
    needed,
    floor,
    last,
    tokens,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The id of the number that is the `needed`-th to equal `value`, in order of ids."""
    seen = count * 0
    found = count * 0
    for start in range(0, count, GROUP):
        ids_gn, x_gn = _read(logits_ptr, list_ptr, start, count, floor, last, tokens, GROUP, BLOCK)
        ids_n = tl.reshape(ids_gn, [GROUP * BLOCK])
        same_n = (tl.reshape(x_gn, [GROUP * BLOCK]) == value).to(tl.int32)
        rank_n = seen + tl.cumsum(same_n, 0)
        found = tl.maximum(found, tl.max(tl.where((same_n > 0) & (rank_n <= needed), ids_n, 0), 0))
        seen += tl.sum(same_n, 0)
    return found


@jit
def _search(
    logits_ptr,
    list_ptr,
    near_ptr,
    count,
    low,
    peak,
    target,
    floor,
    last,
    factor,
    shift,
    tokens,
    COUNTS: tl.constexpr,
    NEAR: tl.constexpr,
    AT_ONCE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Floor and last id of the fewest numbers, of those that stay now, whose weight is at least the
    target: numbers weigh 1 or their mass. low: a bound that such a floor is not below."""
    high = _value(_key(peak) + 1)
    above = target.to(tl.float32) * 0.0
    found = count * 0
    wide = count > AT_ONCE
    looks = count > 0
    while looks:
        if wide:
            low, high, above = _narrow(
                logits_ptr, list_ptr, count, low, peak, target.to(tl.float32), floor, last, factor,
                shift, tokens, COUNTS, NEAR, GROUP, BLOCK,
            )  # fmt: skip
        found = _gather(
            logits_ptr, list_ptr, near_ptr, count, low, high, floor, last, tokens, NEAR, GROUP, BLOCK,
        )  # fmt: skip
        looks = (found > NEAR) & (count <= AT_ONCE) & (wide == 0)
        wide = looks
    offs_n = tl.arange(0, NEAR)
    live_n = offs_n < found
    x_n = tl.load(near_ptr + offs_n, mask=live_n, other=float("-inf"))
    weight_n = live_n.to(tl.float32)
    if not COUNTS:
        weight_n = tl.exp2(tl.fma(x_n, factor, -shift))
    weight_n = tl.where(live_n, weight_n, 0.0)
    value = _value(_reaching(_key(x_n), weight_n, live_n, target.to(tl.float32) - above))
    over = above.to(tl.float64) + tl.sum(tl.where(x_n > value, weight_n, 0.0).to(tl.float64), 0)
    each = tl.max(tl.where(x_n == value, weight_n, 1e-38), 0)
    # more than NEAR are all equal
    same = tl.where(found > NEAR, found, tl.sum(((x_n == value) & live_n).to(tl.int32), 0))
    needed = tl.ceil((target - over) / each.to(tl.float64))
    needed = tl.minimum(tl.maximum(needed, 1.0), same.to(tl.float64)).to(tl.int32)
    last_now = tl.where(value == floor, last, tokens)
    if needed < same:
        last_now = _cut(
            logits_ptr, list_ptr, count, value, needed, floor, last, tokens, GROUP, BLOCK
        )
    return value, last_now


@jit
def _mass(
    logits_ptr,
    list_ptr,
    part_ptr,
    count,
    floor,
    last,
    factor,
    shift,
    tokens,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The mass of what stays, of each listed block and in all."""
    total = shift * 0.0
    for start in range(0, count, GROUP):
        _, x_gn = _read(logits_ptr, list_ptr, start, count, floor, last, tokens, GROUP, BLOCK)
        mass_g = tl.sum(tl.exp2(tl.fma(x_gn, factor, -shift)), 1)
        at_g = start + tl.arange(0, GROUP)
        block_g = tl.load(list_ptr + at_g, mask=at_g < count, other=0)
        tl.store(part_ptr + block_g, mass_g, mask=at_g < count)
        total += tl.sum(mass_g, 0)
    return total


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
    """One row."""
    after_others(EARLY)
    row = tl.program_id(0)
    top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    log_min_p = tl.load(min_p_ptr + row)
    temperature = temperature_of(temperature_ptr, greedy_ptr, row)
    factor = 1.4426950408889634 / temperature
    _, peak, shift, mass_c = row_of(largest_ptr, mass_ptr, row, tiles, factor, TILES)
    total = tl.sum(mass_c, 0)
    asks = (top_k < tokens) | (top_p < 1) | (log_min_p > float("-inf"))
    if greedy_ptr is not None:
        asks = asks & (tl.load(greedy_ptr + row) == 0)
    tl.store(floor_ptr + row, float("-inf"))
    tl.store(last_ptr + row, tokens)
    if asks & is_distribution(peak, total):
        blocks = tiles * EACH
        logits_ptr += row.to(tl.int64) * stride
        largest_ptr += row * tiles
        mass_ptr += row * tiles
        peaks_ptr += row * blocks
        list_ptr += row * blocks
        part_ptr += row * blocks
        near_ptr += row * NEAR
        floor, last = _floor(
            logits_ptr, largest_ptr, peaks_ptr, list_ptr, near_ptr, part_ptr, top_k, top_p, log_min_p,
            temperature, factor, peak, shift, total, tokens, blocks,
            TILES, EACH, NEAR, AT_ONCE, GROUP, BLOCK,
        )  # fmt: skip
        _settle(
            logits_ptr, largest_ptr, mass_ptr, peaks_ptr, list_ptr, part_ptr, floor, last, factor,
            peak, shift, tokens, tiles, TILES, EACH, GROUP, BLOCK,
        )  # fmt: skip
        tl.store(floor_ptr + row, floor)
        tl.store(last_ptr + row, last)


@jit
def _floor(
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
    """Floor and last id of what stays of a row."""
    floor = peak * 0.0 + float("-inf")
    last = tokens
    ids = tokens
    if top_k < tokens:
        ids = top_k.to(tl.int32)
        low = _bound(peaks_ptr, blocks, ids, TILES * EACH)
        count = _list(list_ptr, peaks_ptr, blocks, low, TILES * EACH)
        target = ids.to(tl.float64)
        if low == _LOWEST:  # fewer blocks than k, or fewer that are not -inf
            numbers, _, _, _, _, _, _, low, _ = _weigh(
                logits_ptr, list_ptr, count, low, peak, peak, peak, float("inf"), floor, last,
                factor, shift, tokens, True, GROUP, BLOCK,
            )  # fmt: skip
            target = tl.minimum(target, numbers.to(tl.float64))
        floor, last = _search(
            logits_ptr, list_ptr, near_ptr, count, low, peak, target, floor, last, factor, shift,
            tokens, True, NEAR, AT_ONCE, GROUP, BLOCK,
        )  # fmt: skip
        if top_p < 1:
            total = _mass(
                logits_ptr, list_ptr, part_ptr, count, floor, last, factor, shift, tokens, GROUP,
                BLOCK,
            ).to(tl.float64)  # fmt: skip
    if top_p < 1:
        # what is below the bound has less mass than 1 - p; a thousandth is for rounding
        tail = tl.log((1 - top_p) * total / ids) - 1e-3
        low = tl.maximum((peak + temperature * tail).to(tl.float32), tl.maximum(floor, _LOWEST))
        if top_k >= tokens:
            low = _raised(
                largest_ptr, peaks_ptr, part_ptr, low, peak, factor, shift, (1 - top_p) * total,
                total, blocks // EACH, TILES, EACH, BLOCK,
            )  # fmt: skip
        count = _list(list_ptr, peaks_ptr, blocks, low, TILES * EACH)
        floor, last = _search(
            logits_ptr, list_ptr, near_ptr, count, low, peak, top_p * total, floor,
            last, factor, shift, tokens, False, NEAR, AT_ONCE, GROUP, BLOCK,
        )  # fmt: skip
    least = (peak.to(tl.float64) + temperature * log_min_p).to(tl.float32)
    last = tl.where(least > floor, tokens, last)
    return tl.maximum(floor, least), last


@jit
def _raised(
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
    """A bound that a top-p's floor is not below, from `low` up: below it lies less than the allowed
    mass, by what the blocks weigh and no number of theirs can exceed."""
    offs_c = tl.arange(0, TILES)
    offs_cl = offs_c[:, None] * EACH + tl.arange(0, EACH)[None, :]
    live_cl = offs_cl < tiles * EACH
    max_c = tl.load(largest_ptr + offs_c, mask=offs_c < tiles, other=float("-inf"))
    scale_c = tl.exp2(shift_of(max_c, factor) - shift)
    peak_cl = tl.load(peaks_ptr + offs_cl, mask=live_cl, other=float("-inf"))
    part_cl = tl.load(part_ptr + offs_cl, mask=live_cl, other=0.0)
    part_cl = tl.where(part_cl == 0, 0.0, part_cl * scale_c[:, None])
    limit = (allowed * 0.999 - 1e-6 * total).to(tl.float32)  # what sums round
    high = peak
    for _ in range(12):
        tried = low * 0.5 + high * 0.5
        most = BLOCK * tl.exp2(tl.fma(tried, factor, -shift))
        below_cl = tl.where(peak_cl < tried, part_cl, tl.minimum(part_cl, most))
        fits = tl.sum(tl.sum(below_cl, 1), 0) <= limit
        low = tl.where(fits, tried, low)
        high = tl.where(fits, high, tried)
    return low


@jit
def _bound(peaks_ptr, blocks, ids, BLOCKS: tl.constexpr):
    """The k-th largest maximum of a block, the least float where there is none."""
    offs_l = tl.arange(0, BLOCKS)
    live_l = offs_l < blocks
    peak_l = tl.load(peaks_ptr + offs_l, mask=live_l, other=float("-inf"))
    found = tl.full([], _LOWEST, tl.float32)
    if ids <= blocks:
        found = _value(_reaching(_key(peak_l), live_l.to(tl.float32), live_l, ids.to(tl.float32)))
    return tl.maximum(found, _LOWEST)


@jit
def _settle(
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
    """Make the masses of a row's tiles those of what stays, under the shift of the row's maximum."""
    blocks = tiles * EACH
    offs_l = tl.arange(0, TILES * EACH)
    tl.debug_barrier()
    tl.store(part_ptr + offs_l, tl.zeros([TILES * EACH], tl.float32), mask=offs_l < blocks)
    count = _list(list_ptr, peaks_ptr, blocks, floor, TILES * EACH)
    _mass(logits_ptr, list_ptr, part_ptr, count, floor, last, factor, shift, tokens, GROUP, BLOCK)
    tl.debug_barrier()
    offs_c = tl.arange(0, TILES)
    offs_cl = offs_c[:, None] * EACH + tl.arange(0, EACH)[None, :]
    part_cl = tl.load(part_ptr + offs_cl, mask=offs_cl < blocks, other=0.0)
    tl.store(mass_ptr + offs_c, tl.sum(part_cl, 1), mask=offs_c < tiles)
    tl.store(largest_ptr + offs_c, tl.zeros([TILES], tl.float32) + peak, mask=offs_c < tiles)
