"""Quantizing a matrix to 8 bits in one launch, one scale a row: INT8 and e4m3.

The formulas are those of `quant.int8` and `quant.fp8`, and the bytes are too: divisions are rounded
to nearest, nothing is contracted, ties go to even. A program takes one row: it reads it once (a
long one once more, from a cache), finds the scale, and writes codes and scale to storages that are
there already.

Legend: N rows, K columns.
"""

from __future__ import annotations

from torch import Tensor

from lowroll.kernels.launch import block, jit, tl
from lowroll.kernels.quantize.rows import KINDS

LONGEST = 4096  # weights that a program holds in registers


def quantize_rows_into(w_NK: Tensor, codes_NK: Tensor, scale_N1: Tensor, kind: str) -> None:
    """Write the codes and the scales (float32) of a finite matrix. Triton only: ask
    `launch.triton_supports` first.

    kind: "int8" or "fp8"; ValueError for another. A row with a NaN or an infinity gets a scale that
    is not finite.
    """
    if kind not in KINDS:
        raise ValueError(f"kind: {kind!r} is none of {', '.join(KINDS)}")
    w_NK, (num_rows, num_in) = w_NK.contiguous(), w_NK.shape
    width = min(block(num_in), LONGEST)
    _quantize8_kernel[(num_rows,)](
        w_NK,
        codes_NK,
        scale_N1,
        num_in,
        WIDTH=width,
        WHOLE=width >= num_in,
        INTEGER=kind == "int8",
        num_warps=4 if width >= num_in else 8,
        enable_fp_fusion=False,
    )


# -- Triton ----------------------------------------------------------------------------------------


@jit
def _or_nan(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@jit
def _scale(top, INTEGER: tl.constexpr):
    largest: tl.constexpr = 127.5 if INTEGER else 448.0
    scale = tl.div_rn(tl.reduce(top, 0, _or_nan), largest)
    return tl.where(scale == 0.0, 1.1920928955078125e-07, scale)


@jit
def _codes(w, scale, INTEGER: tl.constexpr):
    ratio = tl.div_rn(w, tl.zeros_like(w) + scale)
    if INTEGER:  # adding 1.5 * 2^23 rounds to a whole number, half to even
        codes = ((tl.minimum(tl.maximum(ratio, -128.0), 127.0) + 12582912.0) - 12582912.0).to(
            tl.int8
        )
    else:
        codes = tl.minimum(tl.maximum(ratio, -448.0), 448.0).to(tl.float8e4nv)
    return codes


@jit
def _quantize8_kernel(
    w, codes, scales, K, WIDTH: tl.constexpr, WHOLE: tl.constexpr, INTEGER: tl.constexpr
):
    n, at = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    w += n * K
    codes += n * K
    if WHOLE:
        values = tl.load(w + at, mask=at < K, other=0.0).to(tl.float32)
        scale = _scale(tl.abs(values), INTEGER)
        tl.store(codes + at, _codes(values, scale, INTEGER), mask=at < K)
    else:
        top = tl.zeros((WIDTH,), tl.float32)
        for k in range(0, K, WIDTH):
            top = _or_nan(
                top, tl.abs(tl.load(w + k + at, mask=at < K - k, other=0.0).to(tl.float32))
            )
        scale = _scale(top, INTEGER)
        for k in range(0, K, WIDTH):
            values = tl.load(w + k + at, mask=at < K - k, other=0.0).to(tl.float32)
            tl.store(codes + k + at, _codes(values, scale, INTEGER), mask=at < K - k)
    tl.store(scales + n, scale)
