"""Mixture of experts: each token's weighted sum of S of E SwiGLU networks.

    y = sum_s g_s W_down[e_s] (silu(W_gate[e_s] x) * W_up[e_s] x)

(Shazeer et al. 2017, arXiv 1701.06538, with the softmax before the choice as in Qwen3-MoE; variants
as in `MixtureSpec`.) `kernels.moe.route` chooses the experts e_s and their weights g_s.

All experts are stacked in one `Linear` with the parts "experts.7.gate_proj" and so on: formats and
checkpoints see one matrix [E N, K]. It is multiplied with rows sorted by expert
(`kernels.moe.grouped`).

Legend: `model`; S choices a token, P = T S slots, E experts, F intermediate size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowroll.kernels.batch_invariant import product
from lowroll.kernels.batch_invariant import rows as invariant
from lowroll.kernels.fused.swiglu import clamped_swiglu, silu_mul
from lowroll.kernels.launch import triton_supports
from lowroll.kernels.matmul import ordered
from lowroll.kernels.moe import grouped
from lowroll.kernels.moe.route import Groups, choose, choose_by, combine, gather, sort_slots
from lowroll.kernels.moe.scores import Routing, SigmoidRouting
from lowroll.kernels.moe.stack import Stack
from lowroll.model.engine_linear import refuse_gradient
from lowroll.model.linear import Linear
from lowroll.model.spec import ModelSpec
from lowroll.quant.formats import QTensor, get_format


class Router(nn.Module):
    def __init__(self, spec: ModelSpec, device: torch.device | str, dtype: torch.dtype) -> None:
        super().__init__()
        mixture = spec.mixture
        self.weight = nn.Parameter(
            torch.empty(mixture.num_experts, spec.hidden_size, device=device, dtype=dtype)
        )
        self.bias: nn.Parameter | None = None
        if mixture.has_biases:
            self.bias = nn.Parameter(torch.empty(mixture.num_experts, device=device, dtype=dtype))
        self.choices = mixture.experts_per_token
        self.renormalize = mixture.renormalize
        self.scores = mixture.scores
        self.correction_bias: nn.Parameter | None = None
        if self.scores is not None:
            # bfloat16 would change the choice; without load balancing there is no gradient
            correction_E = torch.empty(mixture.num_experts, device=device, dtype=torch.float32)
            self.correction_bias = nn.Parameter(correction_E, requires_grad=False)

    @property
    def routing(self) -> Routing:
        """The parameters of the choice."""
        sigmoids = None
        if self.scores is not None:
            assert self.correction_bias is not None
            correction_E, scores = self.correction_bias.detach(), self.scores
            sigmoids = SigmoidRouting(correction_E, scores.groups, scores.groups_kept, scores.scale)
        return Routing(self.choices, self.renormalize, self.bias, sigmoids)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        """Move the module, but keep the correction's dtype."""
        kept_E = None if self.correction_bias is None else self.correction_bias.detach()
        super()._apply(fn, recurse)
        moved_E = self.correction_bias
        if kept_E is not None and moved_E is not None and moved_E.dtype != kept_E.dtype:
            self.correction_bias = nn.Parameter(kept_E.to(moved_E.device), requires_grad=False)
        return self

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights [T, S], float32, and experts [T, S], the best first."""
        return choose(x_TD, self.weight, self.routing)


class StackedLinear(Linear):
    def __init__(
        self,
        num_experts: int,
        in_features: int,
        parts: dict[str, int],
        bias: bool = False,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        stacked = {
            f"experts.{expert}.{part}": rows
            for expert in range(num_experts)
            for part, rows in parts.items()
        }
        super().__init__(in_features, stacked, bias, device, dtype)
        self.num_experts = num_experts

    def set_weight(self, weight: QTensor | nn.Parameter) -> None:
        """Set the weight. ValueError when a block of the format spans two experts."""
        if isinstance(weight, QTensor):
            _split_experts(weight, self.num_experts)
        super().set_weight(weight)

    def products(self, x_PK: Tensor, groups: Groups) -> Tensor:
        """Multiply sorted rows with their experts' matrices: [P, N]."""
        y_PN = self.multiply(x_PK, groups)
        if self.bias is None:
            return y_PN
        place_P = torch.arange(len(y_PN), device=y_PN.device, dtype=groups.ends_E.dtype)
        expert_P = torch.searchsorted(groups.ends_E, place_P, right=True)
        bias_EN = self.bias.view(self.num_experts, -1)
        return y_PN + F.embedding(expert_P, bias_EN).to(y_PN.dtype)

    def multiply(self, x_PK: Tensor, groups: Groups) -> Tensor:
        raise NotImplementedError


class LearnerStack(StackedLinear):
    """A learner's stack, whose numbers are the same without gradients."""

    @property
    def codes(self) -> QTensor | None:
        return self.aligned

    def multiply(self, x_PK: Tensor, groups: Groups) -> Tensor:
        weight = self.weight if self.aligned is None else self.aligned
        master_NK = None if isinstance(self.weight, QTensor) else self.weight
        in_codes = self.aligned is not None
        y_PN = _GroupedProduct.apply(
            x_PK, master_NK, weight, groups, self.num_experts, in_codes, self.exact
        )
        assert isinstance(y_PN, Tensor)
        return y_PN


class EngineStack(StackedLinear):
    """An engine's stack, without gradients."""

    @property
    def codes(self) -> QTensor:
        assert isinstance(self.weight, QTensor), "an engine's layer multiplies a QTensor"
        return self.weight

    def stack(self, x: Tensor) -> Stack:
        refuse_gradient(x)
        stack = _make_stack(self.codes, self.num_experts, x.dtype)
        return stack if self.bias is None else replace(stack, bias_N=self.bias)

    def multiply(self, x_PK: Tensor, groups: Groups) -> Tensor:
        refuse_gradient(x_PK)
        return _low_bit_multiply(x_PK, self.codes, groups, self.num_experts, self.exact)


class Experts(nn.Module):
    stacked: type[StackedLinear]

    def __init__(self, spec: ModelSpec, device: torch.device | str, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, mixture = spec.hidden_size, spec.mixture
        mlp_size = mixture.expert_size
        self.router = Router(spec, device, dtype)

        def make_stack(in_features: int, parts: dict[str, int]) -> StackedLinear:
            return self.stacked(
                mixture.num_experts, in_features, parts, mixture.has_biases, device, dtype
            )

        self.gate_up = make_stack(hidden, {"gate_proj": mlp_size, "up_proj": mlp_size})
        self.down = make_stack(mlp_size, {"down_proj": hidden})
        self.clamped_gate = mixture.clamped_gate
        self.exact = False

    def forward(self, x_TD: Tensor) -> Tensor:
        if self.exact:
            return self._exactly(x_TD)
        weights_TS, experts_TS = self.router(x_TD)
        groups = sort_slots(experts_TS, self.gate_up.num_experts)
        gate_up_P = self.gate_up.products(gather(x_TD, groups, self.router.choices), groups)
        if self.clamped_gate is None:
            h_PF = silu_mul(gate_up_P)
        else:
            h_PF = clamped_swiglu(gate_up_P, *self.clamped_gate)
        assert isinstance(h_PF, Tensor)
        y_PD = self.down.products(h_PF, groups)
        return combine(y_PD, weights_TS, x_TD.dtype, groups)

    def _exactly(self, x_TD: Tensor) -> Tensor:
        logits_TE = product.linear(x_TD, self.router.weight)
        weights_TS, experts_TS = choose_by(logits_TE, self.router.routing)
        groups = sort_slots(experts_TS, self.gate_up.num_experts)
        gate_up_P = self.gate_up.multiply(gather(x_TD, groups, self.router.choices), groups)
        h_PF = invariant.silu_mul(gate_up_P)
        assert isinstance(h_PF, Tensor)
        y_PD = self.down.multiply(h_PF, groups)
        y_TSD = y_PD[groups.place_P].unflatten(0, (-1, self.router.choices))
        weighted = (y_TSD * weights_TS[..., None]).unbind(1)
        return sum(weighted[1:], weighted[0])


class LearnerExperts(Experts):
    stacked = LearnerStack


class EngineExperts(Experts):
    stacked = EngineStack
    gate_up: EngineStack
    down: EngineStack

    def forward(self, x_TD: Tensor) -> Tensor:
        if not triton_supports(x_TD):
            return super().forward(x_TD)
        return grouped.experts(
            x_TD,
            self.router.weight,
            self.gate_up.stack(x_TD),
            self.down.stack(x_TD),
            self.router.routing,
            self.clamped_gate,
        )


class _GroupedProduct(torch.autograd.Function):
    """Products of rows sorted by expert: forward in the format's own arithmetic if `aligned`,
    backward with the dequantized weight."""

    @staticmethod
    def forward(
        ctx: Any,
        x_PK: Tensor,
        master_NK: Tensor | None,
        weight: Tensor | QTensor,
        groups: Groups,
        num_experts: int,
        aligned: bool,
        exact: bool,
    ) -> Tensor:
        ctx.weight, ctx.groups, ctx.num_experts = weight, groups, num_experts
        ctx.master_dtype = None if master_NK is None else master_NK.dtype
        ctx.save_for_backward(x_PK if ctx.needs_input_grad[1] else None)
        if isinstance(weight, QTensor) and aligned:
            return _low_bit_multiply(x_PK.detach(), weight, groups, num_experts, exact)
        w_ENK = _dense_by_expert(weight, num_experts, x_PK.dtype)
        if exact:
            pieces = x_PK.detach().split([end - start for start, end in groups.bounds])
            by_expert = zip(pieces, w_ENK, strict=True)
            return torch.cat([ordered.product(x_RK, w_NK) for x_RK, w_NK in by_expert])
        return grouped.product(x_PK.detach(), w_ENK.transpose(1, 2), groups)

    @staticmethod
    def backward(ctx: Any, grad_PN: Tensor) -> tuple[Tensor | None, ...]:
        (x_PK,) = ctx.saved_tensors
        grad_PN = grad_PN.contiguous()
        x_grad_PK = None
        master_grad_NK = None
        if ctx.needs_input_grad[0]:
            w_ENK = _dense_by_expert(ctx.weight, ctx.num_experts, grad_PN.dtype)
            x_grad_PK = grouped.product(grad_PN, w_ENK, ctx.groups)
        if ctx.needs_input_grad[1]:
            master_grad_ENK = grouped.outer(grad_PN, x_PK, ctx.groups)
            master_grad_NK = master_grad_ENK.flatten(0, 1).to(ctx.master_dtype)
        return x_grad_PK, master_grad_NK, *(None,) * 5


def _dense_by_expert(weight: Tensor | QTensor, num_experts: int, dtype: torch.dtype) -> Tensor:
    w_NK = weight.dequantize(dtype) if isinstance(weight, QTensor) else weight.detach().to(dtype)
    return w_NK.contiguous().view(num_experts, -1, w_NK.shape[1])  # int4's may have a padded row


def _make_stack(weight: QTensor, num_experts: int, dtype: torch.dtype) -> Stack:
    """Return the weight as stored if the kernels support it, else dequantized, to float32 for a
    format that rounds activations."""
    format = get_format(weight.format)
    rounded = None
    if format.stacked:
        kind, *names = format.stacked
        tensors = (weight.tensors[name] for name in names)
        stack = Stack(kind, num_experts, *tensors, rows=format.rows or "")
        if grouped.supports(stack, dtype):
            return stack
    elif format.rounds:
        dtype, rounded = torch.float32, format.rounded
    w_NK = _dense_by_expert(weight, num_experts, dtype).flatten(0, 1)
    return Stack("dense", num_experts, w_NK, rounded=rounded)


def _low_bit_multiply(
    x_PK: Tensor, weight: QTensor, groups: Groups, num_experts: int, exact: bool
) -> Tensor:
    if triton_supports(x_PK):
        return grouped.multiply(x_PK, _make_stack(weight, num_experts, x_PK.dtype), groups)
    return _low_bit_product(x_PK, weight, groups, num_experts, exact)


def _low_bit_product(
    x_PK: Tensor, weight: QTensor, groups: Groups, num_experts: int, exact: bool
) -> Tensor:
    experts = weight.derive("experts", lambda q: tuple(_split_experts(q, num_experts)))
    return torch.cat(
        [
            expert.linear(x_PK[start:end], None, exact)
            for expert, (start, end) in zip(experts, groups.bounds, strict=True)
            if end > start
        ]
    )


def _split_experts(weight: QTensor, num_experts: int) -> list[QTensor]:
    return get_format(weight.format).split(weight, [weight.shape[0] // num_experts] * num_experts)
