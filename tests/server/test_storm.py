"""A little of the storm of `make torture`: a thousand requests, most of them wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fixtures.storm import GUST, Storm
from tests.fixtures.stormed import Stormed, folders


@pytest.mark.slow
def test_a_storm_leaves_good_answers_right_and_nothing_behind(tmp_path: Path) -> None:
    with Stormed(folders(tmp_path)) as server:
        storm = Storm(tmp_path, server, seed=1)
        problems = [found for _ in range(5) for found in storm.blow(GUST) if found]
        assert problems == [] and server.alive
        asked = storm.statuses
    assert sum(asked.values()) > 700 and asked[200] > 300
    assert {200, 400, 401, 408, 409, 415} <= asked.keys() and not asked[500]
