"""The same rollouts whatever the number of engines and whatever happens to them: tokens over random
fleets of fakes, bits over real ones."""

from __future__ import annotations

import random
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from lowroll.config import from_mapping
from lowroll.engine.native import NativeEngine
from lowroll.engine.parts import cost, dealt
from lowroll.engine.remote.pool import EnginePool
from lowroll.kernels.invariant import rows
from lowroll.model import hf
from lowroll.runs.rollouts import RolloutEngine
from lowroll.types import Group, Request
from tests.fixtures.fleets import Fleet
from tests.fixtures.runs import settings
from tests.fixtures.serving import TOKENS, listening
from tests.fixtures.tiny import hf_folder


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, pytest.param(3, marks=pytest.mark.long)])
def test_a_random_fleet_draws_what_one_engine_draws(seed: int) -> None:
    assert Fleet(random.Random(seed)).problem() is None


# -- parts -----------------------------------------------------------------------------------------


def asked(count: int, n: int = 3) -> list[Request]:
    """All begin with the same pages, of which an engine that has them makes no others."""
    return [
        Request(
            [*range(2, 22), 30 + i], n=n, max_tokens=8 + i % 5, seed=3, id=f"r{i}", ignore_eos=True
        )
        for i in range(count)
    ]


def test_parts_follow_from_the_requests_and_have_equal_cost() -> None:
    requests = asked(23)
    parts = dealt(requests, 4)
    assert sorted(sum(parts, [])) == list(range(23)) and parts == dealt(requests, 4)
    costs = [sum(cost(requests[i]) for i in part) for part in parts]
    assert max(costs) - min(costs) <= max(map(cost, requests))
    assert dealt(requests[:2], 3) == [[0], [1], []]
    wished = dealt(requests, 2, [1] * 23)
    costs = [sum(cost(requests[i]) for i in part) for part in wished]
    assert 0 < costs[1] - costs[0] <= 2 * max(map(cost, requests)), "its share, and no more"
    assert 0 in wished[1] and 22 in wished[0]


class Alone:
    """What `RolloutEngine.generate` needs of a run in one process."""

    generate = RolloutEngine.generate

    def __init__(self, engine: NativeEngine, cfg: object) -> None:
        self.engine, self.cfg = engine, cfg


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["fp32", "bf16"])
def test_bits_do_not_depend_on_the_number_of_engines(tmp_path: Path, weights: str) -> None:
    """With parts: those of one process, too, and of an engine that has pages of another part."""
    folder, requests, parts = hf_folder(tmp_path / "model"), asked(11), 5

    def made() -> NativeEngine:
        return NativeEngine(folder, weights=weights, device="cpu", cache_tokens=2048, page_size=4)

    tree = settings(folder, tmp_path / "run", rollout={"parts": parts})
    alone = Alone(made(), from_mapping(tree).resolved())
    seen: list[tuple[int, int]] = []
    wanted = alone.generate(requests, lambda *counts: seen.append(counts))
    assert seen[-1] == (11, 11) and sorted(seen) == seen
    with ExitStack() as stack:
        urls = [stack.enter_context(listening(made(), TOKENS)) for _ in range(3)]
        for count in (1, 3):
            found = drawn(urls[:count], requests, parts)
            assert found == wanted, f"{count} engines"
        if weights == "bf16":
            return
        one, three = (drawn(urls[:count], requests, None) for count in (1, 3))
    # in last bits they may differ, by the processor: that is what parts are for
    for mine, theirs in zip(flat(one), flat(three), strict=True):
        assert mine == pytest.approx(theirs, abs=1e-4)


def drawn(urls: list[str], requests: list[Request], parts: int | None) -> list[Group]:
    given = {"token": TOKENS.token, "admin_token": TOKENS.admin, "start_s": 30.0, "silent_s": 20.0}
    with EnginePool(urls, parts=parts, **given) as pool:
        return pool.generate(requests)


def flat(groups: list[Group]) -> list[list[float]]:
    return [[*one.token_ids, *one.logprobs] for group in groups for one in group.rollouts]


def test_exact_engines_need_no_parts(tmp_path: Path) -> None:
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
            assert flat(drawn(urls[:count], requests, None)) == flat(wanted), f"{count} engines"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"asynchrony": {"max_async_level": 1}}, "max_async_level"),
        ({"asynchrony": {"partial": "keep"}}, "partial"),
        ({"asynchrony": {"oversampling_factor": 2.0}}, "oversampling_factor"),
    ],
)
def test_parts_are_of_batches_that_are_drawn_whole(
    tmp_path: Path, changes: dict, said: str
) -> None:
    tree = settings(tmp_path / "model", tmp_path / "run", rollout={"parts": 2}, **changes)
    with pytest.raises(ValueError, match=f"rollout.parts.*asynchrony.{said}"):
        from_mapping(tree)
