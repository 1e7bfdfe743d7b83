"""Nothing is lost and nothing comes twice, whichever end is killed at whatever moment."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fixtures.ends import LEARNED, POINTS, Pair, digest, made, strike
from tests.fixtures.processes import eventually


@pytest.fixture(params=["filesystem", "zmq"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    pair = Pair(tmp_path, request.param)
    try:
        pair.start("orchestrator")
        pair.start("trainer")
        yield pair
    finally:
        pair.stop()


@pytest.mark.slow
def test_either_end_is_killed_at_every_point(pair: Pair) -> None:
    for role, points in POINTS[pair.transport].items():
        for point in points:
            pair.kill_at(role, point)
            pair.start(role)
    assert pair.finish() == []
    assert pair.kills >= 25


@pytest.mark.slow
def test_either_end_or_both_are_killed_at_random(pair: Pair) -> None:
    rng = random.Random(0)
    for _ in range(15):
        strike(pair, rng)
    assert pair.finish() == []
    assert pair.kills >= 15


@pytest.mark.slow
def test_a_run_goes_on_over_the_other_transport(tmp_path: Path) -> None:
    """The spool and the trainer's words are the same files."""
    begun = 0
    for transport in ("zmq", "filesystem", "zmq"):
        pair = Pair(tmp_path, transport, attempts=dict.fromkeys(["orchestrator", "trainer"], begun))
        try:
            wanted = pair.progress() + 5
            pair.start("orchestrator")
            pair.start("trainer")
            assert eventually(lambda: pair.progress() >= wanted)
            assert pair.finish() == []
        finally:
            pair.stop()
        begun = max(pair.attempts.values())


def test_the_check_sees_what_is_wrong(tmp_path: Path) -> None:
    """A step that is lost, comes twice, or is another."""
    pair = Pair(tmp_path, "zmq")

    def told(*steps: tuple[int, int, int]) -> list[str]:
        lines = [f"{a} {c} {s} {digest(made(s))}" for a, c, s in steps]
        (tmp_path / LEARNED).write_text("\n".join(lines))
        return pair.wrong(3)

    assert told((1, 0, 1), (1, 0, 2), (1, 0, 3)) == []
    assert told((1, 0, 1), (1, 0, 2), (2, 0, 1), (2, 0, 2), (2, 0, 3)) == []
    assert told((1, 0, 1), (1, 0, 3)) == ["attempt 1: step 3 behind 1"]
    assert told((1, 0, 1), (1, 0, 1), (1, 0, 2), (1, 0, 3)) == ["attempt 1: step 1 behind 1"]
    assert told((1, 0, 1)) == ["the last step is 1, not 3"]
    assert told((1, 0, 1), (1, 0, 2), (1, 0, 3), (2, 0, 1), (2, 0, 2), (2, 0, 3)) == [
        "attempt 2 does 3 steps again"
    ]
    (tmp_path / LEARNED).write_text(f"1 0 1 {digest(made(2))}")
    assert "attempt 1: another batch of step 1" in pair.wrong(1)
