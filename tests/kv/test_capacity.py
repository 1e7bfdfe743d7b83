"""The default size of the KV cache: by hand, against a cache without end, and in engines that know
their requests."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

import lowroll
from lowroll import machine
from lowroll.engine import cache_size as engine_module
from lowroll.engine.scheduler import Scheduler
from lowroll.kv.capacity import SHARE, NoRoom, Workload, capacity
from lowroll.kv.pages import PagePool
from lowroll.kv.policy.base import CachePolicy
from lowroll.kv.policy.dense import DENSE
from lowroll.kv.policy.table import make
from lowroll.model.device import free_memory
from lowroll.types import Request
from tests.fixtures.policies import HashedRKV, Recent
from tests.fixtures.scheduling import FakeRunner, check_invariants, tag
from tests.fixtures.tiny import hf_folder

EOS = 0


def test_loads_by_hand() -> None:
    # 20 prompt tokens are 5 pages of 4; a sample stores 12 more, behind a tail of 3 at most: 4
    # pages. Where groups take turns, their prompts' pages are there twice
    assert Workload(2, 3, 20, 13).tokens(4, max_batch=256) == 4 * (2 * 5 + 6 * 4 + 1)
    assert Workload(2, 3, 20, 13).tokens(4, max_batch=5) == 4 * (2 * 2 * 5 + 5 * 4 + 1)
    assert Workload(2, 3, 20, 13).tokens(4, max_batch=4) == 4 * (2 * 2 * 5 + 4 * 4 + 1)
    assert Workload(9, 3, 20, 13).tokens(4, max_batch=4) == 4 * (
        2 * 4 * 5 + 4 * 4 + 1
    )  # rows of four groups
    assert Workload(1, 1, 3, 1).tokens(4, max_batch=1) == 4 * (1 + 1)
    assert Workload(1, 1, 2, 2).tokens(4, max_batch=1) == 4 * (1 + 1)  # tail: the whole prompt
    assert Workload(1, 1, 3, 1, longest=41).tokens(4, max_batch=1) == 44


def test_capacity_by_hand() -> None:
    plenty: dict[str, Any] = {"page_size": 4, "max_batch": 8, "bytes_per_token": 100, "free": 10**9}
    assert capacity([Workload(2, 3, 20, 13), Workload(1, 1, 3, 1)], context=512, **plenty) == 4 * 35
    assert (
        capacity([Workload(2, 3, 20, 13)], context=512, **plenty | {"free": 40_000})
        == 40_000 // 4 // 100
    )
    assert capacity([], context=512, **plenty) == 8 * 512
    assert capacity([], context=10**5, **plenty) == 10**5
    assert capacity([], context=10**5, **plenty | {"max_batch": 64, "free": 10**12}) == 64 * 4096
    assert (
        capacity([], context=10**5, **plenty | {"max_batch": 10**6, "free": 10**12}) == 2**34 // 100
    )
    assert capacity([], context=10**5, **plenty | {"free": 4000}) == 10


def serve(
    requests: list[Request], num_pages: int, page_size: int, **options: Any
) -> tuple[list[Any], int]:
    """What was planned, step by step, and the prefix pages that were found again."""
    pool, plans = PagePool(num_pages, page_size), []
    scheduler = Scheduler(pool, behavior=tag(), eos_ids={EOS}, **options)
    runner = FakeRunner(pool, scheduler)
    for request in requests:
        scheduler.add(request)
    while scheduler.has_work:
        plan = scheduler.plan()
        plans.append(([(c.start, c.stop) for c in plan.prefills], len(plan.decodes), plan.steps))
        for sequence, ids in runner.run(plan):
            scheduler.commit_run(sequence, ids, [-1.0] * len(ids))
        check_invariants(scheduler)
    return plans, pool.hits


@pytest.mark.slow
@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("seed", range(150))
def test_nothing_waits_that_would_not_wait_in_a_cache_without_end(seed: int, bounded: bool) -> None:
    rng = random.Random(seed)
    page_size, max_batch = rng.choice([1, 3, 4, 16]), rng.choice([1, 2, 5, 16, 64])
    load = Workload(
        rng.randint(1, 12), rng.choice([1, 2, 4, 8]), rng.randint(1, 40), rng.randint(1, 24)
    )
    head = [rng.randrange(1, 12) for _ in range(rng.randint(0, load.prompt - 1))]
    requests = []
    for i in range(load.groups):
        longest = load.prompt if i % 2 else rng.randint(len(head) + 1, load.prompt)
        ids = head + [rng.randrange(12, 10**6) for _ in range(longest - len(head))]
        requests.append(Request(ids, n=load.n, max_tokens=load.response, seed=i, id=str(i)))
    options = {
        "max_batch": max_batch,
        "max_prefill_tokens": rng.choice([16, 8192]),
        "prefill_chunk": rng.choice([None, 5]),
        "lookahead": rng.choice([1, 16]),
    }
    if bounded:
        options["kv"] = Recent(rng.randint(1, 30), rng.randint(1, 12))
    pages = load.tokens(page_size, max_batch, options.get("kv", DENSE)) // page_size
    mine = serve(requests, pages, page_size, **options)
    assert mine == serve(requests, 4000, page_size, **options)


def test_an_engine_takes_what_its_loads_can_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = hf_folder(tmp_path / "model")
    each = 2 * 2 * 2 * 16 * 4  # keys and values, layers, heads, their size, float32

    def cache_tokens(free: int | None, **options: Any) -> int:
        monkeypatch.setattr(engine_module, "free_memory", lambda device: free)
        return lowroll.Engine(folder, weights="fp32", device="cpu", **options).stats().cache_tokens

    load = Workload(4, 8, 30, 10)
    assert (
        cache_tokens(10**9, workloads=[load])
        == load.tokens(16, 256)
        < 256 * 256
        == cache_tokens(10**9)
    )
    assert cache_tokens(SHARE * 160 * each, workloads=[load]) == 160
    assert cache_tokens(320 * each, cache_tokens=320) == 320
    assert cache_tokens(None, cache_tokens=2**15) == 2**15  # what nobody knows refuses nothing
    assert cache_tokens(None, workloads=[load]) == load.tokens(16, 256)
    with pytest.raises(
        ValueError, match=r"^cache_tokens: a KV cache of 336 tokens takes 0\.000172 GB, and 0\.000"
    ):
        cache_tokens(320 * each, cache_tokens=336)
    with pytest.raises(
        ValueError,
        match=r"^cache_tokens: 15 is less than one page of 16 tokens, which is all that "
        r"the free memory allows$",
    ):
        cache_tokens(SHARE * 15 * each)


def test_a_policys_state_is_taken_off_before_the_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = hf_folder(tmp_path / "model")
    each = 2 * 2 * 2 * 16 * 4  # keys and values, layers, heads, their size, float32
    kv = make("snapkv", budget=64, buffer=16)
    state = (8 + 2) * 8 * 2 * 4 * 16 * 4  # slots, window, layers, query heads, their size, float32

    def cache_tokens(free: int, **options: Any) -> int:
        monkeypatch.setattr(engine_module, "free_memory", lambda device: free)
        engine = lowroll.Engine(folder, weights="fp32", device="cpu", kv=kv, max_batch=8, **options)
        assert engine.stats().policy_bytes == state
        return engine.stats().cache_tokens

    load = Workload(8, 8, 30, 100)
    assert cache_tokens(SHARE * 160 * each + state, workloads=[load]) == 160
    assert cache_tokens(160 * each + state, cache_tokens=160) == 160
    with pytest.raises(NoRoom, match=r"takes 8.19e-05 GB and the state of snapkv 4.1e-05 GB, and"):
        cache_tokens(160 * each + state - 1, cache_tokens=160)
    with pytest.raises(ValueError, match="^cache_tokens: 0 is less than one page"):
        cache_tokens(state - 1)


def most_running(num_pages: int, kv: CachePolicy, n: int) -> int:
    """Samples of 100 + 3,997 tokens, n of each prompt, that run together on pages of 16."""
    pool, max_batch = PagePool(num_pages, 16), 256
    scheduler = Scheduler(
        pool,
        behavior=tag(),
        eos_ids={EOS},
        kv=kv,
        max_batch=max_batch,
        max_prefill_tokens=8192,
        prefill_chunk=None,
        lookahead=1,
    )
    for i in range(max_batch // n):
        ids = [1 + i, *range(1000, 1099)]
        scheduler.add(Request(ids, n=n, max_tokens=3997, ignore_eos=True, id=str(i)))
    runner, most = FakeRunner(pool, scheduler), 0
    for _ in range(4):
        for sequence, ids in runner.run(scheduler.plan()):
            scheduler.commit_run(sequence, ids, [-1.0] * len(ids))
        most = max(most, scheduler.num_running)
    return most


def test_the_same_memory_admits_more_sequences_under_a_budget() -> None:
    """The shapes of Qwen2.5-1.5B, in bfloat16: 4,096 keys are 112 MiB and 256 pages; a budget of 512
    and 128 more is 17.5 MiB, 40 pages of a sample's own, beside the 7 of its prompt."""
    each, kv = 28_672, HashedRKV(512, 128)
    free = SHARE * 16 * 4096 * each
    for n, bounded in ((1, 4096 // (40 + 7)), (8, 8 * (4096 // (8 * 40 + 7)))):
        load = [Workload(256 // n, n, 100, 3997)]
        known: dict[str, Any] = {"page_size": 16, "max_batch": 256, "bytes_per_token": each}
        pages = capacity(load, context=32768, free=free, **known) // 16
        assert pages == 4096 == capacity(load, context=32768, free=free, kv=kv, **known) // 16
        assert most_running(pages, DENSE, n) == 16
        assert bounded <= most_running(pages, kv, n) < bounded + 8 and bounded >= 5 * 16


def test_the_memory_of_a_machine_and_of_a_container(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In bytes; None where the system does not say. A container's files that nobody needs are
    free."""
    monkeypatch.setattr(machine, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(machine, "GROUP", tmp_path)
    assert free_memory(torch.device("cpu")) is None
    whole = machine.total_memory()
    for text, expected in (
        ("MemTotal: 9 kB\nMemAvailable:    100 kB\n", 102_400),
        ("MemTotal: 9 kB\n", None),
        ("MemAvailable: much kB\n", None),
    ):
        (tmp_path / "meminfo").write_text(text)
        assert free_memory(torch.device("cpu")) == expected
    (tmp_path / "meminfo").write_text("MemAvailable: 100 kB\n")
    for limit, used, free in (
        ("max\n", 0, 102_400),
        ("60000\n", 50_000, 14_000),
        ("60000\n", 70_000, 0),
        ("900000\n", 50_000, 102_400),
    ):
        (tmp_path / "memory.max").write_text(limit)
        (tmp_path / "memory.current").write_text(f"{used}\n")
        (tmp_path / "memory.stat").write_text("anon 7\ninactive_file 4000\n")
        assert machine.free_memory() == free
        assert machine.total_memory() == (whole if limit == "max\n" else int(limit))
