"""Quantized rows times 8-bit weights on CUDA: int8 with int32 sums, e4m3 with float32 sums. On a CPU
`quant.int8` chooses among `w8a8_vnni`, `w8a8_onednn` and `w8a8_float32`.

    y[m, n] = (sum_k x[m, k] w[n, k]) * row[m] * column[n] + bias[n]

Few rows go to `gemv`, more int8 rows to `w8a8_triton`, e4m3 to `torch._scaled_mm`. Up to `WIDE` rows
the next kernel applies the scales, to sums rounded once more, since `_scaled_mm` is up to twice
slower with them (docs/LOG.md). Larger products of up to `SHORT` features use `use_fast_accum`, and
so do gradients: a tenth faster, with a loss below bfloat16's rounding.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from lowroll.kernels.launch import triton_supports
from lowroll.kernels.matmul import gemv, w8a8_triton
from lowroll.kernels.quantize.rows import E4M3, Product, QuantizedRows
from lowroll.kernels.support import YES, Support, no

WIDE = 1024  # rows from which `_scaled_mm` itself applies the scales of bfloat16 results
SHORT = 5120  # features whose fast sums err by 1.2e-3 (bfloat16: 1.7e-3; docs/LOG.md)


def multiply(
    rows: QuantizedRows,
    codes_NK: Tensor,
    scale_N: Tensor,
    bias_N: Tensor | None,
    fast: bool = False,
) -> Product:
    """Multiply rows with the transposed codes, both int8 or both float8_e4m3fn. scale_N: float32,
    [N] or [N, 1]. fast: `use_fast_accum` for any K.

    Captured graphs of one device must not run these products at the same time.
    """
    if gemv.supports(rows.codes_MK, codes_NK):
        return Product(gemv.multiply(rows, codes_NK, scale_N, bias_N), dtype=rows.dtype)
    if codes_NK.dtype == torch.int8:
        return _multiply_int8(rows, codes_NK, scale_N, bias_N)
    return _multiply_e4m3(rows, codes_NK, scale_N, bias_N, fast)


def _multiply_int8(
    rows: QuantizedRows, codes_NK: Tensor, scale_N: Tensor, bias_N: Tensor | None
) -> Product:
    if triton_supports(codes_NK):
        return Product(w8a8_triton.multiply(rows, codes_NK, scale_N, bias_N), dtype=rows.dtype)
    sums_MN = torch._int_mm(rows.codes_MK, codes_NK.t()).float()
    return Product(sums_MN * scale_N.flatten(), rows.scale_M1, None, bias_N, rows.dtype)


def _multiply_e4m3(
    rows: QuantizedRows, codes_NK: Tensor, scale_N: Tensor, bias_N: Tensor | None, fast: bool
) -> Product:
    codes_MK, (num_out, num_in) = rows.codes_MK, codes_NK.shape
    if not codes_NK.is_cuda or not scaled_mm_supports(codes_NK.device):
        sums_MN = F.linear(codes_MK.float(), codes_NK.float())
        return Product(sums_MN, rows.scale_M1, scale_N, bias_N, rows.dtype)
    is_bfloat16, has_whole_tiles = rows.dtype == torch.bfloat16, num_out % 16 == num_in % 16 == 0
    if is_bfloat16 and has_whole_tiles and len(codes_MK) >= WIDE:
        bias_N = None if bias_N is None else bias_N.to(torch.bfloat16)
        y_MN = torch._scaled_mm(
            codes_MK,
            codes_NK.t(),
            rows.scale_M1,
            scale_N.view(1, -1),
            bias=bias_N,
            out_dtype=torch.bfloat16,
            use_fast_accum=fast or num_in <= SHORT,
        )
        return Product(y_MN, dtype=rows.dtype)
    sums_dtype = torch.bfloat16 if is_bfloat16 else torch.float32  # float16 could overflow
    sums_MN = e4m3_sums(codes_MK, codes_NK, sums_dtype, fast)
    return Product(sums_MN, rows.scale_M1, scale_N, bias_N, rows.dtype)


def e4m3_sums(codes_MK: Tensor, codes_NK: Tensor, dtype: torch.dtype, fast: bool = False) -> Tensor:
    """Return sum_k x w by the device's e4m3 product, padded to multiples of 16."""
    num_out, num_in = codes_NK.shape
    pad_k, pad_n = -num_in % 16, -num_out % 16
    if pad_k or pad_n:
        codes_MK, codes_NK = _pad(codes_MK, pad_k, 0), _pad(codes_NK, pad_k, pad_n)
    unit_scale = _unit_scale(codes_MK.device)
    sums_MN = torch._scaled_mm(
        codes_MK, codes_NK.t(), unit_scale, unit_scale, out_dtype=dtype, use_fast_accum=fast
    )
    return sums_MN[:, :num_out].contiguous() if pad_n else sums_MN


@cache
def scaled_mm_supports(device: torch.device) -> Support:
    x_MK, w_NK = (
        torch.arange(-160, 160, device=device).remainder(23).view(-1, 32).to(E4M3) for _ in range(2)
    )
    try:
        y_MN = e4m3_sums(x_MK, w_NK, torch.float32)
    except (RuntimeError, AttributeError, NotImplementedError, ValueError):
        return no("torch has no e4m3 product for the device")
    if torch.allclose(y_MN.double(), x_MK.double() @ w_NK.double().t(), rtol=1e-4):
        return YES
    return no("the device's e4m3 product is not right")


def _pad(codes: Tensor, columns: int, rows: int) -> Tensor:
    return F.pad(codes.view(torch.uint8), (0, columns, 0, rows)).view(E4M3)


@cache
def _unit_scale(device: torch.device) -> Tensor:
    return torch.ones((), device=device)
