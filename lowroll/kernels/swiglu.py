"""SwiGLU's gate, silu(gate) * up, from the fused gate-up product (Shazeer 2020), and the next product's codes.

    y = silu(g) * u,      silu(g) = g s,  s = 1 / (1 + exp(-g))      silu and y each rounded to the dtype of gate_up
    d u = d y silu(g),    d g = d y u s (1 + g (1 - s))

Legend: T tokens, F intermediate size.
"""
from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lowroll.kernels.launch import block, fused, jit, tl, warps
from lowroll.kernels.rows import (
    Product,
    Rows,
    empty_rows,
    load_dense,
    magnitude,
    parts,
    quantize_rows,
    step_of,
    store_codes,
)

BLOCK = 1024      # features of a program
PIECE = 4096      # features at a time of a program that quantises, which needs the whole row: more would not fit


def silu_mul(gate_up: Tensor | Product, rows: str | None = None) -> Tensor | Rows:
    """silu(gate) * up [T, F] of gate_up [T, 2F], dense or as codes ("int8" or "fp8").

    Differentiable when gate_up is a tensor and rows None.
    """
    sums = gate_up.sums_MN if isinstance(gate_up, Product) else gate_up
    if not fused(sums) or sums.numel() == 0:
        gate_TF, up_TF = (gate_up.dense() if isinstance(gate_up, Product) else gate_up).chunk(2, dim=-1)
        y_TF = F.silu(gate_TF) * up_TF
        return y_TF if rows is None else quantize_rows(y_TF, rows)
    if isinstance(gate_up, Tensor) and gate_up.requires_grad and torch.is_grad_enabled():
        if rows is not None:
            raise ValueError("silu_mul: codes have no gradient; take a tensor to learn")
        return _SiluMul.apply(gate_up)
    return _forward(gate_up, rows)


def _forward(gate_up: Tensor | Product, rows: str | None) -> Any:
    sums, row, column, bias = parts(gate_up)
    num_tokens, size = sums.shape[0], sums.shape[1] // 2
    y: Any = (torch.empty(num_tokens, size, dtype=gate_up.dtype, device=sums.device) if rows is None
         else empty_rows(sums, (num_tokens, size), rows, gate_up.dtype))
    dtype = _names()[gate_up.dtype]
    if rows is None:
        width = min(BLOCK, block(size))
        _silu_mul[(num_tokens, -(-size // width))](
            sums, row, column, bias, y, sums.stride(0), size, DTYPE=dtype, BLOCK=width, num_warps=warps(width, 256),
            enable_fp_fusion=False)
        return y
    width = min(PIECE, block(size))
    _silu_mul_codes[(num_tokens,)](
        sums, row, column, bias, y.codes_MK, y.scale_M1, sums.stride(0), size, DTYPE=dtype, KIND=rows, BLOCK=width,
        PIECES=-(-size // width), num_warps=warps(width, 256), enable_fp_fusion=False)
    return y


class _SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        return _forward(gate_up, None)

    @staticmethod
    def backward(ctx: Any, grad_TF: Tensor) -> Tensor:
        gate_up, _, _, _ = parts(ctx.saved_tensors[0])
        (num_tokens, size), grad = grad_TF.shape, torch.empty(gate_up.shape, dtype=gate_up.dtype, device=gate_up.device)
        width = min(BLOCK, block(size))
        _silu_mul_backward[(num_tokens, -(-size // width))](
            gate_up, grad_TF.contiguous(), grad, gate_up.stride(0), size, BLOCK=width, num_warps=warps(width, 256))
        return grad


def _names() -> dict[torch.dtype, Any]:
    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@jit
def _gated(gate_up, row, column, bias, t, stride, n, size, DTYPE: tl.constexpr):
    live = n < size
    gate = load_dense(gate_up, row, column, bias, t, stride, n, live).to(DTYPE).to(tl.float32)
    up = load_dense(gate_up, row, column, bias, t, stride, n + size, live).to(DTYPE).to(tl.float32)
    gate = (gate / (1.0 + tl.exp(-gate))).to(DTYPE).to(tl.float32)
    return (gate * up).to(DTYPE)


@jit
def _silu_mul(gate_up, row, column, bias, out, stride, size, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    t, n = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    y = _gated(gate_up, row, column, bias, t, stride, n, size, DTYPE)
    tl.store(out + t * size + n, y, mask=n < size)


@jit
def _silu_mul_codes(gate_up, row, column, bias, codes, scale, stride, size, DTYPE: tl.constexpr, KIND: tl.constexpr,
                    BLOCK: tl.constexpr, PIECES: tl.constexpr):
    t, n = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    bits, pieces = tl.zeros((BLOCK,), tl.int32), ()
    for piece in tl.static_range(PIECES):
        y = _gated(gate_up, row, column, bias, t, stride, piece * BLOCK + n, size, DTYPE)
        bits = tl.maximum(bits, magnitude(y))
        pieces = pieces + (y,)      # type: ignore[assignment]
    amax = tl.max(bits, axis=0).to(tl.float32, bitcast=True)
    tl.store(scale + t, step_of(amax, KIND))
    for piece in tl.static_range(PIECES):
        at = piece * BLOCK + n
        store_codes(pieces[piece].to(tl.float32), amax, codes + t * size + at, at < size, KIND)


@jit
def _silu_mul_backward(gate_up, y_grad, grad, stride, size, BLOCK: tl.constexpr):
    t, n = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = n < size
    gate = tl.load(gate_up + t * stride + n, mask=live, other=0.0).to(tl.float32)
    up = tl.load(gate_up + t * stride + n + size, mask=live, other=0.0).to(tl.float32)
    g = tl.load(y_grad + t * size + n, mask=live, other=0.0).to(tl.float32)
    s = 1.0 / (1.0 + tl.exp(-gate))
    dtype = grad.dtype.element_ty
    tl.store(grad + t * 2 * size + n, (g * up * s * (1.0 + gate * (1.0 - s))).to(dtype), mask=live)
    tl.store(grad + t * 2 * size + n + size, (g * gate * s).to(dtype), mask=live)
