"""What tests draw goes by their names (`tests/fixtures/draws.py`)."""

from __future__ import annotations

import random
import zlib

import pytest
import torch
from hypothesis import settings

Draws = tuple[float, float]


def drawn() -> Draws:
    return random.random(), torch.rand(()).item()


def drawn_by(node: str, fixture: str) -> Draws:
    seed = zlib.crc32(f"{node} {fixture}".encode())
    generator = torch.Generator().manual_seed(seed)
    return random.Random(seed).random(), torch.rand((), generator=generator).item()


@pytest.fixture(scope="module")
def shared() -> Draws:
    return drawn()


@pytest.mark.parametrize("noise", range(3))
def test_what_a_test_draws_goes_by_its_name(
    noise: int, shared: Draws, request: pytest.FixtureRequest
) -> None:
    node = request.node.nodeid
    assert drawn() in [drawn_by(node, name) for name in request.fixturenames]
    assert shared == drawn_by(node.partition("::")[0], "shared")
    for _ in range(noise):  # the next test does not see it
        drawn()


def test_properties_draw_alike_and_have_all_the_time_they_need() -> None:
    assert settings().derandomize and settings().deadline is None
