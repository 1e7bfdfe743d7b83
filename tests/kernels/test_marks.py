"""Penalties and bans from marks: in the interpreter and in plain torch, against loops."""

from __future__ import annotations

import math

import pytest
import torch

from lowroll.kernels.sampling.advance import advance
from lowroll.kernels.sampling.penalties import SEEN, STOPS, TILE, Marked, add, blank, clear, shape
from tests.fixtures.interpreted import both_paths

NEVER = -math.inf


@both_paths
@pytest.mark.parametrize("tokens", [7, TILE + 9])
def test_what_is_marked_is_penalised_and_banned(tokens: int, path: str) -> None:
    g = torch.Generator().manual_seed(tokens)
    logits_BV = torch.randn(4, tokens, generator=g)
    marks_SV = torch.randint(0, 4, (5, tokens), generator=g, dtype=torch.uint8)
    slots, penalty, until, position = (
        [3, 0, 4, 1],
        [1.0, 1.3, 0.7, 1.3],
        [9, 9, 0, 10],
        [8, 9, 5, 9],
    )
    want = []
    for row, slot in enumerate(slots):
        for x, mark in zip(logits_BV[row], marks_SV[slot].tolist(), strict=True):
            p = torch.tensor(penalty[row])
            if mark & SEEN and penalty[row] != 1:
                x = x / p if x > 0 else x * p
            want.append(NEVER if mark & STOPS and position[row] < until[row] else float(x))
    marked = Marked(
        marks_SV,
        torch.tensor(slots),
        torch.tensor(penalty, dtype=torch.float64),
        torch.tensor(until),
    )
    found_BV = shape(logits_BV, marked, torch.tensor(position))
    assert found_BV is logits_BV and found_BV.flatten().tolist() == want
    half_BV = logits_BV.half()
    assert shape(half_BV, marked, torch.tensor(position)).dtype == torch.float32


@both_paths
def test_a_step_marks_what_living_rows_with_a_penalty_draw(path: str) -> None:
    """Row 1 has no penalty, row 2 is dead, and rows 3 and 4 are none: they name slot 0."""
    tokens, slots = torch.tensor([4, 5, 6, 4, 6]), torch.tensor([0, 2, 3, 0, 0])
    pos, end = torch.tensor([7, 7, 9, 0, 0]), torch.tensor([9, 9, 9, 0, 0])
    penalty = torch.tensor([1.5, 1.0, 1.5, 1.0, 1.0], dtype=torch.float64)
    marks_SV = blank(4, 9, torch.device("cpu"))
    marks_SV[0, 4], marks_SV[2, 1] = STOPS, SEEN
    want = marks_SV.clone()
    want[0, 4] = STOPS | SEEN
    results = torch.zeros(2, 5, dtype=torch.int64), torch.zeros(2, 5)
    marked = Marked(marks_SV, slots, penalty, torch.zeros(5, dtype=torch.int64))
    ids, lengths = torch.zeros(5, dtype=torch.int64), torch.ones(5, dtype=torch.int32)
    step, next_ = torch.zeros(1, dtype=torch.int64), pos + 1
    advance(tokens, torch.zeros(5), step, *results, ids, pos, next_, end, lengths, marked)
    assert torch.equal(marks_SV, want) and pos.tolist() == [8, 8, 9, 0, 0]


def test_marks_of_a_slot_are_forgotten_and_added() -> None:
    marks_SV = blank(3, 21, torch.device("cpu"))
    assert marks_SV.shape == (3, 21) and marks_SV.stride() == (32, 1)
    slots, tokens = torch.tensor([0, 2, 2, 1, 2]), torch.tensor([20, 3, 3, 0, 4])
    add(marks_SV, STOPS, slots, tokens)
    add(marks_SV, SEEN, slots[1:3], tokens[1:3])
    want = torch.zeros(3, 21, dtype=torch.uint8)
    want[0, 20] = want[1, 0] = want[2, 4] = STOPS
    want[2, 3] = SEEN | STOPS
    assert torch.equal(marks_SV, want)
    clear(marks_SV, torch.tensor([2, 0]))
    want[[0, 2]] = 0
    assert torch.equal(marks_SV, want)
