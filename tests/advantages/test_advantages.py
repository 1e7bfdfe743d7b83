"""Group advantages and reward shaping against hand-computed values."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowroll import advantages
from lowroll.advantages import grpo, grpo_no_std, length_weighted, overlong, rloo
from lowroll.objectives.table import ALGORITHMS

HAND_COMPUTED = [
    # rewards, std (ddof 1, eps 1e-6), no std, leave one out
    (
        [1, 0, 0, 1],
        [0.8660239038, -0.8660239038, -0.8660239038, 0.8660239038],
        [0.5, -0.5, -0.5, 0.5],
        [0.6666666667, -0.6666666667, -0.6666666667, 0.6666666667],
    ),
    (
        [1] + [0] * 7,
        [2.4748667342] + [-0.3535523906] * 7,
        [0.875] + [-0.125] * 7,
        [1] + [-0.1428571429] * 7,
    ),
    (
        [0.25, 1, 0.5],
        [-0.8728692752, 1.0910865940, -0.2182173188],
        [-0.3333333333, 0.4166666667, -0.0833333333],
        [-0.5, 0.625, -0.125],
    ),
    ([1, 1, 1, 1], [0] * 4, [0] * 4, [0] * 4),
]


@pytest.mark.parametrize(("rewards", "with_std", "without_std", "leave_one_out"), HAND_COMPUTED)
def test_hand_computed_groups(rewards, with_std, without_std, leave_one_out):
    assert grpo(rewards) == pytest.approx(with_std, abs=5e-11)
    assert grpo_no_std(rewards) == pytest.approx(without_std, abs=5e-11)
    assert rloo(rewards) == pytest.approx(leave_one_out, abs=5e-11)


def test_length_weighted_by_hand():
    assert length_weighted([1, 0, 0, 1], [100, 300, 200, 200]) == pytest.approx(
        [0.625, -0.375, -0.375, 0.625], abs=1e-15
    )
    assert length_weighted([1, None, 0], [100, 5000, 300]) == pytest.approx(
        [0.75, 0, -0.25], abs=1e-15
    )
    assert length_weighted([1, 0, 0, 1], [7] * 4) == pytest.approx(grpo_no_std([1, 0, 0, 1]))


# the estimators with a baseline of the group's
COMPARING = [name for name in advantages.TABLE if name != "gae"]


@pytest.mark.parametrize("name", COMPARING)
def test_equal_rewards_give_exactly_zero(name):
    # .1 + .1 + .1 != .3 in binary: a naive mean would leave a rest, which the std would blow up
    for reward in (0.1, 1 / 3, -0.7, 0.0, 1e300):
        assert advantages.TABLE[name]([reward] * 3, [10, 20, 30]) == [0.0] * 3


@pytest.mark.parametrize("name", COMPARING)
def test_a_single_rollout_keeps_its_reward(name):
    assert advantages.TABLE[name]([0.7], [10]) == [0.7]
    assert advantages.TABLE[name]([None], [10]) == [0.0]


@pytest.mark.parametrize("name", COMPARING)
def test_failed_scores_leave_the_statistics(name):
    estimate = advantages.TABLE[name]
    with_errors = estimate([None, 1.0, 0.0, None, 0.5], [9, 10, 20, 9, 30])
    a, b, c = estimate([1.0, 0.0, 0.5], [10, 20, 30])
    assert with_errors == [0.0, a, b, 0.0, c]
    assert estimate([None, 1.0, None], [1, 2, 3]) == [0.0] * 3
    assert estimate([None, None], [1, 2]) == [0.0] * 2


def test_gae_leaves_the_baseline_to_the_critic():
    assert advantages.TABLE["gae"]([0.7, None, 0.0, 0.7], None) == [0.7, 0.0, 0.0, 0.7]
    assert advantages.TABLE["gae"]([-2], [10]) == [-2.0]


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=12).filter(lambda r: max(r) - min(r) > 1e-3))
def test_properties_of_a_group(rewards):
    for estimate in (grpo, grpo_no_std, rloo):
        assert math.fsum(estimate(rewards)) == pytest.approx(0, abs=1e-9)
    others = [statistics.fmean(rewards[:i] + rewards[i + 1 :]) for i in range(len(rewards))]
    assert rloo(rewards) == pytest.approx(
        [r - o for r, o in zip(rewards, others, strict=True)], abs=1e-9
    )
    std = statistics.stdev(rewards)
    assert statistics.stdev(grpo(rewards)) == pytest.approx(std / (std + 1e-6), rel=1e-9)
    shifted = [3 * r + 7 for r in rewards]
    assert grpo(shifted, eps=0.0) == pytest.approx(grpo(rewards, eps=0.0), abs=1e-6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: grpo([]), "empty"),
        (lambda: grpo([1.0, math.nan]), r"rewards\[1\]"),
        (lambda: rloo([math.inf, 0.0]), r"rewards\[0\]"),
        (lambda: length_weighted([1.0, 0.0]), "lengths"),
        (lambda: length_weighted([1.0, 0.0], [3]), "lengths"),
        (lambda: length_weighted([1.0, 0.0], [3, -1]), "negative"),
        (lambda: length_weighted([1.0, 0.0], [0, 0]), "empty"),
        (lambda: overlong(-1, max_length=10, cache=2), "length"),
        (lambda: overlong(5, max_length=10, cache=0), "cache"),
        (lambda: overlong(5, max_length=10, cache=11), "cache"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("length", "penalty"),
    [
        (0, 0),
        (16384, 0),
        (16385, -0.000244140625),
        (18432, -0.5),
        (20480, -1),
        (25000, -1),
    ],
)
def test_overlong_penalty_by_hand(length, penalty):
    assert overlong(length, max_length=20480, cache=4096) == penalty


def test_every_algorithm_names_an_estimator():
    assert {row.advantage for row in ALGORITHMS.values()} <= set(advantages.TABLE)
