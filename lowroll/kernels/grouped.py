"""Products of rows with the matrices of their experts (mixture of experts), and the sorting that they need.

Every token goes to S of E experts. Its S slots are sorted by expert, so that an expert's rows lie together:

    slot p = token * S + choice        place: where a slot lies among the sorted ones
    y[place] = w[e] x[place]           for the places starts[e] <= place < ends[e]

The number of an expert's rows is known on the device alone. Nothing here waits for it on CUDA: shapes depend on the
number of slots and never on their experts.

Legend: T tokens, S choices a token, P = T S slots, E experts, N out features, K in features.
"""
from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor


@dataclass(frozen=True)
class Groups:
    """Slots sorted by expert, the earlier slot first: which slot lies at a place, and where each slot lies."""

    slot_P: Tensor
    place_P: Tensor
    ends_E: Tensor               # int32: one past the last place of each expert

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """The places of each expert, on the host."""
        ends = self.ends_E.tolist()
        return list(zip([0, *ends[:-1]], ends, strict=True))


def sort_slots(experts_TS: Tensor, num_experts: int) -> Groups:
    """Sort the slots of tokens that chose these experts."""
    sorted_P, slot_P = experts_TS.flatten().sort(stable=True)
    place_P = torch.empty_like(slot_P)
    place_P[slot_P] = torch.arange(len(slot_P), device=slot_P.device)
    every_E = torch.arange(num_experts, device=slot_P.device, dtype=sorted_P.dtype)
    return Groups(slot_P, place_P, torch.searchsorted(sorted_P, every_E, right=True, out_int32=True))


def product(x_PK: Tensor, w_EKN: Tensor, groups: Groups) -> Tensor:
    """Rows times the matrices of their experts: [P, N]. Not differentiable."""
    if _on_device(x_PK, w_EKN):
        return torch.nn.functional.grouped_mm(x_PK, w_EKN, offs=groups.ends_E)
    y_PN = x_PK.new_empty(x_PK.shape[0], w_EKN.shape[2])
    for expert, (start, end) in enumerate(groups.bounds):
        if end > start:
            y_PN[start:end] = x_PK[start:end] @ w_EKN[expert]
    return y_PN


def outer(y_PN: Tensor, x_PK: Tensor, groups: Groups) -> Tensor:
    """The sum of y x^T over the rows of each expert, 0 for one without: [E, N, K], the gradient of the matrices."""
    if _on_device(x_PK, y_PN):
        return torch.nn.functional.grouped_mm(y_PN.t(), x_PK, offs=groups.ends_E)
    w_ENK = x_PK.new_zeros(len(groups.ends_E), y_PN.shape[1], x_PK.shape[1])
    for expert, (start, end) in enumerate(groups.bounds):
        if end > start:
            torch.mm(y_PN[start:end].t(), x_PK[start:end], out=w_ENK[expert])
    return w_ENK


def _on_device(a: Tensor, b: Tensor) -> bool:
    """Does the device have a grouped product for these? It wants bfloat16 and rows of whole 16 bytes."""
    return (a.is_cuda and a.dtype == b.dtype == torch.bfloat16 and a.shape[-1] % 8 == b.shape[-1] % 8 == 0
            and _grouped_mm_is_right(a.device))


@cache
def _grouped_mm_is_right(device: torch.device) -> bool:
    """Does torch's grouped product on this device do what the loops do, experts without rows included?"""
    generator = torch.Generator().manual_seed(0)
    x_PK, w_ENK = (torch.randn(shape, generator=generator).to(device, torch.bfloat16)
                   for shape in ((40, 64), (3, 32, 64)))
    groups = sort_slots(torch.tensor([0, 2], device=device).repeat_interleave(20)[:, None], 3)
    try:
        got_PN = torch.nn.functional.grouped_mm(x_PK, w_ENK.transpose(1, 2), offs=groups.ends_E)
        got_ENK = torch.nn.functional.grouped_mm(got_PN.t(), x_PK, offs=groups.ends_E)
    except (RuntimeError, AttributeError, NotImplementedError, ValueError, TypeError):
        return False
    wanted_PN = torch.cat([x_PK[:20] @ w_ENK[0].t(), x_PK[20:] @ w_ENK[2].t()])
    wanted_ENK = torch.stack([got_PN[:20].t() @ x_PK[:20], torch.zeros_like(w_ENK[0]), got_PN[20:].t() @ x_PK[20:]])
    return all(torch.allclose(got.float(), wanted.float(), rtol=0.02, atol=0.5)
               for got, wanted in ((got_PN, wanted_PN), (got_ENK, wanted_ENK)))
