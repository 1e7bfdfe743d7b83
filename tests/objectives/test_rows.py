"""TBPO, Sparse-RL, AIPO and the generic correction on rows that were worked out by hand, and at
their limits.

Every row checks the value and, by autograd, the gradient.
"""

from __future__ import annotations

import math

import pytest
import torch

from lowroll.objectives.objective import Objective, named, select
from lowroll.objectives.reduce import Denominators, count
from lowroll.objectives.table import ALGORITHMS, RULES, forms
from tests.fixtures.objectives import f64, random_batch, single

aipo, decoupled, gspo, ipo = map(named, ("aipo", "decoupled", "gspo", "ipo"))
naive_is, reweight, sparse = map(named, ("is", "reweight", "sparse"))
tbpo, tis = named("tbpo"), named("tis")


def ragged(*rows):
    """Log-probs [B, T] of rows of probabilities, padded with 1, and the mask."""
    length = max(map(len, rows))
    mask = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows])
    return f64([[*row, *[1.0] * (length - len(row))] for row in rows]).log(), mask


def run(function, learner, **inputs):
    """J, dJ/dlearner as nested lists, statistics."""
    learner = learner.clone().requires_grad_()
    J, stats = function(learner=learner, **inputs)
    J.backward()
    return J.item(), learner.grad.tolist(), stats


# TBPO: A, learner - proximal, proximal - behavior -> r, w as applied, J, in the band

LPO = [-1.0, -2.0, -0.5, -0.25]
TBPO_ROWS = {
    "a": (1, [1e-3, 0, -2e-4, 0], [0.1, 0, -0.1, 0.2], 1.000200020, 1.051271096, 1.051481372, True),
    "b": (1, [2e-3, 0, 0, 0], [0.1, 0, -0.1, 0.2], 1.000500125, 1.051271096, 1.051691605, False),
    "c": (1, [-2e-3, 0, 0, 0], [0] * 4, 0.999500125, 1, 0.999500125, True),
    "d": (-1, [2e-3, 0, 0, 0], [0] * 4, 1.000500125, 1, -1.000500125, True),
    "e": (-1, [4e-3, 0, 0, 0], [0] * 4, 1.001000500, 1, -1.0007, False),
    "f": (-1, [-2e-3, 0, 0, 0], [0] * 4, 0.999500125, 1, -0.9997, False),
    "g": (-1, [1e-3, 0, 0, 0], [4, 0, 0, 0], 1.000250031, 2, -2.000500063, True),
    "h": (1, [1e-3, 0, 0, 0], [-4, 0, 0, 0], 1.000250031, 0.5, 0.500125016, True),
}


@pytest.mark.parametrize("row", TBPO_ROWS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_tbpo_by_hand(row, dtype):
    A, moved, mismatch, r, w, J, active = TBPO_ROWS[row]
    lpo = torch.tensor([LPO], dtype=dtype)
    got, gradient, stats = run(
        tbpo,
        lpo + torch.tensor([moved], dtype=dtype),
        proximal=lpo,
        behavior=lpo - torch.tensor([mismatch], dtype=dtype),
        advantages=torch.full((1, 4), float(A)),
        mask=torch.ones(1, 4),
    )
    close = 2e-9 if dtype == torch.float64 else 1e-6
    assert got == pytest.approx(J, abs=close)
    assert gradient[0] == pytest.approx([w * r * A / 4 * active] * 4, abs=close)
    assert stats["policy/ratio_mean"] == pytest.approx(r, abs=close)
    assert stats["correction/weight_mean"] == pytest.approx(w, abs=close)
    assert stats["correction/truncated_fraction"] == (row in "gh")
    assert stats["policy/band_masked_fraction"] == (not active)
    assert [
        stats[f"policy/{name}"]
        for name in ("clip_fraction_high", "clip_fraction_low", "dual_clip_fraction")
    ] == [row == "b", row == "f", row == "e"]


def test_tbpo_averages_over_all_sequences_and_ignores_a_zero_advantage():
    rows = [TBPO_ROWS[name] for name in "abdf"] + [(0, [0.5, 0, 0, 0], [0] * 4, 0, 0, 0, False)]
    lpo = f64([LPO] * 5)
    got, gradient, stats = run(
        tbpo,
        lpo + f64([row[1] for row in rows]),
        proximal=lpo,
        behavior=lpo - f64([row[2] for row in rows]),
        advantages=f64([[row[0]] * 4 for row in rows]),
        mask=torch.ones(5, 4),
    )
    assert got == pytest.approx(sum(row[5] for row in rows) / 5, abs=2e-9)
    assert [any(row) for row in gradient] == [True, False, True, False, False]
    assert stats["policy/band_masked_fraction"] == 0.4


# Sparse-RL

BEHAVIOR, RAGGED = ragged([0.5, 0.4, 0.8], [0.6, 0.3, 0.2, 0.5], [0.6, 0.3])
PROXIMAL, _ = ragged([0.45, 0.5, 0.8], [0.66, 0.24, 0.3, 0.5], [0.66, 2e-5])
LEARNER, _ = ragged([0.5, 0.45, 0.84], [0.6, 0.3, 0.15, 0.5], [0.6, 0.3])
SPARSE = {
    "proximal": PROXIMAL,
    "behavior": BEHAVIOR,
    "mask": RAGGED,
    "advantages": f64([[1] * 4, [-1] * 4, [1] * 4]),
}


@pytest.mark.parametrize("sign", [1, -1])
def test_sparse_by_hand(sign):
    inputs = SPARSE | {"advantages": f64([[1] * 4, [-1] * 4, [sign] * 4])}
    J, gradient, stats = run(sparse, LEARNER, **inputs)
    assert (
        J
        == pytest.approx((1.0583333333 - 1.05) / 3, abs=5e-11)
        == pytest.approx(0.0027777778, abs=5e-11)
    )
    assert gradient[0] == pytest.approx([1 / 9, 1.125 / 9, 1.05 / 9, 0])
    assert gradient[1] == pytest.approx([-1 / 12, -1 / 12, 0, -1 / 12])
    assert gradient[2] == [0] * 4
    assert stats["correction/rejected_sequence_fraction"] == pytest.approx(1 / 3)
    assert stats["correction/rejected_fraction"] == pytest.approx(2 / 9)
    assert stats["correction/weight_mean"] == pytest.approx(0.9611185185, abs=5e-11)


def test_sparse_as_its_released_code_does_by_hand():
    # xi 1.5 of S2 lies on the bounds themselves: they are widened by less than the rounding of any
    # dtype
    J, gradient, stats = run(
        sparse,
        LEARNER,
        xi_cap=1.5 + 1e-12,
        token_rs=(0.5, 1.5 + 1e-12),
        normalize_xi=True,
        **SPARSE,
    )
    assert J == pytest.approx(0.0028901511, abs=5e-11)
    assert gradient[0][1] == pytest.approx(1.125 / 9 / 0.9611185185)
    assert stats["correction/weight_mean"] == pytest.approx(1)
    # what the options do one by one
    assert run(sparse, LEARNER, xi_cap=1.2, **SPARSE)[0] == pytest.approx(
        ((1 + 1.2 * 0.9 + 1.05) / 3 - (1 + 1 + 1.2 * 0.8 + 1) / 4) / 3
    )
    assert run(sparse, LEARNER, token_rs=(0.95, 1.3), **SPARSE)[0] == pytest.approx(
        ((1.125 + 1.05) / 3 - 2 / 4) / 3
    )  # masked tokens stay in |o|
    assert run(sparse, LEARNER, veto=1e-5, **SPARSE)[0] == pytest.approx(
        0.0027777778 + (1.1 * (0.6 / 0.66) + 1.2 * 2e-5 / 0.3) / 6, abs=5e-11
    )


def test_the_veto_is_taken_in_the_log_domain():
    lpo = f64([[0.0, -2.0]])
    for log_xi, kept in ((-9.2103, True), (-9.2104, False), (-60.0, False)):
        J, _ = sparse(
            learner=lpo,
            proximal=lpo,
            behavior=lpo - f64([[log_xi, 0]]),
            advantages=f64([[1, 1]]),
            mask=torch.ones(1, 2),
        )
        assert (J.item() > 0) == kept


@pytest.mark.parametrize("sign", [1, -1])
def test_repair_by_hand(sign):
    """S3 is impossible from its second token on. Its first has xi 1.1 and R .6 / .66: 1 of 1.1 x R,
    in half of the response."""
    inputs = SPARSE | {"advantages": f64([[1] * 4, [-1] * 4, [sign] * 4])}
    J, gradient, stats = run(sparse, LEARNER, repair="mask", **inputs)
    assert J == pytest.approx((1.0583333333 - 1.05 + sign * 0.5) / 3, abs=5e-11)
    plain = run(sparse, LEARNER, **inputs)
    assert gradient[:2] == plain[1][:2]
    assert gradient[2] == pytest.approx([sign / 6, 0, 0, 0])
    assert stats["correction/rejected_sequence_fraction"] == 0
    assert stats["correction/rejected_fraction"] == pytest.approx(1 / 9)
    assert stats["correction/repaired_sequence_fraction"] == pytest.approx(1 / 3)
    assert stats["correction/repaired_fraction"] == pytest.approx(1 / 9)
    # the other denominators: 9 tokens; 3 sequences of 5
    for reduce, divisor in (("token-mean", 9), ("constant", 15), ("seq-mean-token-sum", 3)):
        own = {"reduce": reduce, "max_length": 5}
        difference = run(sparse, LEARNER, repair="mask", **inputs, **own)[0]
        difference -= run(sparse, LEARNER, **inputs, **own)[0]
        assert difference == pytest.approx(sign / divisor)


def test_repair_without_an_anomaly_or_from_the_first_token_on_is_what_there_was():
    whole = SPARSE | {"mask": RAGGED * torch.tensor([[1], [1], [0]])}
    first = SPARSE | {"proximal": PROXIMAL.flip(1), "behavior": BEHAVIOR.flip(1)}
    first |= {"mask": RAGGED.flip(1), "veto": 0.95}  # S1: .9 comes last; S2: 1, 1.5, .8
    last_two = torch.tensor([[0, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]])
    first["mask"] = first["mask"] * last_two  # S3, which begins with the impossible token
    for inputs in (whole, first):
        repaired, plain = (run(sparse, LEARNER, repair=r, **inputs) for r in ("mask", None))
        assert repaired[:2] == plain[:2]
        rates = {name: repaired[2].pop(f"correction/repaired{name}_fraction") for name in NAMES}
        assert repaired[2] == plain[2] and set(rates.values()) == {0}
    assert plain[2]["correction/rejected_sequence_fraction"] == 1
    with pytest.raises(ValueError, match="repair: unknown 'drop'"):
        run(sparse, LEARNER, repair="drop", **SPARSE)
    with pytest.raises(ValueError, match="repair: without a veto"):
        run(sparse, LEARNER, repair="mask", veto=None, **SPARSE)


NAMES = ("", "_sequence")


def test_a_masked_token_is_no_anomaly_to_repair_from():
    mask = f64([[1, 1, 1, 0], [1] * 4, [1, 0, 0, 0]])
    repaired, plain = (
        run(sparse, LEARNER, repair=r, **SPARSE | {"mask": mask}) for r in ("mask", None)
    )
    assert repaired[:2] == plain[:2]
    assert plain[1][2][0] != 0


# AIPO: one sample, slot 0 is the prompt; -4 J is the document's loss before loss_scale

AIPO = {
    "behavior": f64([[-9, -1, -0.9, -0.5, -2.5]]),
    "advantages": f64([[0.5] * 5]),
    "mask": torch.tensor([[0, 1, 1, 1, 1]]),
}
AIPO_LEARNER = f64([[-9, -1.2, -0.8, -3, -0.1]])
RATIO = [0.81873075308, 1.10517091808, 0.08208499862, 11.0231763806]


@pytest.mark.parametrize(
    ("options", "coefficients", "loss"),
    [
        ({}, [0.40936538, 0.55258546, 0, 0], 0.9333068191),
        ({"kl_tau": 0.1}, [0.42573999, 0.54153375, 0, 0], 0.9441149898),
        ({"ratio_type": "sequence"}, [0.10234134, 0.10234134, 0, 0], 0.2046826883),
        ({"token_mask_high": 12.0}, [0.40936538, 0.55258546, 0, 5.51158819], 1.4844656381),
        ({"sequence_mask_high": 5.0}, [0, 0, 0, 0], 0),
        ({"sequence_mask_low": 0.09}, [0, 0, 0, 0], 0),
        ({"geo_mask_low": 0.96}, [0, 0, 0, 0], 0),  # geometric mean .95122942
        (
            {"geo_mask_low": 0.95, "geo_mask_high": 0.952},
            [0.40936538, 0.55258546, 0, 0],
            0.9333068191,
        ),
        ({"geo_mask_high": 0.95}, [0, 0, 0, 0], 0),
        ({"adv_tau": 0.0, "kl_tau": 1.0}, [0.2 * RATIO[0], -0.1 * RATIO[1], 0, 0], None),
        ({"token_mask_low": 0.05}, [0.40936538, 0.55258546, 0.5 * RATIO[2], 0], None),
        ({"mode": "truncate"}, [0.40936538, 0.55258546, 0, 4.0], None),
        (
            {"mode": "truncate", "token_mask_high": 1.0, "token_mask_low": 0.0},
            [0.40936538, 0.5, 0.5 * RATIO[2], 0.5],
            None,
        ),
        ({"ratio_type": "sequence", "sequence_clip_high": 0.5}, [0.0625, 0.0625, 0, 0], None),
    ],
)
def test_aipo_by_hand(options, coefficients, loss):
    J, gradient, stats = run(aipo, AIPO_LEARNER, **AIPO, **options)
    assert [4 * g for g in gradient[0]] == pytest.approx([0, *coefficients], abs=5e-9)
    value = -sum(c * lp for c, lp in zip(coefficients, AIPO_LEARNER[0, 1:].tolist(), strict=True))
    assert -4 * J == pytest.approx(value if loss is None else loss, abs=5e-9)
    assert stats["policy/ratio_mean"] == pytest.approx(sum(RATIO) / 4)
    kept = sum(c != 0 for c in coefficients)
    assert stats["correction/rejected_fraction"] == (4 - kept) / 4
    assert stats["correction/rejected_sequence_fraction"] == (kept == 0)


def test_aipo_learns_from_a_teacher():
    teacher = f64([[math.nan, -1.0, -1.8, -0.5, -0.5]])
    _, gradient, _ = run(aipo, AIPO_LEARNER, teacher=teacher, teacher_tau=0.5, **AIPO)
    expected = [0, RATIO[0] * (0.5 + 0.5 * 0.2), RATIO[1] * (0.5 - 0.5 * 1.0), 0, 0]
    assert [4 * g for g in gradient[0]] == pytest.approx(expected)
    plain = run(aipo, AIPO_LEARNER, **AIPO)
    assert run(aipo, AIPO_LEARNER, teacher=teacher, **AIPO) == plain
    entry = named("aipo")
    assert run(entry, AIPO_LEARNER, teacher=teacher, teacher_tau=0.5, **AIPO)[1] == gradient
    with pytest.raises(ValueError, match="teacher: teacher_tau 0.5 needs"):
        run(entry, AIPO_LEARNER, teacher_tau=0.5, **AIPO)


def test_aipo_divides_by_every_loss_token_of_the_batch():
    inputs = AIPO | {"counts": Denominators(40, 7)}
    assert run(aipo, AIPO_LEARNER, **inputs)[0] == pytest.approx(-0.9333068191 / 40, abs=1e-11)


def test_aipos_sequence_ratio_is_capped_at_e_to_the_ten():
    lpr = f64([[-7.0, -7.0]])
    inputs = {
        "behavior": lpr,
        "advantages": torch.ones(1, 2),
        "mask": torch.ones(1, 2),
        "ratio_type": "sequence",
        "token_mask_high": 1e3,
        "geo_mask_high": 1e3,
        "sequence_mask_high": 1e3,
        "sequence_clip_high": 1e9,
    }
    assert run(aipo, lpr + 6.0, **inputs)[1][0] == pytest.approx([math.exp(10) / 4] * 2)
    assert run(aipo, lpr + 4.5, **inputs)[1][0] == pytest.approx([math.exp(9) / 4] * 2)


def test_a_masked_sequence_is_not_a_rejected_one():
    """A threshold above 1 would flag every padded token, whose weight is 1 by convention."""
    batch = {
        "proximal": f64([[-1.0, -1.0]] * 3),
        "behavior": f64([[-2.0, -1.5], [-2.0, -1.0], [-2.0, -2.0]]),
        "advantages": torch.ones(3, 2),
        "mask": torch.tensor([[1, 0], [1, 1], [0, 0]]),
    }
    stats = run(sparse, batch["proximal"], veto=1.5, **batch)[2]
    assert (
        stats["correction/rejected_sequence_fraction"] == 0.5
        and stats["correction/rejected_fraction"] == 2 / 3
    )
    del batch["proximal"]
    stats = run(aipo, f64([[-1.0, -1.0]] * 3), sequence_mask_low=1.5, **batch)[2]
    assert stats["correction/rejected_sequence_fraction"] == 0.5


def test_aipo_truncated_is_the_truncated_gradient():
    """With every mask off: min(rho, delta) A grad log pi, which is TIS where nothing has moved
    since the rollouts."""
    batch = random_batch(3, B=5, T=7, spread=1)
    off = {
        "token_mask_low": 0.0,
        "geo_mask_low": 0.0,
        "geo_mask_high": math.inf,
        "sequence_mask_high": math.inf,
    }
    common = {"behavior": batch["lpr"], "advantages": batch["A"], "mask": batch["mask"]}
    _, gradient, stats = run(
        aipo, batch["lpn"], mode="truncate", token_mask_high=1.5, **off, **common
    )
    _, expected, _ = run(
        tis, batch["lpn"], proximal=batch["lpn"], cap=1.5, reduce="token-mean", **common
    )
    torch.testing.assert_close(f64(gradient), f64(expected), rtol=1e-12, atol=1e-14)
    assert (
        0 < stats["correction/truncated_fraction"] < 1
        and stats["correction/rejected_fraction"] == 0
    )


# IPO and DPPO on the same sample: probabilities move by -.067, .043, -.557, .823; gradients hold -2
# kl_tau log rho


@pytest.mark.parametrize(
    ("A", "options", "seeds", "kept"),
    [
        (0.5, {}, [0.40976538, 0.55238546, 0.005, -0.0048], 2),
        (0.5, {"signed": True, "width": 0.1}, [0.40976538, 0.55238546, 0.0460425, -0.0048], 3),
        (0.5, {"kl_tau": 0.0}, [0.40936538, 0.55258546, 0, 0], 2),
        (
            0.5,
            {"width": 0.9},
            [0.40976538, 0.55238546, 0.0460425, 0.5 * math.exp(2) - 0.0048],
            4,
        ),  # 11.02 is cut at e^2
        (0.5, {"width": 0.9, "ratio_cap": 1.0}, [0.40976538, 0.4998, 0.0460425, 0.4952], 4),
        (0.5, {"width": 0.05}, [0.0004, 0.55238546, 0.005, -0.0048], 1),
        (
            -0.5,
            {"signed": True, "width": 0.1},
            [-0.40896538, -0.55278546, 0.005, -0.5 * math.exp(2) - 0.0048],
            3,
        ),
        (0, {"signed": True, "width": 0.1}, [0.0004, -0.0002, 0.005, -0.0048], 3),
    ],
)
def test_ipo_by_hand(A, options, seeds, kept):
    inputs = AIPO | {"advantages": f64([[A] * 5])}
    J, gradient, stats = run(ipo, AIPO_LEARNER, **inputs, **options)
    assert [4 * g for g in gradient[0]] == pytest.approx([0, *seeds], abs=5e-9)
    log_ratio = [-0.2, 0.1, -2.5, 2.4]
    pulls = [s + 2 * options.get("kl_tau", 1e-3) * x for s, x in zip(seeds, log_ratio, strict=True)]
    value = sum(c * lp for c, lp in zip(pulls, AIPO_LEARNER[0, 1:].tolist(), strict=True))
    assert 4 * J == pytest.approx(
        value - options.get("kl_tau", 1e-3) * (0.04 + 0.01 + 6.25 + 5.76), abs=2e-8
    )
    assert stats["correction/rejected_fraction"] == (4 - kept) / 4
    assert stats["correction/truncated_fraction"] == (
        0.25
        if kept == 4 and "ratio_cap" not in options
        else 0.5
        if kept == 4
        else 0.25
        if A <= 0
        else 0
    )


# The generic correction: w = 2, .5, 1 and 4, .25 (sequence products 1 and 1, geometric means 1 and
# 1), R = 1, A = 1

W = [[2, 0.5, 1], [4, 0.25]]
KEYS = {
    "proximal": f64([[-3.0] * 3] * 2),
    "behavior": -3 - f64([W[0], [*W[1], 1]]).log(),
    "advantages": torch.ones(2, 3),
    "mask": torch.tensor([[1, 1, 1], [1, 1, 0]]),
}
LN2 = math.log(2)


def weights(learner=KEYS["proximal"], **options):
    """The weight of every token as the gradient shows it: rows of 3 and 2."""
    _, gradient, stats = run(reweight, learner, reduce="seq-mean-token-sum", **KEYS, **options)
    return [[2 * g for g in gradient[0]], [2 * g for g in gradient[1][:2]]], stats


def near(expected):
    return [pytest.approx(row, abs=1e-12) for row in expected]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [[2, 0.5, 1], [2, 0.25]]),  # C = 2
        ({"cap": math.inf}, W),
        ({"weight": "none"}, [[1, 1, 1], [1, 1]]),
        ({"weight": "sequence"}, [[1, 1, 1], [1, 1]]),
        ({"icepop": (0.4, 2.5)}, [[2, 0.5, 1], [0, 0]]),
        ({"icepop": (0.6, 2.5)}, [[2, 0, 1], [0, 0]]),
        (
            {"normalize": True, "cap": math.inf},
            [[2 / 1.55, 0.5 / 1.55, 1 / 1.55], [4 / 1.55, 0.25 / 1.55]],
        ),
        ({"normalize": True}, [[2 / 1.15, 0.5 / 1.15, 1 / 1.15], [2 / 1.15, 0.25 / 1.15]]),
        ({"veto": 0.3, "cap": math.inf}, [[2, 0.5, 1], [0, 0]]),
        ({"veto": 0.2, "cap": math.inf}, W),
        # k1's bounds are on the inverse of w: 1/2, 2, 1 and 1/4, 4
        ({"reject": {"token_k1": (0.4, 3)}, "cap": math.inf}, [[2, 0.5, 1], [0, 0]]),
        ({"reject": {"token_k1": (0.6, 5)}, "cap": math.inf}, [[0, 0.5, 1], [0, 0.25]]),
        ({"reject": {"token_k1": (0, 3)}, "cap": math.inf}, [[2, 0.5, 1], [4, 0]]),
        # k2 = ln(w)^2 / 2: .2402, .2402, 0 and .9609, .9609
        ({"reject": {"token_k2": 0.2}, "cap": math.inf}, [[0, 0, 1], [0, 0]]),
        ({"reject": {"token_k2": 0.5}, "cap": math.inf}, [[2, 0.5, 1], [0, 0]]),
        # k3 = w - 1 - ln w: .3069, .1931, 0 and 1.6137, .6363
        ({"reject": {"token_k3": 0.25}, "cap": math.inf}, [[0, 0.5, 1], [0, 0]]),
        ({"reject": {"token_k3": 1.0}, "cap": math.inf}, [[2, 0.5, 1], [0, 0.25]]),
        # sums of k2: .4805, 1.9218; means: .1602, .9609
        ({"reject": {"seq_sum_k2": 0.5}, "cap": math.inf}, [[2, 0.5, 1], [0, 0]]),
        ({"reject": {"seq_sum_k2": 0.4}, "cap": math.inf}, [[0, 0, 0], [0, 0]]),
        ({"reject": {"seq_mean_k2": 0.4}, "cap": math.inf}, [[2, 0.5, 1], [0, 0]]),
        # sums of k3: .5, 2.25; means: 1/6, 1.125
        ({"reject": {"seq_sum_k3": 0.51}, "cap": math.inf}, [[2, 0.5, 1], [0, 0]]),
        ({"reject": {"seq_sum_k3": 2.26}, "cap": math.inf}, W),
        ({"reject": {"seq_mean_k3": 0.2}, "cap": math.inf}, [[2, 0.5, 1], [0, 0]]),
        # maxima
        ({"reject": {"seq_max_k2": 0.25}, "cap": math.inf}, [[2, 0.5, 1], [0, 0]]),
        ({"reject": {"seq_max_k2": 0.2}, "cap": math.inf}, [[0, 0, 0], [0, 0]]),
        ({"reject": {"seq_max_k3": 1.6}, "cap": math.inf}, [[2, 0.5, 1], [0, 0]]),
        ({"reject": {"seq_max_k3": 1.7}, "cap": math.inf}, W),
        # sums and means of k1 are 0
        (
            {
                "reject": {"seq_sum_k1": (0.999, 1.001), "seq_mean_k1": (0.999, 1.001)},
                "cap": math.inf,
            },
            W,
        ),
        # every rule must be passed
        ({"reject": {"token_k1": (0.6, 5), "seq_mean_k3": 0.2}}, [[0, 0.5, 1], [0, 0]]),
    ],
)
def test_reweight_by_hand(options, expected):
    got, stats = weights(**options)
    assert got == near(expected)
    rejected = [e == 0 for row in expected for e in row] if "icepop" not in options else [False]
    assert stats["correction/rejected_fraction"] == pytest.approx(sum(rejected) / len(rejected))


def test_sequence_weights_and_geometric_rejection_by_hand():
    lpo = f64([[-3.0] * 2] * 3)
    log_w = f64([[LN2, LN2], [0.0004, 0.0008], [-0.003, 0.0001]])  # products 4, 1.0012, .9971
    inputs = {
        "proximal": lpo,
        "behavior": lpo - log_w,
        "advantages": torch.ones(3, 2),
        "mask": torch.ones(3, 2),
        "reduce": "seq-mean-token-sum",
    }
    _, gradient, stats = run(reweight, lpo, weight="sequence", cap=3.0, **inputs)
    assert [3 * row[0] for row in gradient] == pytest.approx(
        [3, math.exp(0.0012), math.exp(-0.0029)]
    )
    assert stats["correction/truncated_fraction"] == pytest.approx(1 / 3)
    _, gradient, stats = run(
        reweight, lpo, weight="none", reject={"seq_mean_k1": (0.999, 1.001)}, **inputs
    )
    assert [3 * row[0] for row in gradient] == pytest.approx(
        [0, 1, 0]
    )  # geometric means 2, 1.0006, .99855
    assert stats["correction/rejected_sequence_fraction"] == pytest.approx(2 / 3)
    for bounds, kept in (
        ((0.15, 1.1), [1, 1, 1]),
        ((0.3, 1.1), [0, 1, 1]),
        ((0.15, 1.001), [1, 1, 0]),
    ):
        _, gradient, _ = run(reweight, lpo, weight="none", reject={"seq_sum_k1": bounds}, **inputs)
        assert [3 * row[0] for row in gradient] == pytest.approx(kept)  # on 1/4, .9988, 1.0029


def test_the_weight_comes_after_the_clip():
    row = {"proximal": 0.05, "behavior": 0.01}  # w = 5, R = 1.6: clipped at 1.2
    assert single(reweight, 0.08, 1, **row)[:2] == pytest.approx((2.4, 0))
    assert single(reweight, 0.08, -1, **row)[:2] == pytest.approx((-3.2, -3.2))
    assert single(reweight, 0.08, 1, cap=math.inf, **row)[:2] == pytest.approx((6, 0))


def test_bypass_clips_against_the_sampler():
    batch = random_batch(5, B=6, T=8, spread=0.6)
    common = {"behavior": batch["lpr"], "advantages": batch["A"], "mask": batch["mask"]}
    plain = run(naive_is, batch["lpn"], **common)
    for options in ({}, {"weight": "sequence", "cap": 1.5}, {"normalize": True}):
        J, gradient, _ = run(reweight, batch["lpn"], bypass=True, **options, **common)
        assert (J, gradient) == plain[:2]
    assert (
        run(reweight, batch["lpn"], proximal=batch["lpo"], bypass=True, **common)[:2] == plain[:2]
    )
    # what it rejects is the learner's mismatch with the sampler, not the proximal policy's
    rho = (batch["lpn"] - batch["lpr"]).exp()
    _, gradient, _ = run(
        reweight, batch["lpn"], bypass=True, reject={"token_k1": (0.5, 1.25)}, **common
    )
    inside = (1 / rho >= 0.5) & (1 / rho <= 1.25)
    assert torch.equal(f64(gradient), torch.where(inside, f64(plain[1]), 0))


def test_verls_token_mean_by_its_counts():
    inputs = KEYS | {"reduce": "token-mean", "weight": "none", "reject": {"token_k2": 0.5}}
    assert run(reweight, KEYS["proximal"], **inputs)[0] == pytest.approx(3 / 5)
    entry = named("reweight")
    options = {name: inputs[name] for name in ("reduce", "weight", "reject")}
    tensors = {name: KEYS[name] for name in ("proximal", "behavior", "mask")}
    verdict = entry.verdict(learner=KEYS["proximal"], **tensors, **options)
    kept = KEYS["mask"].bool() & verdict.kept_N.reshape(2, 3)
    assert run(reweight, KEYS["proximal"], counts=count(mask=kept), **inputs)[0] == pytest.approx(1)


# Identity limits


@pytest.mark.parametrize("seed", range(3))
def test_identity_limits(seed):
    batch = random_batch(seed, B=6, T=8, spread=0.8)

    def of(function, **options):
        inputs = {
            "behavior": batch["lpr"],
            "proximal": batch["lpo"],
            "advantages": batch["A"],
            "mask": batch["mask"],
        }
        if not isinstance(function, Objective):
            function = named(function)
        learner = batch["lpn"].clone().requires_grad_()
        J, _ = function(learner=learner, **inputs, **options)
        J.backward()
        return torch.cat([J.detach().reshape(1), learner.grad.reshape(-1)])

    def same(a, b):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-15)

    same(of("sparse", veto=None), of("decoupled"))
    same(of("sparse", veto=None, xi_cap=2.0), of("tis"))
    same(of("sparse", veto=0.2), of("reweight", veto=0.2, cap=math.inf))
    same(
        of("sparse", token_rs=(0.5, 2.0)),
        of("reweight", reject={"token_k1": (0.5, 2.0)}, cap=math.inf, veto=1e-4),
    )
    same(of("reweight"), of("tis"))
    same(of("reweight", cap=math.inf), of("decoupled"))
    same(of("reweight", weight="none"), of("grpo"))
    same(of("reweight", bypass=True), of("is"))
    same(of("reweight", icepop=(0, 1e30)), of("decoupled"))
    same(
        of("aipo", token_mask_high=math.inf, sequence_mask_high=math.inf, mode="mask"),
        of("aipo", token_mask_high=math.inf, sequence_mask_high=math.inf, mode="truncate"),
    )
    same(
        of("ipo", width=math.inf, ratio_cap=math.inf, kl_tau=0.0),
        of(
            "aipo",
            token_mask_low=0.0,
            token_mask_high=math.inf,
            geo_mask_low=0.0,
            geo_mask_high=math.inf,
            sequence_mask_high=math.inf,
        ),
    )
    same(
        of("tbpo", eps_low=0.2, eps_high=0.3, eps_negative=math.inf, cap=1.0),
        of("gspo", eps_low=0.2, eps_high=0.3),
    )
    assert not torch.allclose(
        of("tbpo", eps_low=0.2, eps_high=0.3, eps_negative=0.1, cap=1.0),
        of("gspo", eps_low=0.2, eps_high=0.3),
    )
    assert not torch.allclose(of("sparse", veto=0.2), of("decoupled"))
    same(
        of(select("dr_grpo", "sparse"), max_length=9, veto=None),
        of(select("dr_grpo", "decoupled"), max_length=9),
    )

    batch["lpr"] = batch["lpo"]  # xi = w = 1
    plain = of("grpo")
    same(of("sparse"), plain)
    same(of("sparse", normalize_xi=True, xi_cap=1.5, token_rs=(0.5, 1.5)), plain)
    same(
        of(
            "reweight", reject={rule: (0.9, 1.1) if rule.endswith("k1") else 0.01 for rule in RULES}
        ),
        plain,
    )
    same(of("reweight", weight="sequence", normalize=True), plain)
    same(of("tbpo", eps_negative=math.inf), of("gspo"))
    same(of("reweight", bypass=True), plain)

    batch["lpn"] = batch["lpr"]  # on policy: the policy gradient, but for the value of J
    reinforce = of("grpo", reduce="token-mean")[1:]
    same(of("aipo")[1:], reinforce)
    same(of("ipo")[1:], reinforce)
    same(of("ipo", signed=True)[1:], reinforce)
    same(of("tbpo", reduce="token-mean")[1:], reinforce)


def test_tbpo_and_gspo_with_tis_weigh_by_different_means():
    """GSPO's baseline caps each token's weight, TBPO the sequence's."""
    lpo = f64([[-3.0, -3.0]])
    inputs = {
        "proximal": lpo,
        "behavior": lpo - f64([[math.log(4), -math.log(4)]]),
        "advantages": torch.ones(1, 2),
        "mask": torch.ones(1, 2),
    }
    assert run(select("gspo", "tis"), lpo, **inputs)[1][0] == pytest.approx([1, 0.125])
    assert run(tbpo, lpo, **inputs)[1][0] == pytest.approx([0.5, 0.5])
    assert run(decoupled, lpo, **inputs)[1][0] == pytest.approx([2, 0.125])


def bad(name, **changes):
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
    ("name", "changes", "message"),
    [
        ("tbpo", {"cap": 0.5}, "cap: 0.5 must be 1 or more"),
        ("tbpo", {"eps_negative": 0}, "eps_negative"),
        ("tbpo", {"dual_clip": 3.0}, "dual_clip: objective tbpo has no such option"),
        ("sparse", {"xi_cap": 0}, "cap"),
        ("sparse", {"token_rs": (1.5, 0.5)}, "token_rs"),
        ("sparse", {"token_rs": 0.5}, "token_rs: 0.5 must be two numbers"),
        ("sparse", {"veto": 0}, "veto"),
        ("sparse", {"normalize_xi": True, "counts": Denominators(9, 3)}, "counts: .*weight_sum"),
        ("aipo", {"ratio_type": "word"}, "ratio_type: unknown 'word'"),
        ("aipo", {"mode": "drop"}, "mode: unknown 'drop'"),
        ("aipo", {"geo_mask_low": 11}, "geo_mask_low: 11 must lie between 0 and geo_mask_high"),
        ("aipo", {"token_mask_low": math.nan}, "token_mask_low"),
        ("aipo", {"sequence_clip_high": 0}, "sequence_clip_high"),
        ("ipo", {"width": -0.1}, "width: -0.1 must be 0 or more"),
        ("ipo", {"ratio_cap": 0}, "ratio_cap: 0 must be positive"),
        ("aipo", {"eps_high": 0.2}, "eps_high: objective aipo has no such option"),
        ("reweight", {"weight": "word"}, "weight: unknown 'word'"),
        ("reweight", {"icepop": (2.0, 1.0)}, "icepop"),
        ("reweight", {"icepop": 2.0}, "icepop"),
        ("reweight", {"reject": {"token_k4": 1.0}}, "reject: unknown rule 'token_k4'"),
        ("reweight", {"reject": {"seq_max_k1": (0.5, 2)}}, "reject: unknown rule 'seq_max_k1'"),
        ("reweight", {"reject": {"token_k1": 2.0}}, r"reject\.token_k1: 2.0 must be two numbers"),
        (
            "reweight",
            {"reject": {"token_k2": (0, 1)}},
            r"reject\.token_k2: \(0, 1\) must be one number",
        ),
        ("reweight", {"reject": {"token_k3": -1.0}}, r"reject\.token_k3"),
        ("reweight", {"veto": -1e-4}, "veto"),
        ("reweight", {"proximal": None}, "proximal"),
    ],
)
def test_bad_options_are_named(name, changes, message):
    with pytest.raises(ValueError, match=message):
        bad(name, **changes)


def test_a_row_says_whose_ratio_is_a_whole_sequences_and_who_has_a_critic():
    pairs = [(a, c) for a in ALGORITHMS for c in ("none", *forms(a))]
    whole = {select(*names).name for names in pairs if select(*names).row.sequences}
    assert whole == {"gspo", "gspo+tis", "gspo+decoupled", *(f"{a}+tbpo" for a in ALGORITHMS)}
    assert [name for name, row in ALGORITHMS.items() if row.has_critic] == ["ppo"]
