"""KL estimators and mismatch statistics against hand-computed values."""

from __future__ import annotations

import math

import pytest
import torch

from lowroll.objectives.kl import ESTIMATORS, k3, penalty
from lowroll.objectives.mismatch import by_length, by_staleness, mismatch, spread
from lowroll.objectives.reduce import Denominators


def f64(values):
    return torch.tensor(values, dtype=torch.float64)


# KL to a reference


@pytest.mark.parametrize(
    ("learner", "reference", "k1", "k2", "k3", "slope"),
    [
        (-1, -1.2, 0.2, 0.02, 0.0187307531, 0.1812692469),
        (-2, -1.5, -0.5, 0.125, 0.1487212707, -0.6487212707),
        (-0.1, -4, 3.9, 7.605, 2.9202419115, 0.9797580886),
    ],
)
def test_estimators_by_hand(learner, reference, k1, k2, k3, slope):
    d = learner - reference
    for name, value, gradient in (("k1", k1, 1), ("k2", k2, d), ("k3", k3, slope), ("k3+", k3, d)):
        lp = f64([[learner]]).requires_grad_()
        KL, stats = penalty(
            learner=lp, reference=f64([[reference]]), mask=torch.ones(1, 1), estimator=name
        )
        KL.backward()
        assert KL.item() == pytest.approx(value, abs=1e-10), name
        assert lp.grad.item() == pytest.approx(gradient, abs=1e-10), name
        assert stats == {"policy/kl_reference": pytest.approx(value, abs=1e-10)}


def test_estimators_agree_with_the_exact_kl():
    generator = torch.Generator().manual_seed(0)
    logp, logq = (
        torch.randn(50, generator=generator, dtype=torch.float64).log_softmax(0) for _ in range(2)
    )
    logq = (0.7 * logp + 0.3 * logq).log_softmax(0)
    exact = (logp.exp() * (logp - logq)).sum().item()
    for name in ("k1", "k3"):  # the expectation over every token, not a sample
        assert (logp.exp() * ESTIMATORS[name](logp - logq)).sum().item() == pytest.approx(
            exact, rel=1e-12
        )


def test_penalty_reduces_like_the_policy_term():
    learner, reference = (
        f64([[-1, -2, math.nan], [-0.1, -1, -2]]),
        f64([[-1.2, -1.5, math.inf], [-4, -1, -2]]),
    )
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    a, b, c = 0.0187307531, 0.1487212707, 2.9202419115
    expected = {
        "seq-mean-token-mean": ((a + b) / 2 + c / 3) / 2,
        "token-mean": (a + b + c) / 5,
        "constant": (a + b + c) / 8,
        "seq-mean-token-sum": (a + b + c) / 2,
    }
    for mode, value in expected.items():
        call = {"reduce": mode, "max_length": 4}
        KL, stats = penalty(learner=learner, reference=reference, mask=mask, **call)
        assert KL.item() == pytest.approx(value, abs=1e-10)
        assert stats["policy/kl_reference"] == pytest.approx((a + b + c) / 5, abs=1e-10)
        keep = mask.bool()
        KL, _ = penalty(
            learner=learner[keep],
            reference=reference[keep],
            mask=torch.ones(5),
            segments=torch.tensor([0, 0, 1, 1, 1]),
            **call,
        )
        assert KL.item() == pytest.approx(value, abs=1e-10)
        rows = [
            penalty(
                learner=learner[i : i + 1],
                reference=reference[i : i + 1],
                mask=mask[i : i + 1],
                counts=Denominators(5, 2),
                **call,
            )[0].item()
            for i in range(2)
        ]
        assert sum(rows) == pytest.approx(value, abs=1e-10)


def test_masked_garbage_and_far_log_ratios():
    learner = f64([[math.nan, -1.0, -60.0]]).requires_grad_()
    KL, _ = penalty(
        learner=learner, reference=f64([[1.0, -math.inf, -1.0]]), mask=torch.tensor([[0, 0, 1]])
    )
    KL.backward()
    assert KL.item() == pytest.approx(math.exp(20) - 21)
    assert learner.grad.tolist() == [[0, 0, 0]]
    assert k3(f64(1e-5)).item() == pytest.approx(5e-11, rel=1e-5)
    with pytest.raises(ValueError, match="estimator: unknown 'k4'"):
        penalty(learner=learner, reference=learner, mask=torch.ones(1, 3), estimator="k4")


# Sampler against learner: the sequences of two responses, learner and behaviour probabilities

LEARNER = [[0.45, 0.5, 0.8, 1.0], [0.66, 0.24, 0.3, 0.5]]
BEHAVIOR = [[0.5, 0.4, 0.8, 1.0], [0.6, 0.3, 0.2, 0.5]]
MASK = [[1, 1, 1, 0], [1, 1, 1, 1]]
EXPECTED = {
    "kl_k1": -0.0564878246,
    "kl_k3": 0.0220836040,
    "weight_max": 1.5,
    "weight_min": 0.8,
    "logp_diff_mean": 0.1503461295,
    "logp_diff_max": math.log(1.5),
    "prob_diff_mean": 0.0528571429,
    "prob_diff_max": 0.1,
    "ess": 0.9611347638,
    "ess_sequence": 0.9936794076,
    "chi2_token": 0.2103571429,
    "chi2_sequence": 0.5040125,
    "geo_ratio_mean": (1.0400419115 + 1.0718733737) / 2,
    "ppl_ratio": 0.9472228677,
    "pearson": 0.9425542565,
    "ppl_learner": ((0.45 * 0.5 * 0.8) ** (-1 / 3) + (0.66 * 0.24 * 0.3 * 0.5) ** (-1 / 4)) / 2,
    "ppl_sampler": ((0.5 * 0.4 * 0.8) ** (-1 / 3) + (0.6 * 0.3 * 0.2 * 0.5) ** (-1 / 4)) / 2,
}


def test_mismatch_by_hand():
    expected = {
        f"mismatch/{name}": pytest.approx(value, abs=1e-10) for name, value in EXPECTED.items()
    }
    learner, behavior, mask = f64(LEARNER).log(), f64(BEHAVIOR).log(), torch.tensor(MASK)
    learner[0, 3] = math.nan
    behavior[0, 3] = -math.inf
    assert mismatch(learner=learner, behavior=behavior, mask=mask) == expected
    keep = mask.bool()
    order = torch.tensor([3, 0, 6, 1, 4, 2, 5])
    packed = {
        "learner": learner[keep][order],
        "behavior": behavior[keep][order],
        "mask": torch.ones(7),
    }
    segments = torch.tensor([0, 0, 0, 2, 2, 2, 2])[
        order
    ]  # segment 1 has no token: no sequence to average
    assert mismatch(segments=segments, **packed) == expected


def test_mismatch_of_single_sequences():
    for row, (geometric, product, perplexities) in enumerate(
        [(1.0400419115, 1.125, 1.7710976 / 1.8420157), (1.0718733737, 1.32, 2.5470554 / 2.7301209)]
    ):
        got = mismatch(
            learner=f64(LEARNER).log()[row : row + 1],
            behavior=f64(BEHAVIOR).log()[row : row + 1],
            mask=torch.tensor(MASK)[row : row + 1],
        )
        assert got["mismatch/geo_ratio_mean"] == pytest.approx(geometric, abs=1e-10)
        assert got["mismatch/chi2_sequence"] == pytest.approx(product**2 - 1, abs=1e-12)
        assert got["mismatch/ppl_ratio"] == pytest.approx(perplexities, abs=1e-7)
        assert got["mismatch/ess_sequence"] == pytest.approx(1)


def test_no_mismatch():
    lp = f64(LEARNER).log()
    got = mismatch(learner=lp, behavior=lp, mask=torch.tensor(MASK))
    ones = {
        "weight_max",
        "weight_min",
        "ess",
        "ess_sequence",
        "geo_ratio_mean",
        "ppl_ratio",
        "pearson",
    }
    same = dict.fromkeys(("ppl_learner", "ppl_sampler"), EXPECTED["ppl_learner"])
    assert got == {
        f"mismatch/{name}": pytest.approx(same.get(name, float(name in ones)), abs=1e-12)
        for name in EXPECTED
    }


def test_unusable_tokens_are_left_out():
    learner, behavior = f64(LEARNER).log(), f64(BEHAVIOR).log()
    reference = mismatch(
        learner=learner, behavior=behavior, mask=torch.tensor([[1, 0, 1, 0], [1, 1, 1, 1]])
    )
    behavior[0, 1] = -math.inf
    assert mismatch(learner=learner, behavior=behavior, mask=torch.tensor(MASK)) == reference
    assert mismatch(learner=learner, behavior=behavior, mask=torch.zeros(2, 4)) == {}
    constant = mismatch(
        learner=f64([[-0.3] * 3]), behavior=f64([[-0.1, -0.2, -0.3]]), mask=torch.ones(1, 3)
    )
    assert "mismatch/pearson" not in constant and len(constant) == len(EXPECTED) - 1


def test_the_spread_by_hand():
    ratio = f64(
        [[0.1, 0.3, 0, 9], [-0.2, 0.2, 0, 0], [9, 9, 9, 9]]
    )  # l - b; means .1333 and 0; the rest masked
    got = spread(
        learner=ratio - 1,
        behavior=f64([[-1.0] * 4] * 3),
        mask=torch.tensor([[1, 1, 1, 0], [1] * 4, [0] * 4]),
    )
    tokens = [0.1, 0.3, 0, -0.2, 0.2, 0, 0]
    mean = sum(tokens) / 7
    assert got == {
        "spread/token_std": pytest.approx((sum((x - mean) ** 2 for x in tokens) / 7) ** 0.5),
        "spread/token_p99": pytest.approx(0.3),
        "spread/sequence_std": pytest.approx(0.4 / 6),
        "spread/sequence_p99": pytest.approx(0.4 / 3),
    }
    assert spread(learner=ratio, behavior=ratio, mask=torch.zeros(3, 4)) == {}


def test_every_class_of_lengths_is_the_mismatch_of_its_own_responses():
    generator = torch.Generator().manual_seed(0)
    lengths = [1, 3, 4, 5, 8, 9, 16, 17]
    learner, behavior = (
        torch.rand(8, 17, generator=generator, dtype=torch.float64).log() for _ in range(2)
    )
    mask = torch.arange(17) < torch.tensor(lengths)[:, None]
    got = by_length(learner=learner, behavior=behavior, mask=mask)
    classes = {4: [0, 1, 2], 8: [3, 4], 16: [5, 6], 32: [7]}
    assert len(got) == 4 * len(classes)
    for tokens, rows in classes.items():
        own = mismatch(learner=learner[rows], behavior=behavior[rows], mask=mask[rows])
        for name in ("kl_k1", "kl_k3", "logp_diff_max", "ess"):
            assert got[f"mismatch/length_{tokens}/{name}"] == pytest.approx(
                own[f"mismatch/{name}"], rel=1e-12
            )
    assert by_length(learner=learner, behavior=behavior, mask=torch.zeros(8, 17)) == {}


def test_by_staleness_divides_the_tokens_by_their_age():
    learner = torch.tensor([[-1.0, -2.0, -3.0], [-1.0, -1.0, -9.0]])
    behavior = torch.tensor([[-1.5, -2.0, -1.0], [-1.1, -1.0, 0.0]])
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    ages = torch.tensor([[2.0, 0.0, 2.0], [0.0, 1.0, 7.0]])
    found = by_staleness(learner=learner, behavior=behavior, mask=mask, staleness=ages)
    assert found == pytest.approx(
        {
            "mismatch/staleness_0/kl_k1": -0.05,
            "mismatch/staleness_0/logp_diff_mean": 0.05,
            "mismatch/staleness_2/kl_k1": 0.75,
            "mismatch/staleness_2/logp_diff_mean": 1.25,
        }
    )
    empty = by_staleness(learner=learner, behavior=behavior, mask=0 * mask, staleness=ages)
    assert empty == {}
