"""How evenly work is dealt: arithmetic, the same everywhere."""

from __future__ import annotations

import pytest

from bench.dealing import SIZES, draw, measure


@pytest.mark.parametrize("workload", SIZES)
def test_ranks_end_together(workload: str) -> None:
    for size in (2, 8):
        found = measure(draw(workload, seed=1), size)
        assert 1 <= found["dealt"] < 1.06 and 1 <= found["in lockstep"] < 1.06
        assert found["dealt"] < found["samples by number"]
