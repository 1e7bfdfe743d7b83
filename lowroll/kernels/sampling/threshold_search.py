"""A search for the threshold of a row's filters, in Triton, by one program a row.

Numbers that stay so far weigh 1, or their mass exp2(x * factor - shift). The threshold is the
largest number that reaches the target weight together with those above it.
"""

from __future__ import annotations

from lowroll.kernels.launch import constexpr, jit, tl

LOWEST = constexpr(-3.4028234663852886e38)
_VALUE_ITERATIONS = constexpr(16)  # iterations before bits are split


@jit
def key_of(x):
    """Return the int32 whose order is that of the floats. Both zeros have one key."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@jit
def value_of(key):
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@jit
def reaching(key_n, weight_n, live_n, target):
    """Return the largest live key that reaches the target weight with those above it, else the
    smallest."""
    low = tl.min(tl.where(live_n, key_n, 2147483647), 0)
    high = tl.max(tl.where(live_n, key_n, -2147483648), 0)
    # bits of unsigned keys from the first in which two can differ
    sign_bit = tl.full([], 0x80000000, tl.uint32)
    unsigned_n = key_n.to(tl.uint32, bitcast=True) ^ sign_bit
    prefix = high.to(tl.uint32, bitcast=True) ^ sign_bit
    differing_bits = prefix ^ low.to(tl.uint32, bitcast=True) ^ sign_bit
    bit = sign_bit
    while bit > differing_bits:
        bit = bit >> 1
    prefix = prefix & ~((bit << 1) - 1)
    while bit > 0:
        candidate = prefix | bit
        weight = tl.sum(tl.where(unsigned_n >= candidate, weight_n, 0.0), 0)
        prefix = tl.where(weight >= target, candidate, prefix)
        bit = bit >> 1
    return tl.maximum((prefix ^ sign_bit).to(tl.int32, bitcast=True), low)


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
    index_g = start + tl.arange(0, GROUP)
    block_g = tl.load(list_ptr + index_g, mask=index_g < count, other=0)
    ids_gn = block_g[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    live_gn = (index_g < count)[:, None] & (ids_gn < tokens)
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
    """Return counts and weights from `low` and the pivots on, and smallest and largest of [low,
    high)."""
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
    low_key, high_key = key_of(low).to(tl.int64), key_of(high).to(tl.int64)
    by_bits = value_of((low_key + (high_key - low_key) * quarter // 4).to(tl.int32))
    interpolated = low * (1 - quarter / 4) + high * (quarter / 4)
    return tl.minimum(tl.maximum(tl.where(by_value, interpolated, by_bits), low), high)


@jit
def _narrow_interval(
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
    """Return an interval [low, high) of at most NEAR or only equal numbers that holds the
    threshold, and the weight above it."""
    high = value_of(key_of(peak) + 1)
    above = target * 0.0
    num_above = target * 0.0
    iteration = 0
    continues = count > 0
    while continues:
        by_value = iteration < _VALUE_ITERATIONS
        q1 = _pivot(low, high, 1, by_value)
        q2 = _pivot(low, high, 2, by_value)
        q3 = _pivot(low, high, 3, by_value)
        n0, n1, n2, n3, w1, w2, w3, smallest, largest = weigh(
            logits_ptr, list_ptr, count, low, q1, q2, q3, high, floor, last, factor, shift,
            tokens, COUNTS, GROUP, BLOCK,
        )  # fmt: skip
        reaches1, reaches2, reaches3 = w1 >= target, w2 >= target, w3 >= target
        num_from_low = tl.where(reaches3, n3, tl.where(reaches2, n2, tl.where(reaches1, n1, n0)))
        num_above = tl.where(
            reaches3, num_above, tl.where(reaches2, n3, tl.where(reaches1, n2, n1))
        )
        above = tl.where(reaches3, above, tl.where(reaches2, w3, tl.where(reaches1, w2, w1)))
        high = tl.where(reaches3, high, tl.where(reaches2, q3, tl.where(reaches1, q2, q1)))
        low = tl.where(reaches3, q3, tl.where(reaches2, q2, tl.where(reaches1, q1, low)))
        continues = (num_from_low - num_above > NEAR) & (smallest < largest)
        iteration += 1
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
    tl.debug_barrier()
    num_found = count * 0
    for start in range(0, count, GROUP):
        _, x_gn = _read(logits_ptr, list_ptr, start, count, floor, last, tokens, GROUP, BLOCK)
        x_n = tl.reshape(x_gn, [GROUP * BLOCK])
        within_n = ((x_n >= low) & (x_n < high)).to(tl.int32)
        index_n = num_found + tl.cumsum(within_n, 0) - 1
        tl.store(near_ptr + index_n, x_n, mask=(within_n > 0) & (index_n < NEAR))
        num_found += tl.sum(within_n, 0)
    tl.debug_barrier()
    return num_found


@jit
def _last_equal_id(
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
    num_seen = count * 0
    last_id = count * 0
    for start in range(0, count, GROUP):
        ids_gn, x_gn = _read(logits_ptr, list_ptr, start, count, floor, last, tokens, GROUP, BLOCK)
        ids_n = tl.reshape(ids_gn, [GROUP * BLOCK])
        equal_n = (tl.reshape(x_gn, [GROUP * BLOCK]) == value).to(tl.int32)
        rank_n = num_seen + tl.cumsum(equal_n, 0)
        last_id = tl.maximum(
            last_id, tl.max(tl.where((equal_n > 0) & (rank_n <= needed), ids_n, 0), 0)
        )
        num_seen += tl.sum(equal_n, 0)
    return last_id


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
    """Return floor and last id of the fewest numbers whose weight reaches the target. low: at most
    the floor."""
    high = value_of(key_of(peak) + 1)
    above = target.to(tl.float32) * 0.0
    num_gathered = count * 0
    narrows = count > AT_ONCE
    continues = count > 0
    while continues:
        if narrows:
            low, high, above = _narrow_interval(
                logits_ptr, list_ptr, count, low, peak, target.to(tl.float32), floor, last, factor,
                shift, tokens, COUNTS, NEAR, GROUP, BLOCK,
            )  # fmt: skip
        num_gathered = _gather(
            logits_ptr, list_ptr, near_ptr, count, low, high, floor, last, tokens, NEAR, GROUP, BLOCK,
        )  # fmt: skip
        continues = (num_gathered > NEAR) & (count <= AT_ONCE) & (narrows == 0)
        narrows = continues
    offs_n = tl.arange(0, NEAR)
    live_n = offs_n < num_gathered
    x_n = tl.load(near_ptr + offs_n, mask=live_n, other=float("-inf"))
    weight_n = live_n.to(tl.float32)
    if not COUNTS:
        weight_n = tl.exp2(tl.fma(x_n, factor, -shift))
    weight_n = tl.where(live_n, weight_n, 0.0)
    value = value_of(reaching(key_of(x_n), weight_n, live_n, target.to(tl.float32) - above))
    weight_above = above.to(tl.float64) + tl.sum(
        tl.where(x_n > value, weight_n, 0.0).to(tl.float64), 0
    )
    unit_weight = tl.max(tl.where(x_n == value, weight_n, 1e-38), 0)
    # more than NEAR are all equal
    num_equal = tl.where(
        num_gathered > NEAR, num_gathered, tl.sum(((x_n == value) & live_n).to(tl.int32), 0)
    )
    needed = tl.ceil((target - weight_above) / unit_weight.to(tl.float64))
    needed = tl.minimum(tl.maximum(needed, 1.0), num_equal.to(tl.float64)).to(tl.int32)
    new_last = tl.where(value == floor, last, tokens)
    if needed < num_equal:
        new_last = _last_equal_id(
            logits_ptr, list_ptr, count, value, needed, floor, last, tokens, GROUP, BLOCK
        )
    return value, new_last


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
    """Return the mass of what stays in the listed blocks, and store each block's."""
    total = shift * 0.0
    for start in range(0, count, GROUP):
        _, x_gn = _read(logits_ptr, list_ptr, start, count, floor, last, tokens, GROUP, BLOCK)
        mass_g = tl.sum(tl.exp2(tl.fma(x_gn, factor, -shift)), 1)
        index_g = start + tl.arange(0, GROUP)
        block_g = tl.load(list_ptr + index_g, mask=index_g < count, other=0)
        tl.store(part_ptr + block_g, mass_g, mask=index_g < count)
        total += tl.sum(mass_g, 0)
    return total
