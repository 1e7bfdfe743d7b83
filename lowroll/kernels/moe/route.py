"""Routing in a mixture of experts: which experts a token goes to, where its slots lie, and the sum
over them.

    p = softmax(R x)        float32, over the E experts
    chosen: the S largest logits, of equal ones the lower expert;    g = p of the chosen, over their sum if asked for

Every token has S slots: slot = token * S + choice. Sorted by expert, the earlier slot first, they
have places, and an expert's places lie together: from the end of the expert before it to its own
end. The number of an expert's places is known on the device alone, and nothing waits for it.

Logits are sums in float32 of the model's own numbers, rounded to nothing less, so that products
which add in another order choose alike but for near-ties.

Legend: T tokens, S choices a token, P = T S slots, E experts, D hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lowroll.kernels.launch import block, early_start, fused

PARTS = 8  # of the sum over features, which few tokens would leave to one program
MOST_SLOTS = 1 << 14  # that the sorting kernel takes: every expert's program reads all of them


@dataclass(frozen=True)
class Groups:
    """Slots sorted by expert: which slot lies at a place, at which place a slot lies, and where
    experts end."""

    slot_P: Tensor
    place_P: Tensor
    ends_E: Tensor  # int32: one past the last place of each expert

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """The places of each expert, on the host."""
        ends = self.ends_E.tolist()
        return list(zip([0, *ends[:-1]], ends, strict=True))


def choose(
    x_TD: Tensor, router_ED: Tensor, choices: int, renormalize: bool
) -> tuple[Tensor, Tensor]:
    """(weights [T, S] in float32, experts [T, S]), by falling logit. Differentiable, and the same
    with a gradient as without."""
    if fused(x_TD):
        return _Choose.apply(x_TD, router_ED, choices, renormalize)
    logits_TE = F.linear(x_TD.float(), router_ED.float())
    experts_TS = logits_TE.detach().sort(dim=-1, descending=True, stable=True).indices[:, :choices]
    return _weights(logits_TE, experts_TS, renormalize), experts_TS


def _weights(logits_TE: Tensor, experts_TS: Tensor, renormalize: bool) -> Tensor:
    weights_TS = logits_TE.softmax(dim=-1).gather(1, experts_TS)
    return weights_TS / weights_TS.sum(dim=-1, keepdim=True) if renormalize else weights_TS


def sort_slots(experts_TS: Tensor, num_experts: int) -> Groups:
    """Sort the slots of tokens that chose these experts."""
    if fused(experts_TS) and experts_TS.numel() <= MOST_SLOTS:
        return _sort_slots(experts_TS, num_experts)
    sorted_P, slot_P = experts_TS.flatten().sort(stable=True)
    place_P = torch.empty_like(slot_P)
    place_P[slot_P] = torch.arange(len(slot_P), device=slot_P.device)
    every_E = torch.arange(num_experts, device=slot_P.device, dtype=sorted_P.dtype)
    return Groups(
        slot_P, place_P, torch.searchsorted(sorted_P, every_E, right=True, out_int32=True)
    )


def choose_and_sort(
    x_TD: Tensor, router_ED: Tensor, choices: int, renormalize: bool
) -> tuple[Tensor, Groups]:
    """(weights [T, S], the sorted slots): `choose` and `sort_slots` for an engine, one launch less
    for one token.

    Where `launch.fused(x_TD)`; not differentiable.
    """
    if len(x_TD) == 1:
        groups = _empty(choices, len(router_ED), x_TD.device)
        return _choose(x_TD, router_ED, choices, renormalize, groups)[0], groups
    weights_TS, experts_TS = _choose(x_TD, router_ED, choices, renormalize)
    return weights_TS, sort_slots(experts_TS, len(router_ED))


def gather(x_TD: Tensor, groups: Groups, choices: int) -> Tensor:
    """The rows of tokens at the places of their slots: [P, D]. Differentiable, in a fixed order of
    sums."""
    return _Gather.apply(x_TD, groups, choices)


def combine(
    y_PD: Tensor, weights_TS: Tensor, dtype: torch.dtype, groups: Groups | None = None
) -> Tensor:
    """The weighted sum over the slots of every token: [T, D]. y lies by place, or by slot if no
    groups are given.

    Differentiable where y lies by place.
    """
    if groups is None:
        return _sum_slots(y_PD, None, weights_TS, weights_TS.shape[1], dtype)
    return _Combine.apply(y_PD, weights_TS, dtype, groups)


class _Choose(torch.autograd.Function):
    """The choice is the kernel's; the gradient of its weights is that of the formula for the same
    experts."""

    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, router_ED: Tensor, choices: int, renormalize: bool
    ) -> tuple[Tensor, Tensor]:
        weights_TS, experts_TS = _choose(x_TD, router_ED, choices, renormalize)
        ctx.save_for_backward(x_TD, router_ED, experts_TS)
        ctx.renormalize = renormalize
        ctx.mark_non_differentiable(experts_TS)
        return weights_TS, experts_TS

    @staticmethod
    def backward(ctx: Any, grad_TS: Tensor, _experts_grad: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, router_ED, experts_TS = ctx.saved_tensors
        with torch.enable_grad():
            leaves = [
                t.detach().requires_grad_(need)
                for t, need in zip((x_TD, router_ED), ctx.needs_input_grad, strict=False)
            ]
            logits_TE = F.linear(*(leaf.float() for leaf in leaves))
            weights_TS = _weights(logits_TE, experts_TS.long(), ctx.renormalize)
        grads = iter(
            torch.autograd.grad(
                weights_TS, [leaf for leaf in leaves if leaf.requires_grad], grad_TS
            )
        )
        return *(next(grads) if leaf.requires_grad else None for leaf in leaves), None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, groups: Groups, choices: int) -> Tensor:
        ctx.groups, ctx.choices = groups, choices
        return x_TD[groups.slot_P // choices]

    @staticmethod
    def backward(ctx: Any, grad_PD: Tensor) -> tuple[Tensor | None, ...]:
        return _sum_slots(grad_PD, ctx.groups, None, ctx.choices, grad_PD.dtype), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, y_PD: Tensor, weights_TS: Tensor, dtype: torch.dtype, groups: Groups
    ) -> Tensor:
        ctx.save_for_backward(y_PD, weights_TS)
        ctx.groups = groups
        return _sum_slots(y_PD, groups, weights_TS, weights_TS.shape[1], dtype)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        y_PD, weights_TS = ctx.saved_tensors
        (slots, features), choices, slot_P = y_PD.shape, weights_TS.shape[1], ctx.groups.slot_P
        if not fused(y_PD):
            grad_PD = grad_TD.float()[slot_P // choices]
            w_grad_TS = (grad_PD * y_PD.float()).sum(1)[ctx.groups.place_P].view_as(weights_TS)
            return (
                (grad_PD * weights_TS.flatten()[slot_P, None]).to(y_PD.dtype),
                w_grad_TS,
                None,
                None,
            )
        from lowroll.kernels.moe import triton_route as kernels

        y_grad_PD, w_grad_TS = torch.empty_like(y_PD), torch.empty_like(weights_TS)
        kernels.spread[(slots,)](
            grad_TD.contiguous(),
            y_PD,
            slot_P,
            weights_TS,
            y_grad_PD,
            w_grad_TS,
            features,
            CHOICES=choices,
            BLOCK_D=min(2048, block(features)),
            num_warps=4,
        )
        return y_grad_PD, w_grad_TS, None, None


def _sum_slots(
    y_PD: Tensor, groups: Groups | None, weights_TS: Tensor | None, choices: int, dtype: torch.dtype
) -> Tensor:
    tokens, features = y_PD.shape[0] // choices, y_PD.shape[1]
    if not fused(y_PD):
        y_TSD = (y_PD if groups is None else y_PD[groups.place_P]).view(tokens, choices, features)
        return (y_TSD if weights_TS is None else y_TSD * weights_TS[..., None]).sum(1).to(dtype)
    from lowroll.kernels.moe import triton_route as kernels

    out_TD = torch.empty((tokens, features), dtype=dtype, device=y_PD.device)
    wide = min(1024, block(features))
    kernels.combine[(tokens, -(-features // wide))](
        y_PD.contiguous(),
        None if groups is None else groups.place_P,
        weights_TS,
        out_TD,
        features,
        CHOICES=choices,
        BLOCK_D=wide,
        num_warps=4,
        **early_start(),
    )
    return out_TD


def _choose(
    x_TD: Tensor, router_ED: Tensor, choices: int, renormalize: bool, groups: Groups | None = None
) -> tuple[Tensor, Tensor]:
    """`groups`: to fill with the slots of the one token."""
    from lowroll.kernels.moe import triton_route as kernels

    (tokens, features), num_experts = x_TD.shape, len(router_ED)
    parts = torch.empty((PARTS, tokens, num_experts), dtype=torch.float32, device=x_TD.device)
    weights_TS = torch.empty((tokens, choices), dtype=torch.float32, device=x_TD.device)
    experts_TS = torch.empty((tokens, choices), dtype=torch.int32, device=x_TD.device)
    wide = max(16, block(num_experts))
    kernels.logits[(-(-tokens // 16), PARTS)](
        x_TD.contiguous(),
        router_ED.to(x_TD.dtype),
        parts,
        tokens,
        features,
        num_experts,
        PARTS=PARTS,
        BLOCK_T=16,
        BLOCK_E=wide,
        BLOCK_K=64,
        num_warps=4,
        **early_start(),
    )
    slot_P, place_P, ends_E = (
        (None,) * 3 if groups is None else (groups.slot_P, groups.place_P, groups.ends_E)
    )
    kernels.choose[(tokens,)](
        parts,
        weights_TS,
        experts_TS,
        slot_P,
        place_P,
        ends_E,
        tokens,
        num_experts,
        CHOICES=choices,
        RENORMALIZE=renormalize,
        PARTS=PARTS,
        BLOCK_E=wide,
        BLOCK_S=block(choices),
        num_warps=1,
        **early_start(),
    )
    return weights_TS, experts_TS


def _sort_slots(experts_TS: Tensor, num_experts: int) -> Groups:
    from lowroll.kernels.moe import triton_route as kernels

    slots = experts_TS.numel()
    groups = _empty(slots, num_experts, experts_TS.device)
    kernels.sort[(num_experts,)](
        experts_TS.contiguous(),
        groups.slot_P,
        groups.place_P,
        groups.ends_E,
        slots,
        BLOCK_P=min(1024, max(16, block(slots))),
        num_warps=4,
        **early_start(),
    )
    return groups


def _empty(slots: int, num_experts: int, device: torch.device) -> Groups:
    slot_P, place_P = (torch.empty(slots, dtype=torch.int64, device=device) for _ in range(2))
    return Groups(slot_P, place_P, torch.empty(num_experts, dtype=torch.int32, device=device))
