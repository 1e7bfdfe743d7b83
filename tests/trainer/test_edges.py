"""The trainer at its edges: every bound of its settings from both sides, the schedule's corners,
what may be packed."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from lowroll.trainer import loop as trainer_loop
from lowroll.trainer.guard import Guard, GuardSettings
from lowroll.trainer.loop import Trainer
from lowroll.trainer.muon import Muon
from lowroll.trainer.optim import Optimizer, OptimSettings, learning_rate
from lowroll.trainer.packing import check, collate, first_fit, num_fed, pack
from lowroll.trainer.sft import epochs
from lowroll.trainer.step import learn
from lowroll.transport.memory import MemoryRolloutChannel
from lowroll.weights.aligned_forward import align, refresh
from lowroll.weights.publish import digest
from tests.fixtures.learner import make_batch, settings, tiny_model
from tests.fixtures.samples import sample


def test_the_corners_of_the_schedule() -> None:
    """Full at the end of the warm-up, the floor from the end of the run on."""
    settings = OptimSettings(1.0, "linear", warmup_steps=2, total_steps=6, min_lr_ratio=0.2)
    assert [learning_rate(settings, step) for step in (0, 1, 2, 4, 6, 9)] == pytest.approx(
        [0.5, 1, 1, 0.6, 0.2, 0.2]
    )
    assert learning_rate(replace(settings, lr_scheduler_type="cosine"), 4) == pytest.approx(0.6)
    assert learning_rate(replace(settings, lr_scheduler_type="constant"), 9) == 1.0
    assert learning_rate(replace(settings, total_steps=2), 2) == 1.0
    assert learning_rate(replace(settings, total_steps=2), 3) == pytest.approx(0.2)
    assert learning_rate(replace(settings, warmup_steps=0), 0) == 1.0


@pytest.mark.parametrize(("most", "scale"), [(None, 1.0), (5.0, 1.0), (2.5, 0.5), (9.0, 1.0)])
def test_gradients_are_clipped_above_the_bound_and_reported_as_they_were(
    most: float | None, scale: float
) -> None:
    """One step of AdamW with eps above all: w moves by rate g / eps nearly, so the clip shows in w
    itself."""
    w = nn.Parameter(torch.zeros(1, 2))
    optimizer = Optimizer(
        {"w": w}, OptimSettings(1.0, weight_decay=0.0, eps=1e6, max_grad_norm=most)
    )
    w.grad = torch.tensor([[3.0, 4.0]])
    optimizer.begin_step()
    metrics = optimizer.update()
    assert metrics["optim/grad_norm"] == pytest.approx(5.0) and metrics["optim/skipped"] == 0.0
    torch.testing.assert_close(
        w.detach(), torch.tensor([[-3e-6, -4e-6]]) * scale, rtol=1e-4, atol=0
    )
    assert metrics["optim/update_norm"] == pytest.approx(5e-6 * scale, rel=1e-4)
    assert (optimizer.num_steps, optimizer.num_updates, optimizer.refused_in_a_row) == (
        1,
        1,
        0,
    ) and w.grad is None


def test_refusals_are_counted_in_a_row_and_forgotten_by_a_good_update() -> None:
    w = nn.Parameter(torch.ones(2))
    optimizer = Optimizer({"w": w}, OptimSettings())
    for refused in (1, 2):
        w.grad = torch.ones(2)
        assert (
            optimizer.update(refuse=True)["optim/skipped"] == 1.0
            and optimizer.refused_in_a_row == refused
        )
    assert torch.equal(w.detach(), torch.ones(2)) and optimizer.num_updates == 0
    assert optimizer.update()["optim/skipped"] == 0.0 and optimizer.refused_in_a_row == 0
    with pytest.raises(ValueError, match="params: nothing to train"):
        Optimizer({}, OptimSettings())


def test_muon_refuses_what_is_no_stack_of_matrices() -> None:
    for shape, rows in (((4,), (4,)), ((4, 2), (3,)), ((4, 2), (3, 2)), ((2, 2, 2), (2,))):
        with pytest.raises(ValueError, match="is no stack of matrices"):
            Muon({"w": torch.zeros(shape)}, {"w": rows}, 0.0)
    Muon({"w": torch.zeros(4, 2)}, {"w": (3, 1)}, 0.0)


# -- packing


def test_a_sample_may_fill_the_context_and_use_the_whole_vocabulary() -> None:
    full = sample([0, 63, 5, 6], [63, 0, 5, 6, 7])
    assert num_fed(full) == 8
    check([full], 64, 8)
    for bad, words in (
        (sample([0] * 5, [1] * 5), "9 tokens to read"),
        (sample([64], [1]), "prompt_ids leaves"),
        (sample([-1], [1]), "prompt_ids leaves"),
        (sample([1], [64]), "token_ids leaves"),
        (sample([1], [-1]), "token_ids leaves"),
    ):
        with pytest.raises(ValueError, match=f"sample 1 .*{words}"):
            check([full, bad], 64, 8)


def test_first_fit_at_its_capacity() -> None:
    assert [(p.indices, p.num_tokens) for p in first_fit([3, 2], 5)] == [((0, 1), 5)]
    assert [(p.indices, p.num_tokens) for p in first_fit([3, 2], 4)] == [((0,), 3), ((1,), 2)]
    assert [p.indices for p in first_fit([1, 1], 1)] == [(0,), (1,)]


def test_portions_are_packed_by_themselves() -> None:
    samples = [sample([1] * length, [2]) for length in (3, 4, 2, 1)]
    assert pack(samples, [[0, 2], [3, 1]], 5) == [[0, 2], [1, 3]]
    assert pack(samples, [[2, 3, 0]], 5) == [[0, 2], [3]] and pack(samples, [], 5) == []


def test_a_packed_batch_on_the_cpu_keeps_types_and_large_ids() -> None:
    packed = collate([sample([2**40, 3], [7], [-1e-8], [1], advantage=0.1)], [0])
    assert packed.ids_T.tolist() == [2**40, 3] and packed.targets_N.dtype == torch.int64
    assert packed.behavior_N.dtype == packed.advantages_N.dtype == torch.float32
    assert (
        packed.behavior_N.tolist() == pytest.approx([-1e-8]) and packed.mask_N.dtype == torch.bool
    )


# -- the guard


def test_only_what_is_there_can_be_no_number() -> None:
    def odd(metrics: dict[str, float], **settings: object) -> float:
        return Guard(GuardSettings(**settings), "int8").look(metrics)[0]["guard/nonfinite"]

    assert odd({}) == odd({"optim/skipped": 0.0, "mismatch/ess": 1.0}) == 0.0
    for bad in (
        {"optim/skipped": 1.0},
        {"mismatch/ess": math.nan},
        {"mismatch/weight_max": math.inf},
    ):
        assert odd(bad) == 1.0 and odd(bad, nonfinite=False) == 0.0


def test_the_trend_of_the_kl_by_hand() -> None:
    """Five steps make the baseline, their mean 0.01; then the average moves by a tenth: to 0.1, ten
    times it."""
    for last, rings in ((0.91, False), (0.9101, True)):
        guard = Guard(GuardSettings(patience=9), "int8")
        for kl in (0.0, 0.02, 0.01, 0.015, 0.005):
            assert guard.look({"mismatch/kl_k3": kl})[0]["guard/kl"] == 0.0
        assert guard.baseline == pytest.approx(0.01) and guard.num_seen == 5
        guard.baseline = guard.average = 0.01  # without the rounding of the mean
        assert guard.look({"mismatch/kl_k3": last})[0]["guard/kl"] == rings
        assert guard.average == pytest.approx(0.01 + (last - 0.01) / 10)
    guard = Guard(GuardSettings(kl_floor=2e-3), "int8")  # a small KL may grow as it likes
    for kl in (1e-5,) * 5:
        guard.look({"mismatch/kl_k3": kl})
    assert guard.look({"mismatch/kl_k3": 1.9e-2})[0]["guard/kl"] == 0.0
    assert guard.look({"mismatch/kl_k3": 9e-2})[0]["guard/kl"] == 1.0


# -- a step


def test_after_a_step_an_aligned_learner_runs_on_the_codes_of_its_new_weights() -> None:
    model = align(tiny_model(), "int8")
    batch, before = make_batch(model), digest(model)
    learn(model, batch, Optimizer(model.trainable_parameters(), OptimSettings(1e-2)), settings())
    codes = digest(model)
    assert codes != before
    refresh(model)
    assert digest(model) == codes


def test_the_times_and_the_order_of_a_trainers_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    model, channel, told = tiny_model(), MemoryRolloutChannel(), []
    trainer = Trainer(
        model,
        Optimizer(model.trainable_parameters(), OptimSettings()),
        settings(),
        channel,
        lambda version: told.append(version) or {"weights/x": 1.0},
    )
    clock = itertools.chain((10.0, 12.5, 13.0), itertools.repeat(0.0))
    monkeypatch.setattr(trainer_loop.time, "monotonic", lambda: next(clock))
    batch = make_batch(model, step=4)
    channel.send(batch)
    metrics = trainer.step(trainer.receive())
    assert (metrics["time/learn"], metrics["time/publish"], metrics["weights/x"]) == (2.5, 0.5, 1.0)
    assert metrics["perf/learn_tokens_per_second"] == pytest.approx(
        sum(map(num_fed, batch.samples)) / 2.5
    )
    assert (told, trainer.version, trainer.last_step) == ([1], 1, 4)
    for step in (3, 4):
        channel.send(replace(batch, step=step))
        with pytest.raises(
            ValueError, match=f"batch of step {step}: step 4 was already learned from"
        ):
            trainer.step(trainer.receive())
    channel.send(replace(batch, step=5))
    trainer.step(trainer.receive())
    assert (told, trainer.version, trainer.last_step) == ([1, 2], 2, 5)


def test_epochs_of_one_demonstration_and_of_none() -> None:
    assert list(itertools.islice(epochs(1, seed=0), 3)) == [0, 0, 0]
    with pytest.raises(ValueError, match="no demonstration to learn from"):
        next(epochs(0, seed=0))
