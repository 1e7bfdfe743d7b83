"""Schedules by hand, AdamW against a float64 recurrence, clipping, refusal of non-finite gradients,
bitwise state."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from lowroll.trainer.optim import Optimizer, OptimSettings, learning_rate


def rates(steps, **settings):
    return [learning_rate(OptimSettings(**settings), s) for s in steps]


def test_constant_rate_with_warmup():
    assert rates(range(6), learning_rate=2.0, warmup_steps=4) == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]


def test_linear_rate():
    got = rates(
        [0, 1, 2, 5, 9, 10, 99],
        learning_rate=1.0,
        lr_scheduler_type="linear",
        warmup_steps=2,
        total_steps=10,
        min_lr_ratio=0.2,
    )
    assert got == pytest.approx(
        [0.5, 1.0, 1.0, 0.7, 0.3, 0.2, 0.2]
    )  # p = 0, 3/8, 7/8, 1, 1 from step 2 on


def test_cosine_rate():
    got = rates([0, 1, 2, 3, 4, 7], learning_rate=1.0, lr_scheduler_type="cosine", total_steps=4)
    assert got == pytest.approx([1.0, 0.8535533906, 0.5, 0.1464466094, 0.0, 0.0], abs=1e-10)


def parameters(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return {
        "w": nn.Parameter(torch.randn(3, 2, generator=generator).to(dtype)),
        "norm": nn.Parameter(torch.randn(2, generator=generator).to(dtype)),
    }


def set_grads(optimizer, k):
    generator = torch.Generator().manual_seed(100 + k)
    loss = sum(
        (p * torch.randn(p.shape, generator=generator)).sum() for p in optimizer.params.values()
    )
    loss.backward()


def test_updates_follow_the_recurrence_with_clipping_and_decay_on_matrices_only():
    settings = OptimSettings(
        learning_rate=0.1,
        weight_decay=0.5,
        betas=(0.8, 0.9),
        eps=1e-3,
        max_grad_norm=0.7,
        lr_scheduler_type="linear",
        total_steps=4,
    )
    optimizer = Optimizer(parameters(), settings)
    want = {n: p.detach().double().clone() for n, p in optimizer.params.items()}
    m = {n: torch.zeros_like(p) for n, p in want.items()}
    v = {n: torch.zeros_like(p) for n, p in want.items()}
    for k in range(3):
        set_grads(optimizer, k)
        grads = {n: p.grad.double() for n, p in optimizer.params.items()}
        norm = math.sqrt(sum(float((g * g).sum()) for g in grads.values()))
        assert optimizer.begin_step() == pytest.approx(0.1 * (1 - k / 4))
        metrics, moved = optimizer.update(), 0.0
        assert (
            metrics["optim/grad_norm"] == pytest.approx(norm, rel=1e-6)
            and metrics["optim/skipped"] == 0
        )
        for n, p in want.items():
            g, lr = grads[n] * min(1.0, 0.7 / (norm + 1e-6)), 0.1 * (1 - k / 4)
            m[n] = 0.8 * m[n] + 0.2 * g
            v[n] = 0.9 * v[n] + 0.1 * g * g
            p.mul_(1 - lr * (0.5 if n == "w" else 0.0))
            step = (
                lr * (m[n] / (1 - 0.8 ** (k + 1))) / ((v[n] / (1 - 0.9 ** (k + 1))).sqrt() + 1e-3)
            )
            p.sub_(step)
            moved += float((step * step).sum())
            assert torch.allclose(optimizer.params[n].double(), p, atol=1e-6)
        assert metrics["optim/update_norm"] == pytest.approx(math.sqrt(moved), rel=1e-5)
    assert all(p.grad is None for p in optimizer.params.values())


def test_one_step_of_several_updates_shares_its_rate():
    optimizer = Optimizer(
        parameters(), OptimSettings(learning_rate=1.0, lr_scheduler_type="linear", total_steps=2)
    )
    assert optimizer.begin_step() == 1.0
    for k in range(3):
        set_grads(optimizer, k)
        optimizer.update()
    assert optimizer.begin_step() == 0.5
    assert (optimizer.num_steps, optimizer.num_updates) == (2, 3)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e38])
def test_a_non_finite_gradient_changes_nothing(poison):
    optimizer = Optimizer(parameters(), OptimSettings(learning_rate=0.1))
    set_grads(optimizer, 0)
    optimizer.update()
    before = {n: p.detach().clone() for n, p in optimizer.params.items()}
    moments = {k: t.clone() for k, t in optimizer.state()[0].items()}
    for refused in (1, 2):
        set_grads(optimizer, 1)
        optimizer.params["norm"].grad[1] = poison
        optimizer.params["w"].grad[0, 0] = 1e38 if poison == 1e38 else 0.0  # the norm overflows
        metrics = optimizer.update()
        assert not math.isfinite(metrics["optim/grad_norm"])
        assert metrics["optim/skipped"] == 1 and metrics["optim/update_norm"] == 0
        assert optimizer.refused_in_a_row == refused
    assert all(torch.equal(p, before[n]) for n, p in optimizer.params.items())
    assert all(torch.equal(t, moments[k]) for k, t in optimizer.state()[0].items())
    set_grads(optimizer, 1)
    optimizer.update()
    assert optimizer.refused_in_a_row == 0 and optimizer.num_updates == 2
    assert all(p.isfinite().all() for p in optimizer.params.values())


def test_a_parameter_without_a_gradient_takes_part_with_zero():
    settings = OptimSettings(learning_rate=0.1, weight_decay=0.0)
    sparse, dense = Optimizer(parameters(), settings), Optimizer(parameters(), settings)
    for k in range(3):
        for optimizer in (sparse, dense):
            set_grads(optimizer, k)
        if k == 1:
            sparse.params["norm"].grad = None
            dense.params["norm"].grad.zero_()
        for optimizer in (sparse, dense):
            optimizer.update()
    assert all(torch.equal(sparse.params[n], dense.params[n]) for n in sparse.params)


def test_bfloat16_parameters_learn_through_float32_masters():
    """Ten updates of 1e-3 on weights of 1 each round away in bfloat16, and add up to 1e-2 on the
    master."""
    param = nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
    optimizer = Optimizer(
        {"w": param}, OptimSettings(learning_rate=1e-3, weight_decay=0.0, max_grad_norm=None)
    )
    optimizer.begin_step()
    for _ in range(10):
        (param * 0.5).sum().backward()
        (param * 0.5).sum().backward()
        assert param.grad is None and optimizer.masters["w"].grad is not None
        assert optimizer.masters["w"].grad.eq(1.0).all()
        optimizer.update()
    assert torch.allclose(optimizer.masters["w"], torch.full((4, 4), 0.99), atol=1e-5)
    assert torch.equal(param, optimizer.masters["w"].bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stop", [0, 1, 3])
def test_restored_state_continues_bitwise(dtype, stop):
    settings = OptimSettings(learning_rate=0.01, lr_scheduler_type="cosine", total_steps=6)

    def advance(optimizer, steps):
        for k in steps:
            set_grads(optimizer, k)
            optimizer.begin_step()
            optimizer.update()

    whole = Optimizer(parameters(dtype), settings)
    advance(whole, range(stop))
    tensors, state = whole.state()
    tensors = {k: t.clone() for k, t in tensors.items()}
    weights = {n: p.detach().clone() for n, p in whole.params.items()}
    advance(whole, range(stop, 6))

    resumed = Optimizer(parameters(dtype), settings)
    advance(resumed, range(2))  # leftovers that the restore must replace
    with torch.no_grad():
        for n, p in resumed.params.items():
            p.copy_(weights[n])
    resumed.restore(tensors, state)
    advance(resumed, range(stop, 6))
    assert all(torch.equal(resumed.params[n], p) for n, p in whole.params.items())
    assert whole.state()[1] == resumed.state()[1]
    assert all(torch.equal(t, whole.state()[0][k]) for k, t in resumed.state()[0].items())


def test_restore_refuses_foreign_state_before_any_change():
    optimizer = Optimizer(parameters(), OptimSettings())
    set_grads(optimizer, 0)
    optimizer.update()
    tensors, state = optimizer.state()
    good = {k: t.clone() for k, t in tensors.items()}
    for bad, words in [
        ({k: t for k, t in good.items() if k != "w.exp_avg"}, "w.exp_avg is missing"),
        (good | {"z.exp_avg": torch.zeros(1)}, "z.exp_avg is unknown"),
        (good | {"w.exp_avg": torch.zeros(2, 2)}, r"w.exp_avg is torch.float32 \[2, 2\]"),
    ]:
        with pytest.raises(ValueError, match=words):
            optimizer.restore(bad, state | {"num_steps": 77})
        assert optimizer.num_steps == 0
        assert all(torch.equal(optimizer.state()[0][k], t) for k, t in good.items())
