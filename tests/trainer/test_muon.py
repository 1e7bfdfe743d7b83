"""Muon: the iteration against its scalar form, the update's length, decay, stacked matrices, and
bitwise state."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lowroll.model import hf, lora
from lowroll.trainer.muon import Muon, hidden_matrices, orthogonalize
from lowroll.trainer.optim import Optimizer, OptimSettings
from tests.fixtures.tensors import normal
from tests.fixtures.tiny import hf_folder


def polynomial(s: Tensor) -> Tensor:
    """Five steps of the quintic on singular values."""
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return s


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (32, 32), (1, 9), (9, 1)])
def test_the_iteration_is_the_quintic_on_singular_values(shape: tuple[int, int]) -> None:
    """Oracle: U p(S / |S|) V^T in float64."""
    x = normal(*shape)
    u, s, v = torch.linalg.svd(x.double(), full_matrices=False)
    want = u @ torch.diag(polynomial(s / s.norm())) @ v
    torch.testing.assert_close(orthogonalize(x).double(), want, rtol=0, atol=2e-5)
    torch.testing.assert_close(
        orthogonalize(1e-4 * x), orthogonalize(x), rtol=0, atol=1e-5
    )  # length is forgotten


def test_singular_values_come_near_one_and_directions_stay() -> None:
    x = normal(64, 96)
    got = orthogonalize(x)
    values = torch.linalg.svdvals(got)
    assert 0.65 < values.min() and values.max() < 1.25
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    assert float((got * (u @ v)).sum() / (got.norm() * (u @ v).norm())) > 0.98
    assert torch.equal(orthogonalize(torch.zeros(3, 4)), torch.zeros(3, 4))


def test_known_values_of_the_quintic() -> None:
    """The 2 x 2 identity: s = 1/sqrt 2 -> 1.1065337242, .7120848663, 1.1005940697, .7057639296,
    1.1081111157."""
    torch.testing.assert_close(
        orthogonalize(torch.eye(2)), 1.1081111157 * torch.eye(2), rtol=0, atol=1e-5
    )


def stepped(
    p: Tensor, grads: list[Tensor], rows: tuple[int, ...], rate: float, decay: float
) -> tuple[Tensor, float]:
    p = p.clone()
    muon, moved = Muon({"w": p}, {"w": rows}, decay), 0.0
    for g in grads:
        p.grad = g.clone()
        moved = float(muon.step(rate).sqrt())
    return p, moved


def test_updates_follow_the_recurrence() -> None:
    p, grads = normal(6, 10, seed=1), [normal(6, 10, seed=k) for k in (2, 3, 4)]
    m, want = torch.zeros(6, 10, dtype=torch.float64), p.double()
    for g in grads:
        m = 0.95 * m + 0.05 * g.double()
        u, s, v = torch.linalg.svd(0.05 * g.double() + 0.95 * m, full_matrices=False)
        update = 0.3 * 0.2 * math.sqrt(10) * u @ torch.diag(polynomial(s / s.norm())) @ v
        want = want * (1 - 0.3 * 0.1) - update
    got, moved = stepped(p, grads, (6,), 0.3, 0.1)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-4)
    assert moved == pytest.approx(float(update.norm()), rel=1e-4)


@pytest.mark.parametrize("shape", [(64, 256), (256, 64), (128, 128)])
def test_an_update_has_the_rms_of_adam(shape: tuple[int, int]) -> None:
    """0.2 times the rate, whatever the shape and the gradient's size (up to the spread of the
    quintic)."""
    p = torch.zeros(shape)
    got, _ = stepped(p, [1e-3 * normal(*shape)], (shape[0],), 1e-2, 0.0)
    assert float(got.square().mean().sqrt()) == pytest.approx(0.2 * 1e-2, rel=0.2)


def test_decay_alone_shrinks() -> None:
    p = normal(4, 5)
    got, moved = stepped(p, [torch.zeros(4, 5)] * 2, (4,), 0.5, 0.1)
    assert torch.equal(got, p * 0.95 * 0.95) and moved == 0


def test_torch_agrees() -> None:
    """torch.optim.Muon (its iteration is in bfloat16) within bfloat16's rounding."""
    p, grads = normal(16, 24, seed=1), [normal(16, 24, seed=k) for k in (2, 3)]
    theirs = nn.Parameter(p.clone())
    optimizer = torch.optim.Muon(
        [theirs],
        lr=0.1,
        weight_decay=0.05,
        momentum=0.95,
        nesterov=True,
        adjust_lr_fn="match_rms_adamw",
    )
    for g in grads:
        theirs.grad = g.clone()
        optimizer.step()
    ours, _ = stepped(p, grads, (16,), 0.1, 0.05)
    update = (ours - p * (1 - 0.1 * 0.05) ** 2).abs().max()
    assert (ours - theirs.detach()).abs().max() < 0.03 * update


def test_stacked_matrices_are_orthogonalised_apart() -> None:
    p, g = normal(12, 8, seed=1), normal(12, 8, seed=2)
    fused, _ = stepped(p, [g], (8, 2, 2), 0.1, 0.01)
    apart = torch.cat(
        [
            stepped(a, [b], (len(a),), 0.1, 0.01)[0]
            for a, b in zip(p.split([8, 2, 2]), g.split([8, 2, 2]), strict=True)
        ]
    )
    torch.testing.assert_close(fused, apart, rtol=0, atol=1e-6)
    assert (fused - stepped(p, [g], (12,), 0.1, 0.01)[0]).abs().max() > 1e-3
    with pytest.raises(ValueError, match="w of shape .* is no stack"):
        Muon({"w": p}, {"w": (8, 2)}, 0.0)


@pytest.mark.slow
def test_muon_takes_the_hidden_matrices(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "m", "qwen3")
    model = hf.load(folder).requires_grad_(True)
    names = hidden_matrices(model)
    kinds = ("qkv.weight", "o.weight", "gate_up.weight", "down.weight")
    assert (
        set(names) == {n for n in model.trainable_parameters() if n.endswith(kinds)}
        and len(names) == 8
    )
    assert names["blocks.0.qkv.weight"] == (64, 32, 32) and names["blocks.1.gate_up.weight"] == (
        48,
        48,
    )
    adapted = lora.attach(hf.load(folder), 3, 6.0)
    assert set(hidden_matrices(adapted)) == set(adapted.trainable_parameters())


# -- inside the optimizer --------------------------------------------------------------------------

MATRICES = {"w": (4, 2), "down": (5,)}


def made(dtype: torch.dtype = torch.float32, **settings: object) -> Optimizer:
    params = {
        "w": nn.Parameter(normal(6, 5, seed=1).to(dtype)),
        "down": nn.Parameter(normal(5, 6, seed=2).to(dtype)),
        "embedding": nn.Parameter(normal(7, 5, seed=3).to(dtype)),
        "norm": nn.Parameter(normal(5).to(dtype)),
    }
    return Optimizer(
        params, OptimSettings(**{"learning_rate": 0.1, "optimizer": "muon", **settings}), MATRICES
    )


def set_grads(optimizer: Optimizer, k: int) -> None:
    loss = sum(
        (p.float() * normal(*p.shape, seed=50 + k + i)).sum()
        for i, p in enumerate(optimizer.params.values())
    )
    loss.backward()


def test_the_rest_is_adamws() -> None:
    ours, adamw = made(), made(optimizer="adamw")
    for k in range(3):
        for optimizer in (ours, adamw):
            set_grads(optimizer, k)
            optimizer.begin_step()
            metrics = optimizer.update()
    for name in ("embedding", "norm"):
        assert torch.equal(ours.params[name], adamw.params[name])
    assert not torch.equal(ours.params["w"], adamw.params["w"])
    assert set(ours.state()[0]) == {
        "w.momentum",
        "down.momentum",
        "embedding.exp_avg",
        "embedding.exp_avg_sq",
        "norm.exp_avg",
        "norm.exp_avg_sq",
    }
    assert metrics["optim/update_norm"] > 0
    assert "w.momentum" not in adamw.state()[0] and "w.exp_avg" in adamw.state()[0]


def test_the_update_norm_covers_both() -> None:
    optimizer = made(weight_decay=0.0, max_grad_norm=None)
    before = [p.detach().clone() for p in optimizer.params.values()]
    set_grads(optimizer, 0)
    optimizer.begin_step()
    metrics = optimizer.update()
    moved = math.sqrt(
        sum(
            float((p.detach() - b).square().sum())
            for p, b in zip(optimizer.params.values(), before, strict=True)
        )
    )
    assert metrics["optim/update_norm"] == pytest.approx(moved, rel=1e-5)


def test_the_update_norm_is_muons_where_nothing_is_left_to_adamw() -> None:
    weight = nn.Parameter(normal(6, 5))
    optimizer = Optimizer(
        {"w": weight},
        OptimSettings(learning_rate=0.1, optimizer="muon", weight_decay=0.0),
        {"w": MATRICES["w"]},
    )
    before = weight.detach().clone()
    set_grads(optimizer, 0)
    optimizer.begin_step()
    metrics = optimizer.update()
    assert metrics["optim/update_norm"] == pytest.approx(
        float((weight.detach() - before).norm()), rel=1e-5
    )


def test_a_schedule_reaches_muon() -> None:
    optimizer = made(lr_scheduler_type="linear", total_steps=2, weight_decay=0.0)
    moves = []
    for _ in range(2):
        before = optimizer.params["w"].detach().clone()
        set_grads(optimizer, 0)
        optimizer.begin_step()
        optimizer.update()
        moves.append(float((optimizer.params["w"].detach() - before).norm()))
    assert moves[1] / moves[0] == pytest.approx(0.5, rel=1e-3)


def test_a_refused_update_changes_nothing() -> None:
    optimizer = made()
    set_grads(optimizer, 0)
    optimizer.update()
    before = {k: t.clone() for k, t in optimizer.state()[0].items()}
    weights = {n: p.detach().clone() for n, p in optimizer.params.items()}
    set_grads(optimizer, 1)
    optimizer.params["down"].grad[0, 0] = math.nan
    assert optimizer.update()["optim/skipped"] == 1
    assert all(torch.equal(t, before[k]) for k, t in optimizer.state()[0].items())
    assert all(torch.equal(p, weights[n]) for n, p in optimizer.params.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_comes_back_bitwise(dtype: torch.dtype) -> None:
    whole, half = made(dtype), made(dtype)
    for k in range(4):
        for optimizer in (whole, half):
            set_grads(optimizer, k)
            optimizer.begin_step()
            optimizer.update()
        if k == 1:
            tensors, state = half.state()
            tensors = {name: t.clone() for name, t in tensors.items()}
            fresh = made(dtype)
            for name, p in half.params.items():
                fresh.params[name].data.copy_(p.detach())
            fresh.restore(tensors, state)
            half = fresh
    assert all(torch.equal(p, half.params[name]) for name, p in whole.params.items())
    ours, theirs = whole.state()[0], half.state()[0]
    assert ours.keys() == theirs.keys() and all(
        torch.equal(t, theirs[name]) for name, t in ours.items()
    )
    other = made(dtype, optimizer="adamw")
    with pytest.raises(ValueError, match="optimizer state: .* is (missing|unknown)"):
        other.restore(ours, whole.state()[1])


def test_refusals() -> None:
    with pytest.raises(ValueError, match="muon needs matrices"):
        Optimizer({"w": nn.Parameter(normal(2, 2))}, OptimSettings(optimizer="muon"))


def test_an_unused_state_clears_a_used_optimizer() -> None:
    used, fresh = made(), made()
    set_grads(used, 0)
    used.update()
    used.restore(*fresh.state())
    for name, p in fresh.params.items():
        used.params[name].data.copy_(p.detach())
    for optimizer in (used, fresh):
        set_grads(optimizer, 1)
        optimizer.update()
    assert all(torch.equal(p, used.params[name]) for name, p in fresh.params.items())
