"""The same rollouts whatever the number of engines and whatever happens to them: tokens over random
fleets of fakes, bits over real ones."""

from __future__ import annotations

import random
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from lowroll.engine.native import NativeEngine
from lowroll.engine.remote.pool import EnginePool
from lowroll.engine.remote.replica import PoolOptions
from lowroll.kernels.batch_invariant import rows
from lowroll.model import hf
from lowroll.types import Group, Request
from tests.fixtures.fleets import Fleet
from tests.fixtures.serving import TOKENS, listening
from tests.fixtures.tiny import hf_folder


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, pytest.param(3, marks=pytest.mark.long)])
def test_a_random_fleet_draws_what_one_engine_draws(seed: int) -> None:
    assert Fleet(random.Random(seed)).problem() is None


def asked(count: int, n: int = 3) -> list[Request]:
    """All begin with the same pages, of which an engine that has them makes no others."""
    return [
        Request(
            [*range(2, 22), 30 + i], n=n, max_tokens=8 + i % 5, seed=3, id=f"r{i}", ignore_eos=True
        )
        for i in range(count)
    ]


def drawn(urls: list[str], requests: list[Request]) -> list[Group]:
    given = {"token": TOKENS.token, "admin_token": TOKENS.admin, "start_s": 30.0, "silent_s": 20.0}
    with EnginePool(urls, PoolOptions(**given)) as pool:
        return pool.generate(requests)


def flat(groups: list[Group]) -> list[list[float]]:
    return [[*one.token_ids, *one.logprobs] for group in groups for one in group.rollouts]


def test_bits_do_not_depend_on_the_number_of_engines(tmp_path: Path) -> None:
    """Whatever runs beside a request, on whichever engine, its bits are those of one that is alone."""
    if not rows.supports_device(torch.device("cpu")):
        pytest.skip("needs a CPU with AVX2 and a C++ compiler")
    folder, requests = hf_folder(tmp_path / "model"), asked(11)

    def made(**options: Any) -> NativeEngine:
        model = hf.load(folder).be_exact()
        options = {"cache_tokens": 2048, "page_size": 4, **options}
        return NativeEngine(model, weights="int8", device="cpu", **options)

    alone = made(max_batch=1, prefill_chunk=5, prefix_caching=False)
    wanted = [alone.generate([request])[0] for request in requests]
    with ExitStack() as stack:
        urls = [stack.enter_context(listening(made(), TOKENS)) for _ in range(3)]
        for count in (1, 3):
            assert flat(drawn(urls[:count], requests)) == flat(wanted), f"{count} engines"
