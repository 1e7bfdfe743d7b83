"""A CPU's own step of the gated delta rule: against torch, and who takes it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lowroll.kernels import cxx
from lowroll.kernels.fused import delta_step as in_place
from lowroll.model.recurrence import delta_step

runs_here = pytest.mark.skipif(
    not cxx.supports(in_place.SOURCE, torch.device("cpu"), ""),
    reason="the kernel does not run here",
)


def drawn(rows: int, heads: int, keys: int, values: int, slots: int) -> list[Tensor]:
    """Arguments of `in_place.delta_step`; one row forgets its state."""
    g = torch.Generator().manual_seed(rows)
    q, k = (torch.randn(rows, heads, keys, generator=g) for _ in range(2))
    decay = -torch.rand(rows, heads, generator=g)
    decay[0] = -torch.inf
    beta = torch.rand(rows, heads, generator=g)
    v = torch.randn(rows, heads, values, generator=g)
    state = torch.randn(slots, heads, keys, values, generator=g)
    normalized = k / k.norm(dim=-1, keepdim=True)
    return [q, normalized, v, decay, beta, state, torch.randperm(slots, generator=g)[:rows]]


@runs_here
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1, 8, 8), (5, 3, 24, 40), (16, 4, 128, 128), (3, 2, 7, 96)])
@torch.inference_mode()
def test_steps_are_those_of_torch_and_other_slots_stay(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    *tokens, state, slots = drawn(*shape, slots=shape[0] + 2)
    tokens[2] = tokens[2].to(dtype)
    want, states = delta_step(*tokens, state[slots])
    expected = state.index_copy(0, slots, states)
    got = in_place.delta_step(*tokens, state, slots)
    assert got.dtype == dtype
    torch.testing.assert_close(got, want, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-5)
    torch.testing.assert_close(state, expected, rtol=1e-5, atol=1e-5)
    untouched = [slot for slot in range(len(state)) if slot not in slots.tolist()]
    assert torch.equal(state[untouched], expected[untouched])


@runs_here
@torch.inference_mode()
def test_a_row_is_the_same_alone_in_any_batch_and_on_any_threads() -> None:
    *tokens, state, slots = drawn(6, 4, 32, 64, slots=9)
    states = [state.clone() for _ in range(3)]
    want = in_place.delta_step(*tokens, states[0], slots)
    torch.set_num_threads(3 - min(torch.get_num_threads(), 2))
    assert torch.equal(in_place.delta_step(*tokens, states[1], slots), want)
    alone = in_place.delta_step(*(x[4:5] for x in tokens), states[2], slots[4:5])
    assert torch.equal(alone, want[4:5]) and torch.equal(states[0], states[1])
    assert torch.equal(states[2][slots[4]], states[0][slots[4]])


def test_who_takes_it() -> None:
    assert not in_place.supports(torch.empty(1, 1, 8, 8))  # gradients need the old states
    with torch.inference_mode():
        assert not in_place.supports(torch.empty(1, 1, 8, 12))
        assert not in_place.supports(torch.empty(1, 1, 8, 8, device="meta"))
