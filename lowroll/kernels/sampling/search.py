"""The search for the threshold of a row's filters, in Triton.

A list of blocks is read GROUP at a time. Numbers that stay so far (x > floor, and of those equal to
it ids up to `last`) weigh 1, or their mass exp2(x * factor - shift); the threshold is the largest
number that has, with those above it, the target's weight. A row has one program, with its own
workspaces.
"""

from __future__ import annotations

from lowroll.kernels.launch import constexpr, jit, tl

LOWEST = constexpr(-3.4028234663852886e38)
_BY_VALUE = constexpr(16)  # iterations before bits are split


@jit
def key_of(x):
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@jit
def value_of(key):
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@jit
def reaching(key_n, weight_n, live_n, target):
    """Return the largest live key that has, with those above it, the target's weight, or the
    smallest."""
    low = tl.min(tl.where(live_n, key_n, 2147483647), 0)
    high = tl.max(tl.where(live_n, key_n, -2147483648), 0)
    # bits from the first in which two can differ, of keys without a sign
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
def list_blocks(list_ptr, peaks_ptr, blocks, least, BLOCKS: tl.constexpr):
    """List the blocks that reach `least`, in order; return their number."""
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
    at_g = start + tl.arange(0, GROUP)
    block_g = tl.load(list_ptr + at_g, mask=at_g < count, other=0)
    ids_gn = block_g[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    live_gn = (at_g < count)[:, None] & (ids_gn < tokens)
    x_gn = tl.load(logits_ptr + ids_gn, mask=live_gn, other=float("-inf")).to(tl.float32)
    drops_gn = (x_gn < floor) | ((x_gn == floor) & (ids_gn > last))
    return ids_gn, tl.where(drops_gn, float("-inf"), x_gn)


@jit
def weigh(
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
    """Return counts from `low` and each pivot on, weights from each pivot on, and smallest and
    largest of [low, high)."""
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
    """Return a pivot within [low, high]: evenly in value, or in bits, which always terminates."""
    first, last = key_of(low).to(tl.int64), key_of(high).to(tl.int64)
    at = value_of((first + (last - first) * quarter // 4).to(tl.int32))
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
    """Return an interval [low, high) that holds the threshold, of at most NEAR or only equal
    numbers, and the weight above it."""
    high = value_of(key_of(peak) + 1)
    above = target * 0.0
    more = target * 0.0
    turn = 0
    wide = count > 0
    while wide:
        by_value = turn < _BY_VALUE
        q1 = _pivot(low, high, 1, by_value)
        q2 = _pivot(low, high, 2, by_value)
        q3 = _pivot(low, high, 3, by_value)
        n0, n1, n2, n3, w1, w2, w3, bottom, top = weigh(
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
    """Write at most NEAR numbers of [low, high) side by side; return how many there are."""
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
    """Return the id of the `needed`-th number equal to `value`, in order of ids."""
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
def search(
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
    """Return floor and last id of the fewest remaining numbers whose weight reaches the target.
    low: a lower bound of the floor."""
    high = value_of(key_of(peak) + 1)
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
    value = value_of(reaching(key_of(x_n), weight_n, live_n, target.to(tl.float32) - above))
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
def mass_of(
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
    total = shift * 0.0
    for start in range(0, count, GROUP):
        _, x_gn = _read(logits_ptr, list_ptr, start, count, floor, last, tokens, GROUP, BLOCK)
        mass_g = tl.sum(tl.exp2(tl.fma(x_gn, factor, -shift)), 1)
        at_g = start + tl.arange(0, GROUP)
        block_g = tl.load(list_ptr + at_g, mask=at_g < count, other=0)
        tl.store(part_ptr + block_g, mass_g, mask=at_g < count)
        total += tl.sum(mass_g, 0)
    return total
