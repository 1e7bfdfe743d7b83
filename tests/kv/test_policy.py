"""What a cache policy costs in pages, by hand, and what moves when it compacts."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lowroll import Engine, Request
from lowroll.kv.cache import KVCache
from lowroll.kv.capacity import Workload, capacity
from lowroll.kv.policy.base import CachePolicy, Footprint, footprint
from lowroll.kv.policy.dense import DENSE
from lowroll.kv.policy.table import POLICIES, make
from lowroll.model.spec import read_spec
from tests.fixtures.policies import Recent
from tests.fixtures.tiny import hf_folder


def test_the_dense_policy_keeps_everything() -> None:
    assert (DENSE.name, DENSE.budget, DENSE.window) == ("dense", None, 1)
    assert DENSE.room(10**9) == sys.maxsize and DENSE.kept(7) == 7
    assert DENSE.after_prompt(10**6) == 10**6 and DENSE.peak(5, 10**6) == 10**6 + 5


def test_numbers_that_a_policy_need_not_give() -> None:
    """A prompt at the limit is compacted, one below it is not; the peak is the limit, or less."""

    class Late(Recent):
        after_prompt = CachePolicy.after_prompt

    kv = Late(6, 3)
    assert [kv.after_prompt(n) for n in (1, 8, 9, 40)] == [1, 8, 6, 6]
    assert [kv.peak(5, more) for more in (0, 3, 4, 5, 99)] == [5, 8, 9, 9, 9]
    assert kv.peak(9, 0) == 9

    class Growing(Late):
        """Keeps more of a larger cache than it takes before the first compaction."""

        def room(self, cached: int) -> int:
            return 2 if cached < 5 else max(0, 12 - cached)

    assert Growing(6, 3).peak(4, 50) == 12


def test_footprints_by_hand() -> None:
    """Pages of 4."""
    # 10 prompt tokens are 3 pages; 12 more keys make 22, 6 pages: 3 of them, or all but the 2 full
    assert footprint(DENSE, 10, 13, 4) == Footprint(3, 10, 0, False, writer=3, sibling=4)
    assert footprint(DENSE, 8, 1, 4) == Footprint(2, 8, 0, False, writer=0, sibling=0)
    # 10 keys stay until there are 14: 4 pages of a sample's own, and nothing shared in the end
    assert footprint(Recent(10, 4), 10, 13, 4) == Footprint(3, 10, 0, True, writer=4, sibling=4)
    assert footprint(Recent(10, 4), 10, 5, 4) == Footprint(3, 10, 0, False, writer=1, sibling=2)
    # of 30 prompt tokens (8 pages) 10 stay, on 3 pages more
    bounded = footprint(Recent(10, 4), 30, 13, 4)
    assert bounded == Footprint(8, 10, 3, True, writer=4, sibling=4) and bounded.alone == 15
    assert footprint(Recent(10, 4), 30, 1, 4) == Footprint(8, 10, 3, False, writer=0, sibling=1)


@pytest.mark.parametrize("seed", range(5))
def test_footprints_are_the_most_that_a_walk_over_the_tokens_meets(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(200):
        kv = Recent(rng.randint(1, 12), rng.randint(1, 6))
        prompt, response, page = rng.randint(1, 30), rng.randint(1, 40), rng.randint(1, 5)
        need = footprint(kv, prompt, response, page)
        cached = peak = min(prompt, kv.budget)
        evicts = False
        for _ in range(response - 1):
            if cached == kv.budget + kv.buffer:
                cached, evicts = kv.budget, True
            cached += 1
            peak = max(peak, cached)
        assert (need.base, need.evicts) == (min(prompt, kv.budget), evicts)
        assert need.sibling == -(-peak // page) - (0 if evicts else need.base // page)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_knows_the_bytes_of_its_state(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """All tensors of the device's side, at its beginning and after it has served."""
    options = {} if name == "dense" else {"budget": 24, "buffer": 8}
    for max_batch in (1, 5):
        kv = make(name, **options)
        engine = Engine(
            hf_folder(tmp_path / "model"),
            weights="int8",
            kv=kv,
            device="cpu",
            dtype=dtype,
            max_batch=max_batch,
            cache_tokens=1024,
        )
        for requests in ([], [Request([5] * 40, n=3, max_tokens=40, ignore_eos=True)]):
            engine.generate(requests)
            selector = engine.runner.selector
            held = [] if selector is None else vars(selector).values()
            state = sum(x.nbytes for x in held if isinstance(x, torch.Tensor))
            assert kv.state_bytes(engine.spec, max_batch, dtype.itemsize) == state
            assert engine.stats().policy_bytes == state
            assert (state > 0) == (name in ("snapkv", "rkv", "h2o"))


@pytest.mark.parametrize("budget", [24, 100_000])
def test_what_records_evictions_is_counted(budget: int, tmp_path: Path) -> None:
    """Positions in 32 bits of the keys that a slot keeps: no more than the context has."""
    folder = hf_folder(tmp_path / "model")
    kv = make("streaming", budget=budget)
    options: dict[str, Any] = dict(weights="int8", device="cpu", max_batch=5, cache_tokens=1024)
    for kept in (False, True):
        engine = Engine(folder, kv=kv, record_evictions=kept, **options)
        recorder = engine.runner.recorder
        held = 0 if recorder is None else recorder.held_LSGK.nbytes
        assert engine.stats().policy_bytes == held == kept * 2 * 7 * 2 * min(budget, 256) * 4
    assert Engine(folder, record_evictions=True, **options).stats().policy_bytes == 0


@pytest.mark.parametrize("name", ["snapkv", "rkv"])
def test_the_ring_of_queries_of_a_published_model(name: str, tmp_path: Path) -> None:
    """Qwen2.5-1.5B: 8 queries of 28 layers, 12 heads of 128 numbers of 2 bytes."""
    tiny = hf_folder(tmp_path / "model")
    spec = replace(read_spec(tiny), num_layers=28, num_heads=12, num_kv_heads=2, head_dim=128)
    spec = replace(spec, max_position=32768)
    kv = make(name)
    assert kv.state_bytes(spec, 9, 2) - kv.state_bytes(spec, 8, 2) == 688_128
    assert kv.state_bytes(spec, 1, 2) == 3 * 688_128  # and two slots that are no sample's
    scores = make("h2o")
    assert scores.state_bytes(spec, 9, 2) - scores.state_bytes(spec, 8, 2) == 28 * 2 * 640 * 4


def test_a_bounded_load_takes_a_smaller_cache() -> None:
    # 14 keys are 4 pages of a sample's own; the 5 full pages of a prompt, the pages of the 10 keys
    # that are left of it, the tail of each, and one
    load, kv = Workload(2, 3, 20, 300), Recent(10, 4)
    own = 4 + 1  # a shorter prompt's sample may hold a tail beside
    want = 4 * (2 * 5 + 2 * (3 + 1) + 2 + 6 * own + 1)
    assert load.tokens(4, 256, kv) == want < load.tokens(4, 256)
    assert load.tokens(4, 256, Recent(400, 4)) == load.tokens(4, 256, DENSE) == load.tokens(4, 256)
    known = {"page_size": 4, "max_batch": 8, "context": 512, "bytes_per_token": 1, "free": 10**9}
    assert capacity([], kv=Recent(90, 10), **known) == 800
    assert capacity([], kv=Recent(10, 4), **known) == 512  # a whole context, as a prompt


@pytest.mark.parametrize("num_heads", [1, 3])
def test_kept_keys_move_head_by_head_onto_the_pages_that_they_leave(
    num_heads: int, tmp_path: Path
) -> None:
    """Two rows in one call; each one's new pages are some of its old ones, and maybe another."""
    spec = read_spec(
        hf_folder(tmp_path / "m", num_attention_heads=num_heads, num_key_value_heads=num_heads)
    )
    cache = KVCache(spec, 16, 4, torch.float32, "cpu")
    g = torch.Generator().manual_seed(num_heads)
    for buffer in (*cache.keys, *cache.values):
        buffer.copy_(torch.randn(buffer.shape, generator=g))
    before = [[b.clone() for b in buffers] for buffers in (cache.keys, cache.values)]
    tables, targets = [[7, 2, 9, 4], [1, 12, 3, 0]], [[7, 2], [3, 14]]
    lengths, kept = [15, 11], 6
    kept_LBGK = torch.stack(
        [
            torch.stack(
                [torch.randperm(n, generator=g)[:kept].sort().values for _ in range(num_heads)]
            )
            for _ in cache.keys
            for n in lengths
        ]
    ).unflatten(0, (len(cache.keys), -1))
    slots_BK = torch.tensor([[t[i // 4] * 4 + i % 4 for i in range(kept)] for t in targets])
    cache.keep(torch.tensor(tables, dtype=torch.int32), kept_LBGK, slots_BK)
    for buffers, old in zip((cache.keys, cache.values), before, strict=True):
        for buffer, was, kept_BGK in zip(buffers, old, kept_LBGK, strict=True):
            want = was.clone()
            for row, table in enumerate(tables):
                for head in range(num_heads):
                    for i, t in enumerate(kept_BGK[row, head].tolist()):
                        place = targets[row][i // 4], i % 4
                        want[(*place, head)] = was[table[t // 4], t % 4, head]
            assert torch.equal(buffer, want)
