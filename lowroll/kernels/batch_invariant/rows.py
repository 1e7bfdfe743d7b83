"""RMSNorm with the residual before it, and SwiGLU's gate: `rows.cpp` for torch. On CUDA
`kernels.fused` is already invariant: a program has a row.

Legend: `kernels.fused`.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from lowroll.kernels import cxx
from lowroll.kernels.batch_invariant.gradient import with_gradient_of
from lowroll.kernels.build import fields, pointer
from lowroll.kernels.fused import norm, swiglu
from lowroll.kernels.launch import contiguous_rows, triton_supports
from lowroll.kernels.quantize.rows import Product, QuantizedRows, quantize_rows
from lowroll.kernels.support import Support

SOURCE = Path(__file__).with_suffix(".cpp")


class RowsArguments(ctypes.Structure):
    _fields_ = [
        *fields(ctypes.c_void_p, "x", "update", "weight", "sum", "out"),
        *fields(ctypes.c_int64, "x_stride", "update_stride"),
        ("eps", ctypes.c_float),
        *fields(ctypes.c_int, "T", "D", "threads"),
    ]


def supports_device(device: torch.device) -> Support:
    return cxx.supports(SOURCE, device, "rows are normed by torch")


def add_rms_norm(
    x_TD: Tensor,
    update_TD: Tensor | Product | None,
    weight_D: Tensor,
    eps: float,
    rows: str | None = None,
) -> tuple[Tensor, Tensor | QuantizedRows]:
    """Compute `kernels.fused.norm.add_rms_norm`; on a CPU float32 without `rows`."""
    if triton_supports(x_TD):
        # a kernel that also rounds may sum squares in another order
        sum_TD, normed = norm.add_rms_norm(x_TD, update_TD, weight_D, eps)
        assert isinstance(normed, Tensor)
        return sum_TD, normed if rows is None else quantize_rows(normed, rows)
    assert rows is None and not isinstance(update_TD, Product)
    if update_TD is None:
        return x_TD, with_gradient_of(norm.rms_norm, _norm, x_TD, weight_D, eps)
    sum_TD, normed_TD = with_gradient_of(
        norm.add_rms_norm, _add_norm, x_TD, update_TD, weight_D, eps
    )
    return sum_TD, normed_TD


def silu_mul(gate_up: Tensor | Product, rows: str | None = None) -> Tensor | QuantizedRows:
    """Compute `kernels.fused.swiglu.silu_mul`; on a CPU float32 without `rows`."""
    if isinstance(gate_up, Product) or triton_supports(gate_up):
        return swiglu.silu_mul(gate_up, rows)
    assert rows is None
    gated = with_gradient_of(swiglu.silu_mul, _gate, gate_up)
    assert isinstance(gated, Tensor)
    return gated


def _norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    return _run("invariant_norm", x_TD, None, weight_D, eps)[1]


def _add_norm(
    x_TD: Tensor, update_TD: Tensor, weight_D: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    sum_TD, normed_TD = _run("invariant_norm", x_TD, update_TD, weight_D, eps)
    assert sum_TD is not None
    return sum_TD, normed_TD


def _gate(gate_up: Tensor) -> Tensor:
    return _run("invariant_gate", gate_up, None, None, 0.0)[1]


def _run(
    function: str, x: Tensor, update_TD: Tensor | None, weight_D: Tensor | None, eps: float
) -> tuple[Tensor | None, Tensor]:
    width = x.shape[-1] // 2 if weight_D is None else x.shape[-1]
    x = contiguous_rows(x)
    update_TD = None if update_TD is None else contiguous_rows(update_TD)
    weight_D = None if weight_D is None else weight_D.contiguous()
    out = x.new_empty(len(x), width)
    sum_TD = None if update_TD is None else torch.empty_like(out)
    arguments = RowsArguments(
        *(pointer(t) for t in (x, update_TD, weight_D, sum_TD, out)),
        x.stride(0),
        0 if update_TD is None else update_TD.stride(0),
        eps,
        len(x),
        width,
    )
    cxx.run(SOURCE, function, arguments)
    return sum_TD, out
