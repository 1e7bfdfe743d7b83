"""Routing in a mixture of experts: the choice of experts by `scores`, the order of slots, the sum.

The device alone knows how many places an expert has, and nothing waits for it. Logits R x + b (some
models have no b) are float32 sums of unrounded numbers, so that other orders of sums choose alike
but for near-ties. Of equal ones the lower expert wins.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lowroll.kernels.launch import after_others, block, early_start, jit, tl, triton_supports
from lowroll.kernels.moe.scores import Routing, keep_best_groups, rank, weigh

PARTS = 8  # shares of the sum over features
MOST_SLOTS = 1 << 14  # of the sorting kernel: each expert's program reads all of them


@dataclass(frozen=True)
class Groups:
    """The slot at each place, the place of each slot, and where experts end."""

    slot_P: Tensor
    place_P: Tensor
    ends_E: Tensor  # int32: one past each expert's last place

    @property
    def bounds(self) -> list[tuple[int, int]]:
        ends = self.ends_E.tolist()
        return list(zip([0, *ends[:-1]], ends, strict=True))


def choose(x_TD: Tensor, router_ED: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """Return (weights float32 [T, S], experts [T, S]), by falling logit or corrected sigmoid.
    Differentiable, and the same with a gradient as without."""
    if triton_supports(x_TD):
        return _Choose.apply(x_TD, router_ED, routing.bias_E, routing)
    return choose_by(_logits(x_TD, router_ED, routing.bias_E), routing)


def choose_by(logits_TE: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """Compute `choose` in plain torch, from logits that include the bias."""
    ranked_TE = rank(logits_TE.detach(), routing.sigmoids)
    experts_TS = ranked_TE.sort(dim=-1, descending=True, stable=True).indices[:, : routing.choices]
    return weigh(logits_TE, experts_TS, routing), experts_TS


def _logits(x_TD: Tensor, router_ED: Tensor, bias_E: Tensor | None) -> Tensor:
    return F.linear(x_TD.float(), router_ED.float(), None if bias_E is None else bias_E.float())


def sort_slots(experts_TS: Tensor, num_experts: int) -> Groups:
    if triton_supports(experts_TS) and experts_TS.numel() <= MOST_SLOTS:
        return _sort_slots(experts_TS, num_experts)
    sorted_P, slot_P = experts_TS.flatten().sort(stable=True)
    place_P = torch.empty_like(slot_P)
    place_P[slot_P] = torch.arange(len(slot_P), device=slot_P.device)
    experts_E = torch.arange(num_experts, device=slot_P.device, dtype=sorted_P.dtype)
    return Groups(
        slot_P, place_P, torch.searchsorted(sorted_P, experts_E, right=True, out_int32=True)
    )


def choose_and_sort(x_TD: Tensor, router_ED: Tensor, routing: Routing) -> tuple[Tensor, Groups]:
    """Compute `choose` and `sort_slots`. Requires `triton_supports(x_TD)`; not differentiable."""
    if len(x_TD) == 1:
        groups = _empty_groups(routing.choices, len(router_ED), x_TD.device)
        return _choose(x_TD, router_ED, routing, groups)[0], groups
    weights_TS, experts_TS = _choose(x_TD, router_ED, routing)
    return weights_TS, sort_slots(experts_TS, len(router_ED))


def gather(x_TD: Tensor, groups: Groups, choices: int) -> Tensor:
    """Gather tokens' rows to the places of their slots: [P, D]. Differentiable, in a fixed order of
    sums."""
    return _Gather.apply(x_TD, groups, choices)


def combine(
    y_PD: Tensor, weights_TS: Tensor, dtype: torch.dtype, groups: Groups | None = None
) -> Tensor:
    """Return the weighted sum of each token's slots: [T, D]. With groups, y lies by place and is
    differentiable; without, by slot."""
    if groups is None:
        return _sum_slots(y_PD, None, weights_TS, weights_TS.shape[1], dtype)
    return _Combine.apply(y_PD, weights_TS, dtype, groups)


class _Choose(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        router_ED: Tensor,
        bias_E: Tensor | None,
        routing: Routing,
    ) -> tuple[Tensor, Tensor]:
        weights_TS, experts_TS = _choose(x_TD, router_ED, routing)
        ctx.save_for_backward(x_TD, router_ED, bias_E, experts_TS)
        ctx.routing = replace(routing, bias_E=None)  # saved above
        ctx.mark_non_differentiable(experts_TS)
        return weights_TS, experts_TS

    @staticmethod
    def backward(ctx: Any, grad_TS: Tensor, _experts_grad: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, experts_TS = ctx.saved_tensors
        needs = ctx.needs_input_grad[:3]
        with torch.enable_grad():
            x_TD, router_ED, bias_E = (
                None if t is None else t.detach().requires_grad_(needs_grad)
                for t, needs_grad in zip(inputs, needs, strict=True)
            )
            assert x_TD is not None and router_ED is not None
            logits_TE = _logits(x_TD, router_ED, bias_E)
            weights_TS = weigh(logits_TE, experts_TS.long(), ctx.routing)
        wanted = [t for t in (x_TD, router_ED, bias_E) if t is not None and t.requires_grad]
        grads = iter(torch.autograd.grad(weights_TS, wanted, grad_TS))
        return *(next(grads) if needs_grad else None for needs_grad in needs), None


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
        if not triton_supports(y_PD):
            grad_PD = grad_TD.float()[slot_P // choices]
            w_grad_TS = (grad_PD * y_PD.float()).sum(1)[ctx.groups.place_P].view_as(weights_TS)
            y_grad_PD = (grad_PD * weights_TS.flatten()[slot_P, None]).to(y_PD.dtype)
            return y_grad_PD, w_grad_TS, None, None
        y_grad_PD, w_grad_TS = torch.empty_like(y_PD), torch.empty_like(weights_TS)
        _spread_kernel[(slots,)](
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
    if not triton_supports(y_PD):
        if groups is not None:
            y_PD = y_PD[groups.place_P]
        y_TSD = y_PD.view(tokens, choices, features)
        if weights_TS is not None:
            y_TSD = y_TSD * weights_TS[..., None]
        return y_TSD.sum(1).to(dtype)
    out_TD = torch.empty((tokens, features), dtype=dtype, device=y_PD.device)
    block_d = min(1024, block(features))
    _combine_kernel[(tokens, -(-features // block_d))](
        y_PD.contiguous(),
        None if groups is None else groups.place_P,
        weights_TS,
        out_TD,
        features,
        CHOICES=choices,
        BLOCK_D=block_d,
        num_warps=4,
        **early_start(),
    )
    return out_TD


def _choose(
    x_TD: Tensor,
    router_ED: Tensor,
    routing: Routing,
    groups: Groups | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose by the kernel, which fills `groups` with the slots of a single token."""
    (tokens, features), num_experts = x_TD.shape, len(router_ED)
    choices, sigmoids = routing.choices, routing.sigmoids
    parts = torch.empty((PARTS, tokens, num_experts), dtype=torch.float32, device=x_TD.device)
    weights_TS = torch.empty((tokens, choices), dtype=torch.float32, device=x_TD.device)
    experts_TS = torch.empty((tokens, choices), dtype=torch.int32, device=x_TD.device)
    block_e = max(16, block(num_experts))
    _logits_kernel[(-(-tokens // 16), PARTS)](
        x_TD.contiguous(),
        router_ED.to(x_TD.dtype),
        parts,
        tokens,
        features,
        num_experts,
        PARTS=PARTS,
        BLOCK_T=16,
        BLOCK_E=block_e,
        BLOCK_K=64,
        num_warps=4,
        **early_start(),
    )
    slot_P, place_P, ends_E = (
        (None,) * 3 if groups is None else (groups.slot_P, groups.place_P, groups.ends_E)
    )
    _choose_kernel[(tokens,)](
        parts,
        routing.bias_E,
        weights_TS,
        experts_TS,
        slot_P,
        place_P,
        ends_E,
        None if sigmoids is None else sigmoids.correction_E.contiguous(),
        1.0 if sigmoids is None else sigmoids.scale,
        tokens,
        num_experts,
        GROUPS=1 if sigmoids is None else sigmoids.groups,
        GROUPS_KEPT=1 if sigmoids is None else sigmoids.groups_kept,
        CHOICES=choices,
        RENORMALIZE=routing.renormalize,
        PARTS=PARTS,
        BLOCK_E=block_e,
        BLOCK_G=block(1 if sigmoids is None else sigmoids.groups),
        BLOCK_S=block(choices),
        num_warps=1,
        **early_start(),
    )
    return weights_TS, experts_TS


def _sort_slots(experts_TS: Tensor, num_experts: int) -> Groups:
    slots = experts_TS.numel()
    groups = _empty_groups(slots, num_experts, experts_TS.device)
    _sort_kernel[(num_experts,)](
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


def _empty_groups(slots: int, num_experts: int, device: torch.device) -> Groups:
    slot_P, place_P = (torch.empty(slots, dtype=torch.int64, device=device) for _ in range(2))
    return Groups(slot_P, place_P, torch.empty(num_experts, dtype=torch.int32, device=device))


# -- Triton ----------------------------------------------------------------------------------------


@jit(do_not_specialize=["tokens"])
def _logits_kernel(
    x_ptr,
    w_ptr,
    part_ptr,
    tokens,
    features,
    num_experts,
    PARTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,
):
    after_others(EARLY)
    offs_t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    offs_e, part = tl.arange(0, BLOCK_E), tl.program_id(1)
    sums_te = tl.zeros((BLOCK_T, BLOCK_E), tl.float32)
    for step in range(part, tl.cdiv(features, BLOCK_K), PARTS):
        offs_k = step * BLOCK_K + tl.arange(0, BLOCK_K)
        x_tk = tl.load(
            x_ptr + offs_t[:, None] * features + offs_k[None, :],
            mask=(offs_t[:, None] < tokens) & (offs_k[None, :] < features),
            other=0.0,
        )
        w_ke = tl.load(
            w_ptr + offs_e[None, :] * features + offs_k[:, None],
            mask=(offs_e[None, :] < num_experts) & (offs_k[:, None] < features),
            other=0.0,
        )
        sums_te = tl.dot(x_tk, w_ke, sums_te, input_precision="ieee")
    tl.store(
        part_ptr + (part * tokens + offs_t[:, None]) * num_experts + offs_e[None, :],
        sums_te,
        mask=(offs_t[:, None] < tokens) & (offs_e[None, :] < num_experts),
    )


@jit(do_not_specialize=["tokens"])
def _choose_kernel(
    part_ptr,
    bias_ptr,
    weights_ptr,
    experts_ptr,
    slot_ptr,
    place_ptr,
    ends_ptr,
    correction_ptr,
    scale,
    tokens,
    num_experts,
    GROUPS: tl.constexpr,
    GROUPS_KEPT: tl.constexpr,
    CHOICES: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Choose for one token. slot_ptr: sort its slots too. correction_ptr: scores are sigmoids."""
    after_others(EARLY)
    token = tl.program_id(0).to(tl.int64)
    offs_e, offs_s = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_S)
    sums_e = tl.zeros((BLOCK_E,), tl.float32)
    for part in tl.static_range(PARTS):
        sums_e += tl.load(
            part_ptr + (part * tokens + token) * num_experts + offs_e,
            mask=offs_e < num_experts,
            other=0.0,
        )
    if bias_ptr is not None:
        sums_e += tl.load(bias_ptr + offs_e, mask=offs_e < num_experts, other=0.0).to(tl.float32)
    remaining_e = tl.where(offs_e < num_experts, sums_e, float("-inf"))
    largest = tl.max(remaining_e, 0)
    total = tl.sum(tl.exp(remaining_e - largest), 0)
    sigmoid_e = 1.0 / (1.0 + tl.exp(-sums_e))
    if correction_ptr is not None:
        correction_e = tl.load(
            correction_ptr + offs_e, mask=offs_e < num_experts, other=float("-inf")
        )
        remaining_e = sigmoid_e + correction_e
        if GROUPS_KEPT < GROUPS:
            size = num_experts // GROUPS
            remaining_e = keep_best_groups(
                remaining_e, offs_e, size, GROUPS, GROUPS_KEPT, BLOCK_E, BLOCK_G
            )
    weights_s, experts_s = tl.zeros((BLOCK_S,), tl.float32), tl.zeros((BLOCK_S,), tl.int32)
    for s in tl.static_range(CHOICES):
        best = tl.max(remaining_e, 0)
        # the first of the largest; with a NaN, the last expert
        expert = tl.min(tl.where(remaining_e == best, offs_e, BLOCK_E), 0)
        expert = tl.minimum(expert, num_experts - 1)
        if correction_ptr is None:
            weight = tl.exp(best - largest) / total
        else:
            weight = tl.sum(tl.where(offs_e == expert, sigmoid_e, 0.0), 0)
        weights_s = tl.where(offs_s == s, weight, weights_s)
        experts_s = tl.where(offs_s == s, expert, experts_s)
        remaining_e = tl.where(offs_e == expert, float("-inf"), remaining_e)
    if RENORMALIZE:
        total = tl.sum(weights_s, 0)
        weights_s = weights_s / (total if correction_ptr is None else total + 1e-20)
    if correction_ptr is not None:
        weights_s *= scale
    tl.store(weights_ptr + token * CHOICES + offs_s, weights_s, mask=offs_s < CHOICES)
    tl.store(experts_ptr + token * CHOICES + offs_s, experts_s, mask=offs_s < CHOICES)
    if slot_ptr is not None:
        experts_s = tl.where(offs_s < CHOICES, experts_s, BLOCK_E)
        ends_e, place_s = tl.zeros((BLOCK_E,), tl.int32), tl.zeros((BLOCK_S,), tl.int32)
        for s in tl.static_range(CHOICES):
            expert = tl.sum(tl.where(offs_s == s, experts_s, 0), 0)
            ends_e += (offs_e >= expert).to(tl.int32)
            place_s += ((experts_s > expert) | ((experts_s == expert) & (offs_s > s))).to(tl.int32)
        tl.store(slot_ptr + place_s, offs_s, mask=offs_s < CHOICES)
        tl.store(place_ptr + offs_s, place_s, mask=offs_s < CHOICES)
        tl.store(ends_ptr + offs_e, ends_e, mask=offs_e < num_experts)


@jit(do_not_specialize=["slots"])
def _sort_kernel(
    experts_ptr, slot_ptr, place_ptr, ends_ptr, slots, BLOCK_P: tl.constexpr, EARLY: tl.constexpr
):
    after_others(EARLY)
    expert = tl.program_id(0)
    next_place = 0
    for start in range(0, slots, BLOCK_P):
        offs_p = start + tl.arange(0, BLOCK_P)
        experts_p = tl.load(experts_ptr + offs_p, mask=offs_p < slots, other=1 << 30)
        next_place += tl.sum((experts_p < expert).to(tl.int32), 0)
    for start in range(0, slots, BLOCK_P):
        offs_p = start + tl.arange(0, BLOCK_P)
        is_expert_p = tl.load(experts_ptr + offs_p, mask=offs_p < slots, other=1 << 30) == expert
        rank_p = tl.cumsum(is_expert_p.to(tl.int32), 0)
        place_p = next_place + rank_p - 1
        tl.store(slot_ptr + place_p, offs_p, mask=is_expert_p)
        tl.store(place_ptr + offs_p, place_p, mask=is_expert_p)
        next_place += tl.sum(is_expert_p.to(tl.int32), 0)
    tl.store(ends_ptr + expert, next_place)


@jit
def _combine_kernel(
    y_ptr,
    place_ptr,
    weights_ptr,
    out_ptr,
    features,
    CHOICES: tl.constexpr,
    BLOCK_D: tl.constexpr,
    EARLY: tl.constexpr,
):
    after_others(EARLY)
    token, offs_d = (
        tl.program_id(0).to(tl.int64),
        tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D),
    )
    sums_d = tl.zeros((BLOCK_D,), tl.float32)
    for s in tl.static_range(CHOICES):
        slot = token * CHOICES + s
        weight = 1.0 if weights_ptr is None else tl.load(weights_ptr + slot)
        row = slot
        if place_ptr is not None:
            row = tl.load(place_ptr + slot)
        y_d = tl.load(y_ptr + row * features + offs_d, mask=offs_d < features, other=0.0)
        sums_d += y_d.to(tl.float32) * weight
    tl.store(
        out_ptr + token * features + offs_d,
        sums_d.to(out_ptr.dtype.element_ty),
        mask=offs_d < features,
    )


@jit
def _spread_kernel(
    grad_ptr,
    y_ptr,
    slot_ptr,
    weights_ptr,
    y_grad_ptr,
    w_grad_ptr,
    features,
    CHOICES: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Compute the gradient of y and of the weight at one place."""
    place = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + place)
    weight, total = tl.load(weights_ptr + slot), 0.0
    for start in range(0, features, BLOCK_D):
        offs_d = start + tl.arange(0, BLOCK_D)
        keep_d = offs_d < features
        grad_d = tl.load(grad_ptr + slot // CHOICES * features + offs_d, mask=keep_d, other=0.0).to(
            tl.float32
        )
        y_d = tl.load(y_ptr + place * features + offs_d, mask=keep_d, other=0.0).to(tl.float32)
        total += tl.sum(grad_d * y_d, 0)
        tl.store(
            y_grad_ptr + place * features + offs_d,
            (weight * grad_d).to(y_grad_ptr.dtype.element_ty),
            mask=keep_d,
        )
    tl.store(w_grad_ptr + slot, total)
