"""bench.scale and the fakes that it asks: what they say, and a whole small run of the real
orchestrator."""

from __future__ import annotations

import asyncio
import random
from itertools import pairwise
from pathlib import Path

import pytest

from bench.fakes import FIRST, STEP, Curve, Device, Totals
from bench.scale import QUANTITIES, WORKS, Work, measure, settings
from lowroll.config import from_mapping


def test_a_curve_goes_through_what_was_measured() -> None:
    curve = Curve([(1.0, 0.1), (3.0, 0.3), (7.0, 0.3)])
    assert [curve.at(size) for size in (1, 2, 3, 5)] == pytest.approx([0.1, 0.2, 0.3, 0.3])
    assert curve.at(0) == 0.1  # nothing is faster than the least that was measured
    assert Curve([(1.0, 0.1), (3.0, 0.3)]).at(4) == pytest.approx(0.4)  # on from the last two


def test_the_baselines_say_how_fast_an_engine_is() -> None:
    steps, first = Curve.stored("decode.json", STEP), Curve.stored("server.json", FIRST)
    assert [size for size, _ in steps.points] == [1, 64, 256]
    assert [size for size, _ in first.points] == [1, 16, 64, 256]
    for curve in (steps, first):
        assert all(a[1] < b[1] for a, b in pairwise(curve.points))
    assert 64 / steps.at(64) == pytest.approx(13_200, rel=0.01)  # tokens/s, as bench.scale says


def test_a_device_draws_every_token_and_never_too_many_rows() -> None:
    totals, dice = Totals(), random.Random(3)
    requests = [[dice.randint(1, 30) for _ in range(dice.randint(1, 5))] for _ in range(12)]
    widest = 0

    async def draw() -> float:
        nonlocal widest
        device = Device(Curve([(0.0, 1e-4), (4.0, 2e-4)]), 1.0, 4, totals)
        tasks = [asyncio.create_task(device.draw(lengths)) for lengths in requests]
        while not all(task.done() for task in tasks):
            widest = max(widest, len(device._running))
            await asyncio.sleep(0)
        return device.drawn

    drawn = asyncio.run(draw())
    assert drawn >= sum(map(sum, requests)) * 0.999 and widest == 4
    assert totals.row_seconds > 0


@pytest.mark.parametrize("count", [1, 4, 512])
@pytest.mark.parametrize("work", WORKS)
def test_every_size_has_settings_that_keep_its_engines_busy(work: str, count: int) -> None:
    urls = [f"http://127.0.0.1:9/{i}" for i in range(count)]
    tree = settings(WORKS[work], urls, Path("model"), Path("out"))
    cfg = from_mapping(tree)
    open_now = cfg.batch_size * cfg.asynchrony.oversampling_factor
    assert open_now >= 1.5 * WORKS[work].rows * count
    assert cfg.batch_size % cfg.rollouts_per_example == 0


@pytest.mark.slow
def test_the_real_orchestrator_over_four_engines(tmp_path: Path) -> None:
    found = measure(4, Work(8, slow=0.2, median=12.0), tmp_path, seconds=0.5, warm_s=0.0)
    assert list(found) == list(QUANTITIES)
    assert found["rollouts a second"] > 0 and found["batches"] > 0
    assert found["tokens a second"] > 4 * found["rollouts a second"]
    assert 0 < found["rows of the engines that draw"] <= 1
    assert found["orchestrator: processor for a rollout"] > 0 and found["wire"] > 0
    assert found["engines fenced"] == 0
    spool = tmp_path / "run/orchestrator/spool"
    assert list(spool.glob("step_*.frame")) and (tmp_path / "run/rollouts").is_dir()
