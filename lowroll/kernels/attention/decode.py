"""Decode attention over the paged cache, and writes of a prompt's keys and values.

The H / G query heads of a key-value head are the rows of one product, so every key is read once.
With few rows, a row's cached tokens are divided into `splits`, joined by their log-sum-exps
(flash-decoding; online softmax: Milakov and Gimelshein 2018, arXiv:1805.02867):

    o = sum_s 2^(lse_s - max) o_s / sum_s 2^(lse_s - max).

The first split starts with the new token, which it writes to its slot, and the layer's sinks
(logits without a value); all splits read only older slots. Their number depends on rows and
key-value heads alone, so a captured graph is right for every length.

Legend: `kernels.attention`; S splits.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from lowroll.kernels.attention import avx2, paged
from lowroll.kernels.launch import (
    after_others,
    block,
    early_start,
    jit,
    let_others_start,
    prefetch,
    tl,
    triton_supports,
)

# three a multiprocessor of an H200; 64 rows of 4 key-value heads are faster unsplit
PROGRAMS = 132 * 3
MAX_SPLITS = 64


def paged_decode(
    q_BHd: Tensor,
    k_BGd: Tensor,
    v_BGd: Tensor,
    keys_pPGd: Tensor,
    values_pPGd: Tensor,
    table_BN: Tensor,
    lengths_B: Tensor,
    scale: float,
    window: int = 0,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Write each row's new key and value to its slot, and attend over its last `window` keys (0:
    all) and the layer's sinks. Return o [B, H, d] in q's dtype.

    table_BN, lengths_B: int32; a length counts the new token. A row of length 0 is dead: it writes
    nothing, and its output is 0. The cache is contiguous.
    """
    in_triton = triton_supports(q_BHd)
    if not in_triton and not avx2.supports(q_BHd, keys_pPGd):
        return _plain(
            q_BHd, k_BGd, v_BGd, keys_pPGd, values_pPGd, table_BN, lengths_B, scale, window, sinks_H
        )
    q_BHd, k_BGd, v_BGd = (packed_heads(x) for x in (q_BHd, k_BGd, v_BGd))
    if not in_triton:
        return avx2.decode(
            q_BHd, k_BGd, v_BGd, keys_pPGd, values_pPGd, table_BN, lengths_B, scale, window, sinks_H
        )
    rows, heads, d = q_BHd.shape
    page, kv_heads = keys_pPGd.shape[1:3]
    is_plain = not window and sinks_H is None
    if is_plain and paged.supports(q_BHd, k_BGd, v_BGd, keys_pPGd):
        return paged.decode(q_BHd, k_BGd, v_BGd, keys_pPGd, values_pPGd, table_BN, lengths_B, scale)
    padded = max(16, block(d))
    splits, length, stages, warps = _launch(rows, kv_heads, padded * keys_pPGd.element_size())
    out_BHd = torch.empty((rows, heads, d), dtype=q_BHd.dtype, device=q_BHd.device)
    part, lse = split_outputs(out_BHd, splits)
    _decode_kernel[(kv_heads * rows * splits,)](
        q_BHd,
        k_BGd,
        v_BGd,
        keys_pPGd,
        values_pPGd,
        table_BN,
        lengths_B,
        sinks_H,
        part,
        lse,
        rows,
        splits,
        q_BHd.stride(0),
        k_BGd.stride(0),
        v_BGd.stride(0),
        table_BN.stride(0),
        scale * math.log2(math.e),
        H=heads,
        G=kv_heads,
        d=d,
        PAGE=page,
        D=padded,
        R=max(16, block(heads // kv_heads)),
        BLOCK=length,
        SPLIT=splits > 1,
        WINDOW=window,
        STAGES=stages,
        num_warps=warps,
        **early_start(),
    )
    if splits > 1:
        combine(part, lse, lengths_B, length, out_BHd, window)
    return out_BHd


def split_outputs(out_BHd: Tensor, splits: int) -> tuple[Tensor, Tensor]:
    """Return float32 buffers for outputs and log-sum-exps; for one split the output itself."""
    if splits == 1:
        return out_BHd, out_BHd
    part_SBHd = out_BHd.new_empty((splits, *out_BHd.shape), dtype=torch.float32)
    return part_SBHd, part_SBHd.new_empty(part_SBHd.shape[:3])


def combine(
    part_SBHd: Tensor,
    lse_SBH: Tensor,
    lengths_B: Tensor,
    length: int,
    out_BHd: Tensor,
    window: int = 0,
) -> None:
    """Join the splits' outputs into `out_BHd`."""
    splits, rows, heads, d = part_SBHd.shape
    width = min(max(16, block(d)), 64)
    _combine_kernel[(rows * heads, -(-d // width))](
        part_SBHd,
        lse_SBH,
        lengths_B,
        out_BHd,
        rows,
        splits,
        H=heads,
        d=d,
        D=width,
        S=block(splits),
        BLOCK=length,
        WINDOW=window,
        num_warps=4,
        **early_start(),
    )


def write_pages(
    keys_pPGd: Tensor, values_pPGd: Tensor, slots_T: Tensor, k_TGd: Tensor, v_TGd: Tensor
) -> None:
    """Write T tokens' keys and values to their slots (int32 or int64); skip negative ones."""
    if not triton_supports(k_TGd):
        live_T = slots_T >= 0
        if not live_T.all():
            slots_T, k_TGd, v_TGd = slots_T[live_T], k_TGd[live_T], v_TGd[live_T]
        keys_pPGd.flatten(0, 1).index_copy_(0, slots_T.long(), k_TGd)
        values_pPGd.flatten(0, 1).index_copy_(0, slots_T.long(), v_TGd)
        return
    k_TGd, v_TGd = packed_heads(k_TGd), packed_heads(v_TGd)
    tokens, numbers = k_TGd.shape[0], k_TGd.shape[1] * k_TGd.shape[2]
    width = min(512, block(numbers))
    tokens_at_once = 2048 // width
    if tokens:
        _write_kernel[(-(-tokens // tokens_at_once), -(-numbers // width))](
            keys_pPGd,
            values_pPGd,
            slots_T,
            k_TGd,
            v_TGd,
            tokens,
            k_TGd.stride(0),
            v_TGd.stride(0),
            N=numbers,
            WIDTH=width,
            BLOCK=tokens_at_once,
            num_warps=4,
        )


def gather_pages(buffer_pPGd: Tensor, table_BN: Tensor) -> Tensor:
    """Return each row's pages: [B, G, L, d], a view of a copy [B, L, G, d]."""
    flat = buffer_pPGd.view(buffer_pPGd.shape[0], -1).index_select(0, table_BN.flatten())
    return flat.view(table_BN.shape[0], -1, *buffer_pPGd.shape[2:]).transpose(1, 2)


def _plain(
    q_BHd: Tensor,
    k_BGd: Tensor,
    v_BGd: Tensor,
    keys_pPGd: Tensor,
    values_pPGd: Tensor,
    table_BN: Tensor,
    lengths_B: Tensor,
    scale: float,
    window: int,
    sinks_H: Tensor | None,
) -> Tensor:
    page = keys_pPGd.shape[1]
    live_B = lengths_B > 0
    table_BN = table_BN[:, : max(1, -(-int(lengths_B.max()) // page))]
    slots_B = newest_slots(table_BN, lengths_B, page)
    write_pages(keys_pPGd, values_pPGd, torch.where(live_B, slots_B, -1), k_BGd, v_BGd)

    # attention over no keys is NaN: a dead row attends to its first slot
    index_L = torch.arange(table_BN.shape[1] * page, device=q_BHd.device)
    allowed_BL = index_L < lengths_B.clamp(min=1)[:, None]
    if window:
        allowed_BL &= index_L >= lengths_B[:, None] - window
    q_BGRd = q_BHd.reshape(q_BHd.shape[0], k_BGd.shape[1], -1, q_BHd.shape[-1])
    k_BGLd, v_BGLd = (gather_pages(pages, table_BN) for pages in (keys_pPGd, values_pPGd))
    mask = allowed_BL[:, None, None]
    if sinks_H is not None:
        # a sink is a key and value of zeros, so the mask alone gives its score
        k_BGLd, v_BGLd = (F.pad(x, (0, 0, 0, 1)) for x in (k_BGLd, v_BGLd))
        mask = _mask_with_sinks(mask, q_BGRd, sinks_H)
    o_BGRd = F.scaled_dot_product_attention(q_BGRd, k_BGLd, v_BGLd, attn_mask=mask, scale=scale)
    o_BHd = o_BGRd.reshape(q_BHd.shape)
    return o_BHd if live_B.all() else o_BHd.masked_fill(~live_B[:, None, None], 0.0)


def _mask_with_sinks(allowed_B11L: Tensor, q_BGRd: Tensor, sinks_H: Tensor) -> Tensor:
    batch, kv_heads, group = q_BGRd.shape[:3]
    hidden_BGRL = ~allowed_B11L.expand(batch, kv_heads, group, -1)
    added_BGRL = q_BGRd.new_zeros(hidden_BGRL.shape).masked_fill_(hidden_BGRL, -torch.inf)
    sinks_GR1 = sinks_H.to(q_BGRd.dtype).view(kv_heads, group, 1)
    return torch.cat([added_BGRL, sinks_GR1.expand(batch, -1, -1, -1)], 3)


def newest_slots(table_BN: Tensor, lengths_B: Tensor, page: int) -> Tensor:
    """Return each row's newest slot, int64; of a dead row its first."""
    position_B = (lengths_B.long() - 1).clamp(min=0)
    pages_B = table_BN.gather(1, (position_B // page)[:, None])[:, 0].long()
    return pages_B * page + position_B % page


def _launch(rows: int, kv_heads: int, row_bytes: int) -> tuple[int, int, int, int]:
    """Return (splits, tokens of a block, stages, warps). Every other stage holds page numbers, the
    rest at most 80 KiB of keys and values."""
    splits = max(1, min(MAX_SPLITS, PROGRAMS // (rows * kv_heads)))
    stages, warps = 5, 4
    token_bytes = 2 * row_bytes
    max_tokens = (80 * 1024) // ((stages - 1) // 2 * token_bytes)
    power_of_two = 1 << (max_tokens.bit_length() - 1)
    wanted = 64 if splits <= 4 else 32
    return splits, max(16, min(wanted, power_of_two)), stages, warps


def packed_heads(x_THd: Tensor) -> Tensor:
    """Return x with contiguous heads; rows may be strided."""
    return x_THd if x_THd.stride()[1:] == (x_THd.shape[2], 1) else x_THd.contiguous()


# -- Triton: base-2 softmax: `scale` arrives times log2(e), a log-sum-exp is a log2 ------


@jit
def hidden_keys(length, WINDOW: tl.constexpr, BLOCK: tl.constexpr):
    """Return how many leading keys, in whole blocks, a window hides."""
    if WINDOW == 0:
        return 0
    return tl.maximum(length - WINDOW, 0) // BLOCK * BLOCK


@jit
def in_window(offs_n, length, WINDOW: tl.constexpr):
    """Return which cached keys the newest query sees."""
    in_n = offs_n < length - 1
    if WINDOW == 0:
        return in_n
    return in_n & (offs_n >= length - WINDOW)


@jit
def split_share(cached, splits, BLOCK: tl.constexpr):
    """Return the blocks of a split, and the number of active splits, at least 1."""
    blocks = tl.cdiv(cached, BLOCK)
    share = tl.maximum(tl.cdiv(blocks, splits), 1)
    return share, tl.maximum(tl.cdiv(blocks, share), 1)


@jit
def _fetch_ahead(
    keys_ptr,
    values_ptr,
    pages_ptr,
    first,
    cached,
    head,
    G: tl.constexpr,
    d: tl.constexpr,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    LINES: tl.constexpr = D // 64 if D > 64 else 1  # of 128 bytes
    offs_n = first + tl.arange(0, BLOCK)
    page_n = tl.load(pages_ptr + offs_n // PAGE, mask=offs_n < cached, other=0).to(tl.int64)
    base_n = (page_n * PAGE + offs_n % PAGE) * (G * d) + head * d
    offs_nl = base_n[:, None] + tl.minimum(tl.arange(0, LINES) * 64, d - 1)[None, :]
    prefetch(keys_ptr + offs_nl, True)
    prefetch(values_ptr + offs_nl, True)


@jit
def _write_head(ptr, x_d, in_d, D: tl.constexpr):
    tl.store(ptr + tl.arange(0, D), x_d.to(ptr.dtype.element_ty), mask=in_d)


@jit
def _add_sinks(m_r, l_r, acc_rd, sinks_ptr, PER: tl.constexpr, R: tl.constexpr):
    offs_r = tl.arange(0, R)
    sink_r = tl.load(sinks_ptr + offs_r, mask=offs_r < PER, other=0.0)
    sink_r = sink_r.to(tl.float32) * 1.4426950408889634  # log2(e), as in `scale`
    most_r = tl.maximum(m_r, sink_r)
    old_r = tl.exp2(m_r - most_r)
    return most_r, l_r * old_r + tl.exp2(sink_r - most_r), acc_rd * old_r[:, None]


@jit
def _decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    keys_ptr,
    values_ptr,
    table_ptr,
    lengths_ptr,
    sinks_ptr,
    out_ptr,
    lse_ptr,
    rows,
    splits,
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
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    let_others_start(EARLY)
    pid = tl.program_id(0)
    head, row, split = pid % G, (pid // G) % rows, pid // (G * rows)
    # lengths and pages come from earlier steps, so they are read before the wait
    length = tl.load(lengths_ptr + row)
    cached = length - 1
    hidden = hidden_keys(length, WINDOW, BLOCK)
    share, active = split_share(cached - hidden, splits, BLOCK)
    first = hidden + split * share * BLOCK
    if EARLY:
        _fetch_ahead(
            keys_ptr,
            values_ptr,
            table_ptr + row.to(tl.int64) * table_stride,
            first,
            cached,
            head,
            G,
            d,
            PAGE,
            D,
            BLOCK,
        )
    after_others(EARLY)
    if split >= active:
        return
    PER: tl.constexpr = H // G
    offs_r = tl.arange(0, R)
    offs_d = tl.arange(0, D)
    in_d = offs_d < d
    in_rd = (offs_r < PER)[:, None] & in_d[None, :]
    q_rd = tl.load(
        q_ptr + row.to(tl.int64) * q_stride + (head * PER + offs_r[:, None]) * d + offs_d[None, :],
        mask=in_rd,
        other=0.0,
    )
    m_r = tl.full([R], float("-inf"), tl.float32)
    l_r = tl.zeros([R], tl.float32)
    acc_rd = tl.zeros([R, D], tl.float32)
    if split == 0:
        if length > 0:
            k_d = tl.load(
                k_ptr + row.to(tl.int64) * k_stride + head * d + offs_d, mask=in_d, other=0.0
            )
            v_d = tl.load(
                v_ptr + row.to(tl.int64) * v_stride + head * d + offs_d, mask=in_d, other=0.0
            )
            page = tl.load(table_ptr + row.to(tl.int64) * table_stride + cached // PAGE)
            slot = (page.to(tl.int64) * PAGE + cached % PAGE) * (G * d) + head * d
            _write_head(keys_ptr + slot, k_d, in_d, D)
            _write_head(values_ptr + slot, v_d, in_d, D)
            m_r = tl.sum(q_rd.to(tl.float32) * k_d.to(tl.float32)[None, :], 1) * scale
            l_r += 1.0
            acc_rd += v_d.to(tl.float32)[None, :]
            if sinks_ptr is not None:
                m_r, l_r, acc_rd = _add_sinks(m_r, l_r, acc_rd, sinks_ptr + head * PER, PER, R)
    for start in tl.range(
        first,
        tl.minimum(first + share * BLOCK, cached),
        BLOCK,
        num_stages=STAGES,
    ):
        offs_n = start + tl.arange(0, BLOCK)
        in_n = in_window(offs_n, length, WINDOW)
        page_n = tl.load(
            table_ptr + row.to(tl.int64) * table_stride + offs_n // PAGE, mask=in_n, other=0
        )
        base_n = (page_n.to(tl.int64) * PAGE + offs_n % PAGE) * (G * d) + head * d
        if D == d:
            in_nd = in_n[:, None]
        else:
            in_nd = in_n[:, None] & in_d[None, :]
        k_nd = tl.load(keys_ptr + base_n[:, None] + offs_d[None, :], mask=in_nd, other=0.0)
        v_nd = tl.load(values_ptr + base_n[:, None] + offs_d[None, :], mask=in_nd, other=0.0)
        s_rn = tl.dot(q_rd, tl.trans(k_nd), input_precision="ieee") * scale
        s_rn = tl.where(in_n[None, :], s_rn, float("-inf"))
        new_r = tl.maximum(m_r, tl.max(s_rn, 1))
        p_rn = tl.exp2(s_rn - new_r[:, None])
        old_r = tl.exp2(m_r - new_r)
        l_r = l_r * old_r + tl.sum(p_rn, 1)
        acc_rd *= old_r[:, None]
        acc_rd = tl.dot(p_rn.to(v_nd.dtype), v_nd, acc_rd, input_precision="ieee")
        m_r = new_r
    dead = length <= 0
    o_rd = tl.where(dead, 0.0, acc_rd / tl.where(dead, 1.0, l_r)[:, None])
    out_r = (split * rows + row).to(tl.int64) * H + head * PER + offs_r
    tl.store(
        out_ptr + out_r[:, None] * d + offs_d[None, :],
        o_rd.to(out_ptr.dtype.element_ty),
        mask=in_rd,
    )
    if SPLIT:
        tl.store(lse_ptr + out_r, m_r + tl.log2(l_r), mask=offs_r < PER)


@jit
def _combine_kernel(
    part_ptr,
    lse_ptr,
    lengths_ptr,
    out_ptr,
    rows,
    splits,
    H: tl.constexpr,
    d: tl.constexpr,
    D: tl.constexpr,
    S: tl.constexpr,
    BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    EARLY: tl.constexpr,
):
    after_others(EARLY)
    pid = tl.program_id(0)
    row, head = pid // H, pid % H
    length = tl.load(lengths_ptr + row)
    hidden = hidden_keys(length, WINDOW, BLOCK)
    _, active = split_share(length - 1 - hidden, splits, BLOCK)
    offs_s = tl.arange(0, S)
    offs_d = tl.program_id(1) * D + tl.arange(0, D)
    in_s = offs_s < active
    part_s = (offs_s * rows + row).to(tl.int64) * H + head
    lse_s = tl.load(lse_ptr + part_s, mask=in_s, other=float("-inf"))
    part_sd = tl.load(
        part_ptr + part_s[:, None] * d + offs_d[None, :],
        mask=in_s[:, None] & (offs_d < d)[None, :],
        other=0.0,
    )
    largest = tl.max(lse_s, 0)
    weight_s = tl.where(length > 0, tl.exp2(lse_s - largest), 0.0)
    total = tl.where(length > 0, tl.sum(weight_s, 0), 1.0)
    o_d = tl.where(length > 0, tl.sum(part_sd * weight_s[:, None], 0) / total, 0.0)
    tl.store(
        out_ptr + (row.to(tl.int64) * H + head) * d + offs_d,
        o_d.to(out_ptr.dtype.element_ty),
        mask=offs_d < d,
    )


@jit
def _write_kernel(
    keys_ptr,
    values_ptr,
    slots_ptr,
    k_ptr,
    v_ptr,
    tokens,
    k_stride,
    v_stride,
    N: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    offs_t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    offs_n = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    slot_t = tl.load(slots_ptr + offs_t, mask=offs_t < tokens, other=-1).to(tl.int64)
    live_tn = (slot_t >= 0)[:, None] & (offs_n < N)[None, :]
    offs_tn = slot_t[:, None] * N + offs_n[None, :]
    k_tn = tl.load(k_ptr + offs_t.to(tl.int64)[:, None] * k_stride + offs_n[None, :], mask=live_tn)
    v_tn = tl.load(v_ptr + offs_t.to(tl.int64)[:, None] * v_stride + offs_n[None, :], mask=live_tn)
    tl.store(keys_ptr + offs_tn, k_tn.to(keys_ptr.dtype.element_ty), mask=live_tn)
    tl.store(values_ptr + offs_tn, v_tn.to(values_ptr.dtype.element_ty), mask=live_tn)
