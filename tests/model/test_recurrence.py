"""The gated delta rule and the convolution before it, against their definitions token by token.
transformers is the oracle of the layer that they are part of (`test_delta_net.py`)."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lowroll.model.recurrence import convolve, delta_rule, delta_step

LENGTHS = [[1], [63], [64], [65], [200], [64, 64], [5, 130, 1, 64, 200, 7]]
Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def draw(tokens: int, heads: int = 3, keys: int = 16, values: int = 24) -> Inputs:
    """q, k, v, decay and beta as a layer makes them."""
    q, k = (F.normalize(torch.randn(tokens, heads, keys), dim=-1) for _ in range(2))
    decay = -torch.rand(heads) * 4 * F.softplus(torch.randn(tokens, heads))
    return (
        q * keys**-0.5,
        k,
        torch.randn(tokens, heads, values),
        decay,
        torch.randn(tokens, heads).sigmoid(),
    )


def draw_states(inputs: Inputs, sequences: int) -> Tensor:
    _, k_THk, v_THv, _, _ = inputs
    return torch.randn(sequences, k_THk.shape[1], k_THk.shape[2], v_THv.shape[2])


def by_token(inputs: Inputs, lengths: list[int], states: Tensor | None) -> tuple[Tensor, Tensor]:
    """The definition, head by head as matrices and vectors."""
    outputs, last = [], []
    for s, sequence in enumerate(zip(*(x.split(lengths) for x in inputs), strict=True)):
        heads = []
        for h in range(inputs[0].shape[1]):
            q, k, v, decay, beta = (x[:, h] for x in sequence)
            state = torch.zeros(k.shape[1], v.shape[1]) if states is None else states[s, h]
            rows = []
            for t in range(len(q)):
                state = decay[t].exp() * state
                state = state + beta[t] * torch.outer(k[t], v[t] - state.T @ k[t])
                rows.append(state.T @ q[t])
            heads.append((torch.stack(rows), state))
        outputs.append(torch.stack([rows for rows, _ in heads], dim=1))
        last.append(torch.stack([state for _, state in heads]))
    return torch.cat(outputs), torch.stack(last)


def close(found: tuple[Tensor, ...], expected: tuple[Tensor, ...], within: float = 1e-5) -> None:
    torch.testing.assert_close(found, expected, atol=within, rtol=within)


def gradients(loss: Tensor, leaves: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, leaves)


def weighted(outputs: tuple[Tensor, Tensor]) -> Tensor:
    """A loss whose gradient differs by element."""
    x = torch.cat([output.flatten() for output in outputs])
    return x @ torch.arange(len(x)).cos()


@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_chunks_compute_the_recurrence(lengths: list[int], with_state: bool) -> None:
    inputs = draw(sum(lengths))
    states = draw_states(inputs, len(lengths)) if with_state else None
    found = delta_rule(*inputs, lengths, states)
    assert found[0].shape == inputs[2].shape
    close(found, by_token(inputs, lengths, states))


@pytest.mark.parametrize(("heads", "keys", "values"), [(1, 8, 8), (3, 32, 8), (8, 4, 20)])
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_any_heads_sizes_and_chunks(heads: int, keys: int, values: int, chunk: int) -> None:
    lengths = [30, 71]
    inputs = draw(sum(lengths), heads, keys, values)
    states = draw_states(inputs, 2)
    found = delta_rule(*inputs, lengths, states, chunk=chunk)
    close(found, by_token(inputs, lengths, states))


def test_a_step_is_a_token_of_the_recurrence() -> None:
    inputs = draw(3)
    states = draw_states(inputs, 3)
    close(delta_step(*inputs, states), by_token(inputs, [1, 1, 1], states))


@pytest.mark.parametrize("lengths", [[1], [65], [5, 130, 64]], ids=str)
def test_gradients_are_those_of_the_recurrence(lengths: list[int]) -> None:
    inputs = [x.requires_grad_() for x in draw(sum(lengths), heads=2, keys=8, values=12)]
    states = draw_states(inputs, len(lengths)).requires_grad_()
    leaves = [*inputs, states]
    found = gradients(weighted(delta_rule(*inputs, lengths, states)), leaves)
    close(found, gradients(weighted(by_token(inputs, lengths, states)), leaves), 1e-4)


@pytest.mark.parametrize("decay", [-1e4, float("-inf")])
def test_a_decay_that_underflows_forgets_and_keeps_the_digits_of_others(decay: float) -> None:
    """After it, weak decays still count: their sums must not be differences of great ones."""
    inputs = draw(100)
    inputs[3].mul_(0.01)
    inputs[3][10::30] = decay
    leaves = [x.requires_grad_() for x in inputs]
    states = draw_states(inputs, 1).requires_grad_()
    found = delta_rule(*leaves, [100], states)
    close(found, by_token(inputs, [100], states))
    for gradient in gradients(weighted(found), [*leaves, states]):
        assert gradient.isfinite().all()


def test_bfloat16_inputs_are_computed_in_float32() -> None:
    inputs = [x.bfloat16() for x in draw(130)]
    states = draw_states(inputs, 2)
    o, last = delta_rule(*inputs, [100, 30], states)
    expected_o, expected_last = delta_rule(*(x.float() for x in inputs), [100, 30], states)
    assert (o.dtype, last.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(o, expected_o.bfloat16())
    assert torch.equal(last, expected_last)
    stepped = delta_step(*(x[:2] for x in inputs), states)
    expected = delta_step(*(x[:2].float() for x in inputs), states)
    assert (stepped[0].dtype, stepped[1].dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(stepped[0], expected[0].bfloat16())
    assert torch.equal(stepped[1], expected[1])


@pytest.mark.parametrize("lengths", [[1], [7], [9, 9, 9], [1, 2, 12, 3, 4]], ids=str)
@pytest.mark.parametrize("taps", [1, 2, 4])
@pytest.mark.parametrize("with_state", [False, True])
def test_a_convolution_sums_the_last_inputs(
    lengths: list[int], taps: int, with_state: bool
) -> None:
    x, weight = torch.randn(sum(lengths), 6), torch.randn(6, taps)
    state = torch.randn(len(lengths), 6, taps - 1) if with_state else None
    y, new = convolve(x, weight, lengths, state)
    start = 0
    for s, length in enumerate(lengths):
        before = torch.zeros(taps - 1, 6) if state is None else state[s].T
        rows = torch.cat([before, x[start : start + length]])
        expected = [(rows[t : t + taps] * weight.T).sum(0) for t in range(length)]
        close((y[start : start + length],), (F.silu(torch.stack(expected)),))
        assert torch.equal(new[s], rows[length:].T)
        start += length


def test_a_convolution_of_bfloat16_rounds_once() -> None:
    x, weight = torch.randn(20, 6).bfloat16(), torch.randn(6, 4).bfloat16()
    y, state = convolve(x, weight, [12, 8])
    expected, _ = convolve(x.float(), weight.float(), [12, 8])
    assert (y.dtype, state.dtype) == (torch.bfloat16, torch.bfloat16)
    assert torch.equal(y, expected.bfloat16())


@pytest.mark.parametrize("lengths", [[], [4, 0], [3], [5]], ids=str)
def test_lengths_that_do_not_fit_are_refused(lengths: list[int]) -> None:
    with pytest.raises(ValueError, match="lengths: every packed sequence needs at least one"):
        delta_rule(*draw(4), lengths)
    with pytest.raises(ValueError, match="lengths: every packed sequence needs at least one"):
        convolve(torch.randn(4, 6), torch.randn(6, 4), lengths)
