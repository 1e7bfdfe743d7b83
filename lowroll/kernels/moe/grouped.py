"""Products of rows with the matrices of their experts (mixture of experts).

    y[place] = w[e] x[place]           for the places of expert e (`route.Groups`)

`product` and `outer` serve the learner in floating point. `experts` and `multiply` serve the
engine: matrices stay in their stored format. Kinds are dense (float32 sums), w8a8 (int8 or e4m3
codes on both sides), and nvfp4, mxfp4 and int4 as in `kernels.matmul.w4a16`, but with int4's scales
rounded to bfloat16.

Other formats are dequantized; `Stack.rounded` rounds their activations. For few rows an expert,
`routed` streams 4-bit codes. The grid covers the worst case of routing.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from lowroll.kernels.launch import (
    INTERPRETED,
    after_others,
    block,
    constexpr,
    early_start,
    jit,
    tl,
    triton_supports,
)
from lowroll.kernels.moe import routed
from lowroll.kernels.moe.route import Groups, choose_and_sort, combine, sort_slots
from lowroll.kernels.moe.scores import Routing
from lowroll.kernels.moe.stack import Stack
from lowroll.kernels.quantize.rows import quantize_rows
from lowroll.kernels.support import NO_CUDA, YES, Support, cuda_supports, no


def experts(
    x_TD: Tensor,
    router_ED: Tensor,
    gate_up: Stack,
    down: Stack,
    routing: Routing,
    clamped_gate: tuple[float, float] | None = None,
) -> Tensor:
    """Compute the whole mixture of experts: [T, D]. Requires `triton_supports(x_TD)`; not
    differentiable. clamped_gate: limit and alpha of `fused.swiglu.clamped_swiglu`."""
    choices = routing.choices
    weights_TS, groups = choose_and_sort(x_TD, router_ED, routing)
    is_plain, slots = clamped_gate is None, weights_TS.numel()
    if is_plain and all(routed.supports(stack, x_TD, slots) for stack in (gate_up, down)):
        h_PF = routed.multiply(x_TD, gate_up, groups, choices=choices, swiglu=True)
        return combine(routed.multiply(h_PF, down, groups, to_slots=True), weights_TS, x_TD.dtype)
    h_PF = _launch(
        *_operand(x_TD, gate_up),
        gate_up,
        groups,
        x_TD.dtype,
        choices=choices,
        swiglu=True,
        clamped_gate=clamped_gate,
        blocked=down.block,
    )
    scale_P1 = None
    if not down.packed:  # the first product has ordered packed features (`blocked`)
        h_PF, scale_P1 = _operand(h_PF, down)
    y_PD = _launch(h_PF, scale_P1, down, groups, x_TD.dtype, to_slots=True)
    return combine(y_PD, weights_TS, x_TD.dtype)


def multiply(x_PK: Tensor, stack: Stack, groups: Groups) -> Tensor:
    """Multiply sorted rows with the matrices of their experts: [P, N]. Requires
    `triton_supports(x_PK)`; not differentiable."""
    return _launch(*_operand(x_PK, stack), stack, groups, x_PK.dtype)


def supports(stack: Stack, dtype: torch.dtype) -> Support:
    if stack.packed and dtype != torch.bfloat16:
        return no("4-bit experts take activations in bfloat16")
    if stack.packed and stack.features % stack.block:
        return no("takes channels of whole blocks")
    if stack.kind == "dense" and stack.codes_NK.dtype != dtype:
        return no("takes activations in the dtype of the matrices")
    return YES


def _operand(x_MK: Tensor, stack: Stack) -> tuple[Tensor, Tensor | None]:
    if stack.packed:  # first codes of all blocks, then second ones, ...
        return x_MK.view(len(x_MK), -1, stack.block).transpose(1, 2).contiguous(), None
    if stack.kind == "dense":
        return (x_MK if stack.rounded is None else stack.rounded(x_MK)).contiguous(), None
    quantized = quantize_rows(x_MK, stack.rows)
    return quantized.codes_MK, quantized.scale_M1


@dataclass(frozen=True)
class GroupedTiling:
    """Places, channels and features of a step, its warps and the steps loaded ahead."""

    places: int
    channels: int
    features: int
    warps: int = 4
    stages: int = 4


def tiles(stack: Stack, slots: int) -> GroupedTiling:
    """Choose the tiling by the format and the average slots of an expert."""
    places = min(128, max(16, block(2 * slots // stack.num_experts)))
    if stack.packed:
        features = 16 * stack.block  # the fewest that the tensor cores take
        if 4 * slots < stack.num_experts:
            return GroupedTiling(8, 32, features, warps=2, stages=3)
        return GroupedTiling(min(places, 32), 64, features, stages=2)
    if stack.codes_NK.dtype == torch.float32:
        return GroupedTiling(16, 64, 32, stages=2)
    if places >= 64:
        return GroupedTiling(places, 128, 128 if stack.kind == "w8a8" else 64, warps=8, stages=3)
    return GroupedTiling(places, 64, 128, stages=4)


def _launch(
    x: Tensor,
    x_scale: Tensor | None,
    stack: Stack,
    groups: Groups,
    dtype: torch.dtype,
    *,
    choices: int = 0,
    swiglu: bool = False,
    clamped_gate: tuple[float, float] | None = None,
    to_slots: bool = False,
    blocked: int = 0,
) -> Tensor:
    limit, alpha = clamped_gate or (0.0, 0.0)
    slots, num_experts = len(groups.slot_P), stack.num_experts
    tiling = tiles(stack, slots)
    channels, tile_channels = stack.channels, tiling.channels
    if swiglu:  # a channel of y needs a gate and an up
        channels, tile_channels = channels // 2, tile_channels // 2
    y = torch.empty((slots, channels), dtype=dtype, device=x.device)
    scale = stack.scale_N1
    if stack.kind == "nvfp4" and scale is not None:
        scale = scale.view(torch.uint8)
    active = min(slots, num_experts)  # the most experts that have places
    max_tiles = (slots + active * (tiling.places - 1)) // tiling.places
    per_expert = -(-channels // tile_channels)
    _multiply_kernel[(max_tiles * per_expert,)](
        x,
        x_scale,
        stack.codes_NK.view(torch.int64) if stack.packed else stack.codes_NK,
        scale,
        stack.global_scale,
        stack.bias_N,
        y,
        groups.slot_P,
        groups.ends_E,
        slots,
        num_experts,
        channels,
        stack.features,
        KIND=stack.kind,
        CHOICES=choices,
        SWIGLU=swiglu,
        LIMIT=limit,
        ALPHA=alpha,
        TO_SLOTS=to_slots,
        G_ROWS=stack.global_scale is not None and stack.global_scale.numel() > 1,
        BLOCKED=blocked,
        PTX=not INTERPRETED,
        BLOCK_E=block(num_experts),
        BLOCK_P=tiling.places,
        BLOCK_N=tiling.channels,
        BLOCK_K=tiling.features,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        **early_start(),
    )
    return y


def product(x_PK: Tensor, w_EKN: Tensor, groups: Groups) -> Tensor:
    """Multiply rows with the matrices of their experts: [P, N]. Not differentiable."""
    w_ENK = w_EKN.transpose(1, 2)
    is_16_bit = x_PK.dtype == w_EKN.dtype and x_PK.dtype in (torch.bfloat16, torch.float16)
    # faster than torch's on Hopper (docs/LOG.md)
    if triton_supports(x_PK) and is_16_bit and w_ENK.is_contiguous():
        return multiply(x_PK, Stack("dense", len(w_ENK), w_ENK.flatten(0, 1)), groups)
    if grouped_mm_supports(x_PK, w_EKN):
        return F.grouped_mm(x_PK, w_EKN, offs=groups.ends_E)
    y_PN = x_PK.new_empty(x_PK.shape[0], w_EKN.shape[2])
    for expert, (start, end) in enumerate(groups.bounds):
        if end > start:
            y_PN[start:end] = x_PK[start:end] @ w_EKN[expert]
    return y_PN


def outer(y_PN: Tensor, x_PK: Tensor, groups: Groups) -> Tensor:
    """Return the matrices' gradient [E, N, K]: the sum of y x^T over each expert's rows."""
    if grouped_mm_supports(x_PK, y_PN):
        return F.grouped_mm(y_PN.t(), x_PK, offs=groups.ends_E)
    w_ENK = x_PK.new_zeros(len(groups.ends_E), y_PN.shape[1], x_PK.shape[1])
    for expert, (start, end) in enumerate(groups.bounds):
        if end > start:
            torch.mm(y_PN[start:end].t(), x_PK[start:end], out=w_ENK[expert])
    return w_ENK


def grouped_mm_supports(a: Tensor, b: Tensor) -> Support:
    """Return whether torch's grouped product takes these."""
    if not a.is_cuda:
        return NO_CUDA
    if not a.dtype == b.dtype == torch.bfloat16:
        return no("takes bfloat16")
    if not a.shape[-1] % 8 == b.shape[-1] % 8 == 0:
        return no("takes rows of whole 16 bytes")
    return grouped_mm_supports_device(a.device)


@cache
def grouped_mm_supports_device(device: torch.device) -> Support:
    """Return whether torch's grouped product handles experts without rows on this device."""
    if not (support := cuda_supports(device)):
        return support
    generator = torch.Generator().manual_seed(0)
    x_PK, w_ENK = (
        torch.randn(shape, generator=generator).to(device, torch.bfloat16)
        for shape in ((40, 64), (3, 32, 64))
    )
    groups = sort_slots(torch.tensor([0, 2], device=device).repeat_interleave(20)[:, None], 3)
    try:
        y_PN = F.grouped_mm(x_PK, w_ENK.transpose(1, 2), offs=groups.ends_E)
        y_PK = F.grouped_mm(y_PN, w_ENK, offs=groups.ends_E)
        y_ENK = F.grouped_mm(y_PN.t(), x_PK, offs=groups.ends_E)
    except (RuntimeError, AttributeError, NotImplementedError, ValueError, TypeError):
        return no("torch has no grouped product for the device")
    expected_PN = torch.cat([x_PK[:20] @ w_ENK[0].t(), x_PK[20:] @ w_ENK[2].t()])
    expected_PK = torch.cat([y_PN[:20] @ w_ENK[0], y_PN[20:] @ w_ENK[2]])
    expected_ENK = torch.stack(
        [y_PN[:20].t() @ x_PK[:20], torch.zeros_like(w_ENK[0]), y_PN[20:].t() @ x_PK[20:]]
    )
    all_close = all(
        torch.allclose(result.float(), expected.float(), rtol=0.02, atol=0.5)
        for result, expected in ((y_PN, expected_PN), (y_PK, expected_PK), (y_ENK, expected_ENK))
    )
    return YES if all_close else no("torch's grouped product is not right on the device")


# -- Triton ----------------------------------------------------------------------------------------
#
# Weights are the left operand: few tokens then fill the narrow side.
#
# Nibble i of a 32-bit word w is feature 8 w + i, so eight products are summed, one for each i.
# Features of rows come in that order: [block, K / block] (`Stack.block`).
#
# A nibble s|ee|m of e2m1, moved to the bits s<<15 | eem<<6, is a bfloat16 of value * 2^-126. The
# scale makes up for it, and one packed multiplication decodes two weights.

# $8, $9: words of rows a and b; $10: their scales as packed bfloat16. $0 .. $7: nibble i of a and
# of b, from the low end, times their scales, as packed bfloat16. One multiplication makes n << 12 |
# n << 6 of a nibble n alone in its half of a register.
_E2M1 = constexpr("""
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


# The same for codes of n - 8: 128 + n is the bfloat16 0x4300 | n, less 136 exactly.
_INT4 = constexpr("""
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


@jit
def _locate_tile(ends_ptr, tile, slots, num_experts, BLOCK_E: tl.constexpr, BLOCK_P: tl.constexpr):
    """Return a tile's expert, first place and the expert's end, -1 beyond the last tile."""
    offs_e = tl.arange(0, BLOCK_E)
    ends_e = tl.load(ends_ptr + offs_e, mask=offs_e < num_experts, other=slots)
    starts_e = tl.load(ends_ptr + offs_e - 1, mask=(offs_e > 0) & (offs_e < num_experts), other=0)
    tiles_e = tl.where(offs_e < num_experts, (ends_e - starts_e + BLOCK_P - 1) // BLOCK_P, 0)
    tiles_through_e = tl.cumsum(tiles_e, 0)
    expert = tl.sum((tiles_through_e <= tile).to(tl.int32), 0)
    is_expert_e = offs_e == expert
    end = tl.sum(tl.where(is_expert_e, ends_e, 0), 0)
    first_place = tl.sum(
        tl.where(is_expert_e, starts_e + (tile - (tiles_through_e - tiles_e)) * BLOCK_P, 0), 0
    )
    return expert, first_place, tl.where(expert < num_experts, end, -1)


@jit
def _decode_words(words, scales, KIND: tl.constexpr, PTX: tl.constexpr):
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
            _decode_nibble(words, scales, 0, KIND),
            _decode_nibble(words, scales, 1, KIND),
            _decode_nibble(words, scales, 2, KIND),
            _decode_nibble(words, scales, 3, KIND),
            _decode_nibble(words, scales, 4, KIND),
            _decode_nibble(words, scales, 5, KIND),
            _decode_nibble(words, scales, 6, KIND),
            _decode_nibble(words, scales, 7, KIND),
        )


@jit
def _decode_nibble(words, scales, NIBBLE: tl.constexpr, KIND: tl.constexpr):
    code = (words >> (4 * NIBBLE)) & 15
    if KIND == "int4":
        level = code.to(tl.float32) - 8.0
    else:
        mantissa, exponent = (code & 1).to(tl.float32), (code >> 1) & 3
        level = tl.where(
            exponent == 0,
            0.5 * mantissa,
            (1.0 + 0.5 * mantissa) * tl.exp2((exponent - 1).to(tl.float32)),
        )
        level = tl.where(code >= 8, -level, level)
    return level * scales


@jit
def _add_packed_product(
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
    """Add the product of packed codes. A block is one int64 word of 16, or two with MXFP4; INT4 has
    a scale for eight blocks."""
    span: tl.constexpr = 2 if KIND == "mxfp4" else 1
    group: tl.constexpr = 8 if KIND == "int4" else 1
    blocks = features // (16 * span)
    for start in range(0, blocks, BLOCK_B):
        offs_b = start + tl.arange(0, BLOCK_B)
        keep_b = offs_b < blocks
        mask_nb = keep_n[:, None] & keep_b[None, :]
        s_nb = tl.load(
            s_ptr + row_n[:, None] * tl.cdiv(blocks, group) + (offs_b // group)[None, :],
            mask=mask_nb,
            other=0,
        )
        s_nb = _decode_scales(s_nb, KIND, PTX)
        for part in tl.static_range(2 * span):
            w_nb = tl.load(
                w_ptr + row_n[:, None] * (blocks * span) + (offs_b * span + part // 2)[None, :],
                mask=mask_nb,
                other=0,
            )
            codes = _decode_words(
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


@jit
def _decode_scales(stored_nb, KIND: tl.constexpr, PTX: tl.constexpr):
    """Return blocks' scales. For PTX, those of e2m1 are times 2^118, which with a final 2^8 makes
    up for 2^-126; MXFP4's saturate beyond E = 136, a scale of 512."""
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


@jit
def _add_product(
    sums_np, w_ptr, x_ptr, row_n, keep_n, token_p, keep_p, features, BLOCK_K: tl.constexpr
):
    for start in range(0, features, BLOCK_K):
        offs_k = start + tl.arange(0, BLOCK_K)
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
        elif w_nk.dtype == tl.float8e4nv:
            # a step's sums are rounded coarsely; sums over steps must not be
            sums_np = tl.dot(w_nk, x_kp, sums_np, max_num_imprecise_acc=BLOCK_K)
        else:
            sums_np = tl.dot(w_nk, x_kp, sums_np, input_precision="ieee")
    return sums_np


@jit
def _gated(gate_np, up_np, dtype: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr):
    gate_np, up_np = gate_np.to(dtype).to(tl.float32), up_np.to(dtype).to(tl.float32)
    if LIMIT > 0.0:
        gate_np = tl.minimum(gate_np, LIMIT)
        up_np = tl.minimum(tl.maximum(up_np, -LIMIT), LIMIT)
        return (up_np + 1.0) * gate_np / (1.0 + tl.exp(-ALPHA * gate_np))
    else:
        return (gate_np / (1.0 + tl.exp(-gate_np))).to(dtype).to(tl.float32) * up_np


@jit(do_not_specialize=["slots", "num_experts"])
def _multiply_kernel(
    x_ptr,
    xs_ptr,
    w_ptr,
    ws_ptr,
    g_ptr,
    bias_ptr,
    y_ptr,
    slot_ptr,
    ends_ptr,
    slots,
    num_experts,
    channels: tl.constexpr,
    features: tl.constexpr,
    KIND: tl.constexpr,
    CHOICES: tl.constexpr,
    SWIGLU: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
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
    """Compute y = w[e] x for some places and channels of an expert.

    xs: a scale a row. ws: a scale a channel or block. g: the global scale, or one a channel. x lies
    at the token, slot / CHOICES, or at the place if CHOICES is 0; y at the place, or at the slot
    with TO_SLOTS. SWIGLU: a matrix has `channels` gates, then as many ups. LIMIT: of
    `clamped_swiglu`. BLOCKED: y is written in the order of packed codes.
    """
    after_others(EARLY)
    height: tl.constexpr = BLOCK_N // 2 if SWIGLU else BLOCK_N
    tiles_n = tl.cdiv(channels, height)
    expert, first_place, end = _locate_tile(
        ends_ptr, tl.program_id(0) // tiles_n, slots, num_experts, BLOCK_E, BLOCK_P
    )
    if first_place >= end:
        return
    place_p = first_place + tl.arange(0, BLOCK_P)
    keep_p = place_p < end
    slot_p = tl.load(slot_ptr + place_p, mask=keep_p, other=0)
    token_p = (slot_p // CHOICES if CHOICES > 0 else place_p).to(tl.int64)
    out_p = (slot_p if TO_SLOTS else place_p).to(tl.int64)
    first_channel, offs_n = (tl.program_id(0) % tiles_n) * height, tl.arange(0, BLOCK_N)
    local_n = first_channel + offs_n % height
    keep_n = local_n < channels
    row_n = (
        expert.to(tl.int64) * channels * (BLOCK_N // height)
        + local_n
        + (offs_n // height) * channels
    )

    sums_np = tl.zeros(
        (BLOCK_N, BLOCK_P), tl.int32 if w_ptr.dtype.element_ty == tl.int8 else tl.float32
    )
    if KIND == "nvfp4" or KIND == "mxfp4" or KIND == "int4":
        sums_np = _add_packed_product(
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
        sums_np = _add_product(
            sums_np, w_ptr, x_ptr, row_n, keep_n, token_p, keep_p, features, BLOCK_K
        )
        if KIND == "w8a8":
            sums_np = (
                sums_np.to(tl.float32) * tl.load(xs_ptr + token_p, mask=keep_p, other=0.0)[None, :]
            )
            sums_np *= tl.load(ws_ptr + row_n, mask=keep_n, other=0.0)[:, None]

    if bias_ptr is not None:
        bias_n = tl.load(bias_ptr + row_n, mask=keep_n, other=0.0).to(tl.float32)
        # the product is rounded first, as a learner adds biases to it
        sums_np = sums_np.to(y_ptr.dtype.element_ty).to(tl.float32) + bias_n[:, None]
    if SWIGLU:
        gate_np, up_np = tl.split(tl.permute(tl.reshape(sums_np, (2, height, BLOCK_P)), (1, 2, 0)))
        y_np = _gated(gate_np, up_np, y_ptr.dtype.element_ty, LIMIT, ALPHA)
        out_n = first_channel + tl.arange(0, height)
    else:
        y_np, out_n = sums_np, local_n
    keep_n = out_n < channels
    if BLOCKED:
        out_n = out_n % BLOCKED * (channels // BLOCKED) + out_n // BLOCKED
    tl.store(
        y_ptr + out_p[None, :] * channels + out_n[:, None],
        y_np.to(y_ptr.dtype.element_ty),
        mask=keep_n[:, None] & keep_p[None, :],
    )
