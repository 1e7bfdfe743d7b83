"""One token a row by inverse CDF, with its log-prob, in one pass over the logits.

Noise is counter-based (Philox4x32-10: Salmon et al. 2011, "Parallel random numbers: as easy as 1,
2, 3"): a row's uniform is u(key, position) and depends on neither the batch, the device nor the
past. Of the ids in order, the token is the first whose cumulative probability exceeds u * total; an
id of probability 0 is never drawn.

On CUDA the vocabulary is cut into tiles. One kernel reads each tile once and leaves its maximum and
its mass (`tiles`); where rows have filters, one finds what stays of theirs, and leaves the masses
of that (`filters`); the last weighs the tiles, finds the one that u falls into, reads that one
again, and finds the token, with the cumulative sums in float64. Tiles are the same for every batch:
so are the bits of a row, whatever the rows beside it ask for. The CPU's torch has blocks of 128
instead, and may differ where u lies within rounding of a boundary.

Greedy rows take the argmax, lower id first, and the log-prob at temperature 1. A row without a
distribution (NaN or +inf logits, or nothing but -inf) gets token 0 and log-prob NaN. Nothing waits
for the device.

Shapes: B rows, V vocabulary, K tokens of a block of the CDF, C = ceil(V / K) blocks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lowroll.kernels.launch import after_others, block, early_start, jit, tl, triton_supports
from lowroll.kernels.sampling.filters import Filters, Kept, keep
from lowroll.kernels.sampling.tiles import (
    TILE,
    WARPS,
    is_distribution,
    row_of,
    shift_of,
    temperature_of,
    tiles_of,
)

CDF_BLOCK = 128
_WORD = 0xFFFFFFFF


def draw(
    logits_BV: Tensor,
    keys_B: Tensor,
    positions_B: Tensor,
    temperature_B: Tensor | None = None,
    greedy_B: Tensor | None = None,
    filters: Filters | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw one token a row: ids int64 [B] and log-probs float32 [B], of softmax(logits /
    temperature) over what the filters leave.

    logits_BV: any float dtype, rows contiguous or expanded (stride 0), left unchanged. keys_B,
    positions_B: int64, the noise. temperature_B: float32 (None is 1). greedy_B: bool (None is all
    False); a greedy row's temperature is 1.
    """
    if not triton_supports(logits_BV):
        return _plain(logits_BV, keys_B, positions_B, temperature_B, greedy_B, filters)
    rows, tokens = logits_BV.shape
    if logits_BV.stride(1) != 1:
        logits_BV = logits_BV.contiguous()
    tiles = tiles_of(logits_BV, temperature_B, greedy_B, blocks=filters is not None)
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
        tokens_B,
        logprobs_B,
        tokens,
        num_tiles,
        logits_BV.stride(0),
        BLOCK=TILE,
        TILES=max(16, block(num_tiles)),
        num_warps=WARPS,
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
    logp_BV = distribution(logits_BV, temperature_B, greedy_B, filters)
    tokens_B = inverse_cdf(logp_BV, uniform(keys_B, positions_B))
    if greedy_B is not None:
        tokens_B = torch.where(greedy_B, logits_BV.argmax(-1), tokens_B)
    logprobs_B = logp_BV.gather(-1, tokens_B[:, None])[:, 0]
    return tokens_B.masked_fill(logprobs_B.isnan(), 0), logprobs_B


def distribution(
    logits_BV: Tensor,
    temperature_B: Tensor | None,
    greedy_B: Tensor | None,
    filters: Filters | None,
) -> Tensor:
    """The log-probs, float32 [B, V], that `draw` draws from (of a greedy row: those that it
    records); -inf for what the filters drop."""
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
    return torch.log_softmax(logits_BV, dim=-1)


def uniform(keys_B: Tensor, counters_B: Tensor) -> Tensor:
    """One float64 in [0, 1), a multiple of 2^-53, a (64-bit key, 64-bit counter) pair. Both int64
    [B]."""
    zero_B = torch.zeros_like(counters_B)
    counter_4B = torch.stack([counters_B & _WORD, (counters_B >> 32) & _WORD, zero_B, zero_B])
    words_4B = philox4x32(counter_4B, torch.stack([keys_B & _WORD, (keys_B >> 32) & _WORD]))
    return (words_4B[0] * 2**21 + (words_4B[1] >> 11)).double() * 2.0**-53


def philox4x32(counter_4B: Tensor, key_2B: Tensor) -> Tensor:
    """Philox4x32-10 of Salmon et al. 2011, section 3.4: words [4, B] of each column. All int64, values
    in [0, 2^32).

    Both halves of a round run as one [2, B] operation, and constants are made on the device: few,
    small launches.
    """
    lane_21 = torch.arange(2, device=counter_4B.device)[:, None]
    multiplier_21 = lane_21 * (0xCD9E8D57 - 0xD2511F53) + 0xD2511F53
    weyl_21 = lane_21 * (0xBB67AE85 - 0x9E3779B9) + 0x9E3779B9
    round_S11 = torch.arange(10, device=counter_4B.device)[:, None, None]
    keys_S2B = (key_2B + round_S11 * weyl_21) & _WORD
    multiplied_2B, other_2B = counter_4B[0::2], counter_4B[1::2]
    for round_2B in keys_S2B.unbind():
        # modulo 2^64: the sign bit is bit 63 of the product
        product_2B = multiplied_2B * multiplier_21
        high_2B, low_2B = (product_2B >> 32) & _WORD, product_2B & _WORD
        multiplied_2B = high_2B.flip(0) ^ other_2B ^ round_2B
        other_2B = low_2B.flip(0)
    return torch.stack([multiplied_2B, other_2B], dim=1).flatten(0, 1)


def inverse_cdf(logp_BV: Tensor, u_B: Tensor) -> Tensor:
    """The first id whose cumulative probability exceeds u * total. An id of probability 0 is never
    drawn.

    Two levels, so that the V-long sum is never written: block masses, the block that u falls into,
    the id within it.
    """
    p_BV = logp_BV.exp()
    missing = -p_BV.shape[-1] % CDF_BLOCK
    p_BCK = (F.pad(p_BV, (0, missing)) if missing else p_BV).unflatten(-1, (-1, CDF_BLOCK))
    cdf_BC = p_BCK.sum(-1).double().cumsum(-1)
    target_B1 = u_B[:, None] * cdf_BC[:, -1:]
    block_B1 = _first_above(cdf_BC, target_B1)
    rest_B1 = target_B1 - F.pad(cdf_BC[:, :-1], (1, 0)).gather(-1, block_B1)
    p_BK = p_BCK.gather(1, block_B1[:, :, None].expand(-1, -1, CDF_BLOCK))[:, 0].double()
    cdf_BK = p_BK.cumsum(-1)
    # the fp32 mass of the block may exceed the sum of its ids by a rounding: then the last possible
    # id is meant
    inside_B1 = torch.minimum(_first_above(cdf_BK, rest_B1), _last_positive(p_BK))
    return (block_B1 * CDF_BLOCK + inside_B1)[:, 0]


def _first_above(cdf_BN: Tensor, target_B1: Tensor) -> Tensor:
    return (cdf_BN <= target_B1).sum(-1, keepdim=True).clamp(max=cdf_BN.shape[-1] - 1)


def _last_positive(p_BK: Tensor) -> Tensor:
    return ((p_BK > 0) * torch.arange(p_BK.shape[-1], device=p_BK.device)).amax(-1, keepdim=True)


# -- Triton ----------------------------------------------------------------------------------------


@jit
def _reached(p_n, offs_n, target, last: tl.constexpr):
    """First index of positive mass whose cumulative mass exceeds the target; if rounding leaves
    none, the last one."""
    cdf_n = tl.cumsum(p_n, 0)
    above = tl.min(tl.where((cdf_n > target) & (p_n > 0), offs_n, last), 0)
    index = tl.minimum(above, tl.max(tl.where(p_n > 0, offs_n, 0), 0))
    return index, tl.sum(tl.where(offs_n < index, p_n, 0.0), 0)


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
    token_ptr,
    logp_ptr,
    tokens,
    tiles,
    stride,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Token and log-prob of one row: the tile that u falls into, then the token within it."""
    after_others(EARLY)
    row = tl.program_id(0)
    temperature = temperature_of(temperature_ptr, greedy_ptr, row)
    offs_c = tl.arange(0, TILES)
    factor = 1.4426950408889634 / temperature
    max_c, largest, shift, mass_c = row_of(largest_ptr, mass_ptr, row, tiles, factor, TILES)
    total = tl.sum(mass_c, 0)

    key, position = tl.load(keys_ptr + row), tl.load(positions_ptr + row)
    zero = (position * 0).to(tl.uint32)
    low, high, _, _ = tl.philox(
        key, position.to(tl.uint32), (position >> 32).to(tl.uint32), zero, zero
    )
    u = (low.to(tl.int64) * 2097152 + (high >> 11).to(tl.int64)).to(
        tl.float64
    ) * 1.1102230246251565e-16
    tile, before = _reached(mass_c, offs_c, u * total, TILES)
    if greedy_ptr is not None:
        greedy = tl.load(greedy_ptr + row) != 0
        first = tl.min(tl.where(max_c == largest, offs_c, TILES - 1), 0)
        tile = tl.where(greedy, first, tile)

    offs_n = tile * BLOCK + tl.arange(0, BLOCK)
    x_n = tl.load(
        logits_ptr + row.to(tl.int64) * stride + offs_n, mask=offs_n < tokens, other=float("-inf")
    ).to(tl.float32)
    if floor_ptr is not None:
        floor, last = tl.load(floor_ptr + row), tl.load(last_ptr + row)
        drops_n = (x_n < floor) | ((x_n == floor) & (offs_n > last))
        x_n = tl.where(drops_n, float("-inf"), x_n)
    tile_shift = shift_of(tl.max(x_n, 0), factor)
    p_n = tl.exp2(tl.fma(x_n, factor, -tile_shift))
    target = (u * total - before) / tl.exp2(tile_shift - shift)
    token, _ = _reached(p_n.to(tl.float64), offs_n, target, 2147483647)
    if greedy_ptr is not None:
        best = tl.min(tl.where(x_n == largest, offs_n, 2147483647), 0)
        token = tl.where(greedy, best, token)
    chosen = tl.sum(tl.where(offs_n == token, x_n, 0.0), 0)
    # the total is relative to the rounded shift: the difference to the exact one is put back
    rounded = largest.to(tl.float64) * factor - shift
    logp = (
        (chosen - largest).to(tl.float64) / temperature
        + rounded * 0.6931471805599453
        - tl.log(total)
    )
    finite = is_distribution(largest, total)
    tl.store(token_ptr + row, tl.where(finite, token, 0).to(tl.int64))
    tl.store(logp_ptr + row, tl.where(finite, logp, float("nan")).to(tl.float32))
