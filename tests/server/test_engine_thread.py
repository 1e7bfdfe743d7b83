"""The engine's thread: what goes in comes out as in one process, whatever happens beside it."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lowroll.engine.native import NativeEngine
from lowroll.model import hf
from lowroll.server.engine_loop import (
    JOBS_S,
    Delta,
    EngineFailed,
    EngineStalled,
    InFlightRequest,
    ServerBusy,
)
from lowroll.server.engine_thread import EngineThread
from lowroll.server.metrics import FAILURES_BEFORE_UNHEALTHY
from lowroll.types import Group, Request
from lowroll.weights.sync.update import WeightUpdate
from tests.fixtures.engines import prompt
from tests.fixtures.serving import Moody, ask, hung, idle, impatient, looped, tiny, until
from tests.fixtures.tiny import hf_folder

LONG = 100  # tokens: a while, for what must happen meanwhile


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three versions of a model's weights."""
    root = tmp_path_factory.mktemp("versions")
    return [hf_folder(root / str(seed), seed=seed) for seed in range(3)]


@pytest.fixture
def engine(folders: list[Path]) -> NativeEngine:
    return tiny(folders[0])


def numbers(group: Group) -> list[tuple[list[int], list[float]]]:
    return [(rollout.token_ids, rollout.logprobs) for rollout in group.rollouts]


def same(group: Group, other: Group) -> bool:
    """The same tokens, and log-probs up to float32's rounding in batches of other sizes."""
    pairs = zip(group.rollouts, other.rollouts, strict=True)
    return all(
        a.token_ids == b.token_ids and a.logprobs == pytest.approx(b.logprobs, abs=1e-4)
        for a, b in pairs
    )


async def group_of(loop: EngineThread, request: Request, stream: bool = False) -> Group:
    async with await loop.submit(request, stream=stream) as ticket:
        return await ticket.group()


async def pieces(ticket: InFlightRequest) -> list[Delta]:
    return [delta async for delta in ticket]


def joined(deltas: list[Delta], n: int) -> list[tuple[list[int], list[float]]]:
    return [
        (
            [token for delta in deltas if delta.sample == i for token in delta.token_ids],
            [number for delta in deltas if delta.sample == i for number in delta.logprobs],
        )
        for i in range(n)
    ]


async def first_tokens(loop: EngineThread, ticket: InFlightRequest, count: int = 1) -> None:
    """Wait until a request has drawn something."""
    handle = ticket.handle
    assert handle is not None
    while True:
        so_far = await loop.call(lambda engine: len(engine.so_far(handle)[0].token_ids), "a look")
        if so_far >= count:
            return


# -- what goes in comes out --------------------------------------------------------------------------


SHARED = prompt(30)
MIXED = [
    ask(*SHARED, n=8),
    ask(*SHARED, 5, n=1, temperature=0.0),
    ask(9, 8, 7, n=8, top_k=5, stop_ids=(11,), top_logprobs=2, ignore_eos=False),
    ask(3, max_tokens=1),
]


@pytest.mark.parametrize("weights", ["fp32", "bf16"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.slow
async def test_one_after_the_other_has_the_bits_of_one_process(
    folders: list[Path], weights: str, stream: bool
) -> None:
    beside = tiny(folders[0], weights=weights)
    alone = [beside.generate([request])[0] for request in MIXED]

    async with looped(tiny(folders[0], weights=weights)) as loop:
        assert [await group_of(loop, request, stream) for request in MIXED] == alone


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.slow
async def test_all_at_once_draw_the_same_and_streams_add_up(
    folders: list[Path], stream: bool
) -> None:
    alone = [tiny(folders[0]).generate([request])[0] for request in MIXED]

    async with looped(tiny(folders[0])) as loop:
        tickets = [await loop.submit(request, stream=stream) for request in MIXED]
        streams = await asyncio.gather(*(pieces(ticket) for ticket in tickets))
        groups = [await ticket.group() for ticket in tickets]
    assert all(same(one, other) for one, other in zip(groups, alone, strict=True))
    for request, group, deltas in zip(MIXED, groups, streams, strict=True):
        assert joined(deltas, request.n) == numbers(group)
        assert sum(delta.finish_reason is not None for delta in deltas) == request.n
        last = {delta.sample: delta for delta in deltas}
        for i, rollout in enumerate(group.rollouts):
            assert last[i].finish_reason == rollout.finish_reason
            assert last[i].stop_reason == rollout.stop_reason
        top = [t for d in deltas if d.sample == 0 for t in d.top_logprobs or []]
        assert top == (group.rollouts[0].top_logprobs or [])
        assert stream or len(deltas) == request.n
    assert not stream or len(streams[0]) > 30


async def test_what_piles_up_for_a_slow_reader_is_one_delta(engine: NativeEngine) -> None:
    async with looped(engine) as loop:
        ticket = await loop.submit(ask(3, 4, n=2), stream=True)
        group = await ticket.group()
        deltas = await pieces(ticket)
        assert [delta.sample for delta in deltas] == [0, 1]
        assert joined(deltas, 2) == numbers(group)
        assert await pieces(ticket) == []


async def test_a_wrong_request_is_named_at_once_and_leaves_the_others(engine: NativeEngine) -> None:
    async with looped(engine) as loop:
        good = await loop.submit(ask(3, 4))
        with pytest.raises(ValueError, match=r"^prompt_ids\[1\]"):
            await loop.submit(ask(3, 999))
        assert len((await good.group()).rollouts[0].token_ids) == 40
        assert (await loop.health()).open == 0


async def test_no_more_samples_than_may_be(engine: NativeEngine) -> None:
    async with looped(engine, max_samples=3) as loop:
        await loop.pause("keep")
        tickets = [await loop.submit(ask(3, 4, n=n)) for n in (2, 1)]
        with pytest.raises(ServerBusy, match="3 samples are open, of 3"):
            await loop.submit(ask(3, 4))
        tickets[0].abort()
        await loop.resume()
        await tickets[1].group()
        await group_of(loop, ask(3, 4, n=5))


# -- pausing -----------------------------------------------------------------------------------------


async def test_keep_stops_in_the_middle_and_goes_on(
    engine: NativeEngine, folders: list[Path]
) -> None:
    request, late = ask(3, 4, n=3, max_tokens=LONG), ask(5, 6)
    wanted = tiny(folders[0]).generate([request, late])

    async with looped(engine) as loop:
        ticket = await loop.submit(request, stream=True)
        await first_tokens(loop, ticket)
        await loop.pause("keep")
        assert loop.paused
        before = (await loop.health()).stats.tokens
        second = await loop.submit(late)
        await asyncio.sleep(0.05)
        found = await loop.health()
        assert (found.stats.tokens, found.state, found.open) == (before, "paused", 2)
        assert before < 3 * LONG
        await loop.resume()
        assert same(await ticket.group(), wanted[0])
        assert same(await second.group(), wanted[1])


async def test_wait_lets_those_in_flight_end_and_holds_new_ones_back(engine: NativeEngine) -> None:
    async with looped(engine) as loop:
        ticket = await loop.submit(ask(3, 4, max_tokens=LONG))
        pausing = asyncio.ensure_future(loop.pause("wait"))
        await loop.call(lambda engine: None, "a turn")
        held, wrong = await loop.submit(ask(5, 6)), await loop.submit(ask(999))
        dropped = await loop.submit(ask(5, 7))
        dropped.abort()
        await pausing
        assert loop.paused
        assert (await ticket.group()).rollouts[0].finish_reason == "length"
        with pytest.raises(ValueError, match="prompt_ids"):
            await wrong.group()
        tokens = (await loop.health()).stats.tokens
        await asyncio.sleep(0.02)
        assert (await loop.health()).stats.tokens == tokens
        await loop.resume()
        assert len((await held.group()).rollouts[0].token_ids) == 40
        assert (await dropped.group()).rollouts[0].finish_reason == "abort"


async def test_wait_gives_up_by_name_and_everything_goes_on(engine: NativeEngine) -> None:
    moody = Moody(engine)
    moody.slow_s = 0.01
    async with looped(moody, drain_s=0.05) as loop:
        ticket = await loop.submit(ask(3, 4, max_tokens=100))
        with pytest.raises(EngineStalled, match="pause: 1 requests still run after 0.05 s"):
            await loop.pause("wait")
        assert not loop.paused
        moody.slow_s = 0
        assert len((await ticket.group()).rollouts[0].token_ids) == 100


async def test_a_pause_that_waits_ends_with_its_client(engine: NativeEngine) -> None:
    async with looped(engine) as loop:
        ticket = await loop.submit(ask(3, 4, max_tokens=LONG))
        pausing = asyncio.ensure_future(loop.pause("wait"))
        await loop.call(lambda engine: None, "a turn")
        pausing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pausing
        later = await loop.submit(ask(5, 6))
        assert (await later.group()).rollouts[0].finish_reason == "length"
        assert not loop.paused
        await loop.abort_all()
        assert (await ticket.group()).rollouts[0].finish_reason == "abort"


async def test_resume_ends_a_pause_that_still_waits(engine: NativeEngine) -> None:
    async with looped(engine) as loop:
        ticket = await loop.submit(ask(3, 4, max_tokens=LONG))
        pausing = asyncio.ensure_future(loop.pause("wait"))
        await loop.call(lambda engine: None, "a turn")
        with pytest.raises(ValueError, match="another pause"):
            await loop.pause("wait")
        await loop.resume()
        with pytest.raises(ValueError, match="resumed before"):
            await pausing
        pausing = asyncio.ensure_future(loop.pause("wait"))
        await loop.call(lambda engine: None, "a turn")
        held = await loop.submit(ask(5, 6))
        await loop.pause("keep")
        with pytest.raises(ValueError, match="another pause came"):
            await pausing
        assert loop.paused
        await loop.resume()
        assert len((await ticket.group()).rollouts[0].token_ids) == LONG
        assert len((await held.group()).rollouts[0].token_ids) == 40


def drains(loop: EngineThread) -> None:
    end = time.monotonic() + 10
    while loop.loop.pausing.state != "draining" and time.monotonic() < end:
        time.sleep(0.001)


@pytest.mark.parametrize("moment", ["before it is known", "while it waits"])
async def test_a_pause_that_was_given_up_may_be_asked_for_again(
    engine: NativeEngine, moment: str
) -> None:
    moody = Moody(engine)
    moody.slow_s = 0.005
    async with looped(moody) as loop:
        ticket = await loop.submit(ask(3, 4, max_tokens=LONG))
        given_up = asyncio.ensure_future(loop.pause("wait"))
        if moment == "while it waits":
            await loop.call(lambda engine: None, "a turn")
            await asyncio.sleep(0.02)
        else:
            await asyncio.sleep(0)  # it has asked, and
            drains(loop)  # the answer is on its way
        given_up.cancel()
        await asyncio.wait([given_up])
        await loop.call(lambda engine: None, "a turn")
        await loop.pause("wait")
        assert loop.paused
        assert (await ticket.group()).rollouts[0].finish_reason == "length"


async def test_abort_answers_with_what_was_drawn(engine: NativeEngine, folders: list[Path]) -> None:
    request = ask(3, 4, n=2, max_tokens=LONG)
    whole = tiny(folders[0]).generate([request])[0]

    async with looped(engine) as loop:
        ticket = await loop.submit(request, stream=True)
        queued = [await loop.submit(ask(5, i, n=8)) for i in range(2, 6)]
        await first_tokens(loop, ticket, 2)
        await loop.pause("abort")
        group = await ticket.group()
        assert [r.finish_reason for r in group.rollouts] == ["abort"] * 2
        for got, all_of_it in zip(numbers(group), numbers(whole), strict=True):
            assert got[0] == all_of_it[0][: len(got[0])] and 2 <= len(got[0]) < LONG
        assert joined(await pieces(ticket), 2) == numbers(group)
        for one in queued:
            assert {r.finish_reason for r in (await one.group()).rollouts} == {"abort"}
        assert idle(engine)
        late = await loop.submit(ask(5, 6))
        await loop.resume()
        assert len((await late.group()).rollouts[0].token_ids) == 40


@pytest.mark.parametrize("paused", [True, False])
async def test_aborted_requests_end_though_others_come(folders: list[Path], paused: bool) -> None:
    """New ones that come before the next step neither run in a pause nor keep the old ones in."""

    moody = Moody(tiny(folders[0]))
    moody.slow_s = 0.05
    async with looped(moody) as loop:
        old = await loop.submit(ask(3, 4))
        await until(lambda: moody.steps > 1, "a step")
        end = loop.pause("abort") if paused else loop.abort_all()
        jobs = [asyncio.create_task(job) for job in (end, loop.submit(ask(5, 6)))]
        await asyncio.gather(*jobs)
        new = jobs[1].result()
        assert (await old.group()).rollouts[0].finish_reason == "abort"
        assert loop.paused is paused
        if paused:
            steps = moody.steps
            await asyncio.sleep(0.2)
            assert moody.steps == steps
            await loop.resume()
        assert (await new.group()).rollouts[0].finish_reason == "length"


async def test_what_is_drawn_goes_on_beside_much_that_is_asked(folders: list[Path]) -> None:
    """Forty calls that wait together, each as long as a turn: a step comes between two."""

    moody = Moody(tiny(folders[0]))
    async with looped(moody) as loop:
        ticket = await loop.submit(ask(3, 4, max_tokens=LONG))
        seen: list[int] = []

        def slow(engine: Any) -> None:
            time.sleep(JOBS_S)
            seen.append(moody.steps)

        await asyncio.gather(*[loop.call(slow, "a call") for _ in range(40)])
        assert len(set(seen)) == 40
        ticket.abort()


# -- aborts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["queued", "prefill", "decode", "paused", "draining", "twice"])
@pytest.mark.parametrize("n", [1, 8])
@pytest.mark.slow
async def test_an_abort_at_every_phase_leaves_nothing(
    folders: list[Path], phase: str, n: int
) -> None:
    engine = tiny(folders[0], max_batch=4, prefill_chunk=4, page_size=4)
    beside = ask(5, 6, max_tokens=LONG)
    wanted = tiny(folders[0], max_batch=4, prefill_chunk=4, page_size=4).generate([beside])[0]

    async with looped(engine) as loop:
        good = await loop.submit(beside)
        if phase == "queued":
            [await loop.submit(ask(7, i, n=4, max_tokens=LONG)) for i in (2, 3)]
        if phase == "paused":
            await loop.pause("keep")
        if phase == "draining":
            pausing = asyncio.ensure_future(loop.pause("wait"))
            await loop.call(lambda engine: None, "a turn")
        async with await loop.submit(ask(*prompt(40), n=n, max_tokens=LONG)) as ticket:
            if phase == "decode":
                await first_tokens(loop, ticket, 3)
        if phase == "twice":
            ticket.abort()
            ticket.abort()
        if phase == "draining":
            await pausing
        await loop.resume()
        rollouts = (await ticket.group()).rollouts
        assert {r.finish_reason for r in rollouts} == {"abort"}
        assert len(rollouts) == n
        assert same(await good.group(), wanted)
        await loop.abort_all()
        await until(lambda: idle(engine) and not loop.open, "pages come back")
        ticket.abort()


async def test_a_cancelled_submission_is_dropped(engine: NativeEngine) -> None:
    moody = Moody(engine)
    async with looped(moody) as loop:
        good = await loop.submit(ask(3, 4, max_tokens=LONG))
        await hung(moody, loop)
        submitting = asyncio.ensure_future(loop.submit(ask(5, 6, max_tokens=LONG)))
        await until(lambda: loop.loop.jobs.qsize() == 1, "it to be asked")
        submitting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await submitting
        moody.hang.clear()
        assert len((await good.group()).rollouts[0].token_ids) == LONG
        await until(lambda: idle(engine) and not loop.open, "pages come back")


# -- weights -----------------------------------------------------------------------------------------


async def test_weights_that_change_in_flight_are_in_the_spans(
    engine: NativeEngine, folders: list[Path]
) -> None:
    masters = [hf.load(folder) for folder in folders]

    async with looped(engine) as loop:
        ticket = await loop.submit(ask(3, 4, n=2, max_tokens=LONG), stream=True)
        digests = [(await loop.health()).behavior.policy[-1].digest]
        for version in (1, 2):
            drawn = (await loop.health()).stats.tokens  # of two samples
            await first_tokens(loop, ticket, drawn // 2 + 2)
            update = WeightUpdate.local(masters[version], version).as_stream()
            tag = await loop.call(lambda engine, u=update: engine.update_weights(u), "weights")
            digests.append(tag.policy[-1].digest)
        for rollout in (await ticket.group()).rollouts:
            spans = rollout.behavior.policy
            assert [span.version for span in spans] == [0, 1, 2]
            assert [span.digest for span in spans] == digests
            assert 0 == spans[0].start < spans[1].start < spans[2].start < LONG
        assert len(set(digests)) == 3


@pytest.mark.slow
async def test_the_prefix_cache_is_never_of_other_weights(folders: list[Path]) -> None:
    request = ask(*prompt(60), n=2, max_tokens=8)
    engine = tiny(folders[0], page_size=4)
    cold = [numbers(tiny(folder, page_size=4).generate([request])[0]) for folder in folders]
    masters = [hf.load(folder) for folder in folders]

    async with looped(engine) as loop:
        for version in (0, 1, 2, 0, 2):
            update = WeightUpdate.local(masters[version], version)
            await loop.call(lambda engine, u=update: engine.update_weights(u), "weights")
            hits = (await loop.health()).stats.prefix_hits
            assert numbers(await group_of(loop, request)) == cold[version]
            again = replace(request, seed=8)
            assert (await loop.health()).stats.prefix_hits >= hits
            await group_of(loop, again)
            assert (await loop.health()).stats.prefix_hits > hits


# -- an engine that fails, hangs, or ends --------------------------------------------------------------


async def test_a_failed_step_answers_its_requests_and_the_engine_goes_on(
    engine: NativeEngine,
) -> None:
    moody, resets = Moody(engine), []
    moody.reset_prefix_cache = lambda: resets.append("pages of prompts")
    async with looped(moody) as loop:
        for failed in range(1, FAILURES_BEFORE_UNHEALTHY + 1):
            await loop.pause("keep")
            tickets = [await loop.submit(ask(3, i, n=2), stream=True) for i in (4, 5)]
            moody.fail = 1
            await loop.resume()
            for ticket in tickets:
                with pytest.raises(EngineFailed) as caught:
                    await ticket.group()
                assert "secret" not in str(caught.value)
                with pytest.raises(EngineFailed):
                    await pieces(ticket)
            found = await loop.health()
            assert found.failures == failed and found.open == 0
            assert found.healthy == (failed < FAILURES_BEFORE_UNHEALTHY)
            assert len(resets) == failed
            assert idle(engine)
        assert len((await group_of(loop, ask(3, 4))).rollouts[0].token_ids) == 40
        assert (await loop.health()).healthy


async def test_what_was_held_back_outlives_a_failure(engine: NativeEngine) -> None:
    moody = Moody(engine)
    async with looped(moody) as loop:
        ticket = await loop.submit(ask(3, 4, max_tokens=LONG))
        pausing = asyncio.ensure_future(loop.pause("wait"))
        await loop.call(lambda engine: None, "a turn")
        held = await loop.submit(ask(5, 6))
        moody.fail = 1
        with pytest.raises(EngineFailed):
            await ticket.group()
        await pausing
        await loop.resume()
        assert len((await held.group()).rollouts[0].token_ids) == 40


async def test_an_engine_that_hangs_is_named_within_the_deadline(engine: NativeEngine) -> None:
    moody = Moody(engine)
    async with looped(moody) as loop:
        ticket = await loop.submit(ask(3, 4, max_tokens=LONG), stream=True)
        await hung(moody, loop)
        with pytest.raises(EngineStalled, match="health: no answer in 0.2 s: .* busy with a step"):
            await loop.health(0.2)
        with impatient(loop):
            with pytest.raises(EngineStalled, match=r"a request: .* busy with a step for \d"):
                await ticket.group()
            with pytest.raises(EngineStalled, match="a new request: .* busy with a step"):
                await loop.submit(ask(5, 6))
        steps = moody.steps
        moody.hang.clear()
        await until(lambda: moody.steps > steps, "a step")
        assert len((await ticket.group()).rollouts[0].token_ids) == LONG
        assert (await loop.health()).open == 0


async def test_a_long_call_has_the_time_that_it_was_given(engine: NativeEngine) -> None:
    async with looped(engine) as loop:
        ticket, go = await loop.submit(ask(3, 4, max_tokens=LONG)), threading.Event()

        def long(engine: Any) -> int:
            loop.watchdog.deadline_s = 0.1  # of other turns
            time.sleep(0.5)
            loop.watchdog.deadline_s = 30.0
            return 5

        assert await loop.call(long, "weights", 30.0) == 5
        assert len((await ticket.group()).rollouts[0].token_ids) == LONG
        with pytest.raises(EngineStalled, match="busy with weights"):
            await loop.call(lambda engine: go.wait(30), "weights", 0.3)
        go.set()
        await until(lambda: loop.watchdog.busy_with != "weights", "the next turn")
        with pytest.raises(KeyError, match="mine"):
            await loop.call(lambda engine: {}["mine"], "a look")
        with pytest.raises(TimeoutError):
            await loop.call(raises_timeout, "a look")


def raises_timeout(engine: Any) -> None:
    raise TimeoutError("its own")


async def test_what_nobody_waits_for_any_more_is_not_begun(engine: NativeEngine) -> None:
    moody, done = Moody(engine), threading.Event()
    async with looped(moody) as loop:
        await hung(moody, loop)
        with impatient(loop), pytest.raises(EngineStalled):
            await loop.call(lambda engine: done.set(), "a call")
        moody.hang.clear()
        await until(lambda: not loop.open, "the hung request to end")
        assert not done.is_set()


async def test_the_end_aborts_what_is_in_flight(engine: NativeEngine) -> None:
    async with looped(engine) as loop:
        ticket = await loop.submit(ask(3, 4, max_tokens=LONG))
        await first_tokens(loop, ticket)
        await loop.pause("keep")
        await asyncio.to_thread(loop.stop)
        assert (await ticket.group()).rollouts[0].finish_reason == "abort"
        with pytest.raises(ServerBusy, match="ending"):
            await loop.submit(ask(3))
        with pytest.raises(EngineStalled, match="does not run"):
            await loop.health()


async def test_the_end_answers_a_pause_and_begins_nothing(engine: NativeEngine) -> None:
    moody = Moody(engine)
    async with looped(moody) as loop:
        await hung(moody, loop)
        waits = [asyncio.ensure_future(loop.pause("wait"))]
        waits += [asyncio.ensure_future(loop.submit(ask(3, i))) for i in (4, 5)]
        await until(lambda: loop.loop.jobs.qsize() == 3, "all to be asked")
        stopping = asyncio.ensure_future(asyncio.to_thread(loop.stop))
        await until(lambda: loop.loop.stopping, "the end to be asked for")
        moody.hang.clear()
        await stopping
        ends = await asyncio.gather(*waits, return_exceptions=True)
        assert [type(end) for end in ends[1:]] == [ServerBusy, ServerBusy]
        assert idle(engine) and not loop.open


async def test_the_end_waits_for_those_in_flight_as_long_as_it_may(engine: NativeEngine) -> None:
    moody = Moody(engine)
    async with looped(moody) as loop:
        first = await loop.submit(ask(3, 4))
        assert await loop.settle(10) == 0
        assert (await first.group()).rollouts[0].finish_reason == "length"
        loop.closing = False
        moody.slow_s = 0.05
        await loop.submit(ask(3, 4, max_tokens=LONG))
        assert await loop.settle(0.1) == 1


class Waits(Moody):
    """Its steps from the one called `hold` on wait for `go` after they have said that the device
    works; `silent` ones say nothing."""

    def __init__(self, engine: NativeEngine, hold: int, silent: bool) -> None:
        super().__init__(engine)
        self.hold = hold
        self.silent = silent
        self.at_work = threading.Event()
        self.go = threading.Event()

    def step(self, meanwhile: Any = lambda: None) -> Any:
        ended = self.engine.step()
        self.steps += 1
        if self.steps >= self.hold:
            if not self.silent:
                meanwhile()
            self.at_work.set()
            assert self.go.wait(30)
        return ended


@pytest.mark.parametrize(
    ("hold", "few", "silent", "seen"),
    [
        (2, 0, True, 1),  # a first token goes at once
        (5, 0, True, 3),  # others when the device works, or after the step that does not say so
        (5, 0, False, 4),
        (5, 8, True, 4),  # a few at once
    ],
)
async def test_news_goes_out_while_the_device_works(
    engine: NativeEngine,
    monkeypatch: pytest.MonkeyPatch,
    hold: int,
    few: int,
    silent: bool,
    seen: int,
) -> None:
    """Each step draws a token; of the one that waits nobody knows yet."""
    monkeypatch.setattr("lowroll.server.engine_loop.UPDATES_SENT_AT_ONCE", few)

    waits = Waits(engine, hold, silent)
    async with looped(waits) as loop:
        ticket = await loop.submit(ask(3, 4, max_tokens=LONG), stream=True)
        assert await asyncio.to_thread(waits.at_work.wait, 30)
        await asyncio.sleep(0.05)
        assert [len(delta.token_ids) for delta in ticket.pending.values()] == [seen]
        waits.go.set()
        group = await ticket.group()
        assert len(group.rollouts[0].token_ids) == LONG
        assert joined(await pieces(ticket), 1) == numbers(group)
