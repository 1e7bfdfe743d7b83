"""Quantization of a matrix to 4 bits in one launch, with the bytes of `lowroll.quant` (nvfp4,
mxfp4, int4). Codes beyond the row are 0.

Legend: `kernels.quantize`; G groups of a row, S weights of a group, U stored words or bytes of a
row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowroll.kernels.launch import jit, tl

TILE = 4096  # weights of a program
_KINDS = {"nvfp4": 0, "mxfp4": 1, "mxfp4_floor": 2, "int4": 3, "int4_asym": 4}


def quantize4(
    w_NK: Tensor,
    kind: str,
    group: int,
    packed_NB: Tensor,
    scale_NG: Tensor,
    global_1: Tensor | None = None,
) -> Tensor | None:
    """Write the codes and scales of a finite matrix, where `launch.triton_supports`.

    kind: nvfp4 (uint8 codes, float8_e4m3fn scales; global_1: float32), mxfp4 or mxfp4_floor (uint8
    codes and exponents), int4 or int4_asym (int32 words, float32 scales). Return int4_asym's zero
    points, float32 [N, G] in -8..7.
    """
    w_NK, (num_rows, num_in), num_groups = w_NK.contiguous(), w_NK.shape, scale_NG.shape[1]
    scales = scale_NG.view(torch.uint8) if scale_NG.dtype == torch.float8_e4m3fn else scale_NG
    codes = packed_NB.view(torch.uint8)
    if codes.shape[1] % 4 == 0:  # eight codes at a time
        codes = codes.view(torch.int32)
    zero_NG = torch.empty_like(scales) if kind == "int4_asym" else None
    groups_per_program = TILE // group
    _quantize4_kernel[(-(-num_rows * num_groups // groups_per_program),)](
        w_NK,
        codes,
        scales,
        scales if zero_NG is None else zero_NG,
        scales if global_1 is None else global_1,
        num_rows * num_groups,
        num_in,
        num_groups,
        codes.shape[1],
        KIND=_KINDS[kind],
        S=group,
        TILE=groups_per_program,
        UNIT=2 * codes.itemsize,
        num_warps=4,
    )
    return zero_NG


# -- Triton ----------------------------------------------------------------------------------------


@jit
def _round_half_to_even(x):
    """Round half to even, for |x| < 2^22."""
    return (x + 12582912.0) - 12582912.0


@jit
def _encode_e2m1(x):
    """Return the codes of `quant.groups.encode_e2m1`. From 1 on, a code is the exponent and the
    mantissa's first bit, rounded half to even, less the two levels below 1."""
    magnitude = tl.abs(x)
    bits = magnitude.to(tl.int32, bitcast=True)
    code = ((bits + 0x1FFFFF + ((bits >> 22) & 1)) >> 22) - 252
    code = tl.maximum(code, (magnitude > 0.25).to(tl.int32) + (magnitude >= 0.75).to(tl.int32))
    return tl.minimum(code, 7) + tl.where(x < 0, 8, 0)


@jit
def _encode_e4m3(x):
    """Return (code, value) of the e4m3 number nearest to 0 <= x <= 448, ties to even; 1/8 in place
    of 0. The interpreter's cast errs where a mantissa rounds up to a power of two."""
    bits = x.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
    code = tl.where(x < 0.015625, _round_half_to_even(x * 512.0).to(tl.int32), normal)
    code = tl.where(code == 0, 32, code)
    value = tl.where(
        code < 8,
        code.to(tl.float32) * 0.001953125,
        ((code + 960) << 20).to(tl.float32, bitcast=True),
    )
    return code, value


@jit
def _nonzero(scale):
    return tl.where(scale > 0, scale, 1.1920928955078125e-07)


@jit
def _quantize4_kernel(
    w,
    codes,
    scales,
    zeros,
    matrix,
    num_groups,
    K,
    G,
    U,
    KIND: tl.constexpr,
    S: tl.constexpr,
    TILE: tl.constexpr,
    UNIT: tl.constexpr,
):
    group = tl.program_id(0) * TILE + tl.arange(0, TILE)
    row, start = (group // G).to(tl.int64), group % G * S
    column = start[:, None] + tl.arange(0, S)[None, :]
    mask = (group < num_groups)[:, None] & (column < K)
    x = tl.load(w + row[:, None] * K + column, mask=mask, other=0.0).to(tl.float32)
    if KIND == 0:
        global_scale = tl.load(matrix)
        exact_scale = tl.minimum(global_scale * tl.div_rn(tl.max(tl.abs(x), axis=1), 6.0), 448.0)
        scale_code, scale = _encode_e4m3(exact_scale)
        code = _encode_e2m1(tl.div_rn(x, tl.div_rn(scale, global_scale)[:, None]))
        tl.store(scales + group, scale_code.to(tl.uint8), mask=group < num_groups)
    elif KIND <= 2:
        bits = tl.max(tl.abs(x), axis=1).to(tl.int32, bitcast=True)
        exponent = ((bits + (0x200000 if KIND == 1 else 0)) >> 23) - 2
        exponent = tl.minimum(tl.maximum(exponent, 0), 254)
        inverse = tl.where(exponent < 254, (254 - exponent) << 23, 1 << 22).to(
            tl.float32, bitcast=True
        )
        code = _encode_e2m1(x * inverse[:, None])  # a power of two: exact, as the division is
        tl.store(scales + group, exponent.to(tl.uint8), mask=group < num_groups)
    elif KIND == 3:
        scale = _nonzero(tl.div_rn(tl.max(tl.abs(x), axis=1), 7.5))
        code = _round_half_to_even(tl.div_rn(x, scale[:, None]))
        tl.store(scales + group, scale, mask=group < num_groups)
    else:
        low, high = tl.minimum(tl.min(x, axis=1), 0.0), tl.maximum(tl.max(x, axis=1), 0.0)
        scale = _nonzero(tl.div_rn(high - low, 15.0))
        zero = _round_half_to_even(tl.minimum(tl.maximum(-8.0 - tl.div_rn(low, scale), -8.0), 7.0))
        code = _round_half_to_even(tl.div_rn(x, scale[:, None]) + zero[:, None])
        tl.store(scales + group, scale, mask=group < num_groups)
        tl.store(zeros + group, zero, mask=group < num_groups)
    if KIND >= 3:
        code = tl.minimum(tl.maximum(code, -8.0), 7.0).to(tl.int32) + 8
    code = tl.where(mask, code, 0)
    packed = tl.sum(tl.reshape(code, (TILE, S // UNIT, UNIT)) << (4 * tl.arange(0, UNIT)), axis=2)
    word = (start // UNIT)[:, None] + tl.arange(0, S // UNIT)[None, :]
    tl.store(
        codes + row[:, None] * U + word,
        packed.to(codes.dtype.element_ty),
        mask=(group < num_groups)[:, None] & (word < U),
    )
