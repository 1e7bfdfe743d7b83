"""The scheduler under policies that bound a sample's cache, against a fake cache whose two heads
keep different keys (`fixtures.scheduling.FakeRunner`)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lowroll.engine.scheduler import Scheduler
from lowroll.kv.pages import PagePool
from lowroll.kv.policy.base import CachePolicy, footprint, prompt_slot
from lowroll.types import Group, Request
from tests.fixtures.policies import Parity, Recent
from tests.fixtures.scheduling import EOS, FakeRunner, Life, check_invariants, commit_all, tag


def make(kv: CachePolicy, num_pages: int = 32, page_size: int = 4, **knobs):
    pool = PagePool(num_pages, page_size)
    defaults = {"behavior": tag(), "max_batch": 8, "max_prefill_tokens": 64, "eos_ids": [EOS]}
    scheduler = Scheduler(pool, kv=kv, **(defaults | knobs))
    return scheduler, FakeRunner(pool, scheduler)


def step(scheduler: Scheduler, runner: FakeRunner):
    plan = scheduler.plan()
    check_invariants(scheduler)
    commit_all(scheduler, runner.run(plan))
    check_invariants(scheduler)
    return plan


def finish(scheduler: Scheduler, runner: FakeRunner, limit: int = 3000) -> dict[int, Group]:
    done: dict[int, Group] = {}
    for _ in range(limit):
        if not scheduler.has_work:
            return done
        step(scheduler, runner)
        done |= scheduler.finished()
    raise AssertionError("the scheduler did not finish")


def test_a_sample_by_hand():
    """Pages of 4, 6 keys stay of 9. The prompt of 5 fills 2 pages, which are never edited."""
    scheduler, runner = make(Recent(6, 3), lookahead=16)
    scheduler.add(Request([1, 2, 3, 4, 5], max_tokens=12, ignore_eos=True))
    step(scheduler, runner)
    plan = step(scheduler, runner)
    (row,) = plan.decodes
    assert (plan.compactions, plan.steps, plan.limits) == ([], 4, [4])  # 5 keys and 4 are 9
    assert row.pages == [0, 1, 2] and (row.cached_len, row.position) == (9, 9)
    plan = step(scheduler, runner)
    (one,) = plan.compactions
    assert (one.pages, one.targets, one.cached, one.kept) == ([0, 1, 2], [2, 3], 9, 6)
    assert (one.slot, one.position) == (row.slot, 8)
    assert scheduler.pool.refcount(0) == 0  # the prefix cache may serve it again
    assert row.pages == [2, 3, 1] and plan.limits == [3]  # page 1 was free at once
    assert (row.cached_len, row.position) == (9, 12)
    plan = step(scheduler, runner)
    (one,) = plan.compactions
    assert (one.pages, one.targets) == ([2, 3, 1], [2, 3])  # in place
    assert scheduler.pool.num_used == len(row.pages) == 3
    finish(scheduler, runner)
    assert scheduler.pool.num_free == 32 and runner.num_compactions == 3


def test_a_prompt_over_the_limit_is_compacted_once_and_its_samples_share_what_is_left():
    """14 prompt tokens, of which 6 stay: 4 pages become 2, and the second, half full, is copied for
    all samples but one."""
    scheduler, runner = make(Parity(6, 3), lookahead=16)
    scheduler.add(Request(list(range(1, 8)) * 2, n=3, max_tokens=3, ignore_eos=True))
    plan = step(scheduler, runner)
    assert plan.compactions == [] and scheduler.pool.num_used == 4 + 2
    plan = scheduler.plan()
    # the prompt's own full pages are cached, for other requests
    assert scheduler.pool.num_used == 1 + 3
    commit_all(scheduler, runner.run(plan))
    (one,) = plan.compactions
    assert (one.cached, one.kept, len(one.pages), len(one.targets)) == (14, 6, 4, 2)
    assert one.targets[0] not in one.pages and plan.forks == [(0, 1), (0, 2)]
    assert len(plan.copies) == 2 and {source for source, _ in plan.copies} == {one.targets[1]}
    assert all(s.group.prompt_pages == [] for s in plan.decodes)
    finish(scheduler, runner)
    scheduler.add(Request(list(range(1, 8)) * 2, max_tokens=3, ignore_eos=True))
    assert scheduler.plan().prefills[0].start == 12  # the whole prompt, not what was left of it


def test_later_waves_fork_from_the_prompts_own_slot():
    """Two at a time: the third and the fourth sample enter when the leader's state has moved on."""
    scheduler, runner = make(Parity(6, 3), max_batch=2)
    scheduler.add(Request([1] * 9, n=4, max_tokens=20, ignore_eos=True))
    forks = []
    while scheduler.has_work:
        forks += step(scheduler, runner).forks
    kept = prompt_slot(2)
    assert forks == [(0, 1), (0, kept), (kept, 1), (kept, 0)]


def test_admission_reserves_the_bounded_worst_case():
    """8 pages of 4 hold one dense sample of 2 + 30 tokens, and two that are bounded."""
    dense, bounded = footprint(Recent(99, 1), 2, 30, 4), footprint(Recent(6, 2), 2, 30, 4)
    assert (dense.alone, dense.evicts) == (8, False)
    assert (bounded.alone, bounded.writer, bounded.evicts) == (3, 2, True)
    running = {}
    for name, kv in (("dense", Recent(99, 1)), ("bounded", Recent(6, 2))):
        scheduler, runner = make(kv, num_pages=8)
        for i in range(4):
            scheduler.add(Request([1, 2], max_tokens=30, ignore_eos=True, seed=i))
        step(scheduler, runner)
        running[name] = scheduler.num_running
        finish(scheduler, runner)
        assert scheduler.pool.peak_used <= 8
    assert running == {"dense": 1, "bounded": 2}


def test_rows_that_are_full_wait_for_the_next_plan_and_the_others_go_on():
    scheduler, runner = make(Recent(6, 4), lookahead=8)
    scheduler.add(Request([1] * 3, max_tokens=30, ignore_eos=True))
    scheduler.add(Request([2] * 6, max_tokens=30, ignore_eos=True))
    step(scheduler, runner)
    plan = step(scheduler, runner)
    assert plan.steps == 7 and plan.limits == [7, 4]
    plan = step(scheduler, runner)
    assert len(plan.compactions) == 2 and plan.limits == [4, 4]


def test_a_later_sample_takes_over_the_tail_that_a_compacted_one_has_left():
    """The second sample enters when the short request has ended, and the first has moved to pages
    of its own."""
    scheduler, runner = make(Recent(6, 3), max_batch=2)
    scheduler.add(Request([7], max_tokens=8, ignore_eos=True))
    scheduler.add(Request([1, 2, 3, 4, 5], n=2, max_tokens=20, ignore_eos=True))
    plans = [step(scheduler, runner) for _ in range(9)]
    assert [len(plan.compactions) for plan in plans] == [0, 0, 0, 0, 0, 1, 0, 0, 1]
    first, second = plans[-1].decodes
    assert plans[-1].copies == [] and second.pages == [1, 2]
    assert first is second.group.leader and not set(first.pages) & set(second.pages)


@pytest.mark.slow
@pytest.mark.parametrize(
    "first",
    [
        pytest.param(first, marks=() if first < 600 else pytest.mark.long)
        for first in range(0, 2000, 100)
    ],
)
def test_any_interleaving_keeps_pages_exact_and_every_key_where_it_belongs(first):
    """600 lives, 2,000 with the long ones: no page is lost or used twice, no sample has more than
    its worst case, every head reads exactly the keys that its policy keeps, of the right tokens and
    weights, and every request gets the tokens that it gets alone."""
    for seed in range(first, first + 100):
        try:
            Life(seed).run()
        except Exception as error:
            raise AssertionError(f"Life({seed}).run()") from error


def test_a_budget_that_is_never_reached_plans_what_the_dense_cache_plans():
    request = Request([1, 2, 3, 4, 5], n=3, max_tokens=9, ignore_eos=True)
    plans = []
    for kv in (Recent(14, 1), None):
        scheduler, runner = make(kv) if kv else make(Recent(10**6, 1))
        scheduler.add(request)
        scheduler.add(replace(request, seed=1))
        mine = []
        while scheduler.has_work:
            plan = step(scheduler, runner)
            rows = [(s.slot, tuple(s.pages)) for s in plan.decodes]
            mine.append((plan.compactions, plan.copies, plan.steps, plan.limits, rows))
        plans.append(mine)
    assert plans[0] == plans[1]


def test_a_policy_that_leaves_no_room_is_an_error_of_the_policy():
    scheduler, runner = make(Recent(6, 0))
    scheduler.add(Request([1] * 8, max_tokens=3))
    with pytest.raises(AssertionError, match="recent: a cache of 6 keys takes no other"):
        step(scheduler, runner)
