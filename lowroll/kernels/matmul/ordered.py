"""y = x W^T in float32 on a CPU by sums of fixed order: `ordered.cpp` for torch.

    s_j = fma over k = j, j + 16, j + 32, ...    j: 16 lanes; zeros follow behind K
    y[m, n] = tree(s_0 .. s_15) + bias[n]        lanes j and j + 8 first, then 4, 2 and 1 apart

BLAS picks the order by rows, alignment and threads. Here y[m, n] depends on its row, column and
bias alone, with AVX2 and with AVX-512. `Compact` rows of w hold the same floats in fewer bytes,
whose reading bounds a product of few rows.

    bfloat16    [K]
    blocks      int8 [K], and float32 scales [K / 32]: q s
    nibbles     4-bit integers [K / 2], and float32 [K / 32, 2], scale and minimum: q s + m,
                rounded twice; byte i of a group holds integers i (low half) and i + 16
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from lowroll.kernels import cxx
from lowroll.kernels.build import fields, pointer
from lowroll.kernels.launch import contiguous_rows, triton_supports
from lowroll.kernels.matmul import tiled
from lowroll.kernels.support import Support

SOURCE = Path(__file__).with_suffix(".cpp")
DEEPEST = 64  # K of a product that may go across
FLOATS, BFLOAT16, BLOCKS, NIBBLES = range(4)  # kinds of the rows of w
GROUP = 32  # integers that share a scale
AT_ONCE = 1024  # rows converted at a time; most matrices fail at the first


class OrderedArguments(ctypes.Structure):
    _fields_ = [
        *fields(ctypes.c_void_p, "x", "w", "bias", "y"),
        *fields(ctypes.c_int64, "x_stride", "w_stride"),
        *fields(ctypes.c_int, "M", "N", "K", "wide", "across", "kind", "threads"),
    ]


class Compact(NamedTuple):
    """A float32 matrix [N, K] in fewer bytes; GROUP divides K. rows: bfloat16 [N, K], or bytes [N,
    -1] of integers, then scales."""

    kind: int
    rows: Tensor


def supports_device(device: torch.device) -> Support:
    return cxx.supports(
        SOURCE, device, "float32 rows are multiplied in an order that depends on the batch"
    )


@cache
def has_avx512() -> bool:
    return torch.backends.cpu.get_cpu_capability() == "AVX512"


def goes_across(M: int, N: int, K: int) -> bool:
    """Return whether lanes are columns, for short rows as in LoRA's up projection: 1.3 to 3 times
    faster with the same bits. Fewer columns leave lanes empty, and AVX2 transposes w too slowly for
    few rows."""
    return K <= DEEPEST and N >= 128 and (has_avx512() or M > 2 or K <= 32)


def compact(w_NK: Tensor) -> Compact | None:
    """Return the same numbers, bit for bit, in the fewest bytes; None where that is float32.
    Training in bfloat16 and GGUF's Q8_0 give compact matrices."""
    if w_NK.shape[1] % GROUP:
        return None
    if (rows := _same_numbers(w_NK, _blocks, _floats_of_blocks)) is not None:
        return Compact(BLOCKS, rows)
    if (rows := _same_numbers(w_NK, _bfloat16, Tensor.float)) is not None:
        return Compact(BFLOAT16, rows)
    return None


def _same_numbers(
    w_NK: Tensor, make: Callable[[Tensor], Tensor], restore: Callable[[Tensor], Tensor]
) -> Tensor | None:
    """Convert a matrix in chunks, which bound the memory; return None if bits differ."""
    rows = None
    for start in range(0, len(w_NK), AT_ONCE):
        chunk_NK = w_NK[start : start + AT_ONCE]
        made = make(chunk_NK)
        if not torch.equal(restore(made).view(torch.int32), chunk_NK.view(torch.int32)):
            return None
        if rows is None:
            rows = made.new_empty(len(w_NK), made.shape[1])
        rows[start : start + AT_ONCE] = made
    return rows


def _bfloat16(w_NK: Tensor) -> Tensor:
    return w_NK.bfloat16()


def _blocks(w_NK: Tensor) -> Tensor:
    """Quantize as `quant.blocks.Q8_0`."""
    w_NGS = w_NK.unflatten(1, (-1, GROUP))
    scale_NG = (w_NGS.abs().amax(-1) / torch.full((), 127.0)).half().float()
    divisor_NG = torch.where(scale_NG == 0, 1.0, scale_NG)
    codes_NK = (w_NGS / divisor_NG[..., None]).round().clamp(-127, 127).to(torch.int8).flatten(1)
    return blocks(codes_NK, scale_NG).rows


def blocks(codes_NK: Tensor, scale_NG: Tensor) -> Compact:
    """Return the matrix q s of int8 q, with a float32 scale for GROUP of them."""
    return Compact(BLOCKS, torch.cat([codes_NK, scale_NG.view(torch.int8)], dim=1))


def nibbles(codes_NK: Tensor, scale_NG: Tensor, low_NG: Tensor) -> Compact:
    """Return the matrix q s + m of uint8 q in 0 .. 15, with a float32 scale and minimum for GROUP
    of them."""
    low_NGS, high_NGS = codes_NK.unflatten(1, (-1, 2, GROUP // 2)).unbind(2)
    codes_NB = (high_NGS << 4 | low_NGS).flatten(1)
    scales_NB = torch.stack([scale_NG, low_NG], dim=-1).flatten(1).view(torch.uint8)
    return Compact(NIBBLES, torch.cat([codes_NB, scales_NB], dim=1))


def _floats_of_blocks(rows: Tensor) -> Tensor:
    num_in = rows.shape[1] // (GROUP + 4) * GROUP
    scale_NG = rows[:, num_in:].contiguous().view(torch.float32)
    return (rows[:, :num_in].float().unflatten(1, (-1, GROUP)) * scale_NG[..., None]).flatten(1)


def compact_product(x_MK: Tensor, w: Compact, bias_N: Tensor | None = None) -> Tensor:
    """Return x w^T + bias, float32 [M, N] on a CPU, with the bits of `product`."""
    return _run(x_MK, w.rows, w.rows[0].nbytes, bias_N, False, w.kind)


def _run(
    x_MK: Tensor, rows: Tensor, stride: int, bias_N: Tensor | None, across: bool, kind: int
) -> Tensor:
    """Call the library. stride: of w's rows, in floats, or in bytes if compact."""
    (M, K), N = x_MK.shape, len(rows)
    x_MK = contiguous_rows(x_MK)
    bias_N = None if bias_N is None else bias_N.contiguous()
    y_MN = torch.empty(M, N)
    if y_MN.numel():
        pointers = [pointer(t) for t in (x_MK, rows, bias_N, y_MN)]
        sizes = x_MK.stride(0), stride, M, N, K
        arguments = OrderedArguments(*pointers, *sizes, has_avx512(), across, kind)
        cxx.run(SOURCE, "ordered_product", arguments)
    return y_MN


def product(
    x_MK: Tensor,
    w_NK: Tensor,
    bias_N: Tensor | None = None,
    dtype: torch.dtype | None = None,
    added_MN: Tensor | None = None,
) -> Tensor:
    """Return x w^T + bias + `added_MN`: [M, N]. Rows may be strided. float32 on a CPU; on CUDA
    `tiled.product`. ValueError for other dtypes and mismatched shapes."""
    if triton_supports(x_MK):
        return tiled.product(x_MK, w_NK, bias_N, dtype, added_MN)
    (M, K), N = x_MK.shape, w_NK.shape[0]
    operands = (x_MK, w_NK) if bias_N is None else (x_MK, w_NK, bias_N)
    if any(t.dtype != torch.float32 for t in operands):
        raise ValueError(
            f"ordered: expected float32, got {', '.join(str(t.dtype) for t in operands)}"
        )
    if w_NK.shape[1] != K or bias_N is not None and bias_N.shape != (N,):
        raise ValueError(f"ordered: {', '.join(str(list(t.shape)) for t in operands)} do not fit")
    w_NK = contiguous_rows(w_NK)
    y_MN = _run(x_MK, w_NK, w_NK.stride(0), bias_N, goes_across(M, N, K), FLOATS)
    return y_MN if added_MN is None else y_MN.add_(added_MN)
