"""The scheduler against a fake cache that remembers which tokens each slot's K/V were computed
from.

Every decode row reads its whole history back from the slots. A page shared too early, copied too
late, freed too soon, served to other weights or written by two samples shows as a wrong content,
whatever the reference counts say.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from lowroll.engine.scheduler import Scheduler
from lowroll.kv.pages import PagePool, page_keys
from lowroll.kv.policy.dense import DENSE
from lowroll.types import BehaviorTag, Group, PolicySpan, Request
from tests.fixtures.scheduling import (
    EOS,
    VOCAB,
    FakeRunner,
    Life,
    check_invariants,
    commit_all,
    expected,
    letters,
    tag,
)


def run_all(scheduler: Scheduler, runner: FakeRunner, limit: int = 5000) -> dict[int, Group]:
    done: dict[int, Group] = {}
    for _ in range(limit):
        if not scheduler.has_work:
            return done
        commit_all(scheduler, runner.run(scheduler.plan()))
        check_invariants(scheduler)
        done |= scheduler.finished()
    raise AssertionError("the scheduler did not finish")


def make(num_pages=16, page_size=4, turn_caching=False, **knobs) -> tuple[Scheduler, FakeRunner]:
    pool = PagePool(num_pages, page_size, turn_caching=turn_caching)
    defaults = {"behavior": tag(), "max_batch": 4, "max_prefill_tokens": 64, "eos_ids": [EOS]}
    scheduler = Scheduler(pool, **(defaults | knobs))
    return scheduler, FakeRunner(pool, scheduler)


def outcome(group: Group) -> list[tuple]:
    return [(r.token_ids, r.finish_reason, r.stop_reason) for r in group.rollouts]


def test_a_group_by_hand():
    """6 prompt tokens, pages of 4: page 0 is shared, page 1 (the tail) is copied for two of three
    samples."""
    scheduler, runner = make()
    scheduler.add(
        Request(prompt_ids=[1, 2, 3, 4, 5, 6], n=3, max_tokens=4, ignore_eos=True, seed=7, id="q")
    )
    plan = scheduler.plan()
    (chunk,) = plan.prefills
    assert (chunk.start, chunk.stop, len(chunk.samples)) == (0, 6, 3)
    assert plan.copies == [] and plan.decodes == [] and chunk.sequence.pages == [0, 1]
    # 9 positions are stored at most: 3 pages a sample, page 0 shared -> 1 + 3 * 2, of which 2 are
    # given out
    assert (scheduler.reserved_pages, scheduler.pool.num_used) == (5, 2)
    commit_all(scheduler, runner.run(plan))
    plan = scheduler.plan()
    assert plan.copies == [(1, 2), (1, 3)] and [s.pages for s in plan.decodes] == [
        [0, 1],
        [0, 2],
        [0, 3],
    ]
    assert [scheduler.pool.refcount(p) for p in range(4)] == [
        3,
        1,
        1,
        1,
    ] and scheduler.reserved_pages == 3
    commit_all(scheduler, runner.run(plan))
    commit_all(scheduler, runner.run(scheduler.plan()))  # position 7 still lies on the tail page
    plan = scheduler.plan()
    assert [s.pages for s in plan.decodes] == [
        [0, 1, 4],
        [0, 2, 5],
        [0, 3, 6],
    ] and scheduler.reserved_pages == 0
    commit_all(scheduler, runner.run(plan))
    assert not scheduler.has_work and scheduler.pool.num_free == 16
    ((_, group),) = scheduler.finished()
    assert [len(r.token_ids) for r in group.rollouts] == [4, 4, 4] and scheduler.finished() == []
    sampler = {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "min_tokens": 0,
    }
    assert [r.behavior for r in group.rollouts] == [
        replace(tag(), sampler=sampler, seed=7, request_id="q", sample=i) for i in range(3)
    ]


@pytest.mark.parametrize(
    ("drawn", "kept", "ended"),
    [
        ([3, 4, 5], [3, 4, 5], None),
        ([3, EOS, 5], [3, EOS], ("stop", EOS)),
        ([EOS, 4, 5], [EOS], ("stop", EOS)),
        ([3, 4, EOS], [3, 4, EOS], ("stop", EOS)),
        ([3, 4, 5, 6], [3, 4, 5, 6], ("length", None)),
        ([3, 4, 5, 6, 7], [3, 4, 5, 6], ("length", None)),
        ([3, 7, 5], [3, 7], ("stop", 7)),
    ],
)
def test_a_run_of_tokens_ends_with_the_one_that_stops(drawn, kept, ended):
    scheduler, _ = make(lookahead=8)
    scheduler.add(Request(prompt_ids=[1, 2, 3, 4, 5], max_tokens=5, stop_ids=(7,)))
    (sequence,) = scheduler.plan().prefills[0].samples
    scheduler.commit_run(sequence, [9], [-0.5])
    (row,) = scheduler.plan().decodes
    scheduler.commit_run(row, drawn, [-float(i) for i in range(len(drawn))])
    assert row.token_ids == [9, *kept] and row.logprobs == [
        -0.5,
        *(-float(i) for i in range(len(kept))),
    ]
    assert (row.finish_reason and (row.finish_reason, row.stop_reason)) == ended
    if ended is None:
        assert row.cached_len == 5 + 1 + len(kept) - 1  # all but the last, which nobody has run yet


def test_a_run_of_tokens_of_an_aborted_sample_is_dropped():
    scheduler, _ = make(lookahead=8)
    request = Request(prompt_ids=[1, 2, 3], max_tokens=5, ignore_eos=True)
    handle = scheduler.add(request)
    (sequence,) = scheduler.plan().prefills[0].samples
    scheduler.commit_run(sequence, [9], [-0.5])
    (row,) = scheduler.plan().decodes
    assert scheduler.abort(handle)
    scheduler.commit_run(row, [3, 4], [-1.0, -1.0])
    assert row.token_ids == [9] and row.logprobs == [-0.5]


def test_rows_take_one_step_while_a_prompt_runs_and_several_when_none_does():
    scheduler, runner = make(lookahead=4)
    scheduler.add(Request(prompt_ids=[1, 2, 3], max_tokens=9, ignore_eos=True))
    steps = []
    for _ in range(3):
        plan = scheduler.plan()
        steps.append((len(plan.prefills), len(plan.decodes), plan.steps))
        commit_all(scheduler, runner.run(plan))
        if len(steps) == 1:
            scheduler.add(Request(prompt_ids=[4, 5], max_tokens=2, ignore_eos=True))
    assert steps == [(1, 0, 1), (1, 1, 1), (0, 2, 4)]


def test_prompts_that_come_one_by_one_run_together():
    """The rows take three steps before other prompts run; one that fills a step, one that has
    begun, and one that no row waits for are not held."""
    long = Request(prompt_ids=[1, 2, 3], max_tokens=40, ignore_eos=True)
    scheduler, runner = make(lookahead=2, gather=3, num_pages=64, prefill_chunk=5)
    plans = []

    def step(*prompts: list[int]) -> None:
        for prompt_ids in prompts:
            scheduler.add(Request(prompt_ids=prompt_ids, max_tokens=2, ignore_eos=True))
        plan = scheduler.plan()
        plans.append((len(plan.prefills), len(plan.decodes), plan.steps))
        commit_all(scheduler, runner.run(plan))
        check_invariants(scheduler)

    scheduler.add(long)
    step()
    step([4])  # its prompt has just run
    step([5])
    step()
    assert plans == [(1, 0, 1), (0, 1, 2), (0, 1, 2), (2, 1, 1)]
    plans.clear()
    step([6] * 7)
    step()
    step()
    step()
    assert plans == [(0, 3, 2), (0, 1, 2), (1, 1, 1), (1, 1, 1)]  # the second chunk follows at once
    plans.clear()
    step([7] * 40, [8] * 24)  # max_prefill_tokens is 64
    assert plans == [(2, 2, 1)]


def test_a_sibling_takes_over_the_tail_of_a_leader_that_ended_at_once():
    """Were it copied instead, the tail would be freed and given to the next group's copy within the
    same plan."""
    pairs = (
        Request(prompt_ids=[1, 2, 3, 4, 5], n=2, max_tokens=6, seed=seed) for seed in range(999)
    )
    short = [r for r in pairs if [len(ids) > 1 for ids, _, _ in expected(r)] == [False, True]][:2]
    scheduler, runner = make()
    for request in short:
        scheduler.add(request)
    commit_all(scheduler, runner.run(scheduler.plan()))
    plan = scheduler.plan()
    assert plan.copies == [] and [s.pages for s in plan.decodes] == [[0, 1], [2, 3]]


@pytest.mark.parametrize("num_pages, max_batch", [(1024, 64), (1024, 16), (7, 16), (4, 1)])
def test_64_samples_enter_in_waves_and_the_prompt_runs_once(num_pages, max_batch):
    request = Request(prompt_ids=[1, 2, 3, 4, 5], n=64, max_tokens=11, seed=3)
    scheduler, runner = make(num_pages=num_pages, max_batch=max_batch)
    prefilled, peak_rows = 0, 0
    scheduler.add(request)
    for _ in range(64 * 11 + 1):
        plan = scheduler.plan()
        prefilled += sum(c.stop - c.start for c in plan.prefills)
        peak_rows = max(peak_rows, len(plan.decodes))
        commit_all(scheduler, runner.run(plan))
        check_invariants(scheduler)
    assert prefilled == 5 and not scheduler.has_work
    if num_pages < 1024:  # a sample stores 15 positions: 4 pages, the first shared
        assert peak_rows == min((num_pages - 1) // 3, max_batch)
    assert scheduler.pool.num_free == num_pages
    assert outcome(scheduler.finished()[0][1]) == expected(request)


def test_admission_waits_for_worst_case_pages_first_in_first_out():
    """8 pages of 4. Samples of 8 + 9 - 1 = 16 positions need 4 pages: two fit, the small third
    waits for its turn."""
    scheduler, runner = make(num_pages=8)
    big = Request(prompt_ids=[1] * 8, max_tokens=9, ignore_eos=True)
    for i, request in enumerate(
        [
            big,
            replace(big, prompt_ids=[2] * 8),
            replace(big, prompt_ids=[3] * 8),
            Request(prompt_ids=[4], max_tokens=1),
        ]
    ):
        assert scheduler.add(request) == i
    plan = scheduler.plan()
    assert [c.sequence.group.handle for c in plan.prefills] == [0, 1]
    for _ in range(8):
        commit_all(scheduler, runner.run(plan))
        plan = scheduler.plan()
        assert not plan.prefills
    commit_all(scheduler, runner.run(plan))
    assert [handle for handle, _ in scheduler.finished()] == [0, 1]
    plan = scheduler.plan()
    assert [c.sequence.group.handle for c in plan.prefills] == [2, 3]


def test_a_promise_lapses_when_a_sample_ends_early():
    scheduler, runner = make(num_pages=4)
    endless = Request(
        prompt_ids=[1, 2], max_tokens=14, stop_ids=tuple(range(VOCAB))
    )  # stops at its first token
    scheduler.add(endless)
    scheduler.add(endless)
    plan = scheduler.plan()
    assert len(plan.prefills) == 1 and scheduler.reserved_pages == 3
    commit_all(scheduler, runner.run(plan))
    assert scheduler.reserved_pages == 0 and scheduler.pool.num_free == 4
    assert len(scheduler.plan().prefills) == 1


def test_prompt_tokens_of_a_step_are_bounded_and_long_prompts_come_in_chunks():
    scheduler, runner = make(num_pages=64, max_prefill_tokens=10, prefill_chunk=4)
    scheduler.add(Request(prompt_ids=[1] * 9, max_tokens=2))
    scheduler.add(Request(prompt_ids=[2] * 5, max_tokens=2))
    scheduler.add(Request(prompt_ids=[3] * 3, max_tokens=2))
    seen = []
    for _ in range(3):
        plan = scheduler.plan()
        seen.append(
            [(c.sequence.group.handle, c.start, c.stop, bool(c.samples)) for c in plan.prefills]
        )
        commit_all(scheduler, runner.run(plan))
    assert seen == [
        [(0, 0, 4, False), (1, 0, 4, False)],  # the third's 3 tokens exceed the 2 that are left
        [(0, 4, 8, False), (1, 4, 5, True), (2, 0, 3, True)],
        [(0, 8, 9, True)],
    ]
    scheduler, runner = make(
        num_pages=64, max_prefill_tokens=4
    )  # whole prompts: a long one runs, alone
    scheduler.add(Request(prompt_ids=[1] * 9, max_tokens=1))
    scheduler.add(Request(prompt_ids=[2], max_tokens=1))
    assert [(c.start, c.stop) for c in scheduler.plan().prefills] == [(0, 9)]


def test_prefix_pages_are_reused_by_equal_weights_only():
    scheduler, runner = make(num_pages=32)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8]
    request = Request(prompt_ids=prompt, max_tokens=2, ignore_eos=True)
    starts = []
    for change in (
        None,
        None,
        [1, 2, 3, 4, 9, 9, 9],
        tag(2),
        None,
        replace(tag(2), kv_policy="rkv"),
        replace(tag(2), kv_dtype="fp8"),
        None,
    ):
        if isinstance(change, BehaviorTag):
            scheduler.set_behavior(change)
        scheduler.add(replace(request, prompt_ids=change) if isinstance(change, list) else request)
        plan = scheduler.plan()
        starts.append(plan.prefills[0].start)
        commit_all(scheduler, runner.run(plan))
        run_all(scheduler, runner)
    # of 8 known tokens 4 are skipped: the last token always runs, on a page of its own
    assert starts == [0, 4, 4, 0, 4, 0, 0, 4] and scheduler.pool.hits == 4


@pytest.mark.parametrize("turn_caching", [False, True])
def test_a_later_turn_finds_the_pages_of_what_was_drawn(turn_caching):
    """Full pages of the keys that there are: the last token's is not."""
    scheduler, runner = make(num_pages=32, turn_caching=turn_caching)
    scheduler.add(Request([1, 2, 3, 4, 5, 6], max_tokens=7, ignore_eos=True, seed=1))
    (rollout,) = run_all(scheduler, runner)[0].rollouts
    for new, start in ((rollout.token_ids, 12), ([*rollout.token_ids[:4], VOCAB - 1, 1, 1, 1], 8)):
        scheduler.add(Request([1, 2, 3, 4, 5, 6, *new, 5], max_tokens=3, ignore_eos=True))
        plan = scheduler.plan()
        assert plan.prefills[0].start == (start if turn_caching else 4)
        commit_all(scheduler, runner.run(plan))
        run_all(scheduler, runner)
        if not turn_caching:
            return


@pytest.mark.parametrize("seed", range(30))
def test_conversations_with_cached_turns_read_what_they_wrote(seed):
    """Random groups in few slots and pages, whose samples go on, while others wait for the tail of
    their prompt, weights change and samples are given up: the fake cache tells of every key that is
    another one's."""
    rng = Random(seed)
    scheduler, runner = make(num_pages=40, max_batch=rng.randint(1, 6), turn_caching=True)
    known = {}
    left = [([rng.randrange(2, VOCAB) for _ in range(rng.randint(1, 11))], 0) for _ in range(8)]
    version = 1
    for _ in range(4000):
        if left and rng.random() < 0.3:
            prompt, turn = left.pop()
            n = rng.choice((1, 1, 2, 8)) if turn == 0 else 1
            asked = Request(prompt, n=n, max_tokens=rng.randint(1, 9), seed=rng.randrange(9))
            known[scheduler.add(asked)] = turn
        if rng.random() < 0.01:
            version += 1
            scheduler.set_behavior(tag(version))
        if not scheduler.has_work:
            if not left:
                break
            continue
        commit_all(scheduler, runner.run(scheduler.plan()))
        if known and rng.random() < 0.02:
            scheduler.abort(rng.choice(list(known)))
        check_invariants(scheduler)
        for handle, group in scheduler.finished():
            turn = known.pop(handle)
            for rollout in group.rollouts:
                if turn < 3 and rng.random() < 0.5:
                    ids = [*group.request.prompt_ids, *rollout.token_ids, rng.randrange(2, VOCAB)]
                    if len(ids) < 60:
                        left.append((ids, turn + 1))
    assert not known and scheduler.pool.num_used == 0


def test_a_prompt_that_ran_under_two_behaviours_is_never_served_though_the_first_came_back():
    pool = PagePool(16, 2)
    scheduler = Scheduler(
        pool, behavior=tag(1), max_batch=4, max_prefill_tokens=64, prefill_chunk=2, eos_ids=[EOS]
    )
    scheduler.add(Request(prompt_ids=[1, 2, 3, 4, 5, 6, 7], max_tokens=2))
    for version in (1, 2, 1, 1):  # the second chunk runs under version 2
        scheduler.set_behavior(tag(version))
        plan = scheduler.plan()
    for sequence in plan.prefills[0].samples:
        scheduler.commit(sequence, 3, -1.0)
    assert (
        plan.prefills[0].samples
        and pool.match(page_keys([1, 2, 3, 4, 5, 6], 2, scheduler.salt)) == []
    )


def test_weights_updated_in_flight_make_spans_and_no_prefix():
    scheduler, runner = make(num_pages=32, prefill_chunk=4)
    request = Request(prompt_ids=[1, 2, 3, 4, 5, 6], max_tokens=3, ignore_eos=True)
    scheduler.add(request)
    runner.run(scheduler.plan())
    scheduler.set_behavior(tag(2))  # in the middle of the prompt
    commit_all(scheduler, runner.run(scheduler.plan()))
    scheduler.set_behavior(replace(tag(3), noise_sigma=0.1))
    run_all_groups = run_all(scheduler, runner)
    scheduler.set_behavior(tag(4))
    behavior = run_all_groups[0].rollouts[0].behavior
    assert (
        behavior.policy == (PolicySpan(2, "digest2", 0), PolicySpan(3, "digest3", 1))
        and behavior.noise_sigma == 0.1
    )
    for version in (2, 1):  # neither the old nor the mixed pages may be served
        scheduler.set_behavior(tag(version))
        handle = scheduler.add(request)
        assert scheduler.plan().prefills[0].start == 0
        scheduler.abort(handle)


def test_a_finished_sample_keeps_the_behavior_it_was_drawn_under():
    scheduler, runner = make()
    pairs = (Request(prompt_ids=[1], n=2, max_tokens=6, seed=seed) for seed in range(99))
    scheduler.add(next(r for r in pairs if len({len(ids) for ids, _, _ in expected(r)}) == 2))
    while not any(s.finish_reason for s in scheduler.in_flight[0].sequences):  # at most 6 steps
        commit_all(scheduler, runner.run(scheduler.plan()))
    scheduler.set_behavior(replace(tag(2), noise_sigma=0.5))
    rollouts = run_all(scheduler, runner)[0].rollouts
    short, long = sorted(rollouts, key=lambda r: len(r.token_ids))
    assert short.behavior.noise_sigma == 0.0 and [s.version for s in short.behavior.policy] == [1]
    assert long.behavior.noise_sigma == 0.5 and [s.version for s in long.behavior.policy] == [1, 2]


def test_abort_returns_what_there_is_and_late_commits_are_ignored():
    scheduler, runner = make()
    handles = [
        scheduler.add(Request(prompt_ids=[i] * 5, n=3, max_tokens=9, ignore_eos=True))
        for i in (1, 2, 3)
    ]
    commit_all(scheduler, runner.run(scheduler.plan()))
    samples = runner.run(scheduler.plan())
    assert scheduler.abort(handles[0]) and scheduler.abort(handles[2])
    assert not scheduler.abort(handles[0]) and not scheduler.abort(77)
    commit_all(scheduler, samples)  # the step was under way: its results still arrive
    check_invariants(scheduler)
    done = dict(scheduler.finished())
    assert set(done) == {handles[0], handles[2]}
    assert [(len(r.token_ids), r.finish_reason) for r in done[handles[0]].rollouts] == [
        (1, "abort")
    ] * 3
    assert [(r.token_ids, r.behavior.policy) for r in done[handles[2]].rollouts] == [
        ([], tag().policy)
    ] * 3
    run_all(scheduler, runner)
    assert scheduler.pool.num_free == 16


def test_a_log_prob_that_is_no_number_is_refused():
    scheduler, _ = make()
    scheduler.add(Request(prompt_ids=[1], max_tokens=2))
    (chunk,) = scheduler.plan().prefills
    with pytest.raises(ValueError, match="logprob of sample 0, token 0 is nan"):
        scheduler.commit(chunk.sequence, 3, float("nan"))


def test_stop_strings_by_hand():
    def stop(ids, strings, min_tokens=0):
        scheduler, _ = make(num_pages=64, decode=letters)
        scheduler.add(
            Request(prompt_ids=[1], max_tokens=60, min_tokens=min_tokens, stop_strings=strings)
        )
        sequence = scheduler.plan().prefills[0].sequence
        for i, token in enumerate(ids):
            scheduler.commit(sequence, token, -1.0)
            if sequence.finish_reason:
                return i, sequence.stop_reason
        return None

    assert stop([1, 2, 3, 4], ("cd", "abc")) == (2, "abc")  # the first that is complete
    assert stop([1, 2, 3], ("bc", "abc")) == (2, "bc")  # both at once: the request's order
    assert stop([1] + [10] * 40 + [2], ("ab",)) == (41, "ab")  # tokens without text in between
    assert stop([5] * 30 + [11, 11], ("é",)) == (31, "é")
    assert stop([1, 2, 3, 1, 2], ("ab",), min_tokens=2) == (
        4,
        "ab",
    )  # not within the first two tokens
    assert stop([1, 2, 1], ("ba",), min_tokens=2) is None


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_lives_with_replays_end_as_the_weights_that_they_name_draw(first):
    """The dense cache alone: drafts of any age, kept or not, under weights that draw other tokens."""
    kept = 0
    for seed in range(first, first + 50):
        try:
            life = Life(seed, DENSE)
            life.run()
        except Exception as error:
            raise AssertionError(f"Life({seed}, DENSE).run()") from error
        kept += life.scheduler.replays.kept
    assert kept > 20
