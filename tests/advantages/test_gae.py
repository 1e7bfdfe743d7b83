"""GAE, whitening and the critic's clipped loss on hand-computed rows, and against independent
computations."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowroll.advantages import gae, place, whiten
from lowroll.objectives.reduce import Denominators, count
from lowroll.objectives.value import value_loss
from tests.fixtures.gae import NAMES, REWARDS, ROWS, VALUES


@pytest.mark.parametrize(NAMES, ROWS)
def test_gae_by_hand(gamma, lam, advantages, returns, whitened):
    A, G = gae(REWARDS, VALUES, gamma=gamma, lam=lam)
    assert A == pytest.approx(advantages, abs=5e-11) and G == pytest.approx(returns, abs=5e-11)
    assert whiten([A], [[1] * 4])[0] == pytest.approx(whitened, abs=5e-11)
    halves = whiten(
        [A[:1], [math.nan, *A[1:]]], [[1], [0, 1, 1, 1]]
    )  # the statistics are the batch's
    assert [*halves[0], *halves[1][1:]] == pytest.approx(whitened, abs=5e-11) and halves[1][0] == 0


def test_masked_tokens_are_carried_over():
    A, G = gae(REWARDS, VALUES, [1, 1, 0, 1], lam=0.95)
    assert A == pytest.approx([0.8315, 0.77, 0, 0.6]) and G == pytest.approx([0.9315, 0.97, 0, 1])
    assert gae([0, 0, math.inf, 1], [0.1, 0.2, math.nan, 0.4], [1, 1, 0, 1], lam=0.95) == (A, G)
    short, _ = gae([0, 0, 1], [0.1, 0.2, 0.4], lam=0.95)
    assert [A[0], A[1], A[3]] == short
    assert gae([1.0, 2.0], [3.0, 4.0], [0, 0]) == ([0.0, 0.0], [0.0, 0.0])
    assert gae([], []) == ([], [])


def test_two_turns_by_hand():
    """Two tokens, two of the environment, one token with the reward."""
    mask = [1, 1, 0, 0, 1]
    A, G = gae(place(1.0, mask), [0.1, 0.2, 5.0, -7.0, 0.3], mask, gamma=0.9, lam=0.5)
    last = 1 - 0.3
    second = 0.9 * 0.3 - 0.2 + 0.45 * last
    first = 0.9 * 0.2 - 0.1 + 0.45 * second
    assert A == pytest.approx([first, second, 0, 0, last]) == [0.25325, 0.385, 0, 0, 0.7]
    assert G == pytest.approx([0.35325, 0.585, 0, 0, 1.0])


@given(
    st.lists(st.tuples(st.floats(-3, 3), st.floats(-3, 3), st.booleans()), min_size=1, max_size=9),
    st.floats(0, 1),
    st.floats(0, 1),
)
def test_gae_is_the_sum_of_discounted_errors(rows, gamma, lam):
    """A_t = sum_k (gamma lam)^k delta_{t+k} over the unmasked tokens."""
    rewards, values, mask = (list(column) for column in zip(*rows, strict=True))
    steps = [t for t, m in enumerate(mask) if m]
    delta = [
        rewards[t] + gamma * (values[steps[i + 1]] if i + 1 < len(steps) else 0) - values[t]
        for i, t in enumerate(steps)
    ]
    A, G = gae(rewards, values, mask, gamma=gamma, lam=lam)
    for i, t in enumerate(steps):
        expected = math.fsum((gamma * lam) ** k * d for k, d in enumerate(delta[i:]))
        assert A[t] == pytest.approx(expected, abs=1e-9)
        assert G[t] == pytest.approx(expected + values[t], abs=1e-9)
    if steps:
        total = [math.fsum(rewards[s] for s in steps[i:]) for i in range(len(steps))]
        assert [gae(rewards, values, mask)[1][t] for t in steps] == pytest.approx(total, abs=1e-9)


def test_the_score_stands_on_the_last_unmasked_token():
    assert place(0.7, [1, 1, 1]) == [0, 0, 0.7]
    assert place(0.7, [1, 0, 1, 0]) == [0, 0, 0.7, 0]
    assert place(0.7, [0, 0]) == [0, 0]


@given(st.lists(st.lists(st.floats(-5, 5), min_size=1, max_size=4), min_size=1, max_size=4))
def test_whitening(rows):
    masks = [[1] * len(row) for row in rows]
    active = [a for row in rows for a in row]
    got = [a for row in whiten(rows, masks) for a in row]
    if len(active) < 2 or min(active) == max(active):
        assert got == [0.0] * len(active)
    else:
        scale = math.sqrt(statistics.variance(active) + 1e-8)
        assert got == pytest.approx(
            [(a - statistics.fmean(active)) / scale for a in active], abs=1e-6
        )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: gae([1.0], [1.0, 2.0]), "values: 2 entries for 1 rewards"),
        (lambda: gae([1.0], [1.0], [1, 1]), "mask: 2 entries"),
        (lambda: gae([1.0, math.nan], [0.0, 0.0]), r"rewards\[1\] = nan"),
        (lambda: gae([1.0, 1.0], [math.inf, 0.0]), r"values\[0\] = inf"),
        (lambda: gae([1.0], [0.0], gamma=1.1), "gamma"),
        (lambda: gae([1.0], [0.0], lam=math.nan), "lam"),
        (lambda: whiten([[1.0]], [[1, 1]]), "masks"),
        (lambda: whiten([[1.0, math.inf]], [[1, 1]]), "advantages"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# The critic's loss

V, OLD, MASK = [0.5, 1.2, -0.3, 0.4], [0.1, 0.2, 0.3, 0.4], torch.ones(1, 4)


def f64(values):
    return torch.tensor([values], dtype=torch.float64)


def critic(values=V, mask=MASK, **options):
    v = (values if isinstance(values, torch.Tensor) else f64(values)).clone().requires_grad_()
    loss, stats = value_loss(
        values=v, old_values=f64(OLD), returns=f64([1.0] * 4), mask=mask, **options
    )
    loss.backward()
    return loss.item(), v.grad[0].tolist(), stats


def test_value_loss_by_hand():
    loss, gradient, stats = critic()  # elements .25, .09, 1.69, .36
    assert loss == pytest.approx(0.29875)
    assert gradient == pytest.approx([-0.5 / 4, 0, -1.3 / 4, -0.6 / 4])
    assert stats == pytest.approx(
        {
            "critic/loss": 0.29875,
            "critic/clip_fraction": 0.25,
            "critic/value_mean": 0.45,
            "critic/return_mean": 1,
        }
    )
    loss, gradient, stats = critic(clip=None)  # .25, .04, 1.69, .36
    assert (loss, stats["critic/clip_fraction"]) == pytest.approx((2.34 / 8, 0))
    assert gradient == pytest.approx([(v - 1) / 4 for v in V])
    assert critic(clip=1.0 + 1e-9)[:2] == critic(clip=None)[:2]
    assert critic(OLD, clip=1e-6)[1] == pytest.approx(
        [(v - 1) / 4 for v in OLD]
    )  # nothing has moved: free


def test_value_loss_under_masks_and_micro_batches():
    mask = torch.tensor([[1, 1, 0, 1]])
    loss, gradient, stats = critic([0.5, 1.2, math.nan, 0.4], mask)
    assert loss == pytest.approx((0.25 + 0.09 + 0.36) / 6)
    assert gradient == pytest.approx([-0.5 / 3, 0, 0, -0.6 / 3]) and stats[
        "critic/value_mean"
    ] == pytest.approx(0.7)
    assert critic(mask=torch.zeros(1, 4))[:2] == (0, [0] * 4)
    counts = count(mask=mask[:, :2]) + count(mask=mask[:, 2:])
    assert counts == Denominators(3, 2)
    parts = []
    for part in (slice(0, 2), slice(2, 4)):
        parts.append(
            value_loss(
                values=f64(V)[:, part],
                old_values=f64(OLD)[:, part],
                returns=torch.ones(1, 2, dtype=torch.float64),
                mask=mask[:, part],
                counts=counts,
            )[0]
        )
    assert float(sum(parts)) == pytest.approx(loss)
    packed, _ = value_loss(
        values=f64(V)[0, [3, 0, 1]],
        old_values=f64(OLD)[0, [3, 0, 1]],
        returns=torch.ones(3, dtype=torch.float64),
        mask=torch.ones(3),
        segments=torch.zeros(3, dtype=torch.int64),
    )
    assert packed.item() == pytest.approx(loss)


def test_value_loss_against_autograd_of_the_formula():
    generator = torch.Generator().manual_seed(0)
    v, old, G = (torch.randn(5, 7, generator=generator, dtype=torch.float64) for _ in range(3))
    v.requires_grad_()
    loss, stats = value_loss(values=v, old_values=old, returns=G, mask=torch.ones(5, 7))
    bounded = torch.max(torch.min(v, old + 0.5), old - 0.5)
    expected = torch.maximum((v - G) ** 2, (bounded - G) ** 2).mean() / 2
    assert loss.item() == pytest.approx(expected.item()) and 0 < stats["critic/clip_fraction"] < 1
    free = (v - G) ** 2 >= (bounded - G) ** 2
    (gradient,) = torch.autograd.grad(loss, v)
    torch.testing.assert_close(gradient, torch.where(free, (v - G) / 35, 0).detach())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clip": 0}, "clip"),
        ({"clip": math.nan}, "clip"),
        ({"returns": torch.ones(1, 3)}, "returns: shape"),
    ],
)
def test_bad_values_are_named(changes, message):
    inputs = {"values": f64(V), "old_values": f64(OLD), "returns": f64(V), "mask": MASK}
    with pytest.raises(ValueError, match=message):
        value_loss(**(inputs | changes))
