"""Decode attention over a paged cache of 8-bit codes (`kernels.attention.quantized_cache`).

Codes become float16 without loss and enter the products unscaled: a key's scale multiplies its
column of scores, and a value's scale 2^e joins the exponent of its weight,

    w_n = 2^(s_n + e_n - m),    o = sum_n w_n q_n / sum_n 2^(s_n - m),    m = max_n (s_n + e_n) - 8

where m keeps the weights within float16 (float32 for a float32 query). The new token is attended to
by its codes, as later steps will read it.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from lowroll.kernels.attention import decode, paged
from lowroll.kernels.attention.decode import (
    combine,
    newest_slots,
    packed_heads,
    split_outputs,
    split_share,
)
from lowroll.kernels.attention.quantized_cache import (
    CARRY,
    FINER,
    LEAST,
    Codes,
    decode_keys,
    decode_values,
    encode,
)
from lowroll.kernels.launch import (
    after_others,
    block,
    constexpr,
    early_start,
    jit,
    let_others_start,
    tl,
    triton_supports,
)

HEADROOM = constexpr(8.0)  # weights reach 2^8 of float16's 2^16, and vanish below 2^-24
ROUND, SMALLEST, FINER_BY = constexpr(CARRY), constexpr(LEAST), constexpr(float(FINER))
SIGN = constexpr(-(1 << 31))


def paged_decode8(
    q_BHd: Tensor,
    k_BGd: Tensor,
    v_BGd: Tensor,
    cache_pP: Codes,
    channels_GF: Tensor,
    table_BN: Tensor,
    lengths_B: Tensor,
    scale: float,
) -> Tensor:
    """Compute `decode.paged_decode` with codes [p, P, G, ...]. channels_GF: int64."""
    if not triton_supports(q_BHd):
        return _plain(q_BHd, k_BGd, v_BGd, cache_pP, channels_GF, table_BN, lengths_B, scale)
    rows, heads, d = q_BHd.shape
    page, kv_heads = cache_pP.keys_TGd.shape[1:3]
    fine = channels_GF.shape[1]
    q_BHd, k_BGd, v_BGd = (packed_heads(x) for x in (q_BHd, k_BGd, v_BGd))
    if paged.supports(q_BHd, k_BGd, v_BGd, cache_pP.keys_TGd):
        return paged.decode8(q_BHd, k_BGd, v_BGd, cache_pP, channels_GF, table_BN, lengths_B, scale)
    padded = max(16, block(d))
    splits = max(1, min(decode.MAX_SPLITS, decode.PROGRAMS // (rows * kv_heads)))
    length = 64 if padded <= 128 else 32
    out_BHd = torch.empty((rows, heads, d), dtype=q_BHd.dtype, device=q_BHd.device)
    part, lse = split_outputs(out_BHd, splits)
    _decode8_kernel[(kv_heads * rows * splits,)](
        q_BHd,
        k_BGd,
        v_BGd,
        *cache_pP,
        channels_GF,
        table_BN,
        lengths_B,
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
        f=fine,
        PAGE=page,
        D=padded,
        F=max(16, block(fine)),
        R=max(16, block(heads // kv_heads)),
        BLOCK=length,
        SPLIT=splits > 1,
        STAGES=5,
        WIDE=q_BHd.dtype == torch.float32,
        num_warps=4,
        **early_start(),
    )
    if splits > 1:
        combine(part, lse, lengths_B, length, out_BHd)
    return out_BHd


def _plain(
    q_BHd: Tensor,
    k_BGd: Tensor,
    v_BGd: Tensor,
    cache_pP: Codes,
    channels_GF: Tensor,
    table_BN: Tensor,
    lengths_B: Tensor,
    scale: float,
) -> Tensor:
    page = cache_pP.keys_TGd.shape[1]
    live_B = lengths_B > 0
    table_BN = table_BN[:, : max(1, -(-int(lengths_B.max()) // page))].long()
    slots_B = newest_slots(table_BN, lengths_B, page)
    for buffer, codes in zip(cache_pP, encode(k_BGd, v_BGd, channels_GF), strict=True):
        buffer.flatten(0, 1).index_copy_(0, slots_B[live_B], codes[live_B])

    # a dead row attends to its first slot, as in `decode`
    index_L = torch.arange(table_BN.shape[1] * page, device=q_BHd.device)
    allowed_BL = index_L < lengths_B.clamp(min=1)[:, None]
    slots_BL = table_BN[:, index_L // page] * page + index_L % page
    stored = Codes(*(buffer.flatten(0, 1)[slots_BL.flatten()] for buffer in cache_pP))
    k_TGd = decode_keys(
        stored.keys_TGd, stored.fine_TGF, stored.scales_TG2, channels_GF, q_BHd.dtype
    )
    v_TGd = decode_values(stored.values_TGd, stored.scales_TG2, q_BHd.dtype)
    k_BGLd, v_BGLd = (x.unflatten(0, slots_BL.shape).transpose(1, 2) for x in (k_TGd, v_TGd))
    q_BGRd = q_BHd.reshape(q_BHd.shape[0], k_BGd.shape[1], -1, q_BHd.shape[-1])
    o_BGRd = F.scaled_dot_product_attention(
        q_BGRd, k_BGLd, v_BGLd, attn_mask=allowed_BL[:, None, None], scale=scale
    )
    o_BHd = o_BGRd.reshape(q_BHd.shape)
    return o_BHd if live_B.all() else o_BHd.masked_fill(~live_B[:, None, None], 0.0)


# -- Triton: base-2 softmax: `scale` arrives times log2(e), a log-sum-exp is a log2 ------


@jit
def _scale_byte(x_d):
    bits = tl.max(tl.abs(x_d), 0).to(tl.int32, bitcast=True)
    return tl.maximum(((bits + ROUND) >> 23) - 8, SMALLEST)


@jit
def _power_of_two(byte):
    return (byte << 23).to(tl.float32, bitcast=True)


@jit
def _rounded(x):
    """Round |x| <= 448 to e4m3, in float32: ties to even, small negatives to -0. The interpreter's
    own cast rounds otherwise."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = tl.maximum((bits >> 23) & 255, 127 - 6)
    rounder = ((exponent + 20) << 23).to(tl.float32, bitcast=True) * 1.5
    rounded_bits = ((x + rounder) - rounder).to(tl.int32, bitcast=True)
    return (rounded_bits | (bits & SIGN)).to(tl.float32, bitcast=True)


@jit
def _write_new_token(
    k_ptr,
    v_ptr,
    keys_ptr,
    values_ptr,
    fine_ptr,
    scales_ptr,
    channels_ptr,
    slot,
    head,
    G: tl.constexpr,
    d: tl.constexpr,
    f: tl.constexpr,
    D: tl.constexpr,
    F: tl.constexpr,
):
    offs_d = tl.arange(0, D)
    offs_f = tl.arange(0, F)
    in_d = offs_d < d
    in_f = offs_f < f
    k_d = tl.load(k_ptr + offs_d, mask=in_d, other=0.0).to(tl.float32)
    v_d = tl.load(v_ptr + offs_d, mask=in_d, other=0.0).to(tl.float32)
    k_byte = _scale_byte(k_d)
    v_byte = _scale_byte(v_d)
    channel_f = tl.load(channels_ptr + head * f + offs_f, mask=in_f, other=0)
    k_f = tl.load(k_ptr + channel_f, mask=in_f, other=0.0).to(tl.float32) * _power_of_two(
        254 - k_byte
    )
    code_d = _rounded(k_d * _power_of_two(254 - k_byte))
    residual_f = _rounded((k_f - _rounded(k_f)) * FINER_BY)
    value_d = _rounded(v_d * _power_of_two(254 - v_byte))
    index = slot * G + head
    e4m3: tl.constexpr = tl.float8e4nv
    tl.store(keys_ptr + index * d + offs_d, code_d.to(e4m3).to(tl.uint8, bitcast=True), mask=in_d)
    tl.store(
        values_ptr + index * d + offs_d, value_d.to(e4m3).to(tl.uint8, bitcast=True), mask=in_d
    )
    tl.store(
        fine_ptr + index * f + offs_f, residual_f.to(e4m3).to(tl.uint8, bitcast=True), mask=in_f
    )
    tl.store(scales_ptr + index * 2, k_byte.to(tl.uint8))
    tl.store(scales_ptr + index * 2 + 1, v_byte.to(tl.uint8))
    return code_d, residual_f, value_d, k_byte, v_byte


@jit
def _load_codes(at_ptr, mask, NUMBER: tl.constexpr):
    return tl.load(at_ptr, mask=mask, other=0).to(tl.float8e4nv, bitcast=True).to(NUMBER)


@jit
def _fine_query(q_r1, channel_ptr, in_f, in_rf, NUMBER: tl.constexpr):
    """Return the query's fine channels over FINER: they multiply the second codes."""
    channel_f = tl.load(channel_ptr, mask=in_f, other=0)
    fine_rf = tl.load(q_r1 + channel_f[None, :], mask=in_rf, other=0.0)
    return (fine_rf.to(tl.float32) / FINER_BY).to(NUMBER)


@jit
def _attend_new_token(q_rd, fine_rf, code_d, left_f, value_d, k_byte, v_byte, scale):
    s_r = tl.sum(q_rd.to(tl.float32) * code_d[None, :], 1)
    s_r = (s_r + tl.sum(fine_rf.to(tl.float32) * left_f[None, :], 1)) * scale
    s_r, e = s_r * _power_of_two(k_byte), (v_byte - 127).to(tl.float32)
    m_r = s_r + e - HEADROOM
    return m_r, tl.exp2(s_r - m_r), tl.exp2(s_r + e - m_r)[:, None] * value_d[None, :]


@jit
def _store_output(
    out_ptr,
    lse_ptr,
    out_r,
    m_r,
    l_r,
    acc_rd,
    dead,
    in_rd,
    in_r,
    d: tl.constexpr,
    D: tl.constexpr,
    SPLIT: tl.constexpr,
):
    o_rd = tl.where(dead, 0.0, acc_rd / tl.where(dead, 1.0, l_r)[:, None])
    tl.store(
        out_ptr + out_r[:, None] * d + tl.arange(0, D)[None, :],
        o_rd.to(out_ptr.dtype.element_ty),
        mask=in_rd,
    )
    if SPLIT:
        tl.store(lse_ptr + out_r, m_r + tl.log2(l_r), mask=in_r)


@jit
def _decode8_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    keys_ptr,
    values_ptr,
    fine_ptr,
    scales_ptr,
    channels_ptr,
    table_ptr,
    lengths_ptr,
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
    f: tl.constexpr,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    F: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    WIDE: tl.constexpr,
    EARLY: tl.constexpr,
):
    let_others_start(EARLY)
    pid = tl.program_id(0)
    head, row, split = pid % G, ((pid // G) % rows).to(tl.int64), pid // (G * rows)
    length = tl.load(lengths_ptr + row)
    cached = length - 1
    share, active = split_share(cached, splits, BLOCK)
    after_others(EARLY)
    if split >= active:
        return
    PER: tl.constexpr = H // G
    NUMBER: tl.constexpr = tl.float32 if WIDE else tl.float16
    offs_r, offs_d, offs_f = tl.arange(0, R), tl.arange(0, D), tl.arange(0, F)
    in_d, in_f = offs_d < d, offs_f < f
    in_rd = (offs_r < PER)[:, None] & in_d[None, :]
    pages_ptr = table_ptr + row * table_stride
    q_r1 = q_ptr + row * q_stride + (head * PER + offs_r[:, None]) * d
    q_rd = tl.load(q_r1 + offs_d[None, :], mask=in_rd, other=0.0).to(NUMBER)
    in_rf = (offs_r < PER)[:, None] & in_f[None, :]
    fine_rf = _fine_query(q_r1, channels_ptr + head * f + offs_f, in_f, in_rf, NUMBER)
    m_r, l_r = tl.full([R], float("-inf"), tl.float32), tl.zeros([R], tl.float32)
    acc_rd = tl.zeros([R, D], tl.float32)
    if split == 0:
        if length > 0:
            page = tl.load(pages_ptr + cached // PAGE).to(tl.int64)
            code_d, residual_f, value_d, k_byte, v_byte = _write_new_token(
                k_ptr + row * k_stride + head * d,
                v_ptr + row * v_stride + head * d,
                keys_ptr,
                values_ptr,
                fine_ptr,
                scales_ptr,
                channels_ptr,
                page * PAGE + cached % PAGE,
                head,
                G,
                d,
                f,
                D,
                F,
            )
            m_r, l_r, acc_rd = _attend_new_token(
                q_rd, fine_rf, code_d, residual_f, value_d, k_byte, v_byte, scale
            )
    for start in tl.range(
        split * share * BLOCK,
        tl.minimum((split + 1) * share * BLOCK, cached),
        BLOCK,
        num_stages=STAGES,
    ):
        offs_n = start + tl.arange(0, BLOCK)
        in_n = offs_n < cached
        page_n = tl.load(pages_ptr + offs_n // PAGE, mask=in_n, other=0)
        index_n = (page_n.to(tl.int64) * PAGE + offs_n % PAGE) * G + head
        in_nd = in_n[:, None] if D == d else in_n[:, None] & in_d[None, :]
        in_nf = in_n[:, None] if F == f else in_n[:, None] & in_f[None, :]
        offs_nd = index_n[:, None] * d + offs_d[None, :]
        k_nd = _load_codes(keys_ptr + offs_nd, in_nd, NUMBER)
        v_nd = _load_codes(values_ptr + offs_nd, in_nd, NUMBER)
        residual_nf = _load_codes(fine_ptr + index_n[:, None] * f + offs_f[None, :], in_nf, NUMBER)
        # both scales at once, the key's in the lower byte
        bytes_n = tl.load(scales_ptr.to(tl.pointer_type(tl.uint16)) + index_n, mask=in_n, other=0)
        bytes_n = bytes_n.to(tl.int32)
        s_rn = tl.dot(fine_rf, tl.trans(residual_nf), input_precision="ieee")
        s_rn = tl.dot(q_rd, tl.trans(k_nd), s_rn, input_precision="ieee")
        s_rn *= (scale * _power_of_two(bytes_n & 255))[None, :]
        s_rn = tl.where(in_n[None, :], s_rn, float("-inf"))
        w_rn = s_rn + ((bytes_n >> 8) - 127).to(tl.float32)[None, :]
        new_r = tl.maximum(m_r, tl.max(w_rn, 1) - HEADROOM)
        old_r = tl.exp2(m_r - new_r)
        l_r = l_r * old_r + tl.sum(tl.exp2(s_rn - new_r[:, None]), 1)
        acc_rd *= old_r[:, None]
        w_rn = tl.exp2(w_rn - new_r[:, None]).to(NUMBER)
        acc_rd = tl.dot(w_rn, v_nd, acc_rd, input_precision="ieee")
        m_r = new_r
    out_r = (split * rows + row) * H + head * PER + offs_r
    _store_output(
        out_ptr, lse_ptr, out_r, m_r, l_r, acc_rd, length <= 0, in_rd, offs_r < PER, d, D, SPLIT
    )
