"""Policy objectives against hand-computed tables, an independent oracle, and each other at their
limits.

Shape legend: B rows, T padded length, N tokens laid end to end.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowroll.objectives.acr import acr as acr_function
from lowroll.objectives.clipped import clipped
from lowroll.objectives.objective import named, select
from lowroll.objectives.reduce import Denominators, aggregate, count, sequences_of
from lowroll.objectives.table import ALGORITHMS, CORRECTIONS, MODES
from tests.fixtures.objectives import f64, of_row, pack, random_batch, single

torch.set_num_threads(1)

acr, dapo, decoupled, dr_grpo = map(of_row, ("acr", "dapo", "decoupled", "dr_grpo"))
grpo, gspo, naive_is, rloo, tis = map(of_row, ("grpo", "gspo", "is", "rloo", "tis"))


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


# An oracle in plain Python, one token at a time


def oracle(name, batch, mode, *, cap=2.0, el=0.2, eh=0.2, dual=None, max_length=7):
    """J computed from the formulas with loops over rows and tokens; nothing of the package is
    used."""
    totals, counts = [], []
    for row in range(len(batch["mask"])):
        columns = [t for t, m in enumerate(batch["mask"][row]) if m]
        lpn, lpo, lpr, A = ([batch[k][row][t] for t in columns] for k in ("lpn", "lpo", "lpr", "A"))
        total = 0.0
        for i in range(len(columns)):
            R, w, rho = (
                math.exp(lpn[i] - lpo[i]),
                math.exp(lpo[i] - lpr[i]),
                math.exp(lpn[i] - lpr[i]),
            )
            if name == "gspo":
                R = math.exp(sum(a - b for a, b in zip(lpn, lpo, strict=True)) / len(columns))
            if name == "is":
                R = rho
            r = min(1, cap / w)
            upper = (1 + eh) / r if name == "acr" else 1 + eh
            J = min(R * A[i], min(max(R, 1 - el), upper) * A[i])
            if dual is not None and A[i] < 0:
                J = max(J, dual * A[i])
            total += {"decoupled": w, "tis": min(w, cap), "acr": min(w, cap)}.get(name, 1.0) * J
        totals.append(total)
        counts.append(len(columns))
    if mode == "token-mean":
        return sum(totals) / max(sum(counts), 1)
    if mode == "constant":
        return sum(totals) / (len(totals) * max_length)
    if mode == "seq-mean-token-sum":
        return sum(totals) / len(totals)
    return sum(total / max(n, 1) for total, n in zip(totals, counts, strict=True)) / len(totals)


NAMES = ("grpo", "is", "decoupled", "tis", "acr", "gspo")


def call(name, batch, learner=None, **options):
    learner = batch["lpn"] if learner is None else learner
    return named(name)(
        learner=learner,
        proximal=batch["lpo"],
        behavior=batch["lpr"],
        advantages=batch["A"],
        mask=batch["mask"],
        **options,
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mode", MODES)
def test_against_the_oracle(name, mode):
    fractions: dict[str, float] = {}
    for seed in range(4):
        batch = random_batch(seed, B=4, T=6, spread=0.7)
        plain = {key: value.tolist() for key, value in batch.items()}
        dual = None if name == "gspo" or seed % 2 else 1.5
        options = {"reduce": mode, "max_length": 7, "eps_low": 0.2, "eps_high": 0.3}
        options |= {"cap": 1.3} if name in ("tis", "acr") else {}
        options |= {"dual_clip": dual} if dual else {}
        lpn = batch["lpn"].clone().requires_grad_()
        J, stats = call(name, batch, lpn, **options)
        fractions = {
            key: fractions.get(key, 0) + value for key, value in stats.items() if "fraction" in key
        }
        J.backward()
        expected = oracle(name, plain, mode, cap=1.3, eh=0.3, dual=dual)
        assert J.item() == pytest.approx(expected, rel=1e-12, abs=1e-14)
        if name == "gspo" and mode != "seq-mean-token-mean":
            continue  # the token form passes sums over a sequence to the tokens in another proportion only
        h = 1e-6
        for row in range(4):
            for t in range(6):
                centre = plain["lpn"][row][t]
                plain["lpn"][row][t] = centre + h
                above = oracle(name, plain, mode, cap=1.3, eh=0.3, dual=dual)
                plain["lpn"][row][t] = centre - h
                below = oracle(name, plain, mode, cap=1.3, eh=0.3, dual=dual)
                plain["lpn"][row][t] = centre
                assert lpn.grad[row, t].item() == pytest.approx(
                    (above - below) / (2 * h), rel=1e-6, abs=1e-8
                )
    reached = {key for key, value in fractions.items() if value > 0}
    unreachable = {"policy/dual_clip_fraction"} if name == "gspo" else set()
    unreachable |= {"correction/truncated_fraction"} if name == "decoupled" else set()
    assert reached | unreachable == set(fractions), "a branch was never taken"


# Packed, micro-batched, masked


@settings(max_examples=25)
@given(seed=st.integers(0, 10_000), name=st.sampled_from(NAMES), mode=st.sampled_from(MODES))
def test_packed_equals_padded(seed, name, mode):
    batch = random_batch(seed)
    batch["mask"][-1, 0] = True  # the last segment id must occur for S to be known without counts
    order = torch.randperm(int(batch["mask"].sum()), generator=torch.Generator().manual_seed(seed))
    packed, segments = pack(batch, order)
    learner_padded, learner_packed = (
        batch["lpn"].clone().requires_grad_(),
        packed["lpn"].clone().requires_grad_(),
    )
    options = {"reduce": mode, "max_length": 7}
    J_padded, stats_padded = call(name, batch, learner_padded, **options)
    J_packed, stats_packed = call(name, packed, learner_packed, segments=segments, **options)
    J_padded.backward()
    J_packed.backward()
    assert J_packed.item() == pytest.approx(J_padded.item(), rel=1e-12, abs=1e-14)
    assert stats_packed == pytest.approx(stats_padded, rel=1e-12, abs=1e-14)
    expected = pack(batch | {"lpn": learner_padded.grad}, order)[0]["lpn"]
    torch.testing.assert_close(learner_packed.grad, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mode", MODES)
def test_micro_batches_sum_to_the_big_batch(name, mode):
    batch = {
        key: value.float() if value.is_floating_point() else value
        for key, value in random_batch(5, B=6, T=9).items()
    }
    batch["mask"][2] = False
    batch["lpr"][1, 3] = -math.inf
    learner = batch["lpn"].clone().requires_grad_()
    whole, _ = call(name, batch, learner, reduce=mode, max_length=9)
    whole.backward()
    parts, micro = [slice(0, 1), slice(1, 4), slice(4, 6)], batch["lpn"].clone().requires_grad_()
    needs_behavior = named(name).needs_behavior
    counts = sum(
        (
            count(mask=batch["mask"][p], behavior=batch["lpr"][p] if needs_behavior else None)
            for p in parts
        ),
        Denominators(0, 0),
    )
    assert counts == Denominators(
        int(batch["mask"].sum()) - int(needs_behavior and bool(batch["mask"][1, 3])), 6
    )
    total = 0.0
    for part in parts:
        J, _ = call(
            name,
            {k: v[part] for k, v in batch.items()},
            micro[part],
            reduce=mode,
            max_length=9,
            counts=counts,
        )
        J.backward()
        total += J.item()
    assert total == pytest.approx(whole.item(), abs=1e-6)
    torch.testing.assert_close(micro.grad, learner.grad, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("garbage", [math.nan, -math.inf, math.inf, 1e30])
def test_masked_entries_may_hold_anything(name, garbage):
    clean, dirty = random_batch(7), random_batch(7)
    assert not clean["mask"].all()
    results = []
    for batch, fill in ((clean, -1.0), (dirty, garbage)):
        for key in ("lpn", "lpo", "lpr", "A"):
            batch[key] = torch.where(batch["mask"], batch[key], fill)
        learner = batch["lpn"].requires_grad_()
        J, stats = call(name, batch, learner)
        J.backward()
        results.append((J.item(), stats, learner.grad))
    (J_clean, stats_clean, grad_clean), (J_dirty, stats_dirty, grad_dirty) = results
    assert J_dirty == J_clean
    assert stats_dirty == stats_clean
    assert torch.equal(grad_dirty, grad_clean)
    assert (grad_dirty[~dirty["mask"]] == 0).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mode", MODES)
def test_an_empty_mask_gives_zero_and_zero_gradient(name, mode):
    batch = random_batch(3)
    batch["mask"][:] = False
    learner = (batch["lpn"] + math.nan).requires_grad_()
    J, stats = call(name, batch, learner, reduce=mode, max_length=4)
    J.backward()
    assert J.item() == 0
    assert torch.equal(learner.grad, torch.zeros_like(learner))
    assert all(math.isfinite(value) for value in stats.values())


def test_no_tokens_at_all():
    empty = torch.zeros(0, requires_grad=True)
    J, _ = acr(
        learner=empty,
        proximal=empty,
        behavior=empty,
        advantages=empty,
        mask=torch.zeros(0),
        segments=torch.zeros(0, dtype=torch.int64),
    )
    J.backward()
    assert J.item() == 0


@pytest.mark.parametrize("name", ["is", "decoupled", "tis", "acr"])
@pytest.mark.parametrize("missing", [math.nan, -math.inf, math.inf])
def test_a_token_without_a_behavior_is_dropped_and_counted(name, missing):
    batch, without = random_batch(11), random_batch(11)
    row, column = batch["mask"].nonzero()[2].tolist()
    batch["lpr"][row, column] = missing
    without["mask"][row, column] = False
    learner = batch["lpn"].clone().requires_grad_()
    J, stats = call(name, batch, learner)
    J.backward()
    expected, expected_stats = call(name, without)
    assert J.item() == expected.item()
    assert learner.grad[row, column] == 0
    assert stats["correction/dropped_tokens"] == 1
    assert stats == expected_stats | {"correction/dropped_tokens": 1}


def test_extreme_ratios_stay_finite():
    lpn, lpo, lpr = (
        torch.tensor([[-200.0, -1e-3]]),
        torch.tensor([[-1e-3, -200.0]]),
        torch.tensor([[-300.0, -1e-3]]),
    )
    lpn.requires_grad_()
    for name in NAMES:
        for sign in (1.0, -1.0):
            J, stats = named(name)(
                learner=lpn,
                proximal=lpo,
                behavior=lpr,
                mask=torch.ones(1, 2),
                advantages=torch.full((1, 2), sign),
            )
            (gradient,) = torch.autograd.grad(J, lpn)
            assert (
                J.isfinite()
                and gradient.isfinite().all()
                and all(map(math.isfinite, stats.values()))
            )


def test_a_non_finite_learner_shows():
    batch = random_batch(2)
    batch["lpn"][0, batch["mask"][0].nonzero()[0, 0]] = math.nan
    assert call("grpo", batch)[0].isnan()


def test_half_precision_is_computed_in_float32():
    batch = random_batch(4)
    halves = {k: v.bfloat16() if v.is_floating_point() else v for k, v in batch.items()}
    upcast = {k: v.float() if v.is_floating_point() else v for k, v in halves.items()}
    J, _ = call("acr", halves)
    assert J.dtype == torch.float32
    assert J.item() == call("acr", upcast)[0].item()


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


def test_only_the_learner_carries_gradient():
    batch = {
        k: v.requires_grad_() if v.is_floating_point() else v for k, v in random_batch(1).items()
    }
    for name in NAMES:
        call(name, batch)[0].backward()
    assert batch["lpn"].grad is not None
    assert all(batch[key].grad is None for key in ("lpo", "lpr", "A"))


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
    batch = random_batch(6)
    for algorithm in ALGORITHMS:
        for correction in CORRECTIONS:
            if algorithm == "gspo" and correction not in ("none", "tis", "decoupled", "tbpo"):
                with pytest.raises(ValueError, match="gspo"):
                    select(algorithm, correction)
                continue
            objective = select(algorithm, correction)
            J, _ = objective(
                learner=batch["lpn"],
                proximal=batch["lpo"] if objective.needs_proximal else None,
                behavior=batch["lpr"] if objective.needs_behavior else None,
                advantages=batch["A"],
                mask=batch["mask"],
                max_length=5,
            )
            assert J.isfinite() and J != 0


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
