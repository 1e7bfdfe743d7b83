"""Triton side of `grouped.py`. It is imported only where it runs, so the room needs no Triton to be
imported.

A program takes some places of one expert and some rows of its matrix. Its weights are the left
operand of the tensor cores' product and the tokens the right one: few tokens then fill the narrow
side. The grid is as long as the tiles can be in the worst case; a program finds its expert in
`ends`, and one that has none leaves at once.

4-bit codes stay eight a 32-bit word. Nibble i of word w belongs to feature 8 w + i, so eight
products are summed, each with the rows' features of one i. The rows come with their features in
that order: [8, K / 8].

A nibble s|ee|m of e2m1, moved to the bits s<<15 | eem<<6, is a bfloat16 of value * 2^-126: the
scale of its block makes up for it, and one packed multiplication decodes two weights.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lowroll.kernels.launch import after_others

# $8, $9: a word of row a and one of row b (their nibbles are i = 0 .. 7 from the low end), $10:
# their scales as packed bfloat16. $0 .. $7: nibble i of a and of b, times their scales, as packed
# bfloat16. A nibble n that lies alone in its half of a register becomes n << 12 | n << 6 by one
# multiplication.
_E2M1 = tl.constexpr("""
{
    .reg .b32 p, q, t;
    prmt.b32 p, $8, $9, 0x5410;
    and.b32 t, p, 0x000F000F;  mul.lo.u32 t, t, 0x1040;  and.b32 t, t, 0x81C081C0;  mul.rn.bf16x2 $0, t, $10;
    and.b32 t, p, 0x00F000F0;  mul.lo.u32 t, t, 0x0104;  and.b32 t, t, 0x81C081C0;  mul.rn.bf16x2 $1, t, $10;
    shr.u32 q, p, 8;
    and.b32 t, q, 0x000F000F;  mul.lo.u32 t, t, 0x1040;  and.b32 t, t, 0x81C081C0;  mul.rn.bf16x2 $2, t, $10;
    and.b32 t, q, 0x00F000F0;  mul.lo.u32 t, t, 0x0104;  and.b32 t, t, 0x81C081C0;  mul.rn.bf16x2 $3, t, $10;
    prmt.b32 p, $8, $9, 0x7632;
    and.b32 t, p, 0x000F000F;  mul.lo.u32 t, t, 0x1040;  and.b32 t, t, 0x81C081C0;  mul.rn.bf16x2 $4, t, $10;
    and.b32 t, p, 0x00F000F0;  mul.lo.u32 t, t, 0x0104;  and.b32 t, t, 0x81C081C0;  mul.rn.bf16x2 $5, t, $10;
    shr.u32 q, p, 8;
    and.b32 t, q, 0x000F000F;  mul.lo.u32 t, t, 0x1040;  and.b32 t, t, 0x81C081C0;  mul.rn.bf16x2 $6, t, $10;
    and.b32 t, q, 0x00F000F0;  mul.lo.u32 t, t, 0x0104;  and.b32 t, t, 0x81C081C0;  mul.rn.bf16x2 $7, t, $10;
}
""")


# The same for codes n that stand for n - 8: 128 + n is the bfloat16 0x4300 | n, and 136 is taken
# from it exactly.
_INT4 = tl.constexpr("""
{
    .reg .b32 p, q, t, c;
    mov.b32 c, 0x43084308;
    prmt.b32 p, $8, $9, 0x5410;
    lop3.b32 t, p, 0x000F000F, 0x43004300, 0xEA;  sub.rn.bf16x2 t, t, c;  mul.rn.bf16x2 $0, t, $10;
    shr.u32 q, p, 4;
    lop3.b32 t, q, 0x000F000F, 0x43004300, 0xEA;  sub.rn.bf16x2 t, t, c;  mul.rn.bf16x2 $1, t, $10;
    shr.u32 q, p, 8;
    lop3.b32 t, q, 0x000F000F, 0x43004300, 0xEA;  sub.rn.bf16x2 t, t, c;  mul.rn.bf16x2 $2, t, $10;
    shr.u32 q, p, 12;
    lop3.b32 t, q, 0x000F000F, 0x43004300, 0xEA;  sub.rn.bf16x2 t, t, c;  mul.rn.bf16x2 $3, t, $10;
    prmt.b32 p, $8, $9, 0x7632;
    lop3.b32 t, p, 0x000F000F, 0x43004300, 0xEA;  sub.rn.bf16x2 t, t, c;  mul.rn.bf16x2 $4, t, $10;
    shr.u32 q, p, 4;
    lop3.b32 t, q, 0x000F000F, 0x43004300, 0xEA;  sub.rn.bf16x2 t, t, c;  mul.rn.bf16x2 $5, t, $10;
    shr.u32 q, p, 8;
    lop3.b32 t, q, 0x000F000F, 0x43004300, 0xEA;  sub.rn.bf16x2 t, t, c;  mul.rn.bf16x2 $6, t, $10;
    shr.u32 q, p, 12;
    lop3.b32 t, q, 0x000F000F, 0x43004300, 0xEA;  sub.rn.bf16x2 t, t, c;  mul.rn.bf16x2 $7, t, $10;
}
""")


@triton.jit
def _places(ends_ptr, tile, slots, num_experts, BLOCK_E: tl.constexpr, BLOCK_P: tl.constexpr):
    """The expert of a tile, its first place and the expert's end; the end is -1 for a tile beyond
    the last."""
    offs_e = tl.arange(0, BLOCK_E)
    ends_e = tl.load(ends_ptr + offs_e, mask=offs_e < num_experts, other=slots)
    starts_e = tl.load(ends_ptr + offs_e - 1, mask=(offs_e > 0) & (offs_e < num_experts), other=0)
    tiles_e = tl.where(offs_e < num_experts, (ends_e - starts_e + BLOCK_P - 1) // BLOCK_P, 0)
    upto_e = tl.cumsum(tiles_e, 0)
    expert = tl.sum((upto_e <= tile).to(tl.int32), 0)
    mine_e = offs_e == expert
    end = tl.sum(tl.where(mine_e, ends_e, 0), 0)
    first = tl.sum(tl.where(mine_e, starts_e + (tile - (upto_e - tiles_e)) * BLOCK_P, 0), 0)
    return expert, first, tl.where(expert < num_experts, end, -1)


@triton.jit
def _decoded(words, scales, KIND: tl.constexpr, PTX: tl.constexpr):
    """Eight bfloat16 (or, in the interpreter, float32) tensors: nibble i of every word, times its
    scale."""
    if PTX:
        return tl.inline_asm_elementwise(
            _INT4 if KIND == "int4" else _E2M1,
            "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r",
            [words, scales],
            dtype=(
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
            ),
            is_pure=True,
            pack=2,
        )
    else:
        return (
            _level(words, scales, 0, KIND),
            _level(words, scales, 1, KIND),
            _level(words, scales, 2, KIND),
            _level(words, scales, 3, KIND),
            _level(words, scales, 4, KIND),
            _level(words, scales, 5, KIND),
            _level(words, scales, 6, KIND),
            _level(words, scales, 7, KIND),
        )


@triton.jit
def _level(words, scales, NIBBLE: tl.constexpr, KIND: tl.constexpr):
    code = (words >> (4 * NIBBLE)) & 15
    if KIND == "int4":
        level = code.to(tl.float32) - 8.0
    else:
        size, exponent = (code & 1).to(tl.float32), (code >> 1) & 3
        level = tl.where(
            exponent == 0, 0.5 * size, (1.0 + 0.5 * size) * tl.exp2((exponent - 1).to(tl.float32))
        )
        level = tl.where(code >= 8, -level, level)
    return level * scales


@triton.jit
def _packed_sum(
    sums_np,
    w_ptr,
    s_ptr,
    x_ptr,
    row_n,
    keep_n,
    token_p,
    keep_p,
    features,
    BLOCK_B: tl.constexpr,
    KIND: tl.constexpr,
    PTX: tl.constexpr,
):
    """w_ptr: int64, sixteen codes of a row. A block is one of them, or two with MXFP4, whose scales
    are for as many. INT4 has a scale for eight blocks."""
    span: tl.constexpr = 2 if KIND == "mxfp4" else 1
    group: tl.constexpr = 8 if KIND == "int4" else 1
    blocks = features // (16 * span)
    for first in range(0, blocks, BLOCK_B):
        offs_b = first + tl.arange(0, BLOCK_B)
        keep_b = offs_b < blocks
        mask_nb = keep_n[:, None] & keep_b[None, :]
        s_nb = tl.load(
            s_ptr + row_n[:, None] * tl.cdiv(blocks, group) + (offs_b // group)[None, :],
            mask=mask_nb,
            other=0,
        )
        s_nb = _scale(s_nb, KIND, PTX)
        for part in tl.static_range(2 * span):
            w_nb = tl.load(
                w_ptr + row_n[:, None] * (blocks * span) + (offs_b * span + part // 2)[None, :],
                mask=mask_nb,
                other=0,
            )
            codes = _decoded(
                (w_nb >> 32 if part % 2 else w_nb & 0xFFFFFFFF).to(tl.int32), s_nb, KIND, PTX
            )
            for i in tl.static_range(8):
                x_bp = tl.load(
                    x_ptr
                    + token_p[None, :] * features
                    + ((8 * part + i) * blocks + offs_b)[:, None],
                    mask=keep_p[None, :] & keep_b[:, None],
                    other=0.0,
                )
                sums_np = tl.dot(codes[i].to(x_bp.dtype), x_bp, sums_np, input_precision="ieee")
    return sums_np


@triton.jit
def _scale(stored_nb, KIND: tl.constexpr, PTX: tl.constexpr):
    """The scales of blocks, for PTX in bfloat16; those of e2m1 times 2^118, which with a final 2^8
    makes up for 2^-126.

    MXFP4's are made by their bits; beyond E = 136, a scale of 512, they saturate.
    """
    if KIND == "int4":
        scale_nb = stored_nb
        if PTX:
            scale_nb = scale_nb.to(tl.bfloat16)
    elif KIND == "mxfp4":
        if PTX:
            scale_nb = (
                ((tl.minimum(stored_nb.to(tl.int32), 136) + 118) << 7)
                .to(tl.int16)
                .to(tl.bfloat16, bitcast=True)
            )
        else:
            scale_nb = tl.exp2(stored_nb.to(tl.float32) - 127.0)
    else:
        scale_nb = stored_nb.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        if PTX:
            scale_nb = (scale_nb * 3.3230699894622897e35).to(tl.bfloat16)
    return scale_nb


@triton.jit
def _sum(sums_np, w_ptr, x_ptr, row_n, keep_n, token_p, keep_p, features, BLOCK_K: tl.constexpr):
    for first in range(0, features, BLOCK_K):
        offs_k = first + tl.arange(0, BLOCK_K)
        keep_k = offs_k < features
        w_nk = tl.load(
            w_ptr + row_n[:, None] * features + offs_k[None, :],
            mask=keep_n[:, None] & keep_k[None, :],
            other=0.0,
        )
        x_kp = tl.load(
            x_ptr + token_p[None, :] * features + offs_k[:, None],
            mask=keep_p[None, :] & keep_k[:, None],
            other=0.0,
        )
        if w_nk.dtype == tl.int8:
            sums_np = tl.dot(w_nk, x_kp, sums_np, out_dtype=tl.int32)
        elif (
            w_nk.dtype == tl.float8e4nv
        ):  # sums of one tile are rounded coarsely, those over tiles are not
            sums_np = tl.dot(w_nk, x_kp, sums_np, max_num_imprecise_acc=BLOCK_K)
        else:
            sums_np = tl.dot(w_nk, x_kp, sums_np, input_precision="ieee")
    return sums_np


@triton.jit(do_not_specialize=["slots", "num_experts"])
def multiply(
    x_ptr,
    xs_ptr,
    w_ptr,
    ws_ptr,
    g_ptr,
    y_ptr,
    slot_ptr,
    ends_ptr,
    slots,
    num_experts,
    rows: tl.constexpr,
    features: tl.constexpr,
    KIND: tl.constexpr,
    CHOICES: tl.constexpr,
    SWIGLU: tl.constexpr,
    TO_SLOTS: tl.constexpr,
    G_ROWS: tl.constexpr,
    BLOCKED: tl.constexpr,
    PTX: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,
):
    """y = w[e] x for some places of an expert and some of the `rows` of its output.

    KIND: dense, w8a8 (xs, ws: a scale a row), nvfp4 (g: the global scale, one or one a row), mxfp4
    or int4. x lies at the place's token, its slot / CHOICES, or at the place itself if CHOICES is
    0; y at the place, or (TO_SLOTS) at the slot. SWIGLU: the matrix has `rows` of gates and then as
    many of ups, and y = silu(gate) * up. BLOCKED: the features of y are written in the order that
    matrices with so many in a block read them in; 0: as they are.
    """
    after_others(EARLY)
    tiles: tl.constexpr = BLOCK_N // 2 if SWIGLU else BLOCK_N  # rows of y in a tile
    tiles_n = tl.cdiv(rows, tiles)
    expert, first, end = _places(
        ends_ptr, tl.program_id(0) // tiles_n, slots, num_experts, BLOCK_E, BLOCK_P
    )
    if first >= end:
        return
    place_p = first + tl.arange(0, BLOCK_P)
    keep_p = place_p < end
    slot_p = tl.load(slot_ptr + place_p, mask=keep_p, other=0)
    token_p = (slot_p // CHOICES if CHOICES > 0 else place_p).to(tl.int64)
    out_p = (slot_p if TO_SLOTS else place_p).to(tl.int64)
    first_n, offs_n = (tl.program_id(0) % tiles_n) * tiles, tl.arange(0, BLOCK_N)
    local_n = first_n + offs_n % tiles
    keep_n = local_n < rows
    row_n = expert.to(tl.int64) * rows * (BLOCK_N // tiles) + local_n + (offs_n // tiles) * rows

    sums_np = tl.zeros(
        (BLOCK_N, BLOCK_P), tl.int32 if w_ptr.dtype.element_ty == tl.int8 else tl.float32
    )
    if KIND == "nvfp4" or KIND == "mxfp4" or KIND == "int4":
        sums_np = _packed_sum(
            sums_np,
            w_ptr,
            ws_ptr,
            x_ptr,
            row_n,
            keep_n,
            token_p,
            keep_p,
            features,
            BLOCK_K // (32 if KIND == "mxfp4" else 16),
            KIND,
            PTX,
        )
        if PTX and KIND != "int4":
            sums_np *= 256.0
        if KIND == "nvfp4":
            sums_np /= (
                tl.load(g_ptr + row_n, mask=keep_n, other=1.0)[:, None]
                if G_ROWS
                else tl.load(g_ptr)
            )
    else:
        sums_np = _sum(sums_np, w_ptr, x_ptr, row_n, keep_n, token_p, keep_p, features, BLOCK_K)
        if KIND == "w8a8":
            sums_np = (
                sums_np.to(tl.float32) * tl.load(xs_ptr + token_p, mask=keep_p, other=0.0)[None, :]
            )
            sums_np *= tl.load(ws_ptr + row_n, mask=keep_n, other=0.0)[:, None]

    if SWIGLU:
        gate_np, up_np = tl.split(tl.permute(tl.reshape(sums_np, (2, tiles, BLOCK_P)), (1, 2, 0)))
        gate_np = gate_np.to(y_ptr.dtype.element_ty).to(tl.float32)
        silu_np = (gate_np / (1.0 + tl.exp(-gate_np))).to(y_ptr.dtype.element_ty).to(tl.float32)
        y_np = silu_np * up_np.to(y_ptr.dtype.element_ty).to(tl.float32)
        out_n = first_n + tl.arange(0, tiles)
    else:
        y_np, out_n = sums_np, local_n
    keep_n = out_n < rows
    if BLOCKED:
        out_n = out_n % BLOCKED * (rows // BLOCKED) + out_n // BLOCKED
    tl.store(
        y_ptr + out_p[None, :] * rows + out_n[:, None],
        y_np.to(y_ptr.dtype.element_ty),
        mask=keep_n[:, None] & keep_p[None, :],
    )
