"""The noise of a draw: a standard Gumbel number -log(E) for each token id, E a unit exponential.

Philox4x32-10 (Salmon et al. 2011) makes four 32-bit words from the 64-bit key of a row and the
counter (position low, position high, c, STREAM). Id 1024 b + 256 j + l has word j of counter c =
256 b + l. With its word w,

    v = (w + 0.5) / 2^32        in float32, and at most 1 - 2^-24
    noise = -log(-log1p(-v))    between -2.9 and 22.9

Large noise comes from a small v, which has all its digits. Implementations have the same v, and
logarithms that differ by less than 1e-5.

Legend: `kernels.sampling`; C counters of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowroll.kernels.launch import INTERPRETED, constexpr, jit, tl

STREAM = 1  # other noise for the same key and position takes another stream
IDS = 1024  # of a block
COUNTERS = 256  # of a block
MOST_V = 1 - 2.0**-24
_WORD = 0xFFFFFFFF
_STREAM, _MOST_V = constexpr(STREAM), constexpr(MOST_V)
_NATIVE = constexpr(not INTERPRETED)


def gumbel(keys_B: Tensor, positions_B: Tensor, tokens: int) -> Tensor:
    """Return the noise of each row's first `tokens` ids, float32 [B, V]. keys_B, positions_B:
    int64."""
    counters = -(-tokens // IDS) * COUNTERS
    c_C = torch.arange(counters, device=keys_B.device)
    low_B1, high_B1 = (positions_B & _WORD)[:, None], (positions_B >> 32 & _WORD)[:, None]
    counter_words = torch.broadcast_tensors(low_B1, high_B1, c_C, torch.full_like(c_C, STREAM))
    key_2B1 = torch.stack([keys_B & _WORD, keys_B >> 32 & _WORD])[..., None]
    words_4BC = philox4x32(torch.stack(counter_words), key_2B1)
    words_BV = words_4BC.unflatten(-1, (-1, COUNTERS)).permute(1, 2, 0, 3).flatten(1)[:, :tokens]
    v_BV = ((words_BV.float() + 0.5) * 2.0**-32).clamp(max=MOST_V)
    return -torch.log(-torch.log1p(-v_BV))


def philox4x32(counter_4X: Tensor, key_2X: Tensor) -> Tensor:
    """Return the Philox4x32-10 words [4, ...] of each counter; keys broadcast. All int64 in [0,
    2^32).

    For few launches, a round's halves are one operation and constants are made on the device.
    """
    lane_2X = torch.arange(2, device=counter_4X.device).view(2, *[1] * (counter_4X.ndim - 1))
    multiplier_2X = lane_2X * (0xCD9E8D57 - 0xD2511F53) + 0xD2511F53
    weyl_2X = lane_2X * (0xBB67AE85 - 0x9E3779B9) + 0x9E3779B9
    multiplied_2X, other_2X = counter_4X[0::2], counter_4X[1::2]
    for round_index in range(10):
        # modulo 2^64: the sign bit is bit 63
        product_2X = multiplied_2X * multiplier_2X
        high_2X, low_2X = (product_2X >> 32) & _WORD, product_2X & _WORD
        multiplied_2X = high_2X.flip(0) ^ other_2X ^ ((key_2X + round_index * weyl_2X) & _WORD)
        other_2X = low_2X.flip(0)
    return torch.stack([multiplied_2X, other_2X], dim=1).flatten(0, 1)


# -- Triton ----------------------------------------------------------------------------------------


@jit
def words_of(key, position, counter_n):
    """Return the four Philox words of each counter."""
    c0 = tl.zeros_like(counter_n).to(tl.uint32) + position.to(tl.uint32)
    c1 = tl.zeros_like(c0) + (position >> 32).to(tl.uint32)
    c2 = counter_n.to(tl.uint32)
    c3 = tl.zeros_like(c0) + tl.full([], _STREAM, tl.uint32)
    k0, k1 = key.to(tl.uint32), (key >> 32).to(tl.uint32)
    p_by, q_by = tl.full([], 0xD2511F53, tl.uint64), tl.full([], 0xCD9E8D57, tl.uint64)
    for _ in tl.static_range(10):
        p, q = c0.to(tl.uint64) * p_by, c2.to(tl.uint64) * q_by
        c0 = (q >> 32).to(tl.uint32) ^ c1 ^ k0
        c2 = (p >> 32).to(tl.uint32) ^ c3 ^ k1
        c1, c3 = q.to(tl.uint32), p.to(tl.uint32)
        k0 += tl.full([], 0x9E3779B9, tl.uint32)
        k1 += tl.full([], 0xBB67AE85, tl.uint32)
    return c0, c1, c2, c3


@jit
def _log2(x):
    """Return the GPU's own logarithm: error 2^-22, absolute within (0.5, 2), relative elsewhere."""
    if _NATIVE:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.log2(x)


@jit
def log2_exponential(word_n):
    """Return log2(-log2(1 - v)): log2(E) plus a constant."""
    v_n = tl.minimum((word_n.to(tl.float32) + 0.5) * 2.3283064365386963e-10, _MOST_V)
    # near 1 the GPU's logarithm has no digits left: five terms of the series over log(2)
    series_n = tl.fma(v_n, 0.28853900817779268, 0.36067376022224085)
    series_n = tl.fma(series_n, v_n, 0.48089834696298783)
    series_n = tl.fma(series_n, v_n, 0.72134752044448170)
    series_n = tl.fma(series_n, v_n, 1.4426950408889634) * v_n
    return _log2(tl.where(v_n < 0.0625, series_n, -_log2(1 - v_n)))


@jit
def best_of(
    logits_ptr, tile, tokens, factor, greedy, key, position, floor, last,
    FILTERED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Return a tile's best score, in units of log(2), and the first id that has it, within floor
    and last. Greedy scores are the logits."""
    counter_n = tile * (TILE // 4) + tl.arange(0, TILE // 4)
    words = words_of(key, position, counter_n)
    first_id_n = counter_n // 256 * 1024 + counter_n % 256
    best_n = tl.full([TILE // 4], float("-inf"), tl.float32)
    winner_n = first_id_n
    for j in tl.static_range(4):
        id_n = first_id_n + j * 256
        x_n = tl.load(logits_ptr + id_n, mask=id_n < tokens, other=float("-inf")).to(tl.float32)
        if FILTERED:
            x_n = tl.where((x_n < floor) | ((x_n == floor) & (id_n > last)), float("-inf"), x_n)
        score_n = tl.where(greedy, x_n, tl.fma(x_n, factor, -log2_exponential(words[j])))
        winner_n = tl.where(score_n > best_n, id_n, winner_n)
        best_n = tl.where(score_n > best_n, score_n, best_n)
    best = tl.max(best_n, 0)
    return best, tl.min(tl.where(best_n == best, winner_n, 2147483647), 0)
