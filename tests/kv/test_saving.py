"""Tokens that a policy saves: the paper's example, a walk over the tokens, and a real engine."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

import lowroll
from lowroll.kv.policy.dense import DENSE
from lowroll.kv.policy.table import POLICIES, make
from lowroll.kv.tokens_saved import Stored, saving, stored
from tests.fixtures.policies import Recent
from tests.fixtures.tiny import hf_folder

EXAMPLE = [(100, 200), (100, 900), (100, 1900)]


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "dense"])
def test_the_example_to_its_printed_digits(name: str) -> None:
    """Budget 512, buffer 128."""
    kv = make(name, budget=512, buffer=128)
    found = saving(kv, EXAMPLE)
    printed = [f"{found[name]:.6f}" for name in ("saving_final", "saving_peak", "saving_mean")]
    assert printed == [
        "0.543030",
        "0.521212",
        "0.436358",
    ]
    each = [stored(kv, *lengths) for lengths in EXAMPLE]
    assert [s.evictions for s in each] == [0, 3, 11] and found["evictions"] == 14 / 3
    assert [(s.peak, s.final) for s in each] == [(300, 300), (640, 616), (640, 592)]


def test_a_dense_cache_and_short_sequences_save_exactly_nothing() -> None:
    nothing = dict.fromkeys(("saving_peak", "saving_final", "saving_mean", "evictions"), 0.0)
    assert saving(DENSE, EXAMPLE) == saving(DENSE, []) == nothing
    assert saving(make("rkv"), [(100, 200), (500, 139), (3, 0)]) == nothing
    assert saving(make("rkv", budget=2000, buffer=1), EXAMPLE) == nothing
    assert saving(make("rkv"), []) == nothing


def test_sequences_by_hand() -> None:
    kv = Recent(4, 2)  # six keys become four; so does a longer prompt
    assert stored(kv, 3, 1) == Stored(4, 4, 4, 0)
    # 4 5 [6 -> 4] 5 [6 -> 4] 5: the key of the last token, which needs the second room, is none
    assert stored(kv, 3, 6) == Stored(6, 5, 4 + 5 + 4 + 5 + 4 + 5, 1)
    assert stored(kv, 3, 7) == Stored(6, 4, 4 + 5 + 4 + 5 + 4 + 5 + 4, 2)
    assert stored(kv, 9, 2) == Stored(6, 4, 5 + 4, 1)
    assert stored(kv, 9, 1) == Stored(5, 5, 5, 0)  # the prompt's own pass draws the only token
    assert stored(kv, 3, 0) == Stored(3, 3, 0, 0)


@pytest.mark.parametrize("seed", range(5))
def test_the_sums_are_those_of_a_walk_over_the_tokens(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(100):
        kv = Recent(rng.randint(1, 12), rng.randint(1, 6))
        prompt, response = rng.randint(1, 30), rng.randint(1, 60)
        cached = min(prompt, kv.budget)
        walk, most = [], cached
        for _ in range(response):
            cached += 1
            most = max(most, cached)
            if cached == kv.budget + kv.buffer:
                cached = kv.budget
            walk.append(cached)
        found = stored(kv, prompt, response)
        assert (found.peak, found.final, found.total) == (most, walk[-1], sum(walk))


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 8])
@pytest.mark.parametrize("prompt", [3, 20])
def test_an_engine_compacts_as_often(
    n: int, prompt: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Responses of every length, also those that end with a full cache. A prompt is compacted once
    for all of its samples; each counts it."""
    kv = make("streaming", budget=8, buffer=4, sinks=2)
    engine = lowroll.Engine(hf_folder(tmp_path / "model"), weights="fp32", device="cpu", kv=kv)
    done = 0
    run = engine.runner._compact

    def counting(compactions: list) -> None:
        nonlocal done
        done += len(compactions)
        run(compactions)

    monkeypatch.setattr(engine.runner, "_compact", counting)
    for response in range(1, 24):
        done = 0
        request = lowroll.Request(
            list(range(5, 5 + prompt)), n=n, max_tokens=response, ignore_eos=True
        )
        (group,) = engine.generate([request])
        lengths = [len(rollout.token_ids) for rollout in group.rollouts]
        assert lengths == [response] * n
        want = sum(stored(kv, prompt, length).evictions for length in lengths)
        shared = n - 1 if kv.after_prompt(prompt) < prompt and response > 1 else 0
        assert done == want - shared, response
