"""SwiGLU's gate of the fused gate-up product (Shazeer 2020), and the next product's codes.

    y = silu(g) u,    silu(g) = g s,  s = 1 / (1 + exp(-g))     silu and y each rounded to the dtype
    d u = d y silu(g),    d g = d y u s (1 + g (1 - s))

Experts of GPT-OSS clamp both (`clamped_swiglu`):

    y = (clamp(u, -limit, limit) + 1) c s,    c = min(g, limit),  s = 1 / (1 + exp(-alpha c))
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lowroll.kernels.launch import after_others, block, early_start, jit, tl, triton_supports, warps
from lowroll.kernels.quantize.rotation import rotated
from lowroll.kernels.quantize.rows import (
    Product,
    QuantizedRows,
    empty_rows,
    encode_rows_kernel,
    encoding,
    load_dense,
    magnitude,
    parts,
    quantize_rows,
    step_of,
    store_codes,
)
from lowroll.kernels.support import needs_gradient

BLOCK = 1024  # features of a program
WHOLE = 96  # rows from which whole rows of codes keep the device busy
LONGEST = 32768  # features of such a row, held in registers
PROCESSORS = 132  # of an H100 or H200
STAYS = 16 << 20  # bytes that the L2 cache keeps


def silu_mul(gate_up: Tensor | Product, rows: str | None = None) -> Tensor | QuantizedRows:
    """Return silu(gate) * up [T, F], dense or as codes of a kind in `rows.KINDS`. Differentiable
    when gate_up is a tensor and rows None."""
    sums = gate_up.sums_MN if isinstance(gate_up, Product) else gate_up
    if not triton_supports(sums) or sums.numel() == 0:
        dense = gate_up.dense() if isinstance(gate_up, Product) else gate_up
        gate_TF, up_TF = dense.chunk(2, dim=-1)
        y_TF = F.silu(gate_TF) * up_TF
        return y_TF if rows is None else quantize_rows(y_TF, rows)
    if needs_gradient(gate_up):
        if rows is not None:
            raise ValueError("silu_mul: codes have no gradient; take a tensor to learn")
        return _SiluMul.apply(gate_up)
    return _forward(gate_up, rows)


def clamped_swiglu(gate_up_TG: Tensor, limit: float, alpha: float) -> Tensor:
    """Return the clamped SwiGLU [T, F], computed in float32 and rounded once. Differentiable; the
    backward pass keeps gate_up alone."""
    y_TF = _ClampedSwiglu.apply(gate_up_TG, limit, alpha)
    assert isinstance(y_TF, Tensor)
    return y_TF


class _ClampedSwiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up_TG: Tensor, limit: float, alpha: float) -> Tensor:
        ctx.save_for_backward(gate_up_TG)
        ctx.constants = (limit, alpha)
        return _clamped_swiglu(gate_up_TG, limit, alpha)

    @staticmethod
    def backward(ctx: Any, grad_TF: Tensor) -> tuple[Tensor | None, ...]:
        (gate_up_TG,), (limit, alpha) = ctx.saved_tensors, ctx.constants
        gate_TF, up_TF = gate_up_TG.chunk(2, dim=-1)
        grads_TG = torch.empty_like(gate_up_TG)
        gate_grad_TF, up_grad_TF = grads_TG.chunk(2, dim=-1)
        clamped_TF = gate_TF.float().clamp(max=limit)
        sigmoid_TF = (alpha * clamped_TF).sigmoid_()
        passed_TF = grad_TF.float() * sigmoid_TF
        up_grad_TF.copy_(passed_TF * clamped_TF).masked_fill_(up_TF.abs() > limit, 0)
        passed_TF *= up_TF.float().clamp(-limit, limit).add_(1)
        # s + c ds/dc = s (1 + alpha c (1 - s)), with s in `passed`
        passed_TF *= sigmoid_TF.neg_().add_(1).mul_(clamped_TF).mul_(alpha).add_(1)
        gate_grad_TF.copy_(passed_TF).masked_fill_(gate_TF > limit, 0)
        return grads_TG, None, None


def _clamped_swiglu(gate_up_TG: Tensor, limit: float, alpha: float) -> Tensor:
    gate_TF, up_TF = gate_up_TG.float().chunk(2, dim=-1)
    gate_TF = gate_TF.clamp(max=limit)
    up_TF = up_TF.clamp(-limit, limit)
    return ((up_TF + 1) * gate_TF * torch.sigmoid(alpha * gate_TF)).to(gate_up_TG.dtype)


def _forward(gate_up: Tensor | Product, rows: str | None) -> Any:
    sums, row, column, bias = parts(gate_up)
    num_tokens, size = sums.shape[0], sums.shape[1] // 2
    is_plain = row is None and column is None and bias is None and sums.dtype == gate_up.dtype
    if rows is not None and is_plain and num_tokens >= WHOLE and size <= LONGEST:
        return _whole_rows(sums, rows)
    y_TF = torch.empty(num_tokens, size, dtype=gate_up.dtype, device=sums.device)
    width = min(BLOCK, block(size))
    grid = (num_tokens, -(-size // width))
    amaxes = torch.empty(grid, dtype=torch.int32, device=sums.device) if rows else None
    _silu_mul_kernel[grid](
        sums,
        row,
        column,
        bias,
        y_TF,
        amaxes,
        sums.stride(0),
        size,
        WIDTH=encoding(rows, size)["WIDTH"],
        BLOCK=width,
        STAYS=y_TF.nbytes <= STAYS,
        num_warps=warps(width, 256),
        enable_fp_fusion=False,
        **early_start(),
    )
    if rows is None:
        return y_TF
    # a row's scale needs the whole row
    codes = empty_rows(y_TF, (num_tokens, size), rows)
    encode_rows_kernel[grid](
        y_TF,
        amaxes,
        codes.codes_MK,
        codes.scale_M1,
        size,
        NUM=block(grid[1]),
        **encoding(rows, size),
        BLOCK=width,
        num_warps=warps(width, 256),
        enable_fp_fusion=False,
        **early_start(),
    )
    return codes


def _whole_rows(gate_up: Tensor, rows: str) -> QuantizedRows:
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    codes = empty_rows(gate_up, (num_tokens, size), rows)
    limit = 8192 if num_tokens <= PROCESSORS else 4096  # for one or two rows at once a processor
    width = min(limit, block(size))
    _silu_mul_codes_kernel[(num_tokens,)](
        gate_up,
        codes.codes_MK,
        codes.scale_M1,
        gate_up.stride(0),
        size,
        PIECES=-(-size // width),
        **encoding(rows, size),
        BLOCK=width,
        num_warps=warps(width, 256),
        enable_fp_fusion=False,
        **early_start(),
    )
    return codes


class _SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        return _forward(gate_up, None)

    @staticmethod
    def backward(ctx: Any, grad_TF: Tensor) -> Tensor:
        return silu_mul_backward(ctx.saved_tensors[0], grad_TF)


def silu_mul_backward(gate_up: Tensor, y_grad_TF: Tensor, y_TF: Tensor | None = None) -> Tensor:
    """Return the gradient of gate_up; fill `y_TF`, if given, with silu(gate) * up."""
    gate_up = parts(gate_up)[0]
    num_tokens, size = y_grad_TF.shape
    grad = torch.empty(gate_up.shape, dtype=gate_up.dtype, device=gate_up.device)
    width = min(BLOCK, block(size))
    _silu_mul_backward_kernel[(num_tokens, -(-size // width))](
        gate_up,
        y_grad_TF.contiguous(),
        grad,
        y_TF,
        gate_up.stride(0),
        size,
        BLOCK=width,
        num_warps=warps(width, 256),
    )
    return grad


# -- Triton ----------------------------------------------------------------------------------------


@jit
def _gated(gate_up, row, column, bias, t, n, stride, size, DTYPE: tl.constexpr):
    live = n < size
    gate = load_dense(gate_up, row, column, bias, t, stride, n, live).to(DTYPE).to(tl.float32)
    up = load_dense(gate_up, row, column, bias, t, stride, n + size, live).to(DTYPE).to(tl.float32)
    gate = (gate / (1.0 + tl.exp(-gate))).to(DTYPE).to(tl.float32)
    return (gate * up).to(DTYPE)


@jit
def _silu_mul_kernel(
    gate_up,
    row,
    column,
    bias,
    out,
    amaxes,
    stride,
    size,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    STAYS: tl.constexpr,
    EARLY: tl.constexpr,
):
    after_others(EARLY)
    t, n = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    y = _gated(gate_up, row, column, bias, t, n, stride, size, out.dtype.element_ty)
    tl.store(out + t * size + n, y, mask=n < size, eviction_policy="evict_last" if STAYS else "")
    if amaxes is not None:
        if WIDTH > 1:
            y = rotated(y.to(tl.float32), WIDTH)
        tl.store(amaxes + t * tl.num_programs(1) + tl.program_id(1), tl.max(magnitude(y), axis=0))


@jit
def _silu_mul_codes_kernel(
    gate_up,
    codes,
    scale,
    stride,
    size,
    PIECES: tl.constexpr,
    KIND: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    after_others(EARLY)
    t = tl.program_id(0).to(tl.int64)
    row_pieces, bits = tl.tuple([]), tl.zeros((BLOCK,), tl.int32)
    for piece in tl.static_range(PIECES):
        n = piece * BLOCK + tl.arange(0, BLOCK)
        y = _gated(gate_up, None, None, None, t, n, stride, size, gate_up.dtype.element_ty)
        if WIDTH > 1:
            y = rotated(y.to(tl.float32), WIDTH)
        row_pieces, bits = row_pieces + tl.tuple([y]), tl.maximum(bits, magnitude(y))
    amax = tl.max(bits, axis=0).to(tl.float32, bitcast=True)
    tl.store(scale + t, step_of(amax, KIND))
    for piece in tl.static_range(PIECES):
        n = piece * BLOCK + tl.arange(0, BLOCK)
        store_codes(row_pieces[piece].to(tl.float32), amax, codes + t * size + n, n < size, KIND)


@jit
def _silu_mul_backward_kernel(gate_up, y_grad, grad, y, stride, size, BLOCK: tl.constexpr):
    t, n = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = n < size
    gate = tl.load(gate_up + t * stride + n, mask=live, other=0.0).to(tl.float32)
    up = tl.load(gate_up + t * stride + n + size, mask=live, other=0.0).to(tl.float32)
    g = tl.load(y_grad + t * size + n, mask=live, other=0.0).to(tl.float32)
    s = 1.0 / (1.0 + tl.exp(-gate))
    dtype = grad.dtype.element_ty
    tl.store(grad + t * 2 * size + n, (g * up * s * (1.0 + gate * (1.0 - s))).to(dtype), mask=live)
    tl.store(grad + t * 2 * size + n + size, (g * gate * s).to(dtype), mask=live)
    if y is not None:
        gate = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
        tl.store(y + t * size + n, (gate * up).to(dtype), mask=live)
