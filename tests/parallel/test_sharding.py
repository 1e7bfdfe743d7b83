"""Models in parts: the step of n ranks beside that of one, what is published of them, and
checkpoints that other numbers of ranks go on from."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lowroll.parallel.ranks import ALONE, Ranks
from tests.fixtures.learners import CASES, Case, Learning, all_cases, arrays
from tests.fixtures.ranks import together

SHARDED = "lowroll.parallel.sharding:Sharded"
NUMBERS = ("optim/grad_norm", "optim/update_norm", "policy/objective", "policy/entropy")


def two_steps(ranks: Ranks, case: Case) -> tuple[list[dict[str, float]], Any]:
    learning = Learning(case, ranks)
    return [learning.step(1), learning.step(2)], arrays(learning.whole())


def distance(found: dict[str, Any], wanted: dict[str, Any]) -> float:
    """2-norm."""
    return float(np.sqrt(sum(np.square(found[name] - wanted[name]).sum() for name in wanted)))


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    torch.set_num_threads(1)
    return all_cases(ALONE, two_steps)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 4])
def test_n_ranks_learn_what_one_learns(size: int, alone: dict[str, Any]) -> None:
    first, *_ = results = together(size, all_cases, two_steps, make=SHARDED)
    assert isinstance(first, dict), results
    for name, case in CASES.items():
        metrics, weights = first[name]
        wanted, expected = alone[name]
        way = distance(expected, arrays(Learning(case).model) or {})
        gap = distance(weights, expected) / way
        print(size, name, gap, [[m[k] / w[k] - 1 for k in NUMBERS if k in w and w[k]] for m, w in zip(metrics, wanted)])
        if size == 1:
            assert gap == 0 and metrics == wanted, name
        assert gap <= case.bound, name
        assert all(other[name][0] == metrics for other in results), name
