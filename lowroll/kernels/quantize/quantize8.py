"""Quantization of a matrix or its transpose to 8 bits, one scale a row, with the bytes of
`quant.int8`, `quant.int8_rotated` and `quant.fp8`."""

from __future__ import annotations

import torch
from torch import Tensor

from lowroll.kernels.launch import block, jit, tl
from lowroll.kernels.quantize.rotation import rotated
from lowroll.kernels.quantize.rows import ROTATED, encoding, magnitude

LONGEST = 4096  # weights that a program holds in registers
# a transpose's tile, of 128-byte pieces, and rows a program searches for magnitudes
ROWS, COLUMNS, MANY = 128, 64, 512
TYPES = ("int8", ROTATED, "fp8")


def quantize_rows_into(w_NK: Tensor, codes_NK: Tensor, scale_N1: Tensor, kind: str) -> None:
    """Write codes and float32 scales of a matrix, where `launch.triton_supports`. A row with a NaN
    or an infinity gets a non-finite scale. ValueError for a kind not in `TYPES`."""
    _require(kind)
    w_NK, (num_rows, num_in) = w_NK.contiguous(), w_NK.shape
    width, keywords = min(block(num_in), LONGEST), encoding(kind, num_in)
    _quantize8_kernel[(num_rows,)](
        w_NK,
        codes_NK,
        scale_N1,
        num_in,
        WIDTH=width,
        WHOLE=width >= num_in,
        INTEGER=keywords["KIND"] == "int8",
        ROTATION=keywords["WIDTH"],
        num_warps=4 if width >= num_in else 8,
        enable_fp_fusion=False,
    )


def quantize_columns_into(w_NK: Tensor, codes_KN: Tensor, scale_K1: Tensor, kind: str) -> None:
    """Compute `quantize_rows_into` of the transpose of a row-major matrix. kind: "int8" or
    "fp8"."""
    _require(kind, ("int8", "fp8"))
    num_rows, num_columns = w_NK.shape
    amax_K = torch.zeros(num_columns, dtype=torch.int32, device=w_NK.device)
    _column_amax_kernel[(-(-num_columns // COLUMNS), -(-num_rows // MANY))](
        w_NK, amax_K, num_rows, num_columns, MANY=MANY, ROWS=ROWS, COLUMNS=COLUMNS
    )
    _quantize8_columns_kernel[(-(-num_columns // COLUMNS), -(-num_rows // ROWS))](
        w_NK,
        amax_K,
        codes_KN,
        scale_K1,
        num_rows,
        num_columns,
        INTEGER=kind == "int8",
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        enable_fp_fusion=False,
    )


def _require(kind: str, known: tuple[str, ...] = TYPES) -> None:
    if kind not in known:
        raise ValueError(f"kind: {kind!r} is none of {', '.join(known)}")


# -- Triton ----------------------------------------------------------------------------------------


@jit
def _maximum_or_nan(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@jit
def _scale_of(amax, INTEGER: tl.constexpr):
    largest: tl.constexpr = 127.5 if INTEGER else 448.0
    scale = tl.div_rn(amax, largest)
    return tl.where(scale == 0.0, 1.1920928955078125e-07, scale)


@jit
def _encode(w, scale, INTEGER: tl.constexpr):
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
    w,
    codes,
    scales,
    K,
    WIDTH: tl.constexpr,
    WHOLE: tl.constexpr,
    INTEGER: tl.constexpr,
    ROTATION: tl.constexpr,
):
    n, offs = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    w += n * K
    codes += n * K
    if WHOLE:
        values = rotated(tl.load(w + offs, mask=offs < K, other=0.0).to(tl.float32), ROTATION)
        scale = _scale_of(tl.reduce(tl.abs(values), 0, _maximum_or_nan), INTEGER)
        tl.store(codes + offs, _encode(values, scale, INTEGER), mask=offs < K)
    else:
        largest = tl.zeros((WIDTH,), tl.float32)
        for k in range(0, K, WIDTH):
            values = tl.load(w + k + offs, mask=offs < K - k, other=0.0).to(tl.float32)
            largest = _maximum_or_nan(largest, tl.abs(rotated(values, ROTATION)))
        scale = _scale_of(tl.reduce(largest, 0, _maximum_or_nan), INTEGER)
        for k in range(0, K, WIDTH):
            values = tl.load(w + k + offs, mask=offs < K - k, other=0.0).to(tl.float32)
            values = rotated(values, ROTATION)
            tl.store(codes + k + offs, _encode(values, scale, INTEGER), mask=offs < K - k)
    tl.store(scales + n, scale)


@jit
def _column_amax_kernel(
    w, amaxes, N, K, MANY: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Find the largest magnitudes as bits, which have the numbers' order."""
    k = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    first_row = tl.program_id(1).to(tl.int64) * MANY
    largest_bits = tl.zeros((ROWS, COLUMNS), tl.int32)
    for start in range(0, MANY, ROWS):
        n = first_row + start + tl.arange(0, ROWS)
        live = (n < N)[:, None] & (k < K)[None, :]
        largest_bits = tl.maximum(
            largest_bits, magnitude(tl.load(w + n[:, None] * K + k[None, :], live, other=0.0))
        )
    tl.atomic_max(amaxes + k, tl.max(largest_bits, axis=0), mask=k < K)


@jit
def _quantize8_columns_kernel(
    w,
    amaxes,
    codes,
    scales,
    N,
    K,
    INTEGER: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    k = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    n = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = (n < N)[:, None] & (k < K)[None, :]
    values = tl.load(w + n[:, None] * K + k[None, :], live, other=0.0).to(tl.float32)
    amax = tl.load(amaxes + k, mask=k < K, other=0).to(tl.float32, bitcast=True)
    scale = _scale_of(amax, INTEGER)
    if tl.program_id(1) == 0:
        tl.store(scales + k, scale, mask=k < K)
    transposed_codes = tl.trans(
        _encode(values, tl.broadcast_to(scale[None, :], (ROWS, COLUMNS)), INTEGER)
    )
    offs = k[:, None].to(tl.int64) * N + n[None, :]
    tl.store(codes + offs, transposed_codes, mask=(k < K)[:, None] & (n < N)[None, :])
