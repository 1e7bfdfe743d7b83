"""Whom a rejection hits: by hand, and where there is nothing to say."""

from __future__ import annotations

import math

import pytest
import torch

from lowroll.objectives.mismatch import mismatch
from lowroll.objectives.objective import named
from lowroll.objectives.rejection import rejection

# responses of 2, 4 and 1 tokens, of which the second has one that the learner rules out
W = torch.tensor([1.5, 0.8, 1.0, 1.0, 1e-5, 1.0, 2.0], dtype=torch.float64)
GIVEN = {
    "learner": W.log() - 2,
    "behavior": torch.full_like(W, -2),
    "mask": torch.ones(7, dtype=torch.bool),
    "segments": torch.tensor([0, 0, 1, 1, 1, 1, 2]),
}
REWARDS = torch.tensor([1.0, 0.0, 0.5], dtype=torch.float64)


def kept(**changes):
    given = GIVEN | changes
    zeros = torch.zeros_like(given["learner"])
    verdict = named("sparse").verdict(**given, proximal=given["learner"], veto=1e-4)
    assert verdict is not None and len(verdict.kept_N) == len(zeros)
    return verdict.kept_N


def test_by_hand() -> None:
    found = rejection(**GIVEN, rewards=REWARDS, kept=kept(), veto=1e-4)
    assert found == {
        "mismatch/weight_mean": pytest.approx(W.sum().item() / 7),
        "correction/vetoed_fraction": pytest.approx(1 / 7),
        "correction/rejected_length_ratio": pytest.approx(4 / (7 / 3)),
        "correction/rejected_reward_gap": pytest.approx(-0.5),
    }
    beside = mismatch(**GIVEN)
    assert beside["mismatch/weight_min"] < found["mismatch/weight_mean"]
    assert found["mismatch/weight_mean"] < beside["mismatch/weight_max"]


def test_where_nothing_is_rejected_nothing_is_said_of_it() -> None:
    calm = {**GIVEN, "learner": GIVEN["behavior"]}
    found = rejection(**calm, rewards=REWARDS, kept=kept(**calm), veto=1e-4)
    assert found == {"mismatch/weight_mean": 1.0, "correction/vetoed_fraction": 0.0}
    assert rejection(**calm, rewards=REWARDS) == {"mismatch/weight_mean": 1.0}
    tokens = kept()  # of a response of which something is left
    tokens[2] = True
    assert len(rejection(**GIVEN, rewards=REWARDS, kept=tokens, veto=1e-4)) == 2


def test_masked_and_unusable_tokens_and_failed_scores_are_left_out() -> None:
    odd = {name: x.clone() for name, x in GIVEN.items()}
    odd["mask"][3] = False
    odd["learner"][3] = torch.nan
    odd["behavior"][1] = -torch.inf
    odd["mask"][6] = False  # the whole third response
    rewards = torch.tensor([1.0, math.nan, 9.0], dtype=torch.float64)
    found = rejection(**odd, rewards=rewards, kept=kept(**odd), veto=1e-4)
    assert found == {
        "mismatch/weight_mean": pytest.approx((1.5 + 1 + 1e-5 + 1) / 4),
        "correction/vetoed_fraction": pytest.approx(1 / 4),
        "correction/rejected_length_ratio": pytest.approx(3 / 2),
    }
    odd["mask"][:] = False
    nothing = rejection(**odd, rewards=rewards, kept=torch.ones(7, dtype=torch.bool), veto=1e-4)
    assert nothing == {"mismatch/weight_mean": 0.0, "correction/vetoed_fraction": 0.0}
