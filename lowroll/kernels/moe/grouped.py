"""Products of rows with the matrices of their experts (mixture of experts).

    y[place] = w[e] x[place]           for the places of expert e (`route.Groups`)

`product` and `outer` serve the learner: plain floating point, forward and backward. `multiply`
serves the engine: the matrices lie as their format stores them, tokens are gathered and outputs
scattered on the way, and SwiGLU is part of the first product. `experts` chains it all.

    dense     the weights' own floating point, sums in float32
    w8a8      int8 or e4m3 codes on both sides, (sum_k q_x q_w) s_x s_w
    nvfp4     e2m1 codes, an e4m3 scale for 16 weights of a row, over a global scale of the matrix or the row
    mxfp4     e2m1 codes, a power of two for 32 weights of a row
    int4      codes that stand for n - 8, a scale for 128 weights of a row, which Triton's rounds to bfloat16 first

A format without a kernel of its own is multiplied as the numbers that its codes stand for, and
where its product rounds activations, they are rounded first (`Stack.rounded`).

4-bit codes are streamed past few rows an expert by a kernel in CUDA C++ where it can be built
(`routed`), and Triton's takes what is left. Tiles depend on shapes alone: a launch has as many
programs as the tiles can be in the worst case.

Legend: T tokens, S choices a token, P = T S slots, E experts, N out features, K in features, F
width of an expert.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from lowroll.kernels.launch import INTERPRETED, block, early_start, fused
from lowroll.kernels.moe import routed
from lowroll.kernels.moe.route import Groups, choose_and_sort, combine, sort_slots
from lowroll.kernels.quantize.rows import quantize_rows


@dataclass(frozen=True)
class Stack:
    """The matrices of all experts, one under the other, as their format stores them."""

    kind: str
    num_experts: int
    codes_NK: Tensor  # floats, int8, float8_e4m3fn; uint8 [N, K / 2]; int4: int32 [N, K / 8]
    scale_N1: Tensor | None = None  # w8a8, int4: float32; nvfp4: float8_e4m3fn; mxfp4: uint8
    global_scale: Tensor | None = None  # nvfp4: float32 [1] or [N]
    rounded: Callable[[Tensor], Tensor] | None = field(
        default=None, kw_only=True
    )  # dense: x as its product takes it

    @property
    def rows(self) -> int:
        """Of the matrix of one expert."""
        return self.codes_NK.shape[0] // self.num_experts

    @property
    def features(self) -> int:
        return self.codes_NK.shape[1] * (2 * self.codes_NK.element_size() if self.packed else 1)

    @property
    def block(self) -> int:
        """Features that stand together in the order of packed codes, see `triton_grouped`."""
        return 32 if self.kind == "mxfp4" else 16 if self.packed else 0

    @property
    def packed(self) -> bool:
        """Two codes a byte?"""
        return self.kind in ("nvfp4", "mxfp4", "int4")


def experts(
    x_TD: Tensor, router_ED: Tensor, gate_up: Stack, down: Stack, choices: int, renormalize: bool
) -> Tensor:
    """The whole mixture of experts: [T, D]. Where `launch.fused(x_TD)`; not differentiable."""
    weights_TS, groups = choose_and_sort(x_TD, router_ED, choices, renormalize)
    if all(routed.takes(stack, x_TD, weights_TS.numel()) for stack in (gate_up, down)):
        h_PF = routed.multiply(x_TD, gate_up, groups, choices=choices, swiglu=True)
        return combine(routed.multiply(h_PF, down, groups, to_slots=True), weights_TS, x_TD.dtype)
    h_PF = _launch(
        *_operand(x_TD, gate_up),
        gate_up,
        groups,
        x_TD.dtype,
        choices=choices,
        swiglu=True,
        blocked=down.block,
    )
    h_PF, scale_P1 = (h_PF, None) if down.packed else _operand(h_PF, down)
    y_PD = _launch(h_PF, scale_P1, down, groups, x_TD.dtype, to_slots=True)
    return combine(y_PD, weights_TS, x_TD.dtype)


def multiply(x_PK: Tensor, stack: Stack, groups: Groups) -> Tensor:
    """Sorted rows times the matrices of their experts: [P, N]. Where `launch.fused(x_PK)`; not
    differentiable."""
    return _launch(*_operand(x_PK, stack), stack, groups, x_PK.dtype)


def runs(stack: Stack, dtype: torch.dtype) -> bool:
    """Do the kernels multiply these matrices with activations of this dtype?"""
    if stack.packed:
        return dtype == torch.bfloat16 and stack.features % stack.block == 0
    return stack.kind == "w8a8" or stack.codes_NK.dtype == dtype


def _operand(x_MK: Tensor, stack: Stack) -> tuple[Tensor, Tensor | None]:
    """Activations as the product with these matrices reads them, and their scales."""
    if stack.packed:  # the features of the first code of all blocks, then of the second, ...
        return x_MK.view(len(x_MK), -1, stack.block).transpose(1, 2).contiguous(), None
    if stack.kind == "dense":
        return (x_MK if stack.rounded is None else stack.rounded(x_MK)).contiguous(), None
    quantized = quantize_rows(x_MK, "int8" if stack.codes_NK.dtype == torch.int8 else "fp8")
    return quantized.codes_MK, quantized.scale_M1


@dataclass(frozen=True)
class Tiles:
    """Places, rows and features of one step of a program, its warps, and the steps that are loaded
    ahead."""

    places: int
    rows: int
    features: int
    warps: int = 4
    stages: int = 4


def tiles(stack: Stack, slots: int) -> Tiles:
    """By twice the slots that an expert has on average: few experts are cut, and the narrow side is
    filled."""
    places = min(128, max(16, block(2 * slots // stack.num_experts)))
    if stack.packed:
        few = 4 * slots < stack.num_experts
        features = 16 * stack.block  # as few as the tensor cores take of each code of a block
        return (
            Tiles(8, 32, features, warps=2, stages=3)
            if few
            else Tiles(min(places, 32), 64, features, stages=2)
        )
    if stack.codes_NK.dtype == torch.float32:
        return Tiles(16, 64, 32, stages=2)
    if places >= 64:
        return Tiles(places, 128, 128 if stack.kind == "w8a8" else 64, warps=8, stages=3)
    return Tiles(places, 64, 128, stages=4)


def _launch(
    x: Tensor,
    x_scale: Tensor | None,
    stack: Stack,
    groups: Groups,
    dtype: torch.dtype,
    *,
    choices: int = 0,
    swiglu: bool = False,
    to_slots: bool = False,
    blocked: int = 0,
    chosen: Tiles | None = None,
) -> Tensor:
    """One product. The arguments are those of `triton_grouped.multiply`; `chosen` in place of
    `tiles`."""
    from lowroll.kernels.moe import triton_grouped as kernels

    slots, count = len(groups.slot_P), stack.num_experts
    rows, size = stack.rows // 2 if swiglu else stack.rows, chosen or tiles(stack, slots)
    y = torch.empty((slots, rows), dtype=dtype, device=x.device)
    active = min(slots, count)  # experts that have places, at most
    most = (slots + active * (size.places - 1)) // size.places
    per_expert = -(-rows // (size.rows // 2 if swiglu else size.rows))
    kernels.multiply[(most * per_expert,)](
        x,
        x_scale,
        stack.codes_NK.view(torch.int64) if stack.packed else stack.codes_NK,
        stack.scale_N1.view(torch.uint8)
        if stack.kind == "nvfp4" and stack.scale_N1 is not None
        else stack.scale_N1,
        stack.global_scale,
        y,
        groups.slot_P,
        groups.ends_E,
        slots,
        count,
        rows,
        stack.features,
        KIND=stack.kind,
        CHOICES=choices,
        SWIGLU=swiglu,
        TO_SLOTS=to_slots,
        G_ROWS=stack.global_scale is not None and stack.global_scale.numel() > 1,
        BLOCKED=blocked,
        PTX=not INTERPRETED,
        BLOCK_E=block(count),
        BLOCK_P=size.places,
        BLOCK_N=size.rows,
        BLOCK_K=size.features,
        num_warps=size.warps,
        num_stages=size.stages,
        **early_start(),
    )
    return y


def product(x_PK: Tensor, w_EKN: Tensor, groups: Groups) -> Tensor:
    """Rows times the matrices of their experts: [P, N]. Not differentiable."""
    w_ENK, half = (
        w_EKN.transpose(1, 2),
        x_PK.dtype == w_EKN.dtype and x_PK.dtype in (torch.bfloat16, torch.float16),
    )
    if (
        fused(x_PK) and half and w_ENK.is_contiguous()
    ):  # faster than torch's on Hopper (docs/LOG.md)
        return multiply(x_PK, Stack("dense", len(w_ENK), w_ENK.flatten(0, 1)), groups)
    if _on_device(x_PK, w_EKN):
        return F.grouped_mm(x_PK, w_EKN, offs=groups.ends_E)
    y_PN = x_PK.new_empty(x_PK.shape[0], w_EKN.shape[2])
    for expert, (start, end) in enumerate(groups.bounds):
        if end > start:
            y_PN[start:end] = x_PK[start:end] @ w_EKN[expert]
    return y_PN


def outer(y_PN: Tensor, x_PK: Tensor, groups: Groups) -> Tensor:
    """The sum of y x^T over the rows of each expert, 0 for one without: [E, N, K], the gradient of
    the matrices."""
    if _on_device(x_PK, y_PN):
        return F.grouped_mm(y_PN.t(), x_PK, offs=groups.ends_E)
    w_ENK = x_PK.new_zeros(len(groups.ends_E), y_PN.shape[1], x_PK.shape[1])
    for expert, (start, end) in enumerate(groups.bounds):
        if end > start:
            torch.mm(y_PN[start:end].t(), x_PK[start:end], out=w_ENK[expert])
    return w_ENK


def _on_device(a: Tensor, b: Tensor) -> bool:
    """Does the device have a grouped product for these? It wants bfloat16 and rows of whole 16
    bytes."""
    return (
        a.is_cuda
        and a.dtype == b.dtype == torch.bfloat16
        and a.shape[-1] % 8 == b.shape[-1] % 8 == 0
        and _grouped_mm_is_right(a.device)
    )


@cache
def _grouped_mm_is_right(device: torch.device) -> bool:
    """Does torch's grouped product on this device do what the loops do, experts without rows
    included?"""
    generator = torch.Generator().manual_seed(0)
    x_PK, w_ENK = (
        torch.randn(shape, generator=generator).to(device, torch.bfloat16)
        for shape in ((40, 64), (3, 32, 64))
    )
    groups = sort_slots(torch.tensor([0, 2], device=device).repeat_interleave(20)[:, None], 3)
    try:
        got_PN = F.grouped_mm(x_PK, w_ENK.transpose(1, 2), offs=groups.ends_E)
        got_PK = F.grouped_mm(got_PN, w_ENK, offs=groups.ends_E)
        got_ENK = F.grouped_mm(got_PN.t(), x_PK, offs=groups.ends_E)
    except (RuntimeError, AttributeError, NotImplementedError, ValueError, TypeError):
        return False
    wanted_PN = torch.cat([x_PK[:20] @ w_ENK[0].t(), x_PK[20:] @ w_ENK[2].t()])
    wanted_PK = torch.cat([got_PN[:20] @ w_ENK[0], got_PN[20:] @ w_ENK[2]])
    wanted_ENK = torch.stack(
        [got_PN[:20].t() @ x_PK[:20], torch.zeros_like(w_ENK[0]), got_PN[20:].t() @ x_PK[20:]]
    )
    return all(
        torch.allclose(got.float(), wanted.float(), rtol=0.02, atol=0.5)
        for got, wanted in ((got_PN, wanted_PN), (got_PK, wanted_PK), (got_ENK, wanted_ENK))
    )
