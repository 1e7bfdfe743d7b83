"""Attention in Triton whose bits depend on a query and its keys alone, over cached pages or packed
keys.

    shares of SHARE keys, in tiles of BLOCK:   m, l, o of the online softmax
    joined in order, from the first on:        m' = max(m, m_s)
                                               l' = l 2^(m - m') + l_s 2^(m_s - m'),  o' likewise

(Milakov and Gimelshein 2018.) Shares begin at multiples of SHARE, so decoding, chunked prompts and
packed sequences use the same order. Tiles that a query cannot see add zeros. A product with ones
sums the weights in an order that other rows do not change.

Legend: `kernels.attention`; I tiles of queries, L joined shares.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from lowroll.kernels.attention.decode import packed_heads
from lowroll.kernels.launch import (
    INTERPRETED,
    after_others,
    block,
    early_start,
    jit,
    tl,
    triton_supports_device,
)
from lowroll.kernels.support import YES, Support, cuda_supports, no

# products of 16 and of 128 rows use different instructions, compared on this chip alone
CAPABILITY = (9, 0)
SHARE = 256  # keys
WIDEST = 256  # numbers of a head
PROGRAMS = 132 * 2  # of decoding: two a multiprocessor of an H200


class QueryTiles(NamedTuple):
    """Tiles of neighbouring queries, int32 [I] each: first token, number (0 is none), keys
    before the first query's own, and where keys begin: a row of the page table, or the first
    packed key."""

    first_I: Tensor
    count_I: Tensor
    before_I: Tensor
    origin_I: Tensor


def supports_device(device: torch.device) -> Support:
    if not (support := triton_supports_device(device)) or INTERPRETED:
        return support
    return cuda_supports(device, CAPABILITY, only=True)


def supports_heads(head_dim: int, heads: int, kv_heads: int) -> Support:
    if head_dim > WIDEST:
        return no(f"takes heads of up to {WIDEST}")
    if block(heads // kv_heads) > 16:
        return no("takes at most 16 query heads a key-value head")
    return YES


class Shape(NamedTuple):
    """Rows (queries times heads) and keys of a tile, loads in flight and warps."""

    rows: int
    keys: int
    stages: int
    warps: int


def choose(d: int, size: int, decoded: bool) -> Shape:
    """Choose the shape for heads of d numbers of `size` bytes (measured on an H200). A tile's keys
    determine bits, so they depend on nothing else."""
    width = max(16, block(d)) * size
    keys = min(128, max(32, 2**15 // width))
    if INTERPRETED:  # numpy's order depends on the shape of a product
        return Shape(64, keys, 1, 4)
    if decoded:
        return Shape(16, keys, 3 if width <= 256 else 2, 4)
    return Shape(128, keys, 1, 8) if width == 256 else Shape(64, keys, 1, 4)


def queries_of(heads: int, kv_heads: int, d: int, size: int) -> int:
    """Return the query tokens of a tile."""
    return max(1, choose(d, size, decoded=False).rows // block(heads // kv_heads))


def tile(
    lengths_S: Tensor, before_S: Tensor, origin_S: Tensor, queries: int, most: int
) -> QueryTiles:
    """Cut packed sequences into `most` tiles of up to `queries` tokens, without a wait for the
    device; `most` has to be enough, and the last tiles are empty. All int32.

    lengths_S: query tokens. before_S: keys before the first query. origin_S: as in `QueryTiles`.
    """
    tiles_S = (lengths_S + (queries - 1)) // queries
    ends_S = tiles_S.cumsum(0)
    index_I = torch.arange(most, device=lengths_S.device)
    # an empty tile counts as one of the last sequence
    sequence_I = torch.searchsorted(ends_S, index_I, right=True).clamp(max=len(lengths_S) - 1)
    first_tile_S = ends_S - tiles_S
    skipped_I = (index_I - first_tile_S[sequence_I]) * queries
    starts_S = lengths_S.cumsum(0) - lengths_S
    remaining_I = lengths_S[sequence_I] - skipped_I
    count_I = torch.where(index_I < ends_S[-1], remaining_I.clamp(min=0, max=queries), 0)
    columns = (
        starts_S[sequence_I] + skipped_I,
        count_I,
        before_S[sequence_I] + skipped_I,
        origin_S[sequence_I],
    )
    return QueryTiles(*(x_I.to(torch.int32) for x_I in columns))


def attend(
    q_THd: Tensor,
    keys_pPGd: Tensor,
    values_pPGd: Tensor,
    table_SN: Tensor | None,
    tiles: QueryTiles,
    scale: float,
) -> Tensor:
    """Return o [T, H, d], each query attending to its own key and those before it.

    table_SN: int32 pages of each sequence; None: keys and values are packed, [T, G, d].
    """
    q_THd = packed_heads(q_THd)
    out_THd = torch.empty(q_THd.shape, dtype=q_THd.dtype, device=q_THd.device)
    tokens, heads, d = q_THd.shape
    kv_heads = keys_pPGd.shape[-2]
    if table_SN is None:
        keys_pPGd, values_pPGd = packed_heads(keys_pPGd), packed_heads(values_pPGd)
    shape = choose(d, q_THd.element_size(), decoded=False)
    _prompts_kernel[(len(tiles.first_I), kv_heads)](
        q_THd,
        keys_pPGd,
        values_pPGd,
        table_SN,
        *tiles,
        out_THd,
        q_THd.stride(0),
        *(
            (keys_pPGd.stride(0), values_pPGd.stride(0))
            if table_SN is None
            else (kv_heads * d,) * 2
        ),
        0 if table_SN is None else table_SN.stride(0),
        scale * math.log2(math.e),
        H=heads,
        G=kv_heads,
        d=d,
        PAGE=0 if table_SN is None else keys_pPGd.shape[1],
        D=max(16, block(d)),
        R=shape.rows,
        PER=block(heads // kv_heads),
        BLOCK=shape.keys,
        SHARE=SHARE,
        STAGES=shape.stages,
        num_warps=shape.warps,
        enable_fp_fusion=False,
        **early_start(),
    )
    return out_THd


def decode(
    q_BHd: Tensor,
    k_BGd: Tensor,
    v_BGd: Tensor,
    keys_pPGd: Tensor,
    values_pPGd: Tensor,
    table_BN: Tensor,
    lengths_B: Tensor,
    scale: float,
) -> Tensor:
    """Compute `decode.paged_decode` with the bits of `attend`."""
    q_BHd, k_BGd, v_BGd = (packed_heads(x) for x in (q_BHd, k_BGd, v_BGd))
    rows, heads, d = q_BHd.shape
    page, kv_heads = keys_pPGd.shape[1:3]
    shares = -(-table_BN.shape[1] * page // SHARE)
    programs = max(1, min(shares, PROGRAMS // (rows * kv_heads)))
    out_BHd = torch.empty((rows, heads, d), dtype=q_BHd.dtype, device=q_BHd.device)
    part_LBHd = stats_2LBH = None
    if programs > 1:
        part_LBHd = out_BHd.new_empty((shares, rows, heads, d), dtype=torch.float32)
        stats_2LBH = part_LBHd.new_empty((2, shares, rows, heads))
    shape = choose(d, q_BHd.element_size(), decoded=True)
    _decode_kernel[(kv_heads * rows * programs,)](
        q_BHd,
        k_BGd,
        v_BGd,
        keys_pPGd,
        values_pPGd,
        table_BN,
        lengths_B,
        out_BHd,
        part_LBHd,
        stats_2LBH,
        rows,
        programs,
        shares,
        q_BHd.stride(0),
        k_BGd.stride(0),
        v_BGd.stride(0),
        table_BN.stride(0),
        scale * math.log2(math.e),
        H=heads,
        G=kv_heads,
        d=d,
        PAGE=page,
        D=max(16, block(d)),
        R=shape.rows,
        PER=block(heads // kv_heads),
        BLOCK=shape.keys,
        SHARE=SHARE,
        STAGES=shape.stages,
        num_warps=shape.warps,
        enable_fp_fusion=False,
        **early_start(),
    )
    if part_LBHd is not None:
        _join_kernel[(rows * heads,)](
            part_LBHd,
            stats_2LBH,
            lengths_B,
            out_BHd,
            rows,
            shares,
            H=heads,
            d=d,
            D=max(16, block(d)),
            SHARE=SHARE,
            num_warps=1,
            enable_fp_fusion=False,
            **early_start(),
        )
    return out_BHd


# -- Triton: softmax in base 2, so `scale` arrives times log2(e) ------------------------------------


@jit
def _token_offsets(table, origin, offs_n, in_n, stride, PAGE: tl.constexpr):
    if PAGE:
        page_n = tl.load(table + offs_n // PAGE, mask=in_n, other=0).to(tl.int64)
        return (page_n * PAGE + offs_n % PAGE) * stride
    else:
        return (origin + offs_n).to(tl.int64) * stride


@jit
def _attend_share(
    q_rd,
    seen_r,
    keys,
    values,
    table,
    origin,
    first,
    stop,
    key_stride,
    value_stride,
    scale,
    d: tl.constexpr,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Return m, l and o over the keys [first, stop); each row sees those below `seen_r`."""
    offs_d = tl.arange(0, D)
    in_d = offs_d < d
    ones_nk = tl.full([BLOCK, 16], 1.0, q_rd.dtype)
    m_r = tl.full([R], float("-inf"), tl.float32)
    l_rk = tl.zeros([R, 16], tl.float32)
    o_rd = tl.zeros([R, D], tl.float32)
    for start in tl.range(first, stop, BLOCK, num_stages=STAGES):
        offs_n = start + tl.arange(0, BLOCK)
        in_n = offs_n < stop
        in_nd = in_n[:, None] & in_d[None, :]
        key_base_n = _token_offsets(table, origin, offs_n, in_n, key_stride, PAGE)
        value_base_n = key_base_n
        if not PAGE:
            value_base_n = _token_offsets(table, origin, offs_n, in_n, value_stride, PAGE)
        k_nd = tl.load(keys + key_base_n[:, None] + offs_d[None, :], mask=in_nd, other=0.0)
        v_nd = tl.load(values + value_base_n[:, None] + offs_d[None, :], mask=in_nd, other=0.0)
        s_rn = tl.dot(q_rd, tl.trans(k_nd), input_precision="ieee") * scale
        s_rn = tl.where(offs_n[None, :] < seen_r[:, None], s_rn, float("-inf"))
        new_r = tl.maximum(m_r, tl.max(s_rn, 1))
        shift_r = tl.where(new_r == float("-inf"), 0.0, new_r)
        p_rn = tl.exp2(s_rn - shift_r[:, None]).to(v_nd.dtype)
        old_r = tl.exp2(m_r - shift_r)
        l_rk = tl.dot(p_rn, ones_nk, l_rk * old_r[:, None], input_precision="ieee")
        o_rd = tl.dot(p_rn, v_nd, o_rd * old_r[:, None], input_precision="ieee")
        m_r = new_r
    return m_r, tl.max(l_rk, 1), o_rd


@jit
def _join_softmax(m_r, l_r, o_rd, m_s, l_s, o_s):
    new_r = tl.maximum(m_r, m_s)
    shift_r = tl.where(new_r == float("-inf"), 0.0, new_r)
    old_r, share_r = tl.exp2(m_r - shift_r), tl.exp2(m_s - shift_r)
    return new_r, l_r * old_r + l_s * share_r, o_rd * old_r[:, None] + o_s * share_r[:, None]


@jit
def _prompts_kernel(
    q,
    keys,
    values,
    table,
    first_ptr,
    count_ptr,
    before_ptr,
    origin_ptr,
    out,
    q_stride,
    key_stride,
    value_stride,
    table_stride,
    scale,
    H: tl.constexpr,
    G: tl.constexpr,
    d: tl.constexpr,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    PER: tl.constexpr,
    BLOCK: tl.constexpr,
    SHARE: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    after_others(EARLY)
    tile_index, head = tl.program_id(0), tl.program_id(1)
    count = tl.load(count_ptr + tile_index)
    if count == 0:
        return
    first_token, num_before = tl.load(first_ptr + tile_index), tl.load(before_ptr + tile_index)
    origin = tl.load(origin_ptr + tile_index)
    offs_r, offs_d = tl.arange(0, R), tl.arange(0, D)
    query_r, head_r = offs_r // PER, head * (H // G) + offs_r % PER
    live_r = (query_r < count) & (offs_r % PER < H // G)
    live_rd = live_r[:, None] & (offs_d < d)[None, :]
    token_r = (first_token + query_r).to(tl.int64)
    q_ptrs = q + token_r[:, None] * q_stride + head_r[:, None] * d + offs_d[None, :]
    q_rd = tl.load(q_ptrs, mask=live_rd, other=0.0)
    seen_r = num_before + 1 + tl.minimum(query_r, count - 1)
    if PAGE:
        table += origin.to(tl.int64) * table_stride
    stop = num_before + count
    m_r = tl.full([R], float("-inf"), tl.float32)
    l_r = tl.zeros([R], tl.float32)
    o_rd = tl.zeros([R, D], tl.float32)
    for share in range(0, stop, SHARE):
        m_s, l_s, o_s = _attend_share(
            q_rd,
            seen_r,
            keys + head * d,
            values + head * d,
            table,
            origin,
            share,
            tl.minimum(share + SHARE, stop),
            key_stride,
            value_stride,
            scale,
            d,
            PAGE,
            D,
            R,
            BLOCK,
            STAGES,
        )
        m_r, l_r, o_rd = _join_softmax(m_r, l_r, o_rd, m_s, l_s, o_s)
    out_ptrs = out + token_r[:, None] * (H * d) + head_r[:, None] * d + offs_d[None, :]
    tl.store(out_ptrs, tl.div_rn(o_rd, l_r[:, None]).to(out.dtype.element_ty), mask=live_rd)


@jit
def _decode_kernel(
    q,
    k,
    v,
    keys,
    values,
    table,
    lengths,
    out,
    part,
    stats,
    rows,
    programs,
    shares,
    q_stride,
    k_stride,
    v_stride,
    table_stride,
    scale,
    H: tl.constexpr,
    G: tl.constexpr,
    d: tl.constexpr,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    PER: tl.constexpr,
    BLOCK: tl.constexpr,
    SHARE: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Attend for one key-value head of one row over some shares. The program of the last share
    writes the new key and value, and reads them from their slot."""
    after_others(EARLY)
    pid = tl.program_id(0)
    head, row, program = pid % G, (pid // G) % rows, pid // (G * rows)
    length = tl.load(lengths + row)
    last = tl.maximum(length - 1, 0)
    offs_r, offs_d = tl.arange(0, R), tl.arange(0, D)
    head_r = head * (H // G) + offs_r
    live_rd = (offs_r < H // G)[:, None] & (offs_d < d)[None, :]
    out_ptrs = out + (row * H + head_r).to(tl.int64)[:, None] * d + offs_d[None, :]
    if length <= 0:
        if program == 0:
            tl.store(out_ptrs, tl.zeros([R, D], out.dtype.element_ty), mask=live_rd)
        return
    table += row.to(tl.int64) * table_stride
    if (last // SHARE) % programs == program:
        in_d = offs_d < d
        k_d = tl.load(k + row.to(tl.int64) * k_stride + head * d + offs_d, mask=in_d)
        v_d = tl.load(v + row.to(tl.int64) * v_stride + head * d + offs_d, mask=in_d)
        page = tl.load(table + last // PAGE).to(tl.int64)
        slot = (page * PAGE + last % PAGE) * (G * d) + head * d + offs_d
        tl.store(keys + slot, k_d, mask=in_d)
        tl.store(values + slot, v_d, mask=in_d)
        tl.debug_barrier()  # every thread's part is written before any is read
    q_ptrs = q + row.to(tl.int64) * q_stride + head_r[:, None] * d + offs_d[None, :]
    q_rd = tl.load(q_ptrs, mask=live_rd, other=0.0)
    seen_r = tl.full([R], 0, tl.int32) + length
    m_r = tl.full([R], float("-inf"), tl.float32)
    l_r = tl.zeros([R], tl.float32)
    o_rd = tl.zeros([R, D], tl.float32)
    for share in range(program, tl.cdiv(length, SHARE), programs):
        m_s, l_s, o_s = _attend_share(
            q_rd,
            seen_r,
            keys + head * d,
            values + head * d,
            table,
            0,
            share * SHARE,
            tl.minimum(share * SHARE + SHARE, length),
            G * d,
            G * d,
            scale,
            d,
            PAGE,
            D,
            R,
            BLOCK,
            STAGES,
        )
        if part is None:
            m_r, l_r, o_rd = _join_softmax(m_r, l_r, o_rd, m_s, l_s, o_s)
        else:
            part_r = (share * rows + row).to(tl.int64) * H + head_r
            tl.store(part + part_r[:, None] * d + offs_d[None, :], o_s, mask=live_rd)
            tl.store(stats + part_r, m_s, mask=offs_r < H // G)
            tl.store(stats + shares.to(tl.int64) * rows * H + part_r, l_s, mask=offs_r < H // G)
    if part is None:
        tl.store(out_ptrs, tl.div_rn(o_rd, l_r[:, None]).to(out.dtype.element_ty), mask=live_rd)


@jit
def _join_kernel(
    part,
    stats,
    lengths,
    out,
    rows,
    shares,
    H: tl.constexpr,
    d: tl.constexpr,
    D: tl.constexpr,
    SHARE: tl.constexpr,
    EARLY: tl.constexpr,
):
    after_others(EARLY)
    row, head = tl.program_id(0) // H, tl.program_id(0) % H
    length = tl.load(lengths + row)
    if length <= 0:
        return
    offs_d = tl.arange(0, D)
    in_d = offs_d < d
    m_1 = tl.full([1], float("-inf"), tl.float32)
    l_1 = tl.zeros([1], tl.float32)
    o_1d = tl.zeros([1, D], tl.float32)
    for share in range(0, tl.cdiv(length, SHARE)):
        part_index = (share * rows + row).to(tl.int64) * H + head
        m_s = tl.load(stats + part_index)
        l_s = tl.load(stats + shares.to(tl.int64) * rows * H + part_index)
        o_s = tl.load(part + part_index * d + offs_d, mask=in_d, other=0.0)
        m_1, l_1, o_1d = _join_softmax(m_1, l_1, o_1d, m_s, l_s, o_s[None, :])
    out_1d = (row * H + head).to(tl.int64) * d + offs_d[None, :]
    o_1d = tl.div_rn(o_1d, l_1[:, None])
    tl.store(out + out_1d, o_1d.to(out.dtype.element_ty), mask=in_d[None, :])
