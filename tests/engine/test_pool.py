"""Several engines as one, over real HTTP: fakes whose tokens follow from (seed, id, sample, position)
and the version, so that what is lost, doubled or drawn from other weights shows."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from lowroll.engine.remote import replica, weight_broadcaster
from lowroll.engine.remote.discovery import Elastic
from lowroll.engine.remote.http_client import ServerError
from lowroll.engine.remote.pool import EnginePool
from lowroll.engine.remote.replica import PoolOptions, Replica
from lowroll.engine.remote.replica_set import PoolReport
from lowroll.engine.remote.vllm.probe import ADAPTERS, RELOAD
from lowroll.orchestrator.conversations import Conversations, Dialogue
from lowroll.orchestrator.groups import check_group
from lowroll.orchestrator.prompt_source import PromptDraw
from lowroll.types import Group, Message, Prompt, Request
from tests.fixtures.fake_engine import EOS, Child, FakeEngine, Mood, length, publish, started, token
from tests.fixtures.fake_vllm import FakeVllm
from tests.fixtures.processes import eventually
from tests.fixtures.talks import Answers, Numbers

ADMIN = "the-admin-of-these-engines"
HEALTHY = "perf/engines_healthy"
QUICK = 1.2  # seconds of silence, where one is to be noticed: a beat is 0.2
CALM = 20.0  # where nobody is silent but who waits for the processor


def asked(count: int, n: int = 2, tokens: int = 12, **fields: object) -> list[Request]:
    return [
        Request([2, 3, 4 + i], n=n, max_tokens=tokens, seed=9, id=f"r{i}", **fields)
        for i in range(count)
    ]


def expected(request: Request, version: int = 0) -> list[list[int]]:
    """Of a request that ignores the end of a sequence."""
    return [
        [token(version, 9, request.id, i, t, 67) for t in range(request.max_tokens)]
        for i in range(request.n)
    ]


def drawn(group: Group) -> list[list[int]]:
    return [rollout.token_ids for rollout in group.rollouts]


def versions(group: Group) -> set[int]:
    return {span.version for one in group.rollouts for span in one.behavior.policy}


def finish(
    pool: EnginePool | Conversations, handles: list[int], seconds: float = 60.0
) -> list[Group]:
    """The groups of handles, each of which comes once."""
    found: dict[int, Group] = {}
    end = time.monotonic() + seconds
    while len(found) < len(handles):
        assert time.monotonic() < end, f"{len(found)} of {len(handles)} have come"
        for handle, group in pool.step():
            assert handle not in found, "it came twice"
            found[handle] = group
    assert pool.step() == []
    return [found[handle] for handle in handles]


def total(pool: EnginePool, name: str) -> float:
    return pool.report().metrics()[f"perf/engine_{name}" if name != "healthy" else HEALTHY]


def healthy(pool: EnginePool, count: int) -> None:
    if not eventually(lambda: total(pool, "healthy") == count):
        pool.step()  # raises what ended the watch of an engine
        pytest.fail("\n".join(str(one) for one in pool.report().engines))


@contextmanager
def engines(
    count: int, weights: Path | None = None, **fields: object
) -> Iterator[list[FakeEngine]]:
    with ExitStack() as stack:
        made = [FakeEngine(weights=weights, admin=ADMIN, **fields) for _ in range(count)]
        yield [stack.enter_context(fake) for fake in made]


def pooled(fakes: list[FakeEngine], **options: object) -> EnginePool:
    """A pool that has met all of them that run."""
    given = {"admin_token": ADMIN, "silent_s": CALM, "start_s": 5.0} | options
    pool = EnginePool([fake.url for fake in fakes], PoolOptions(**given))
    healthy(pool, sum(fake.runs for fake in fakes))
    return pool


def together(pool: EnginePool, fakes: list[FakeEngine], requests: list[Request]) -> list[int]:
    """The handles of requests of which none ends before all have been dealt."""
    for fake in fakes:
        fake.mood.stalled = True
    handles = [pool.add(request) for request in requests]
    assert eventually(lambda: sum(fake.open for fake in fakes) == len(requests))
    for fake in fakes:
        fake.mood.stalled = False
    return handles


# -- requests --------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 8])
@pytest.mark.parametrize("admin", [ADMIN, None])
def test_a_pool_of_two_is_one_engine(n: int, admin: str | None) -> None:
    requests = asked(9, n)
    with engines(3) as (alone, a, b):
        with pooled([alone], admin_token=admin) as pool:
            one = pool.generate(requests)
        seen: list[tuple[int, int]] = []
        with pooled([a, b], admin_token=admin) as pool:
            two = pool.generate(requests, lambda *counts: seen.append(counts))
            again = finish(pool, [pool.add(request) for request in requests])
    assert one == two == again
    assert seen[-1] == (9, 9)
    assert len(a.bodies) + len(b.bodies) == 18
    assert min(len(a.bodies), len(b.bodies)) >= 6


def test_addresses_are_taken_with_and_without_v1_and_once_each() -> None:
    with engines(1) as (fake,):
        with EnginePool([f"{fake.url}/v1/"], PoolOptions(start_s=5.0)) as pool:
            assert pool.generate(asked(1))
        with pytest.raises(ValueError, match="is named twice"):
            EnginePool([f"{fake.url}/v1", fake.url], PoolOptions(start_s=5.0))
    with pytest.raises(ValueError, match="client.base_url: no engine"):
        EnginePool([])
    with pytest.raises(ValueError, match="url: expected http"):
        EnginePool(["ftp://there"])


def test_the_engine_with_the_fewest_outstanding_tokens_is_next() -> None:
    with engines(2) as (a, b):
        with pooled([a, b]) as pool:
            long = Request([2], n=8, max_tokens=40, seed=9, id="long", ignore_eos=True)
            short = [
                Request([2], max_tokens=8, seed=9, id=f"s{i}", ignore_eos=True) for i in range(12)
            ]
            finish(pool, together(pool, [a, b], [long, *short]))
    counts = sorted([len(a.bodies), len(b.bodies)])
    assert counts == [1, 12], "320 tokens against 12 times 9"


def test_what_does_not_fit_is_refused_before_it_is_sent() -> None:
    with engines(1, context=32) as (fake,), pooled([fake]) as pool:
        with pytest.raises(ValueError, match=r"requests\[1\].max_tokens"):
            pool.generate([*asked(1), Request([2], max_tokens=40)])
        with pytest.raises(ValueError, match="prompt_ids"):
            pool.add(Request([67]))
        assert not fake.bodies
        assert not pool.has_work
        assert pool.step() == []


def test_an_aborted_request_comes_back_once_and_its_engine_hears_of_it() -> None:
    with engines(1) as (fake,), pooled([fake]) as pool:
        fake.mood.stalled = True
        first, second = (pool.add(request) for request in asked(2))
        assert eventually(lambda: fake.open == 2)
        assert len(pool.so_far(first)) == 2
        assert pool.abort(first)
        while not (ended := pool.step()):
            pass
        assert [handle for handle, _ in ended] == [first]
        assert {one.finish_reason for one in ended[0][1].rollouts} == {"abort"}
        assert not pool.abort(first)
        assert pool.so_far(first) == []
        assert eventually(lambda: fake.closed == 1)
        fake.mood.stalled = False
        assert {one.finish_reason for one in finish(pool, [second])[0].rollouts} <= {
            "stop",
            "length",
        }


def test_an_error_of_the_caller_ends_what_it_asked_for() -> None:
    def stop(done: int, of: int) -> None:
        raise KeyboardInterrupt

    with engines(2) as fakes, pooled(fakes) as pool:
        for fake in fakes:
            fake.mood.slow = 0.05
        with pytest.raises(KeyboardInterrupt):
            pool.generate(asked(8), stop)
        assert eventually(lambda: not any(fake.open for fake in fakes))
        assert not pool.has_work
        for fake in fakes:
            fake.mood.slow = 0.0
        assert len(pool.generate(asked(8))) == 8


def test_a_pause_that_someone_left_is_ended() -> None:
    with engines(1) as (fake,):
        fake.paused = True
        with pooled([fake]) as pool:
            assert finish(pool, [pool.add(asked(1)[0])])


# -- what goes wrong -------------------------------------------------------------------------------


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("n", [1, 8])
def test_what_a_dead_engine_had_goes_on_at_another(n: int, together: bool) -> None:
    requests = asked(6, n, ignore_eos=True)
    with engines(2) as (a, b), pooled([a, b]) as pool:
        a.mood.slow = b.mood.slow = 0.06
        told: list[int] = []

        def kill(done: int, of: int) -> None:
            told.append(done)
            if len(told) == 1:
                a.stop()

        if together:
            groups = pool.generate(requests, kill)
        else:
            handles = [pool.add(request) for request in requests]
            assert eventually(lambda: a.open > 0)
            a.stop()
            groups = finish(pool, handles)
        assert [drawn(group) for group in groups] == [expected(r) for r in requests]
        healthy(pool, 1)
        assert total(pool, "fenced") == 1
        a.restart()
        healthy(pool, 2)


@pytest.mark.parametrize("mood", [{"silent": True}, {"stalled": True}, {"sick": 503}])
@pytest.mark.parametrize("together", [True, False])
def test_an_engine_that_does_not_get_on_is_evicted_in_time(mood: dict, together: bool) -> None:
    requests = asked(6, ignore_eos=True)
    with engines(2) as (a, b), pooled([a, b], silent_s=QUICK) as pool:
        a.mood = Mood(slow=2.0, **mood)
        b.mood.slow = 0.01
        if together and "silent" in mood:
            a.mood.silent = False  # it is paused first
            a.mood.stalled = True
        began = time.monotonic()
        if together:
            groups = pool.generate(requests)
        else:
            groups = finish(pool, [pool.add(request) for request in requests])
        assert time.monotonic() - began < 20 * QUICK
        assert [drawn(group) for group in groups] == [expected(r) for r in requests]
        assert total(pool, "handed_over") >= 3
        a.mood = Mood()
        healthy(pool, 2)
        assert total(pool, "late") == 0


def test_a_slow_engine_that_draws_is_left_alone() -> None:
    with engines(1) as (fake,), pooled([fake], silent_s=QUICK) as pool:
        fake.mood.slow = 0.15
        assert drawn(finish(pool, [pool.add(asked(1, ignore_eos=True)[0])])[0])
        assert total(pool, "fenced") == 0


def test_an_engine_that_answers_requests_is_not_silent() -> None:
    """Its health has to wait while it is flooded."""
    with engines(1) as (fake,), pooled([fake], silent_s=QUICK, concurrency=1) as pool:
        fake.mood.slow, fake.mood.sick = 0.02, 503
        handles = [pool.add(request) for request in asked(10, ignore_eos=True)]
        began = time.monotonic()
        finish(pool, handles)
        assert time.monotonic() - began > QUICK
        assert total(pool, "fenced") == 0


@pytest.mark.parametrize("status", [429, 503, 502])
def test_a_busy_engine_is_asked_again_later(status: int) -> None:
    with engines(1) as (fake,), pooled([fake]) as pool:
        fake.mood.refuse, fake.mood.status = 7, status
        groups = finish(pool, [pool.add(request) for request in asked(4, ignore_eos=True)])
        assert [drawn(group) for group in groups] == [expected(r) for r in asked(4)]
        assert total(pool, "retries") == 7
        assert total(pool, "fenced") == 0
        fake.mood.refuse = 2
        assert len(pool.generate(asked(4))) == 4


def test_an_engine_that_stays_busy_is_not_asked_for_ever() -> None:
    with engines(1) as (fake,), pooled([fake], start_s=1.0) as pool:
        fake.mood.refuse = 10**6
        pool.add(asked(1)[0])
        with pytest.raises(ServerError, match=r"answered 503: said the test"):
            finish(pool, [0])


def test_a_lost_connection_is_no_lost_request() -> None:
    with engines(2) as fakes, pooled(fakes) as pool:
        for fake in fakes:
            fake.mood.drop = 5
        groups = finish(pool, [pool.add(request) for request in asked(20, ignore_eos=True)])
        assert [drawn(group) for group in groups] == [expected(r) for r in asked(20)]
        assert total(pool, "retries") == 10


def test_a_wrong_request_ends_the_run_by_name() -> None:
    with engines(1) as (fake,), pooled([fake]) as pool:
        fake.mood.refuse, fake.mood.status = 1, 400
        with pytest.raises(ServerError, match=r"request r0: .* answered 400: said the test"):
            finish(pool, [pool.add(asked(1)[0])])
        assert len(fake.bodies) == 1
        assert not pool.has_work


@pytest.mark.parametrize(("fault", "said"), [("status", "500"), ("garbage", "no JSON")])
def test_a_request_that_fails_everywhere_ends_the_run(fault: str, said: str) -> None:
    with engines(2) as fakes, pooled(fakes) as pool:
        for fake in fakes:
            if fault == "status":
                fake.mood.refuse, fake.mood.status = 10**6, 500
            else:
                fake.mood.garbage = True
        with pytest.raises(ServerError, match=rf"request r0: .*{said}.*sent 4 times"):
            finish(pool, [pool.add(asked(1)[0])])
        assert {len(fake.bodies) for fake in fakes} != {0, 4}, "another engine was tried"


def test_a_request_has_its_own_deadline() -> None:
    with engines(2) as (a, b), pooled([a, b], timeout_s=2.0) as pool:
        a.mood.slow = 0.5  # draws all the time, and is not done in time
        groups = finish(pool, [pool.add(r) for r in asked(2, ignore_eos=True)])
        assert [drawn(group) for group in groups] == [expected(r) for r in asked(2)]
        assert total(pool, "fenced") == 0
        assert total(pool, "retries") == 1


def test_the_wait_for_any_engine_ends_and_names_them() -> None:
    with engines(2) as (a, b), pooled([a, b], silent_s=QUICK, start_s=1.0) as pool:
        a.stop()
        b.mood = Mood(sick=503, stalled=True)
        handle = pool.add(asked(1)[0])
        with pytest.raises(ServerError, match="no engine has answered for 1 s") as found:
            finish(pool, [handle])
        for said in (a.url, "connection", b.url, "503"):
            assert said in str(found.value)


def test_a_start_without_engines_ends_and_names_them() -> None:
    with engines(1) as (fake,):
        gone = fake.url
    with pytest.raises(ServerError, match=f"within 0.7 s: {gone}: .*connection"):
        EnginePool([gone], PoolOptions(start_s=0.7, silent_s=QUICK))


def test_a_start_waits_for_the_first_engine() -> None:
    with engines(2) as (a, b):
        b.stop()
        with pooled([a, b]) as pool:
            assert len(pool.generate(asked(4))) == 4
            b.restart()
            healthy(pool, 2)


# -- who they are ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "odd"),
    [
        ("vocabulary", {"vocab": 99}),
        ("context length", {"context": 99}),
        ("weights", {"format": "int4"}),
        ("KV dtype", {"kv": "fp8"}),
        ("model", {"model": "other"}),
    ],
)
def test_engines_that_are_not_alike_are_named(name: str, odd: dict) -> None:
    with engines(2) as (a, b), engines(1, **odd) as (c,):
        with pytest.raises(ValueError, match=f"engines do not agree: {name}: http.* has .* and"):
            pooled([a, b, c])


def test_the_model_is_checked_unless_it_is_not_to_be() -> None:
    with engines(1) as (fake,):
        with pytest.raises(ValueError, match="serves tiny, and not large"):
            pooled([fake], model="large")
        with pooled([fake], model="large", check_model=False) as pool:
            assert pool.generate(asked(1))
        with pooled([fake], model="tiny") as pool:
            assert pool.generate(asked(1))


def test_a_wrong_token_is_said_at_once() -> None:
    with engines(1, token="a-client-of-this-server") as (fake,):
        began = time.monotonic()
        with pytest.raises(ValueError, match=f"{fake.url}.*401"):
            pooled([fake], token="another", admin_token=None, start_s=60.0)
        assert time.monotonic() - began < 30
        with pooled([fake], token="a-client-of-this-server") as pool:
            assert pool.generate(asked(2))


def test_another_server_on_the_port_gets_no_work() -> None:
    with engines(2) as (a, b), pooled([a, b]) as pool:
        a.model = "other"
        a.restart()
        groups = finish(pool, [pool.add(r) for r in asked(6, ignore_eos=True)])
        assert [drawn(group) for group in groups] == [expected(r) for r in asked(6)]
        assert eventually(lambda: "engines do not agree: model" in errors(pool.report()))


def errors(stats: PoolReport) -> str:
    return "; ".join(one.last_error for one in stats.engines)


# -- versions --------------------------------------------------------------------------------------


def test_all_take_a_version_and_what_is_in_flight_goes_on(tmp_path: Path) -> None:
    first = publish(tmp_path, 1)
    with engines(2, tmp_path) as (a, b), pooled([a, b]) as pool:
        a.mood.slow = b.mood.slow = 0.03
        handles = [pool.add(request) for request in asked(4, tokens=900, ignore_eos=True)]
        assert eventually(lambda: a.open == b.open == 2)
        before = a.drawn, b.drawn
        assert eventually(lambda: a.drawn > before[0] + 20 and b.drawn > before[1] + 20)
        behavior = pool.update(first)
        a.mood.slow = b.mood.slow = 0.0
        assert behavior.policy[0].version == 1
        assert a.held.version == b.held.version == 1
        groups = finish(pool, handles)
        assert all(versions(group) == {0, 1} for group in groups)
        assert [versions(group) for group in pool.generate(asked(4))] == [{1}] * 4
        assert total(pool, "refused") == 0
        pool.update(first)
        assert a.orders == b.orders == ["step_000001"], "once is enough"


def test_a_laggard_is_named_evicted_and_takes_the_version_before_it_works_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = publish(tmp_path, 1)
    with engines(2, tmp_path) as (a, b), pooled([a, b], silent_s=QUICK) as pool:
        a.mood.take_s = 60.0
        began = time.monotonic()
        pool.update(first)
        assert time.monotonic() - began < 20 * QUICK
        assert eventually(lambda: f"engine {a.url} has not answered for" in caplog.text)
        groups = pool.generate(asked(6, ignore_eos=True))
        assert [drawn(group) for group in groups] == [expected(r, 1) for r in asked(6)]
        assert not a.bodies
        healthy(pool, 1)
        assert f"engine {a.url} is evicted: it had not taken step_000001" in caplog.text
        a.restart()
        a.mood.take_s = 0.0
        healthy(pool, 2)
        assert a.held.version == 1
        assert len(pool.generate(asked(6))) == 6
        assert a.bodies


def test_an_engine_that_cannot_take_it_is_evicted(tmp_path: Path) -> None:
    first = publish(tmp_path, 1)
    with engines(2, tmp_path) as (a, b), pooled([a, b], start_s=1.0) as pool:
        a.mood.refuse_weights = 409
        pool.update(first)
        healthy(pool, 1)
        assert [versions(group) for group in pool.generate(asked(4))] == [{1}] * 4
        assert not a.bodies
        b.mood.refuse_weights = 409
        with pytest.raises(ServerError, match=r"no engine took step_000002 .*409") as found:
            pool.update(publish(tmp_path, 2))
        assert a.url in str(found.value)
        assert b.url in str(found.value)
        a.mood.refuse_weights = b.mood.refuse_weights = 0
        healthy(pool, 2)
        assert [versions(group) for group in pool.generate(asked(4))] == [{2}] * 4


def test_an_answer_of_a_version_that_others_still_take_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_broadcaster, "ABREAST_S", 60.0)
    first = publish(tmp_path, 1)
    with engines(2, tmp_path) as (a, b), pooled([a, b]) as pool:
        a.mood.slow, b.mood.take_s = 0.03, 1e6
        handles = [pool.add(request) for request in asked(2, tokens=900, ignore_eos=True)]
        assert eventually(lambda: a.drawn > 2)

        def one_after_the_other() -> None:
            if eventually(lambda: a.held.version == 1):
                a.mood.slow = 0.0
            if eventually(lambda: a.answered == 1):
                b.mood.take_s = 0.0

        threading.Thread(target=one_after_the_other, daemon=True).start()
        pool.update(first)
        assert a.answered == 1, "it was drawn before the other had taken the version"
        groups = finish(pool, handles)
        assert versions(groups[0]) == {0, 1}
        assert total(pool, "refused") == 0


def test_an_engine_that_read_other_bytes_is_evicted(tmp_path: Path) -> None:
    first = publish(tmp_path, 1)
    with engines(2, tmp_path) as (a, b), pooled([a, b]) as pool:
        a.mood.odd_manifest = a.mood.odd_digest = "other"
        pool.update(first)
        healthy(pool, 1)
        assert f"it read 'other', and {first.digest} was published" in errors(pool.report())
        assert [versions(group) for group in pool.generate(asked(4))] == [{1}] * 4
        assert not a.bodies


def test_a_version_with_other_weights_than_were_agreed_on_is_refused(tmp_path: Path) -> None:
    first = publish(tmp_path, 1)
    with engines(2, tmp_path) as (a, b), pooled([a, b]) as pool:
        pool.update(first)
        a.mood.odd_digest = "another"
        groups = finish(pool, [pool.add(request) for request in asked(6, ignore_eos=True)])
        digests = {s.digest for g in groups for one in g.rollouts for s in one.behavior.policy}
        assert digests == {first.digest[:32]}
        assert total(pool, "refused") >= 1


def test_a_restarted_engine_takes_the_newest_version_first(tmp_path: Path) -> None:
    made = [publish(tmp_path, v) for v in (1, 2, 3)]
    with engines(2, tmp_path) as (a, b), pooled([a, b]) as pool:
        for one in made:
            pool.update(one)
        handles = [pool.add(request) for request in asked(40, ignore_eos=True)]
        a.restart()
        groups = finish(pool, handles)
        assert [drawn(group) for group in groups] == [expected(r, 3) for r in asked(40)]
        healthy(pool, 2)
        assert a.orders[-1] == "step_000003"


def test_an_engine_that_is_restarted_unseen_gives_no_old_tokens(tmp_path: Path) -> None:
    """Between two beats it has begun anew, with version 0."""
    first = publish(tmp_path, 1)
    with engines(1, tmp_path) as (fake,), pooled([fake], silent_s=60.0) as pool:
        pool.update(first)
        fake.restart()
        groups = finish(pool, [pool.add(request) for request in asked(3, ignore_eos=True)])
        assert [drawn(group) for group in groups] == [expected(r, 1) for r in asked(3)]
        assert total(pool, "refused") >= 1


@pytest.mark.parametrize("behind", [1, 2, 3])
def test_what_a_lagging_engine_says_is_refused_and_counted(tmp_path: Path, behind: int) -> None:
    made = [publish(tmp_path, v) for v in range(1, 5)]
    with engines(2, tmp_path) as (a, b), pooled([a, b]) as pool:
        for one in made:
            pool.update(one)
        a.mood.lag = behind
        for together in (True, False):
            healthy(pool, 2)
            requests = asked(6, ignore_eos=True)
            groups = (
                pool.generate(requests)
                if together
                else finish(pool, [pool.add(request) for request in requests])
            )
            assert [drawn(group) for group in groups] == [expected(r, 4) for r in asked(6)]
            assert all(versions(group) == {4} for group in groups)
        assert total(pool, "refused") >= 2


def test_a_version_that_was_told_to_nobody_is_refused(tmp_path: Path) -> None:
    first = publish(tmp_path, 1)
    with engines(2, tmp_path) as (a, b), pooled([a, b]) as pool:
        pool.update(first)
        a.mood.lag = -2
        groups = finish(pool, [pool.add(request) for request in asked(6, ignore_eos=True)])
        assert all(versions(group) == {1} for group in groups)
        assert total(pool, "refused") >= 1


def test_an_engine_that_says_yes_and_does_nothing_is_found_out(tmp_path: Path) -> None:
    first = publish(tmp_path, 1)
    with engines(2, tmp_path) as (a, b), pooled([a, b]) as pool:
        a.mood.deaf = True
        pool.update(first)
        groups = finish(pool, [pool.add(request) for request in asked(6, ignore_eos=True)])
        assert [drawn(group) for group in groups] == [expected(r, 1) for r in asked(6)]
        assert total(pool, "refused") >= 1


def test_of_three_engines_the_one_with_other_weights_is_evicted(tmp_path: Path) -> None:
    first = publish(tmp_path, 1)
    with engines(3, tmp_path) as (a, b, c), pooled([a, b, c]) as pool:
        a.mood.odd_digest = "another"
        pool.update(first)
        groups = pool.generate(asked(6, ignore_eos=True))
        assert [drawn(group) for group in groups] == [expected(r, 1) for r in asked(6)]
        assert not a.bodies
        assert eventually(lambda: "another digest" in errors(pool.report()))
        assert total(pool, "healthy") == 2


def test_of_two_engines_nobody_knows_which_is_right(tmp_path: Path) -> None:
    first = publish(tmp_path, 1)
    with engines(2, tmp_path) as (a, b), pooled([a, b]) as pool:
        a.mood.odd_digest = "another"
        with pytest.raises(ServerError, match="hold different weights") as found:
            pool.update(first)
        assert a.url in str(found.value)
        assert b.url in str(found.value)


def test_a_version_that_is_published_again_is_drawn_again(tmp_path: Path) -> None:
    """A trainer went back to a checkpoint, and its step came out otherwise."""
    old = publish(tmp_path / "old", 1, "first")
    new = publish(tmp_path / "new", 1, "second")
    with engines(2, tmp_path / "old") as (a, b), pooled([a, b]) as pool:
        pool.update(old)
        before = pool.behavior.policy
        a.mood.slow = b.mood.slow = 0.05
        handles = [pool.add(request) for request in asked(4, tokens=900, ignore_eos=True)]
        assert eventually(lambda: a.open == b.open == 2)
        a.weights = b.weights = tmp_path / "new"
        pool.update(new)
        assert pool.behavior.policy != before
        a.mood.slow = b.mood.slow = 0.0
        for group in finish(pool, handles):
            spans = {span for one in group.rollouts for span in one.behavior.policy}
            assert {span.digest for span in spans} == {pool.behavior.policy[0].digest}
            assert {span.start for span in spans} == {0}
        assert total(pool, "handed_over") == 4


def test_a_new_pool_takes_engines_as_they_are(tmp_path: Path) -> None:
    made = [publish(tmp_path, v) for v in (1, 2)]
    with engines(2, tmp_path) as (a, b):
        with pooled([a, b]) as pool:
            pool.update(made[0])
        with pooled([a, b]) as pool:
            assert pool.behavior.policy[0].version == 1
            pool.update(made[1])
            assert [versions(group) for group in pool.generate(asked(4))] == [{2}] * 4
        b.restart()
        with pytest.raises(ValueError, match="with other weights than the engines before it"):
            pooled([a, b])


# -- discovery -------------------------------------------------------------------------------------


class Names:
    """A resolver: `127.0.0.x` listens as any address of this machine does."""

    def __init__(self, *addresses: str) -> None:
        self.addresses: list[str] | OSError = list(addresses)
        self.hang_s = 0.0
        self.asked = 0

    def __call__(self, host: str, port: int) -> list[str]:
        self.asked += 1
        time.sleep(self.hang_s)
        if isinstance(self.addresses, Exception):
            raise self.addresses
        return self.addresses


def elastic(names: Names, port: int, **options: object) -> EnginePool:
    given = {"silent_s": QUICK, "start_s": 5.0} | options
    return EnginePool(
        [], PoolOptions(**given), elastic=Elastic("engines", port, 0.05), resolver=names
    )


def test_engines_appear_and_disappear_without_loss() -> None:
    names = Names("127.0.0.1")
    with ExitStack() as stack:
        a = stack.enter_context(FakeEngine())
        b = stack.enter_context(FakeEngine(port=a.port, host="127.0.0.2"))
        pool = stack.enter_context(elastic(names, a.port))
        a.mood.slow = b.mood.slow = 0.02
        requests = asked(30, ignore_eos=True)
        handles = [pool.add(request) for request in requests[:10]]
        names.addresses = ["127.0.0.1", "127.0.0.2"]
        healthy(pool, 2)
        handles += [pool.add(request) for request in requests[10:20]]
        assert eventually(lambda: len(b.bodies) > 0)
        names.addresses = ["127.0.0.2"]
        assert eventually(lambda: len(pool.report().engines) == 1)
        handles += [pool.add(request) for request in requests[20:]]
        groups = finish(pool, handles)
        assert [drawn(group) for group in groups] == [expected(r) for r in requests]
        assert total(pool, "requests") == 30
        assert total(pool, "handed_over") == 0, "what it had it has finished"


def test_a_resolver_that_fails_or_hangs_changes_nothing() -> None:
    names = Names("127.0.0.1")
    with FakeEngine() as fake, elastic(names, fake.port) as pool:
        names.addresses = OSError(-2, "Name or service not known")
        before = names.asked
        assert eventually(lambda: names.asked > before + 1)
        assert len(pool.generate(asked(3))) == 3
        names.hang_s = 0.5
        assert len(pool.generate(asked(3))) == 3


def test_when_all_have_left_a_new_one_is_waited_for() -> None:
    names = Names("127.0.0.1")
    with FakeEngine() as fake, elastic(names, fake.port) as pool:
        context = pool.capabilities.context_length
        names.addresses = ["127.0.0.9"]  # nobody is there
        assert eventually(
            lambda: ["127.0.0.9" in one.url for one in pool.report().engines] == [True]
        )
        assert pool.capabilities.context_length == context
        request, given_up = asked(2, ignore_eos=True)
        handles = [pool.add(request), pool.add(given_up)]
        assert pool.abort(handles[1])
        names.addresses = ["127.0.0.1"]
        groups = finish(pool, handles)
        assert drawn(groups[0]) == expected(request)
        assert {one.finish_reason for one in groups[1].rollouts} == {"abort"}


def test_an_engine_that_nobody_watches_any_more_ends_the_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def broken(self: Replica, beat: float) -> tuple[str, int]:
        raise OverflowError("cannot convert float infinity to integer")

    with engines(1) as fakes, pooled(fakes, silent_s=QUICK) as pool:
        fakes[0].mood.slow = 0.5
        monkeypatch.setattr(Replica, "_heartbeat", broken)
        with pytest.raises(ServerError, match=rf"{fakes[0].port} is not watched any more: Overfl"):
            pool.generate(asked(2, tokens=40, ignore_eos=True))


def test_a_name_that_no_host_can_have_is_told_as_such() -> None:
    names = Names()
    names.addresses = UnicodeError("label too long")  # type: ignore[assignment]
    with pytest.raises(ServerError, match="engines: label too long"):
        elastic(names, 8000, start_s=2.0)


def test_a_name_that_leads_nowhere_is_told() -> None:
    names = Names()
    names.addresses = OSError(-2, "Name or service not known")
    with pytest.raises(ServerError, match=r"engines: Name or service not known"):
        elastic(names, 8000, start_s=2.0)


# -- vLLM ------------------------------------------------------------------------------------------


@contextmanager
def vllms(folder: Path, count: int = 2) -> Iterator[list[FakeVllm]]:
    folder.mkdir()
    config = {"vocab_size": 64, "eos_token_id": [1, 3], "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    with ExitStack() as stack:
        yield [stack.enter_context(FakeVllm(str(folder))) for _ in range(count)]


def test_vllms_take_adapters_by_a_new_name_and_old_requests_keep_theirs(tmp_path: Path) -> None:
    first, second = (publish(tmp_path, v, kind="adapter") for v in (1, 2))
    requests = asked(4, ignore_eos=True)
    with vllms(tmp_path / "model") as fakes:
        with EnginePool(
            [fake.url for fake in fakes], PoolOptions(silent_s=QUICK, start_s=5.0)
        ) as pool:
            assert pool.behavior.weights == "bf16"
            pool.update(first)
            names = [f"pol-v{one.version}-{one.digest[:12]}" for one in (first, second)]
            hold = threading.Event()

            async def wait() -> None:
                while not hold.is_set():
                    await asyncio.sleep(0.005)

            for fake in fakes:
                fake.before = wait
            handles = [pool.add(request) for request in requests]
            assert eventually(lambda: all(len(fake.bodies) == 2 for fake in fakes))
            pool.update(second)
            assert all(fake.adapters == names for fake in fakes), "the old one is in use"
            hold.set()
            assert [versions(group) for group in finish(pool, handles)] == [{1}] * 4
            assert {body["model"] for fake in fakes for body in fake.bodies} == {names[0]}
            groups = pool.generate(requests)
            assert [versions(group) for group in groups] == [{2}] * 4
            digests = {s.digest for g in groups for one in g.rollouts for s in one.behavior.policy}
            assert digests == {second.digest}
            third = publish(tmp_path, 3, kind="adapter")
            pool.update(third)
            assert [len(fake.adapters) for fake in fakes] == [1, 1]
            assert {path for fake in fakes for path, _ in fake.orders} == set(ADAPTERS)
            assert total(pool, "refused") == 0


def test_a_vllm_reads_all_weights_when_what_it_draws_has_ended(tmp_path: Path) -> None:
    first = publish(tmp_path, 1)
    with vllms(tmp_path / "model") as (a, b):
        with EnginePool([a.url, b.url], PoolOptions(silent_s=QUICK, start_s=5.0)) as pool:
            pool.update(first)
            paths = [path for path, _ in a.orders]
            assert paths == ["/pause?mode=wait", RELOAD[0], "/reset_prefix_cache", "/resume"]
            assert a.orders[1][1]["kwargs"] == {"weights_path": str(first.path)}
            assert [versions(group) for group in pool.generate(asked(4))] == [{1}] * 4
            b.refused["/collective_rpc"] = 500
            pool.update(publish(tmp_path, 2))
            assert total(pool, "healthy") == 1
            assert [versions(group) for group in pool.generate(asked(4))] == [{2}] * 4


def test_what_a_vllm_lacks_is_named(tmp_path: Path) -> None:
    with vllms(tmp_path / "model") as (a, b):
        b.context = 32
        with pytest.raises(ValueError, match="engines do not agree: context length"):
            EnginePool([a.url, b.url], PoolOptions(start_s=5.0))
        a.folder = str(tmp_path / "elsewhere")
        with pytest.raises(ValueError, match="folder: .* is not readable here"):
            EnginePool([a.url], PoolOptions(start_s=5.0))
        with EnginePool(
            [a.url], PoolOptions(start_s=5.0, folder=tmp_path / "model", silent_s=QUICK)
        ) as pool:
            with pytest.raises(ValueError, match="stop_strings"):
                pool.add(Request([2], max_tokens=4, stop_strings=("x",)))
        with engines(1) as (own,), pytest.raises(ValueError, match="do not agree: kind of server"):
            EnginePool([own.url, b.url], PoolOptions(start_s=5.0))


# -- several -----------------------------------------------------------------------------------------


def test_an_engine_is_sent_what_its_cache_can_soon_hold() -> None:
    """The rest waits for whoever ends first: with all sent at once one would have half of it."""
    requests = asked(40, 1, 20, ignore_eos=True)
    with engines(2, cache=40) as (a, b), pooled([a, b]) as pool:
        a.mood.slow, b.mood.slow = 0.15, 0.002
        found = finish(pool, [pool.add(request) for request in requests])
        assert [drawn(group) for group in found] == [expected(request) for request in requests]
        assert len(b.bodies) > 2 * len(a.bodies) > 0


def test_later_turns_go_where_the_earlier_ones_were_drawn_unless_that_is_loaded() -> None:
    with engines(3) as fakes, pooled(fakes) as pool:
        firsts = asked(6, 1, 40, ignore_eos=True)
        finish(pool, together(pool, fakes, firsts))
        had = {body["request_id"]: fake for fake in fakes for body in fake.bodies}
        assert all(len(fake.bodies) == 2 for fake in fakes)
        turns = [
            Request([2], max_tokens=40, seed=9, id=f"{one.id}/0/1", follows=one.id)
            for one in reversed(firsts)
        ]
        finish(pool, together(pool, fakes, turns))
        for turn in turns:
            assert turn.id in [body["request_id"] for body in had[turn.follows].bodies]
        crowd = [
            Request([2], max_tokens=40, seed=9, id=f"c{i}", follows="r0", ignore_eos=True)
            for i in range(9)
        ]
        finish(pool, together(pool, fakes, crowd))
        drew = [sum(b["request_id"][0] == "c" for b in fake.bodies) for fake in fakes]
        assert max(drew) <= 5 and min(drew) >= 1, drew


def test_a_slow_taker_holds_nobody_up(tmp_path: Path) -> None:
    first = publish(tmp_path, 1)
    with engines(2, tmp_path) as (a, b), pooled([a, b]) as pool:
        a.mood.take_s = 1e6
        pool.update(first)
        groups = finish(pool, [pool.add(request) for request in asked(4, ignore_eos=True)])
        assert [versions(group) for group in groups] == [{1}] * 4
        assert not a.bodies and total(pool, "healthy") == 2
        a.mood.take_s = 0.0
        more = asked(8, ignore_eos=True)
        # it has work as soon as the pool has heard that it took the version
        assert eventually(
            lambda: finish(pool, [pool.add(request) for request in more]) and a.bodies
        )
        assert a.held.version == 1 and total(pool, "fenced") == 0


def test_an_answer_that_got_lost_fences_its_engine(caplog: pytest.LogCaptureFixture) -> None:
    """It draws and says that it is well; one request is never answered."""
    with engines(2) as (a, b), pooled([a, b], silent_s=QUICK) as pool:
        a.mood.forget, a.mood.slow = 1, 0.05
        requests = asked(8, tokens=900, ignore_eos=True)
        groups = finish(pool, [pool.add(request) for request in requests])
        assert [drawn(group) for group in groups] == [expected(request) for request in requests]
        assert f"{a.url} is evicted: knows of 3 requests, and 4 wait for its answer" in caplog.text
        told = next(one for one in pool.report().engines if one.url == a.url)
        assert told.evicted == 1 and told.handed_over == 4


def test_one_that_returns_sings_before_it_works(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = publish(tmp_path, 1)
    with engines(2, tmp_path) as (a, b), pooled([a, b], silent_s=QUICK) as pool:
        pool.update(first)
        b.mood.bent = 0.2
        b.stop()
        healthy(pool, 1)
        b.restart()
        assert eventually(lambda: "canary: its log-probs are 0.2 nats" in caplog.text)
        assert a.url in caplog.text and total(pool, "healthy") == 1
        assert b.held.version == 1, "the newest weights first"
        assert len(pool.generate(asked(4))) == 4 and not b.bodies
        b.mood.bent = 0.02
        healthy(pool, 2)
        assert pool.generate(asked(4)) and b.bodies


def test_one_that_flaps_is_met_later_each_time(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, away = [], Replica._away

    async def timed(self: Replica, seconds: float) -> None:
        clock = asyncio.get_running_loop().time
        began = clock()
        await away(self, seconds)
        left.append((seconds, clock() - began >= seconds))

    monkeypatch.setattr(Replica, "_away", timed)
    with engines(2) as (a, b), pooled([a, b], silent_s=QUICK) as pool:
        for _ in range(4):
            a.stop()
            healthy(pool, 1)
            a.restart()
            healthy(pool, 2)
        assert [one for one in left if one[0]] == [(0.5, True), (1.0, True), (2.0, True)]
        assert "it was evicted 4 times lately: for 2 s" in caplog.text
        monkeypatch.setattr(Replica, "_count_eviction", lambda self: 1e6)
        a.stop()
        healthy(pool, 1)
        a.restart()
        b.stop()
        assert eventually(lambda: left[-1] == (1e6, False)), "nobody else works"
        healthy(pool, 1)


# -- processes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "fault"), [(8, signal.SIGKILL), (1, signal.SIGSTOP)])
def test_twenty_times_an_engine_is_lost_and_no_request(
    n: int, fault: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Late answers of one that goes on after it was evicted are nobody's."""
    monkeypatch.setattr(replica, "LONGEST_AWAY", 0.0)
    requests = asked(8, n, ignore_eos=True)
    with ExitStack() as stack:
        children = [stack.enter_context(started(None, "--slow", "0.01")) for _ in range(2)]
        pool = stack.enter_context(
            EnginePool([child.url for child in children], PoolOptions(silent_s=QUICK, start_s=20.0))
        )
        for round in range(20):
            victim = round % 2
            handles = [pool.add(request) for request in requests]
            over = (round + 1) * len(requests)
            assert eventually(
                lambda: loaded(pool, children[victim]) or total(pool, "requests") == over  # noqa: B023
            )
            time.sleep(0.005 * (round % 10))
            strike(stack, children, victim, fault)
            groups = finish(pool, handles)
            assert [drawn(group) for group in groups] == [expected(r) for r in requests]
            if fault == signal.SIGSTOP:
                children[victim].process.send_signal(signal.SIGCONT)
            healthy(pool, 2)
        assert total(pool, "requests") == 20 * len(requests)


def loaded(pool: EnginePool, child: Child) -> bool:
    return any(one.url == child.url and one.outstanding for one in pool.report().engines)


def strike(stack: ExitStack, children: list[Child], victim: int, fault: signal.Signals) -> None:
    child = children[victim]
    os.kill(child.process.pid, fault)
    if fault == signal.SIGKILL:
        child.process.wait(10)
        port = int(child.url.rpartition(":")[2])
        children[victim] = stack.enter_context(started(None, "--slow", "0.01", port=port))


def test_whoever_waits_for_the_first_engine_is_told_and_can_leave(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A wrong port was waited for without a word, and without an ear for Ctrl-C."""

    def alive() -> None:
        if "no engine has answered" in caplog.text:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        EnginePool(["http://127.0.0.1:1"], PoolOptions(silent_s=0.1, start_s=60), alive=alive)
    assert "no engine has answered for 0.1 s: http://127.0.0.1:1: " in caplog.text


# -- conversations ---------------------------------------------------------------------------------


def spoken(dialogue: Dialogue, sample: int) -> list[int]:
    """All turns of a conversation to which `Numbers` says 3 and how many messages there are."""
    ids: list[int] = []
    for turn in range(dialogue.max_turns):
        id, i = (f"{dialogue.id}/{sample}/{turn}", 0) if turn else (dialogue.id, sample)
        end = length(9, id, i, dialogue.max_tokens)
        drawn = [token(0, 9, id, i, t, 67) for t in range(end)]
        if end == dialogue.max_tokens or turn == dialogue.max_turns - 1:
            return ids + drawn[: end - 1] + [EOS if end < dialogue.max_tokens else drawn[-1]]
        ids += [*drawn[:-1], EOS, 3, 2 * turn + 2]
    raise AssertionError


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("n", [1, 8])
def test_a_conversation_goes_on_at_another_engine(n: int, together: bool) -> None:
    """One is gone in the middle of it: no turn is lost, doubled or drawn otherwise."""
    prompt = Prompt("p", "e", [{"role": "user", "content": "hi"}])
    dialogues = [
        Dialogue([2, 3, 4 + i], n, 12, seed=9, id=f"r{i}", prompt=prompt, max_turns=3)
        for i in range(4)
    ]
    with engines(2) as (a, b), pooled([a, b], silent_s=20.0, start_s=60.0) as pool:
        a.mood.slow = b.mood.slow = 0.01
        late: list[int] = []

        def reply(_: Prompt, messages: list[Message]) -> list[Message]:
            if len(messages) == 4 and not late:  # somebody's second turn is back
                late.append(a.answered)
                a.stop()
            return [{"role": "user", "content": str(len(messages))}]

        talks = Conversations(pool, Answers(reply), Numbers())
        if together:
            groups = talks.generate(dialogues)
        else:
            groups = finish(talks, [talks.add(one) for one in dialogues])
        assert late and b.answered
    for one, group in zip(dialogues, groups, strict=True):
        check_group(PromptDraw(prompt, one), group)
        assert drawn(group) == [spoken(one, i) for i in range(n)]
