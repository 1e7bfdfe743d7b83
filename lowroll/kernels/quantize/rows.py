"""Quantized rows before a low-bit product, and unscaled sums after it.

The next kernel applies the scales, since a product with unit scales is faster (docs/LOG.md). y is
rounded once. Codes equal those of `quant.int8` and `quant.fp8`:

    int8    scale = amax / 127
            codes = round(x * (127 / max(amax, 1e-30))), half to even
    fp8     scale = max(amax / 448, 1 / (448 * 512))
            codes = e4m3(clamp(x / scale, -448, 448))

"int8_rotated" rotates the row first (`kernels.quantize.rotation`), for a rotated weight. "gradient"
is fp8 for gradients of activations, which are as small as the loss: its floor of 2^-100 only keeps
the scale's reciprocal finite.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowroll.kernels.launch import (
    after_others,
    block,
    contiguous_rows,
    early_start,
    jit,
    tl,
    triton_supports,
    warps,
)
from lowroll.kernels.quantize import avx2
from lowroll.kernels.quantize.rotation import rotate, rotated, width

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
SMALLEST_E4M3_SCALE = 1 / (E4M3_MAX * 512)
SMALLEST_GRADIENT_SCALE = 2.0**-100
KINDS = {"int8": torch.int8, "int8_rotated": torch.int8, "fp8": E4M3, "gradient": E4M3}
ROTATED = "int8_rotated"

# at least MANY rows of more than LONG features are read in pieces
LONG, MANY, PIECE = 8192, 512, 4096


@dataclass(frozen=True)
class QuantizedRows:
    """Activations x = codes * scale, one scale a token. Pass `dtype` on to their Product."""

    codes_MK: Tensor  # int8 or float8_e4m3fn
    scale_M1: Tensor  # float32
    dtype: torch.dtype = torch.bfloat16  # of the activations


@dataclass(frozen=True)
class Product:
    """y = sums * row * column + bias, in float32 and in this order, not yet applied."""

    sums_MN: Tensor  # bfloat16, float32 or int32
    row_M1: Tensor | None = None  # float32
    column_N: Tensor | None = None  # float32, [N] or [N, 1]
    bias_N: Tensor | None = None  # float32 or the model's dtype
    dtype: torch.dtype = torch.bfloat16  # of y

    def dense(self, dtype: torch.dtype | None = None) -> Tensor:
        dtype = dtype or self.dtype
        if self.row_M1 is self.column_N is self.bias_N is None:
            return self.sums_MN.to(dtype)
        y_MN = self.sums_MN.float()
        if self.row_M1 is not None:
            y_MN = y_MN * self.row_M1
        if self.column_N is not None:
            y_MN = y_MN * self.column_N.flatten()
        if self.bias_N is not None:
            y_MN = y_MN + self.bias_N
        return y_MN.to(dtype)


def quantize_rows(x_MK: Tensor, kind: str) -> QuantizedRows:
    """Quantize activations, one scale a row. ValueError for a `kind` not in `KINDS`."""
    require(kind)
    if not triton_supports(x_MK) or x_MK.numel() == 0:
        return _plain(x_MK, kind)
    x_MK, (num_rows, size) = x_MK.contiguous(), x_MK.shape
    rows = empty_rows(x_MK, (num_rows, size), kind)
    if size > LONG and num_rows >= MANY:
        _quantize_long_kernel[(num_rows,)](
            x_MK,
            rows.codes_MK,
            rows.scale_M1,
            size,
            **encoding(kind, size),
            PIECES=-(-size // PIECE),
            BLOCK=PIECE,
            num_warps=8,
            enable_fp_fusion=False,
            **early_start(),
        )
        return rows
    _quantize_kernel[(num_rows,)](
        x_MK,
        rows.codes_MK,
        rows.scale_M1,
        size,
        **encoding(kind, size),
        BLOCK=block(size),
        num_warps=warps(block(size)),
        enable_fp_fusion=False,
        **early_start(),
    )
    return rows


def require(kind: str) -> None:
    if kind not in KINDS:
        raise ValueError(f"rows: {kind!r} is none of {', '.join(KINDS)}")


def encoding(kind: str | None, size: int) -> dict[str, Any]:
    """Return a kernel's keywords for rows of `size` features."""
    if kind == ROTATED:
        return {"KIND": "int8", "WIDTH": width(size)}
    return {"KIND": kind or "", "WIDTH": 1}


def empty_rows(like: Tensor, shape: tuple[int, int], kind: str) -> QuantizedRows:
    """Return uninitialised rows with the device and dtype of `like`."""
    require(kind)
    codes_MK = torch.empty(shape, dtype=KINDS[kind], device=like.device)
    scale_M1 = torch.empty(shape[0], 1, dtype=torch.float32, device=like.device)
    return QuantizedRows(codes_MK, scale_M1, like.dtype)


def parts(x: Tensor | Product) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Return (sums, row, column, bias); a tensor is its own sums."""
    if isinstance(x, Tensor):
        return contiguous_rows(x), None, None, None
    row, column, bias = (
        None if t is None else t.contiguous() for t in (x.row_M1, x.column_N, x.bias_N)
    )
    return contiguous_rows(x.sums_MN), row, column, bias


def _plain(x_MK: Tensor, kind: str) -> QuantizedRows:
    dtype, x_MK = x_MK.dtype, x_MK.float()
    if KINDS[kind] == torch.int8 and avx2.supports(x_MK):
        rotation_width = width(x_MK.shape[1]) if kind == ROTATED else 1
        return QuantizedRows(*avx2.quantize(x_MK, rotation_width), dtype)
    if kind == ROTATED:
        x_MK = rotate(x_MK)
    amax_M1 = x_MK.abs().amax(dim=-1, keepdim=True)
    if KINDS[kind] == torch.int8:
        codes_MK = (x_MK * (127.0 / amax_M1.clamp_min(1e-30))).round_().to(torch.int8)
        return QuantizedRows(codes_MK, amax_M1 / torch.full_like(amax_M1, 127.0), dtype)
    smallest_scale = SMALLEST_GRADIENT_SCALE if kind == "gradient" else SMALLEST_E4M3_SCALE
    scale_M1 = (amax_M1 / torch.full_like(amax_M1, E4M3_MAX)).clamp_min(smallest_scale)
    return QuantizedRows((x_MK / scale_M1).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3), scale_M1, dtype)


# -- Triton ----------------------------------------------------------------------------------------
#
# Launch with enable_fp_fusion=False: a fused multiply-add rounds once where the definition rounds
# twice, and codes would differ.


@jit
def load_dense(sums, row, column, bias, m, stride, n, live):
    """Load y[m, n] of a Product in float32, 0 where not live."""
    y = tl.load(sums + m * stride + n, mask=live, other=0).to(tl.float32)
    if row is not None:
        y = y * tl.load(row + m)
    if column is not None:
        y = y * tl.load(column + n, mask=live, other=0.0)
    if bias is not None:
        y = y + tl.load(bias + n, mask=live, other=0.0).to(tl.float32)
    return y


@jit
def magnitude(y):
    """Return the bits of |y|, ordered as |y|; NaN is above every number, so a maximum keeps it."""
    return y.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@jit
def step_of(amax, KIND: tl.constexpr):
    """Return a row's scale from its largest magnitude."""
    if KIND == "int8":
        return tl.div_rn(amax, 127.0)
    else:
        least: tl.constexpr = 7.888609052210118e-31 if KIND == "gradient" else 1 / 229376
        step = tl.div_rn(amax, 448.0)
        return tl.where(step < least, least, step)  # keeps NaN


@jit
def store_codes(y, amax, at, live, KIND: tl.constexpr):
    """Store the codes of a row. amax: its largest magnitude."""
    if KIND == "int8":
        # as torch divides: by the reciprocal
        scaled = y * (tl.div_rn(1.0, tl.maximum(amax, 1e-30)) * 127.0)
        rounded = (scaled + 12582912.0) - 12582912.0  # 1.5 * 2^23 leaves no fraction, half to even
        tl.store(at, rounded.to(tl.int8), mask=live)
    else:
        step = step_of(amax, KIND)
        reciprocal = tl.div_rn(1.0, step)
        quotient = y * reciprocal  # corrected by the remainder: y / step, rounded once
        quotient = tl.fma(tl.fma(-quotient, step, y), reciprocal, quotient)
        tl.store(at, tl.minimum(tl.maximum(quotient, -448.0), 448.0).to(tl.float8e4nv), mask=live)


@jit
def store_rows(y, codes, scale, m, size, n, live, KIND: tl.constexpr):
    """Quantize the float32 row y, 0 where not live, and store its codes and scale."""
    amax = tl.max(magnitude(y), axis=0).to(tl.float32, bitcast=True)
    tl.store(scale + m, step_of(amax, KIND))
    store_codes(y, amax, codes + m * size + n, live, KIND)


@jit
def encode_rows_kernel(
    y,
    amaxes,
    codes,
    scale,
    size,
    NUM: tl.constexpr,
    KIND: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Encode rows y [M, K] by the largest magnitudes of their blocks."""
    after_others(EARLY)
    m, n = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    blocks, num_blocks = tl.arange(0, NUM), tl.num_programs(1)
    values = rotated(tl.load(y + m * size + n, mask=n < size, other=0.0).to(tl.float32), WIDTH)
    bits = tl.load(amaxes + m * num_blocks + blocks, mask=blocks < num_blocks, other=0)
    amax = tl.max(bits, axis=0).to(tl.float32, bitcast=True)
    if tl.program_id(1) == 0:
        tl.store(scale + m, step_of(amax, KIND))
    store_codes(values, amax, codes + m * size + n, n < size, KIND)


@jit
def _quantize_kernel(
    x,
    codes,
    scale,
    size,
    KIND: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    after_others(EARLY)
    m, n = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    y = rotated(tl.load(x + m * size + n, mask=n < size, other=0.0).to(tl.float32), WIDTH)
    store_rows(y, codes, scale, m, size, n, n < size, KIND)


@jit
def _quantize_long_kernel(
    x,
    codes,
    scale,
    size,
    KIND: tl.constexpr,
    WIDTH: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    after_others(EARLY)
    m = tl.program_id(0).to(tl.int64)
    row_pieces, bits = tl.tuple([]), tl.zeros((BLOCK,), tl.int32)
    for piece in tl.static_range(PIECES):
        n = piece * BLOCK + tl.arange(0, BLOCK)
        y = tl.load(x + m * size + n, mask=n < size, other=0.0)
        if WIDTH > 1:
            y = rotated(y.to(tl.float32), WIDTH)
        row_pieces, bits = row_pieces + tl.tuple([y]), tl.maximum(bits, magnitude(y))
    amax = tl.max(bits, axis=0).to(tl.float32, bitcast=True)
    tl.store(scale + m, step_of(amax, KIND))
    for piece in tl.static_range(PIECES):
        n = piece * BLOCK + tl.arange(0, BLOCK)
        store_codes(row_pieces[piece].to(tl.float32), amax, codes + m * size + n, n < size, KIND)
