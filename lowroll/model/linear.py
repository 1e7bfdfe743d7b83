"""The weight seam: a linear layer whose weight is a Parameter or a QTensor, with an optional
low-rank adapter.

Fused matrices (qkv, gate-up) know their parts, because checkpoints and adapters name the parts.

    y = W x + b,   and with an adapter on a part p:   y_p += (alpha / r) B_p A_p x   (`lowroll.model.adapter`)

A QTensor weight is multiplied in the format's own arithmetic when `low_bit` is set (the engine),
and as the dequantized matrix otherwise (the learner: differentiable in x, the dequantized copy
lives for one product only).

A learner that is `aligned` (QaRL) multiplies in the engine's arithmetic too, with the QTensor Q(W)
of its weight W; the gradient passes the quantizer unchanged (straight-through), scales are
constants:

    Y = lowbit(X, Q(W)) + b        dX = dY dequantize(Q(W))        dW = dY^T X        db = sum dY

Legend: T tokens, K in features, N out features.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowroll.kernels.fused.swiglu import silu_mul, silu_mul_backward
from lowroll.kernels.launch import triton_supports
from lowroll.kernels.quantize.rows import Product, Rows, quantize_rows
from lowroll.kernels.training import low_rank
from lowroll.model import adapter as adapters
from lowroll.model.adapter import Adapter
from lowroll.model.recompute import remake
from lowroll.quant.formats import QTensor, get_format


class Linear(nn.Module):
    """`parts` maps the name of each stacked matrix to its rows, in order: {"q_proj": 512, "k_proj":
    128, ...}."""

    def __init__(
        self,
        in_features: int,
        parts: dict[str, int],
        bias: bool,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.in_features, self.parts, self.low_bit = in_features, dict(parts), False
        rows = sum(parts.values())
        self.weight: nn.Parameter | QTensor = nn.Parameter(
            torch.empty(rows, in_features, device=device, dtype=dtype)
        )
        self.bias = nn.Parameter(torch.empty(rows, device=device, dtype=dtype)) if bias else None
        # what the learner's forward multiplies with, see weights.aligned
        self.aligned: QTensor | None = None
        self.adapter: Adapter | None = None

    def rows(self, part: str) -> slice:
        """Where a part's rows lie in the fused matrix."""
        start = 0
        for name, size in self.parts.items():
            if name == part:
                return slice(start, start + size)
            start += size
        raise KeyError(part)

    def set_weight(self, weight: QTensor | nn.Parameter) -> None:
        """Replace the weight object (not its values) by a QTensor or a Parameter."""
        del self.weight
        self.weight, self.aligned = weight, None

    def quantized(self, format: str) -> QTensor:
        """The weight in `format`: the very tensor that the learner multiplies with, when it has
        one."""
        weight = self.weight
        if self.aligned is not None and self.aligned.format == format:
            return self.aligned
        if isinstance(weight, QTensor):
            if weight.format == format:
                return weight
            if (same := weight.seen_as(format)) is not None:
                return same.clone()
            weight = nn.Parameter(weight.dequantize(), requires_grad=False)
        return get_format(format).quantize(weight)

    @property
    def reads(self) -> str | None:
        """The codes that the layer wants its input in, where whoever makes it can quantize it:
        CUDA, low-bit."""
        if not self.low_bit or not isinstance(self.weight, QTensor) or self.adapter is not None:
            return None
        return get_format(self.weight.format).rows if self.weight.device.type == "cuda" else None

    def read(self, x_TK: Tensor) -> Tensor | Rows:
        """The input as the layer wants it."""
        return x_TK if self.reads is None else quantize_rows(x_TK, self.reads)

    def forward(self, x_TK: Tensor | Rows) -> Tensor | Product:
        if isinstance(x_TK, Rows):
            assert isinstance(self.weight, QTensor)
            return get_format(self.weight.format).product(x_TK, self.weight, self.bias)
        if (
            self.low_bit
            and self.aligned is None
            and isinstance(self.weight, QTensor)
            and torch.is_grad_enabled()
            and (x_TK.requires_grad or (self.bias is not None and self.bias.requires_grad))
        ):
            raise ValueError(
                "low_bit: the engine's arithmetic has no gradient; a learner runs the dequantized "
                "weights (run_low_bit(False)) or the aligned forward"
            )
        if self.adapter is not None and self.adapter.enabled:
            return self._adapted(self.adapter, x_TK)[0]
        if self.aligned is not None:
            master_NK = None if isinstance(self.weight, QTensor) else self.weight
            return _AlignedLinear.apply(x_TK, self.aligned, master_NK, self.bias)
        if not isinstance(self.weight, QTensor):
            return F.linear(x_TK, self.weight, self.bias)
        if self.low_bit:
            return self.weight.linear(x_TK, self.bias)
        return _DequantizedLinear.apply(x_TK, self.weight, self.bias)

    def without_update(
        self, x_TK: Tensor | Rows
    ) -> tuple[Tensor | Product, tuple[Tensor, Tensor, int] | None]:
        """The product, and (l, B, rank) of an adapter whose l B' is missing in it; None when
        nothing is missing. Only a learner's adapter on a device is left out, for a reader whose
        gradient is that of the sum."""
        if (
            self.adapter is None
            or not self.adapter.enabled
            or not isinstance(x_TK, Tensor)
            or not triton_supports(x_TK)
            or not low_rank.supports(self.adapter.rank, x_TK.dtype)
        ):
            return self(x_TK), None
        y_TN, low_TL, b_NL = self._adapted(self.adapter, x_TK, whole=False)
        return y_TN, (low_TL, b_NL, self.adapter.rank)

    def of_gate(self, gate_up_TN: Tensor | Product) -> Tensor | Product:
        """The product of silu(gate) * up, which the backward pass makes again."""
        if (
            torch.is_grad_enabled()
            and isinstance(self.weight, nn.Parameter)
            and self.weight.requires_grad
            and self.adapter is None
            and self.aligned is None
            and isinstance(gate_up_TN, Tensor)
            and triton_supports(gate_up_TN)
        ):
            return _GatedLinear.apply(gate_up_TN, self.weight, self.bias)
        return self(remake(silu_mul(gate_up_TN, self.reads), silu_mul, gate_up_TN))

    def _adapted(
        self, adapter: Adapter, x_TK: Tensor, whole: bool = True
    ) -> tuple[Tensor, Tensor, Tensor]:
        codes = self.weight if self.low_bit and isinstance(self.weight, QTensor) else None
        return adapters.product(
            x_TK,
            self.weight,
            codes if self.aligned is None else self.aligned,
            self.bias,
            adapter,
            self.parts,
            whole,
        )


class _GatedLinear(torch.autograd.Function):
    """A learning weight's product of silu(gate) * up. Backward, one pass over gate_up makes its
    gradient and, for that of the weight, silu(gate) * up again."""

    @staticmethod
    def forward(ctx: Any, gate_up_TN: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
        ctx.save_for_backward(gate_up_TN, weight_NK)
        x_TK = silu_mul(gate_up_TN)
        assert isinstance(x_TK, Tensor)
        return F.linear(x_TK, weight_NK, bias_N)

    @staticmethod
    def backward(ctx: Any, grad_TN: Tensor) -> tuple[Tensor | None, ...]:
        gate_up_TN, weight_NK = ctx.saved_tensors
        x_grad_TK = grad_TN @ weight_NK
        x_TK = torch.empty_like(x_grad_TK)
        gate_up_grad_TN = silu_mul_backward(gate_up_TN, x_grad_TK, x_TK)
        return (
            gate_up_grad_TN,
            grad_TN.t() @ x_TK,
            grad_TN.sum(0) if ctx.needs_input_grad[2] else None,
        )


class _DequantizedLinear(torch.autograd.Function):
    """x times the dequantized matrix, which is made again in the backward pass instead of being
    kept."""

    @staticmethod
    def forward(ctx: Any, x_TK: Tensor, weight: QTensor, bias_N: Tensor | None) -> Tensor:
        ctx.weight, ctx.bias_dtype = weight, None if bias_N is None else bias_N.dtype
        return F.linear(
            x_TK, weight.dequantize(x_TK.dtype), None if bias_N is None else bias_N.to(x_TK.dtype)
        )

    @staticmethod
    def backward(ctx: Any, grad_TN: Tensor) -> tuple[Tensor | None, ...]:
        bias_grad_N = grad_TN.sum(0).to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None
        return grad_TN @ ctx.weight.dequantize(grad_TN.dtype), None, bias_grad_N


class _AlignedLinear(torch.autograd.Function):
    """The engine's product forward, straight through the quantizer backward; the gradient reaches
    the master weight."""

    @staticmethod
    def forward(
        ctx: Any, x_TK: Tensor, weight: QTensor, master_NK: Tensor | None, bias_N: Tensor | None
    ) -> Tensor:
        ctx.weight, ctx.bias_dtype = weight, None if bias_N is None else bias_N.dtype
        ctx.master_dtype = None if master_NK is None else master_NK.dtype
        ctx.save_for_backward(x_TK if ctx.needs_input_grad[2] else None)
        return weight.linear(x_TK.detach(), None if bias_N is None else bias_N.detach())

    @staticmethod
    def backward(ctx: Any, grad_TN: Tensor) -> tuple[Tensor | None, ...]:
        (x_TK,) = ctx.saved_tensors
        x_grad_TK = (
            grad_TN @ ctx.weight.dequantize(grad_TN.dtype) if ctx.needs_input_grad[0] else None
        )
        master_grad_NK = (
            (grad_TN.t() @ x_TK).to(ctx.master_dtype) if ctx.needs_input_grad[2] else None
        )
        bias_grad_N = grad_TN.sum(0).to(ctx.bias_dtype) if ctx.needs_input_grad[3] else None
        return x_grad_TK, None, master_grad_NK, bias_grad_N
