"""Low-rank adapters of a linear layer (Hu et al. 2021): the matrices and the adapted product.

    y_p = W_p x + b_p + (alpha / r) B_p A_p x          for each adapted part p of a fused matrix

All parts share one product with A = [A_p; ...] and one with the block-diagonal B = diag((alpha / r)
B_p), which accumulates onto the base product. Backward, with l = A x:

    dl = dy B      dx = dy W + dl A      dA = dl' x      dB_p = (alpha / r) dy_p' l_p

A frozen W costs no product: only x and l are saved.

Legend: `model`; R adapter rank, L = R times the adapted parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowroll.kernels.matmul import ordered
from lowroll.kernels.training.swiglu_lora import Update
from lowroll.model import frozen_product
from lowroll.model.logprobs import float32_product
from lowroll.quant import fp8
from lowroll.quant.formats import QTensor, float_product, multiplicand


class AdaptedPart(NamedTuple):
    """An adapted part, and its block of B [N, L]."""

    name: str
    rows: slice
    columns: slice


class Adapter(nn.Module):
    """A low-rank update of parts of a linear layer: A [R, K], B [N_part, R] a part, float32.
    Products use copies in the dtype of x.

    After a write to A or B, call `changed`, or `renew` if a CUDA graph reads the copies. An
    engine's adapter may `hold` one of a lower rank or fewer parts.
    """

    def __init__(self, rank: int, alpha: float) -> None:
        super().__init__()
        self.rank = rank
        self.alpha = alpha
        self.held_rank = rank
        self.held: frozenset[str] | None = None  # parts; None: all
        self.enabled = True
        self.version = 0
        self.a = nn.ParameterDict()
        self.b = nn.ParameterDict()
        self._made_of: tuple[object, ...] = ()
        self._made: tuple[Tensor, Tensor] | None = None
        self._parts: dict[str, int] = {}

    @property
    def scaling(self) -> float:
        return self.alpha / self.held_rank

    def hold(self, rank: int, alpha: float, pairs: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Copy (A [rank, K], B [N_part, rank]) of parts in place, zero-padded."""
        self.held_rank, self.alpha, self.held = rank, alpha, frozenset(pairs)
        for part, a_RK in self.a.items():
            b_NR = self.b[part]
            a_RK.zero_()
            b_NR.zero_()
            if part in pairs:
                a_RK[:rank].copy_(pairs[part][0])
                b_NR[:, :rank].copy_(pairs[part][1])

    def holding(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        for part, a_RK in self.a.items():
            if self.held is None or part in self.held:
                yield part, a_RK[: self.held_rank], self.b[part][:, : self.held_rank]

    def blocks(self, parts: Mapping[str, int]) -> list[AdaptedPart]:
        """Return the adapted parts in order. parts: the rows of each part."""
        blocks: list[AdaptedPart] = []
        row = 0
        for name, num_rows in parts.items():
            if name in self.a:
                column = len(blocks) * self.rank
                rows, columns = slice(row, row + num_rows), slice(column, column + self.rank)
                blocks.append(AdaptedPart(name, rows, columns))
            row += num_rows
        return blocks

    def matrices(self, parts: Mapping[str, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return A [L, K] and the scaled block-diagonal B [N, L], cached until a change. Storages
        are reused for CUDA graphs. Autograd's version counter reveals in-place torch operations."""
        masters = [*self.a.values(), *self.b.values()]
        made_of = (
            dtype,
            masters[0].device,
            self.scaling,
            self.version,
            *(p._version for p in masters),
        )
        if made_of == self._made_of and self._made is not None:
            return self._made
        with torch.inference_mode(False), torch.no_grad():
            blocks = self.blocks(parts)
            a_LK = torch.cat([self.a[part.name] for part in blocks]).to(dtype)
            b_NL = a_LK.new_zeros(sum(parts.values()), len(a_LK))
            for part in blocks:
                b_NL[part.rows, part.columns] = (self.b[part.name] * self.scaling).to(dtype)
            self._parts = dict(parts)
            self._made_of = made_of
            cached = self._made
            if cached is not None and cached[0].dtype == dtype and cached[0].device == a_LK.device:
                cached[0].copy_(a_LK)
                cached[1].copy_(b_NL)
            else:
                cached = a_LK, b_NL
            self._made = cached
        return cached

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Adapter:
        self.changed()
        return super()._apply(fn, recurse)

    def changed(self) -> None:
        """Invalidate the copies."""
        self.version += 1

    def renew(self) -> None:
        """Recompute the copies in place."""
        self.changed()
        if self._made is not None:
            self.matrices(self._parts, self._made[0].dtype)


def product(
    x_TK: Tensor,
    weight: Tensor | QTensor,
    codes: QTensor | None,
    transposed: QTensor | None,
    bias_N: Tensor | None,
    adapter: Adapter,
    parts: Mapping[str, int],
    whole: bool = True,
    update: Update | None = None,
    exact: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the layer's product with its adapter, and the update's factors l and (alpha / r) B.

    codes: of a forward in the format's own arithmetic; None: the dequantized base multiplies.
    transposed: codes for the gradient (`quant.fp8.gradient`), which is straight-through. whole:
    include l B'; else a reader (`kernels.training.swiglu_lora`) adds it and returns the gradient of
    the sum. update: x is a gate-up product [T, 2K] without this update; its silu(gate) * up is
    multiplied.
    """
    names = [part.name for part in adapter.blocks(parts)]
    # an argument each, so that autograd gives them gradients
    masters = [*(adapter.a[name] for name in names), *(adapter.b[name] for name in names)]
    in_codes = codes is not None
    dense_NK = None if isinstance(weight, QTensor) else weight
    if codes is None and isinstance(weight, QTensor):
        codes = weight
    y_TN, low_TL = _AdaptedProduct.apply(
        x_TK,
        dense_NK,
        bias_N,
        codes,
        in_codes,
        transposed,
        adapter,
        parts,
        whole,
        update,
        exact,
        *masters,
    )
    return y_TN, low_TL, adapter.matrices(parts, x_TK.dtype)[1]


def _base_product(
    x_TK: Tensor,
    weight_NK: Tensor | None,
    codes: QTensor | None,
    bias_N: Tensor | None,
    low_TL: Tensor | None,
    b_NL: Tensor,
) -> Tensor:
    if low_TL is None and codes is not None:
        return frozen_product.multiply(x_TK, codes, bias_N)
    if low_TL is not None and codes is not None:
        return frozen_product.add_product(F.linear(low_TL, b_NL, bias_N), x_TK, codes)
    assert weight_NK is not None
    if low_TL is None:
        return F.linear(x_TK, weight_NK, bias_N)
    return F.linear(low_TL, b_NL, bias_N).addmm_(x_TK, weight_NK.t())


def _exact_product(
    x_TK: Tensor,
    weight_NK: Tensor | None,
    codes: QTensor | None,
    in_codes: bool,
    bias_N: Tensor | None,
    low_TL: Tensor,
    b_NL: Tensor,
) -> Tensor:
    if codes is not None and in_codes:
        y_TN = codes.linear(x_TK.detach(), bias_N, exact=True)
    else:
        dense_NK = weight_NK if codes is None else multiplicand(codes, x_TK.dtype)
        assert dense_NK is not None
        y_TN = ordered.product(x_TK, dense_NK, None if bias_N is None else bias_N.to(x_TK.dtype))
    return ordered.product(low_TL, b_NL, added_MN=y_TN)


def _input_gradient(
    grad_TN: Tensor,
    low_grad_TL: Tensor,
    a_LK: Tensor,
    weight_NK: Tensor | None,
    codes: QTensor | None,
    transposed: QTensor | None,
) -> Tensor:
    if transposed is not None:
        return fp8.gradient(grad_TN, transposed).addmm_(low_grad_TL, a_LK)
    x_grad_TK = low_grad_TL @ a_LK
    if codes is not None:
        frozen_product.add_input_gradient(x_grad_TK, grad_TN, codes)
        return x_grad_TK
    assert weight_NK is not None
    return x_grad_TK.addmm_(grad_TN, weight_NK)


_NUM_PLAIN_ARGUMENTS = 11  # of `_AdaptedProduct.forward`, before the masters


class _AdaptedProduct(torch.autograd.Function):
    """`product`'s y and l. codes are dequantized unless `in_codes`. masters: A of each part, then
    B."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TK: Tensor,
        weight_NK: Tensor | None,
        bias_N: Tensor | None,
        codes: QTensor | None,
        in_codes: bool,
        transposed: QTensor | None,
        adapter: Adapter,
        parts: Mapping[str, int],
        whole: bool,
        update: Update | None,
        exact: bool,
        *masters: Tensor,
    ) -> tuple[Tensor, Tensor]:
        input_TK, ctx.update = x_TK, update
        if update is not None:
            x_TK = update.gate(input_TK)
        a_LK, b_NL = adapter.matrices(parts, x_TK.dtype)
        low_TL = float_product(x_TK, a_LK, None, exact)
        if exact:
            y_TN = _exact_product(x_TK, weight_NK, codes, in_codes, bias_N, low_TL, b_NL)
        elif codes is not None and in_codes:
            y_TN = codes.linear(x_TK.detach(), bias_N)
            if whole:
                y_TN = y_TN.addmm_(low_TL, b_NL.t())
        else:
            bias_in_dtype_N = None if bias_N is None else bias_N.to(x_TK.dtype)
            added_TL = low_TL if whole else None
            y_TN = _base_product(x_TK, weight_NK, codes, bias_in_dtype_N, added_TL, b_NL)
        trains = ctx.needs_input_grad[1] or any(ctx.needs_input_grad[_NUM_PLAIN_ARGUMENTS:])
        # dx needs neither, but an update's gate needs its input
        needs_inputs = trains or update is not None
        inputs = (input_TK, low_TL) if needs_inputs else (None, None)
        kept_NK = weight_NK if codes is None and transposed is None else None
        ctx.save_for_backward(*inputs, a_LK, b_NL, kept_NK)
        ctx.codes, ctx.transposed = codes, transposed
        ctx.blocks = adapter.blocks(parts)
        ctx.scaling = adapter.scaling
        ctx.dtypes = [None if t is None else t.dtype for t in (weight_NK, bias_N)]
        ctx.mark_non_differentiable(low_TL)
        return y_TN, low_TL

    @staticmethod
    def backward(ctx: Any, grad_TN: Tensor, _low_grad: Tensor) -> tuple[Tensor | None, ...]:
        x_TK, low_TL, a_LK, b_NL, weight_NK = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        low_grad_TL = grad_TN @ b_NL
        x_grad_TK = None
        if needs_x:
            x_grad_TK = _input_gradient(
                grad_TN, low_grad_TL, a_LK, weight_NK, ctx.codes, ctx.transposed
            )
        # the saved input of an update is the gate-up product: recompute what was multiplied
        if ctx.update is not None and x_grad_TK is None:
            x_TK = ctx.update.gate(x_TK)
        elif ctx.update is not None:
            x_grad_TK, x_TK = ctx.update.gate_backward(x_TK, x_grad_TK)
        weight_grad = (grad_TN.t() @ x_TK).to(ctx.dtypes[0]) if needs_weight else None
        bias_grad = grad_TN.sum(0).to(ctx.dtypes[1]) if needs_bias else None
        needs_masters = ctx.needs_input_grad[_NUM_PLAIN_ARGUMENTS:]
        master_grads: list[Tensor | None] = [None] * len(needs_masters)
        if any(needs_masters):
            a_grad_LK = float32_product(low_grad_TL.t(), x_TK).float()
            b_grad_NL = float32_product(grad_TN.t(), low_TL).float() * ctx.scaling
            master_grads = [
                *(a_grad_LK[part.columns] for part in ctx.blocks),
                *(b_grad_NL[part.rows, part.columns] for part in ctx.blocks),
            ]
        return (
            x_grad_TK,
            weight_grad,
            bias_grad,
            *(None,) * (_NUM_PLAIN_ARGUMENTS - 3),
            *master_grads,
        )
