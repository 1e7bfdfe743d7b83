"""Triton side of `route.py`. It is imported only where it runs, so the room needs no Triton to be
imported."""

from __future__ import annotations

import triton
import triton.language as tl

from lowroll.kernels.launch import after_others


@triton.jit(do_not_specialize=["tokens"])
def logits(
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
    """One part's share of the sum over features: [PARTS, T, E] in float32."""
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


@triton.jit(do_not_specialize=["tokens"])
def choose(
    part_ptr,
    weights_ptr,
    experts_ptr,
    slot_ptr,
    place_ptr,
    ends_ptr,
    tokens,
    num_experts,
    CHOICES: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_S: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The experts of one token and their weights; with `slot_ptr` it is the only one, and its slots
    are sorted too."""
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
    left_e = tl.where(offs_e < num_experts, sums_e, float("-inf"))
    largest = tl.max(left_e, 0)
    total = tl.sum(tl.exp(left_e - largest), 0)
    weights_s, experts_s = tl.zeros((BLOCK_S,), tl.float32), tl.zeros((BLOCK_S,), tl.int32)
    for s in tl.static_range(CHOICES):
        best = tl.max(left_e, 0)
        expert = tl.minimum(
            tl.min(tl.where(left_e == best, offs_e, BLOCK_E), 0), num_experts - 1
        )  # NaN: the last
        weights_s = tl.where(offs_s == s, tl.exp(best - largest) / total, weights_s)
        experts_s = tl.where(offs_s == s, expert, experts_s)
        left_e = tl.where(offs_e == expert, float("-inf"), left_e)
    if RENORMALIZE:
        weights_s = weights_s / tl.sum(weights_s, 0)
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


@triton.jit(do_not_specialize=["slots"])
def sort(
    experts_ptr, slot_ptr, place_ptr, ends_ptr, slots, BLOCK_P: tl.constexpr, EARLY: tl.constexpr
):
    """The places of one expert's slots: as many before them as there are slots of lower experts."""
    after_others(EARLY)
    expert = tl.program_id(0)
    lower = 0
    for first in range(0, slots, BLOCK_P):
        offs_p = first + tl.arange(0, BLOCK_P)
        experts_p = tl.load(experts_ptr + offs_p, mask=offs_p < slots, other=1 << 30)
        lower += tl.sum((experts_p < expert).to(tl.int32), 0)
    for first in range(0, slots, BLOCK_P):
        offs_p = first + tl.arange(0, BLOCK_P)
        mine_p = tl.load(experts_ptr + offs_p, mask=offs_p < slots, other=1 << 30) == expert
        rank_p = tl.cumsum(mine_p.to(tl.int32), 0)
        place_p = lower + rank_p - 1
        tl.store(slot_ptr + place_p, offs_p, mask=mine_p)
        tl.store(place_ptr + offs_p, place_p, mask=mine_p)
        lower += tl.sum(mine_p.to(tl.int32), 0)
    tl.store(ends_ptr + expert, lower)


@triton.jit
def combine(
    y_ptr,
    place_ptr,
    weights_ptr,
    out_ptr,
    features,
    CHOICES: tl.constexpr,
    BLOCK_D: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The sum over one token's slots, in the order of its choices. y lies by place, or by slot
    without places."""
    after_others(EARLY)
    token, offs_d = (
        tl.program_id(0).to(tl.int64),
        tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D),
    )
    sums_d = tl.zeros((BLOCK_D,), tl.float32)
    for s in tl.static_range(CHOICES):
        row = token * CHOICES + s
        weight = 1.0 if weights_ptr is None else tl.load(weights_ptr + row)
        if place_ptr is not None:
            row = tl.load(place_ptr + row)
        y_d = tl.load(y_ptr + row * features + offs_d, mask=offs_d < features, other=0.0)
        sums_d += y_d.to(tl.float32) * weight
    tl.store(
        out_ptr + token * features + offs_d,
        sums_d.to(out_ptr.dtype.element_ty),
        mask=offs_d < features,
    )


@triton.jit
def spread(
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
    """The gradient of `combine` at one place: of y, and of its slot's weight."""
    place = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + place)
    weight, total = tl.load(weights_ptr + slot), 0.0
    for first in range(0, features, BLOCK_D):
        offs_d = first + tl.arange(0, BLOCK_D)
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
