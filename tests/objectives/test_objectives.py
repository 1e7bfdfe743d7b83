"""Policy objectives against hand-computed tables, an independent oracle, and each other at their
limits.

Shape legend: B rows, T padded length, N tokens laid end to end.
"""

from __future__ import annotations

import math

import pytest
import torch

from lowroll.objectives.acr import acr as acr_function
from lowroll.objectives.clipped import clipped
from lowroll.objectives.objective import named, select
from lowroll.objectives.reduce import Denominators, aggregate, count, sequences_of
from tests.fixtures.objectives import call, f64, random_batch, single

acr, dapo, decoupled, dr_grpo = map(named, ("acr", "dapo", "decoupled", "dr_grpo"))
grpo, gspo, naive_is, rloo, tis = map(named, ("grpo", "gspo", "is", "rloo", "tis"))


# Aggregation


@pytest.mark.parametrize(
    ("mode", "max_length", "expected"),
    [
        ("seq-mean-token-mean", None, 1.09375),
        ("token-mean", None, 0.9583333333),
        ("constant", 8, 0.359375),
        ("constant", 4, 0.71875),
        ("seq-mean-token-sum", None, 2.875),
    ],
)
def test_aggregation_by_hand(mode, max_length, expected):
    padded = f64([[1, 2, math.nan, math.inf], [0.5, -1, 3, 0.25]])
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
    value = aggregate(padded.reshape(-1), sequences_of(mask), mode=mode, max_length=max_length)
    assert value.item() == pytest.approx(expected, abs=5e-11)
    packed, segments = f64([0.5, 1, -1, 2, 3, 0.25]), torch.tensor([1, 0, 1, 0, 1, 1])
    value = aggregate(
        packed, sequences_of(torch.ones(6), segments), mode=mode, max_length=max_length
    )
    assert value.item() == pytest.approx(expected, abs=5e-11)


def test_fully_masked_sequences_stay_in_the_sequence_count():
    x, mask = f64([3.0, 5.0, 7.0]), torch.tensor([1, 1, 0])
    sequences = sequences_of(mask, torch.tensor([0, 0, 1]))
    assert aggregate(x, sequences, mode="seq-mean-token-mean").item() == 2  # mean(mean(3, 5), 0)
    assert aggregate(x, sequences, mode="seq-mean-token-sum").item() == 4
    assert aggregate(x, sequences, mode="token-mean").item() == 4
    assert count(mask=mask, segments=torch.tensor([0, 0, 1])) == Denominators(2, 2)


# The clip: R, A -> value, gradient


@pytest.mark.parametrize(
    ("ratio", "advantage", "even", "higher", "dual"),
    [
        (1.1, 1, (1.1, 1.1), (1.1, 1.1), (1.1, 1.1)),
        (1.25, 1, (1.2, 0), (1.25, 1.25), (1.25, 1.25)),
        (1.35, 1, (1.2, 0), (1.28, 0), (1.28, 0)),
        (0.7, 1, (0.7, 0.7), (0.7, 0.7), (0.7, 0.7)),
        (0.7, -1, (-0.8, 0), (-0.8, 0), (-0.8, 0)),
        (0.9, -1, (-0.9, -0.9), (-0.9, -0.9), (-0.9, -0.9)),
        (1.5, -1, (-1.5, -1.5), (-1.5, -1.5), (-1.5, -1.5)),
        (4, -1, (-4, -4), (-4, -4), (-3, 0)),
    ],
)
def test_clip_by_hand(ratio, advantage, even, higher, dual):
    def of(function, **options):
        return single(function, 0.1 * ratio, advantage, proximal=0.1, **options)[:2]

    assert of(grpo) == pytest.approx(even, abs=1e-12)
    assert of(grpo, eps_high=0.28) == pytest.approx(higher, abs=1e-12)
    assert of(dapo) == pytest.approx(higher, abs=1e-12)
    assert of(dapo, dual_clip=3.0) == pytest.approx(dual, abs=1e-12)
    assert of(rloo) == pytest.approx(even, abs=1e-12)
    assert of(dr_grpo, max_length=4) == pytest.approx([x / 4 for x in even], abs=1e-12)


def test_ties_are_active():
    zero = torch.zeros(1, 1, dtype=torch.float64)
    lpn = zero.clone().requires_grad_()
    for advantage in (1.0, -1.0):
        J, _ = grpo(
            learner=lpn,
            proximal=zero,
            advantages=zero + advantage,
            mask=torch.ones(1, 1),
            eps_low=0,
            eps_high=0,
        )
        assert torch.autograd.grad(J, lpn)[0].item() == advantage


# Corrections: behavior, proximal, learner probabilities and A -> (J, g) of decoupled, TIS, ACR

ROWS = {
    1: ((0.5, 0.6, 0.66, 1), (1.32, 1.32), (1.32, 1.32), (1.32, 1.32)),
    2: ((0.5, 0.6, 0.78, 1), (1.44, 0), (1.44, 0), (1.44, 0)),
    3: ((0.01, 0.05, 0.08, 1), (6, 0), (2.4, 0), (3.2, 3.2)),
    4: ((0.01, 0.05, 0.16, 1), (6, 0), (2.4, 0), (6, 0)),
    5: ((0.5, 0.6, 0.54, -1), (-1.08, -1.08), (-1.08, -1.08), (-1.08, -1.08)),
    6: ((0.01, 0.05, 0.08, -1), (-8, -8), (-3.2, -3.2), (-3.2, -3.2)),
    7: ((0.01, 0.05, 0.03, -1), (-4, 0), (-1.6, 0), (-1.6, 0)),
    8: ((0.6, 0.3, 0.33, 1), (0.55, 0.55), (0.55, 0.55), (0.55, 0.55)),
    9: ((0.6, 0.3, 0.45, 1), (0.6, 0), (0.6, 0), (0.6, 0)),
    10: ((0.01, 0.05, 0.03, 1), (3, 3), (1.2, 1.2), (1.2, 1.2)),
    11: ((0.1, 0.2, 0.26, 1), (2.4, 0), (2.4, 0), (2.4, 0)),
}


@pytest.mark.parametrize("row", ROWS)
def test_corrections_by_hand(row):
    (behavior, proximal, learner, advantage), *expected = ROWS[row]
    for function, pair in zip((decoupled, tis, acr), expected, strict=True):
        got = single(function, learner, advantage, proximal=proximal, behavior=behavior)[:2]
        assert got == pytest.approx(pair, abs=1e-12), function.__name__


def test_acr_with_dapo_bounds_by_hand():
    behavior, proximal, learner, advantage = ROWS[3][0]
    row = {"proximal": proximal, "behavior": behavior}
    assert single(acr, learner, advantage, eps_high=0.28, **row)[:2] == pytest.approx((3.2, 3.2))
    assert single(select("dapo", "acr"), learner, advantage, **row)[:2] == pytest.approx((3.2, 3.2))
    # up = 1.28 / .4 = 3.2: just below it is active, just above it is not
    assert single(acr, 0.05 * 3.19, 1, eps_high=0.28, **row)[:2] == pytest.approx((6.38, 6.38))
    assert single(acr, 0.05 * 3.21, 1, eps_high=0.28, **row)[:2] == pytest.approx((6.4, 0))


def test_dual_clip_comes_before_the_weight():
    row = {"proximal": 0.02, "behavior": 0.01, "dual_clip": 3.0}  # w = 2, R = 4, A = -1
    for function in (decoupled, tis, acr):
        J, gradient, stats = single(function, 0.08, -1, **row)
        assert (J, gradient) == pytest.approx((-6, 0))
        assert stats["policy/dual_clip_fraction"] == 1


def test_naive_is_clips_the_whole_ratio():
    # rho = w R: 1.32, 1.56, 8 (A > 0 clipped at 1.2), 1.08 and 8 with A < 0 (active), .55 (active)
    expected = {
        1: (1.2, 0),
        2: (1.2, 0),
        3: (1.2, 0),
        5: (-1.08, -1.08),
        6: (-8, -8),
        8: (0.55, 0.55),
    }
    for row, pair in expected.items():
        (behavior, _, learner, advantage), *_ = ROWS[row]
        assert single(naive_is, learner, advantage, behavior=behavior)[:2] == pytest.approx(
            pair, abs=1e-12
        )


def test_statistics_by_hand():
    rows = [ROWS[row][0] for row in ROWS if row != 11]  # row 11 is a tie
    behavior, proximal, learner, advantages = (
        f64(column).reshape(2, 5) for column in zip(*rows, strict=True)
    )
    call = {
        "learner": learner.log(),
        "proximal": proximal.log(),
        "behavior": behavior.log(),
        "advantages": advantages,
        "mask": torch.ones(2, 5),
    }
    policy = {
        "policy/clip_fraction_low": 0.1,
        "policy/dual_clip_fraction": 0,
        "policy/ratio_max": 3.2,
        "policy/ratio_mean": (1.1 + 1.3 + 1.6 + 3.2 + 0.9 + 1.6 + 0.6 + 1.1 + 1.5 + 0.6) / 10,
    }
    applied = {
        "correction/weight_mean": (3 * 1.2 + 5 * 2 + 2 * 0.5) / 10,
        "correction/weight_max": 2,
        "correction/truncated_fraction": 0.5,
        "correction/dropped_tokens": 0,
    }
    assert tis(**call)[1] == pytest.approx(policy | applied | {"policy/clip_fraction_high": 0.4})
    assert acr(**call)[1] == pytest.approx(
        policy
        | applied
        | {"policy/clip_fraction_high": 0.3, "correction/acr_extended_fraction": 0.1}
    )
    plain = decoupled(**call)[1]
    assert plain["correction/truncated_fraction"] == 0
    assert plain["correction/weight_max"] == pytest.approx(5)
    assert plain["correction/weight_mean"] == pytest.approx((3 * 1.2 + 5 * 5 + 2 * 0.5) / 10)


# GSPO


def test_gspo_by_hand():
    lpn = f64([[-1, -0.5, -2, -0.1]]).requires_grad_()
    call = {"proximal": f64([[-1.2, -0.4, -2.1, -0.1]]), "mask": torch.ones(1, 4)}
    J, stats = gspo(learner=lpn, advantages=torch.ones(1, 4), **call)
    assert J.item() == pytest.approx(1.0004, abs=1e-12)
    assert torch.autograd.grad(J, lpn)[0].tolist() == [[0] * 4]
    assert stats["policy/ratio_max"] == pytest.approx(1.0512710964, abs=5e-11)
    assert stats["policy/clip_fraction_high"] == 1
    J, _ = gspo(learner=lpn, advantages=-torch.ones(1, 4), **call)
    assert J.item() == pytest.approx(-1.0512710964, abs=5e-11)
    assert torch.autograd.grad(J, lpn)[0][0].tolist() == pytest.approx(
        [-1.0512710964 / 4] * 4, abs=5e-11
    )


def test_gspo_weighted_by_tis():
    lpn, lpo = f64([[-1.0, -2.0]]).requires_grad_(), f64([[-1.0, -2.0]])
    lpr = lpo - f64([[math.log(5.0), math.log(0.5)]])  # w = 5, .5
    gspo_tis = select("gspo", "tis")
    J, stats = gspo_tis(
        learner=lpn, proximal=lpo, behavior=lpr, advantages=torch.ones(1, 2), mask=torch.ones(1, 2)
    )
    assert J.item() == pytest.approx((2 + 0.5) / 2)
    assert torch.autograd.grad(J, lpn)[0][0].tolist() == pytest.approx([1, 0.25])
    assert stats["correction/truncated_fraction"] == 0.5
    J, _ = select("gspo", "decoupled")(
        learner=lpn, proximal=lpo, behavior=lpr, advantages=torch.ones(1, 2), mask=torch.ones(1, 2)
    )
    assert J.item() == pytest.approx((5 + 0.5) / 2)


# Identity limits


@pytest.mark.parametrize("seed", range(3))
def test_identity_limits(seed):
    batch = random_batch(seed, B=6, T=8, spread=1)

    def value_and_gradient(name, **options):
        learner = batch["lpn"].clone().requires_grad_()
        J, _ = call(name, batch, learner, **options)
        J.backward()
        return torch.cat([J.detach().reshape(1), learner.grad.reshape(-1)])

    def same(a, b):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-15)

    same(value_and_gradient("tis", cap=math.inf), value_and_gradient("decoupled"))
    same(value_and_gradient("acr", cap=math.inf), value_and_gradient("decoupled"))
    same(
        value_and_gradient("dapo", eps_high=0.2, reduce="token-mean"),
        value_and_gradient("grpo", reduce="token-mean"),
    )
    same(
        value_and_gradient("rloo", reduce="token-mean"),
        value_and_gradient("grpo", reduce="token-mean"),
    )
    same(
        value_and_gradient("dr_grpo", max_length=4),
        value_and_gradient("grpo", reduce="constant", max_length=4),
    )
    assert not torch.allclose(value_and_gradient("tis"), value_and_gradient("acr"))
    batch["lpr"] = batch["lpo"]
    plain = value_and_gradient("grpo")
    for name in ("is", "decoupled", "tis", "acr", "none"):
        same(value_and_gradient(name), plain)
    on_policy, _ = select("gspo", "tis")(
        learner=batch["lpn"],
        proximal=batch["lpo"],
        behavior=batch["lpr"],
        advantages=batch["A"],
        mask=batch["mask"],
    )
    same(on_policy, call("gspo", batch, cap=0.5)[0])  # without a behaviour cap means nothing


# The table


def test_select_combines_an_algorithm_with_a_correction():
    assert select("grpo").function is clipped
    combined = select("dapo", "acr")
    assert combined.function is acr_function and combined.name == "dapo+acr"
    assert combined.options["eps_high"] == 0.28 and combined.options["reduce"] == "token-mean"
    assert select("dr_grpo", "tis").options["reduce"] == "constant"
    assert select("grpo", "tis").options["eps_high"] == 0.2
    assert not select("gspo").needs_behavior and select("gspo", "tis").needs_behavior
    banded = select("dapo", "tbpo").options
    assert (banded["eps_low"], banded["eps_high"], banded["reduce"]) == (3e-4, 4e-4, "token-mean")
    assert select("grpo", "aipo").options["reduce"] == "seq-mean-token-mean"
    assert (
        select("dapo", "sparse").options["eps_high"] == 0.28
        and not select("grpo", "aipo").needs_proximal
    )
    with pytest.raises(ValueError, match="gspo"):
        select("gspo", "acr")


def bad(name="acr", **changes):
    batch = random_batch(1)
    inputs = {
        "learner": batch["lpn"],
        "proximal": batch["lpo"],
        "behavior": batch["lpr"],
        "advantages": batch["A"],
        "mask": batch["mask"],
    }
    return named(name)(**(inputs | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reduce": "mean"}, "reduce: unknown mode 'mean'"),
        ({"reduce": "constant"}, "max_length"),
        ({"reduce": "constant", "max_length": 0}, "max_length"),
        ({"cap": 0}, "cap"),
        ({"cap": math.nan}, "cap"),
        ({"eps_low": -0.1}, "eps_low"),
        ({"eps_high": math.nan}, "eps_high"),
        ({"dual_clip": 1.0}, "dual_clip"),
        ({"proximal": torch.zeros(3, 4)}, r"proximal: shape \[3, 4\]"),
        ({"advantages": torch.zeros(3)}, "advantages"),
        ({"mask": torch.full((3, 5), 0.5)}, "mask"),
        ({"mask": torch.ones(3, 5, 1)}, "mask"),
        ({"segments": torch.zeros(3, 5, dtype=torch.int64)}, "segments"),
        ({"behavior": None}, "behavior"),
        ({"kap": 2.0}, "kap: objective acr has no such option"),
    ],
)
def test_bad_input_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        bad(**changes)


@pytest.mark.parametrize(
    "segments",
    [None, torch.zeros(4, dtype=torch.int64), torch.zeros(5), torch.tensor([0, 0, 1, -1, 0])],
)
def test_bad_segments_are_named(segments):
    x = torch.zeros(5)
    with pytest.raises(ValueError, match="segments"):
        grpo(learner=x, proximal=x, advantages=x, mask=torch.ones(5), segments=segments)


def test_unknown_names():
    with pytest.raises(ValueError, match="algorithm: unknown 'a2c'"):
        select("a2c")
    with pytest.raises(ValueError, match="correction: unknown 'mis'"):
        select("grpo", "mis")
