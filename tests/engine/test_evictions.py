"""An engine says what its cache dropped, and the learner that replays it gets the engine's own
log-probs: for every policy, and whatever happens to a sample on its way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lowroll import Engine, Request, score
from lowroll.kv.policy.base import CachePolicy, Compaction
from lowroll.kv.policy.recorder import CompactionRecorder
from lowroll.kv.policy.table import make
from lowroll.model import hf
from lowroll.model.evicted_attention import check_evictions, pack_evictions, unpack_evictions
from lowroll.model.transformer import Transformer
from lowroll.types import Evictions, Group, Rollout
from lowroll.weights.sync.update import WeightUpdate
from tests.fixtures.engines import engine_of, prompt
from tests.fixtures.masters import nudge
from tests.fixtures.tiny import hf_folder

BOUND = 1e-4


def streaming(budget: int = 9, buffer: int = 4) -> CachePolicy:
    return make("streaming", budget=budget, buffer=buffer, sinks=2)


def snapkv(budget: int = 9, buffer: int = 4) -> CachePolicy:
    return make("snapkv", budget=budget, buffer=buffer, window=3, kernel=3)


def rkv(budget: int = 9, buffer: int = 4) -> CachePolicy:
    return make("rkv", budget=budget, buffer=buffer, window=3, kernel=3)


def h2o(budget: int = 9, buffer: int = 4) -> CachePolicy:
    return make("h2o", budget=budget, buffer=buffer)


POLICIES = [streaming, snapkv, rkv, h2o]


@pytest.fixture(scope="module")
def model(folder: Path) -> Transformer:
    return hf.load(folder)


def recording(model: Transformer, kv: CachePolicy, lookahead: int = 1, **options: Any) -> Engine:
    engine = engine_of(model, kv=kv, record_evictions=True, **options)
    engine.scheduler.lookahead = lookahead
    return engine


STEM = prompt(21, 1)
REQUESTS = [
    Request(STEM + prompt(4, 2), n=8, max_tokens=30, seed=1),
    Request(prompt(3, 3), n=1, max_tokens=40, seed=2, ignore_eos=True),
    Request(STEM + prompt(7, 4), n=2, max_tokens=25, seed=3, stop_ids=(9, 17)),
    Request(prompt(9, 5), n=8, max_tokens=20, seed=4),
    Request(prompt(30, 6), n=2, max_tokens=1, seed=5),
]


def off(model: Transformer, groups: Sequence[Group], change: Any = None) -> tuple[float, int]:
    """How far replayed log-probs are from the recorded ones, and how many compactions there were.
    change: what is replayed in the place of what was recorded."""
    rollouts = [(g.request, r) for g in groups for r in g.rollouts if r.token_ids]
    evictions = [r.evictions for _, r in rollouts]
    assert None not in evictions
    total = sum(len(one.after) for one in evictions if one is not None)
    scores = score(
        model,
        [request.prompt_ids + r.token_ids for request, r in rollouts],
        [len(request.prompt_ids) for request, _ in rollouts],
        evictions=[one if change is None else change(one) for one in evictions],
    )
    gaps = [
        float((torch.tensor(r.logprobs) - x).abs().max())
        for (_, r), x in zip(rollouts, scores, strict=True)
    ]
    return max(gaps), total


def later(one: Evictions) -> Evictions:
    """Every compaction a position later."""
    if not one.after:
        return one
    numbers_LGT = unpack_evictions(one)
    numbers_LGT = torch.cat([numbers_LGT, 0 * numbers_LGT[..., :1]], 2)
    return pack_evictions(numbers_LGT, [p + 1 for p in one.after])


def neighbour(one: Evictions) -> Evictions:
    """The keys beside those that were dropped."""
    if not one.after:
        return one
    return pack_evictions(unpack_evictions(one).roll(1, 2), one.after)


OPTIONS: dict[str, dict[str, Any]] = {
    "whole": {},
    "chunks": {"prefill_chunk": 5, "max_prefill_tokens": 12},
    "small": {"cache_tokens": 112, "max_batch": 6},
}
# every pair of a policy, a way to hold its samples and a lookahead
CASES = [
    (kind, options, (1, 16)[(i + j) % 2])
    for i, kind in enumerate(POLICIES)
    for j, options in enumerate(OPTIONS)
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "options", "lookahead"), CASES)
def test_replayed_log_probs_are_the_recorded_ones(
    model: Transformer, kind: Callable[[], CachePolicy], options: str, lookahead: int
) -> None:
    """Shared prompts with n = 8 and n = 1, prompts over and under the budget, prompts found in the
    prefix cache, samples that wait for pages and slots, one-token responses."""
    engine = recording(model, kind(), lookahead, **OPTIONS[options])
    groups = engine.generate(REQUESTS[:2]) + engine.generate(REQUESTS[2:])
    assert (engine.pool.hits > 0) == (kind is not h2o)
    gap, compactions = off(model, groups)
    assert gap < BOUND and compactions > 20
    for change in (later, neighbour, lambda one: None):
        assert off(model, groups, change)[0] > 100 * BOUND


@pytest.mark.parametrize("kind", POLICIES)
def test_replay_of_one_request(
    model: Transformer, kind: Callable[[], CachePolicy], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The quick one of the above; rows are traced one by one."""
    monkeypatch.setattr("lowroll.kv.policy.recorder.MOST_TRACED", 1)
    groups = recording(model, kind(), 16).generate(REQUESTS[1:3])
    gap, compactions = off(model, groups)
    assert gap < BOUND and compactions > 8
    assert off(model, groups, later)[0] > 100 * BOUND


@pytest.mark.parametrize("family", ["smollm3", "olmo2", "granite"])
@pytest.mark.parametrize("kind", POLICIES)
def test_families_replay_what_their_caches_kept(
    kind: Callable[[], CachePolicy], family: str, tmp_path: Path
) -> None:
    """Layers without positions, norms over all heads, and queries that a constant scales."""
    model = hf.load(hf_folder(tmp_path / "m", family))
    groups = recording(model, kind(), 3).generate(REQUESTS[1:3])
    gap, compactions = off(model, groups)
    assert gap < BOUND and compactions > 8
    assert off(model, groups, later)[0] > 100 * BOUND


@pytest.mark.parametrize("kind", POLICIES)
def test_recording_changes_no_bit(model: Transformer, kind: Callable[[], CachePolicy]) -> None:
    """And nothing is recorded unless it is asked for, or where nothing is dropped."""

    def bare(groups: list[Group]) -> list[Rollout]:
        return [replace(r, evictions=None) for g in groups for r in g.rollouts]

    plain = engine_of(model, kv=kind())
    groups = plain.generate(REQUESTS[1:3])
    assert all(r.evictions is None for g in groups for r in g.rollouts)
    engine = recording(model, kind())
    assert bare(engine.generate(REQUESTS[1:3])) == bare(groups)
    assert engine.capabilities.records_evictions and not plain.capabilities.records_evictions
    dense = engine_of(model, record_evictions=True)
    assert not dense.capabilities.records_evictions
    assert dense.generate(REQUESTS[1:2])[0].rollouts[0].evictions is None


def test_a_budget_of_the_whole_sequence_drops_nothing(model: Transformer) -> None:
    """The replay is then the dense learner, bit for bit."""
    groups = recording(model, rkv(54, 1)).generate(REQUESTS[1:3])
    spec = model.spec
    none = Evictions(spec.num_layers, spec.num_kv_heads)
    rollouts = [r for g in groups for r in g.rollouts]
    assert all(r.evictions == none for r in rollouts)
    sequences = [g.request.prompt_ids + r.token_ids for g in groups for r in g.rollouts]
    lens = [len(g.request.prompt_ids) for g in groups for _ in g.rollouts]
    replayed = score(model, sequences, lens, evictions=[r.evictions for r in rollouts])
    for x, y in zip(replayed, score(model, sequences, lens), strict=True):
        assert torch.equal(x, y)


@pytest.mark.slow
@pytest.mark.parametrize("kind", POLICIES)
def test_aborts_and_reused_slots(model: Transformer, kind: Callable[[], CachePolicy]) -> None:
    """A sample that ends early says what it had lost; one in its slot knows nothing of it."""
    engine = recording(model, kind(), 3, max_batch=9)
    some = 0
    for steps in (0, 1, 2, 3, 5, 8):
        doomed = engine.add(replace(REQUESTS[0], ignore_eos=True))
        for _ in range(steps):
            engine.step()
        kept = engine.add(REQUESTS[3])
        engine.step()
        assert engine.abort(doomed)
        done: dict[int, Group] = {}
        while engine.has_work:
            done |= dict(engine.step())
        for rollout in done[doomed].rollouts:
            assert rollout.evictions is not None
            check_evictions(rollout.evictions, 2, 2, model.spec.max_position)
        groups = [g for g in (done[doomed], done[kept]) if any(r.token_ids for r in g.rollouts)]
        gap, compactions = off(model, groups)
        assert gap < BOUND
        some += compactions
    assert some > 20


@pytest.mark.slow
def test_weights_change_between_compactions(folder: Path, model: Transformer) -> None:
    """What was dropped under either weights is recorded; the tokens before the change replay under
    the old ones."""
    engine = recording(model, rkv(), 3)
    handle = engine.add(replace(REQUESTS[0], ignore_eos=True))
    for _ in range(6):
        engine.step()
    engine.update_weights(WeightUpdate.local(nudge(hf.load(folder), 5, size=0.05), 1))
    done: dict[int, Group] = {}
    while engine.has_work:
        done |= dict(engine.step())
    ids = done[handle].request.prompt_ids
    for r in done[handle].rollouts:
        assert r.evictions is not None and len(r.behavior.policy) == 2
        first = r.behavior.policy[1].start
        (x,) = score(model, [ids + r.token_ids], [len(ids)], evictions=[r.evictions])
        gaps = (torch.tensor(r.logprobs) - x).abs()
        assert float(gaps[:first].max()) < BOUND < float(gaps[first + 1 :].max())


def test_half_precision_is_as_close_as_it_can_be(model: Transformer, folder: Path) -> None:
    """In bfloat16 replayed log-probs are within rounding, dense ones are not."""
    half = hf.load(folder, dtype=torch.bfloat16)
    engine = recording(half, rkv(), weights="bf16")
    groups = engine.generate(REQUESTS[1:3])
    dense = off(half, groups, lambda one: None)[0]
    assert off(half, groups)[0] < 0.25 < 1 < dense


def test_of_an_8_bit_cache_the_rounding_is_left(model: Transformer) -> None:
    """Replayed log-probs are as far off as those of the 8-bit cache that drops nothing."""

    def apart(groups: Sequence[Group], replay: bool) -> float:
        rollouts = [(g.request, r) for g in groups for r in g.rollouts]
        scores = score(
            model,
            [request.prompt_ids + r.token_ids for request, r in rollouts],
            [len(request.prompt_ids) for request, _ in rollouts],
            evictions=[r.evictions if replay else None for _, r in rollouts],
        )
        drawn = torch.tensor([x for _, r in rollouts for x in r.logprobs])
        return float((drawn - torch.cat(scores)).abs().mean())

    requests = [replace(r, ignore_eos=True, stop_ids=()) for r in REQUESTS[1:3]]
    whole = apart(engine_of(model, kv_dtype="fp8").generate(requests), False)
    groups = recording(model, rkv(), kv_dtype="fp8").generate(requests)
    assert 1e-3 < apart(groups, True) < 2 * whole < apart(groups, False) / 4


@pytest.mark.slow
def test_more_compactions_than_a_byte_counts(tmp_path: Path) -> None:
    """With a buffer of 1 every token is a compaction."""
    model = hf.load(hf_folder(tmp_path / "m", max_position_embeddings=512))
    long = Request(prompt(8, 9), n=2, max_tokens=290, ignore_eos=True, seed=6)
    groups = recording(model, streaming(6, 1), 16, page_size=16).generate([long])
    evictions = groups[0].rollouts[0].evictions
    assert evictions is not None and len(evictions.after) > 255
    assert unpack_evictions(evictions).dtype == torch.int16
    assert off(model, groups)[0] < BOUND


def test_a_recorder_by_hand() -> None:
    """One layer, one head: slot 0 goes on, slot 1 is copied from it, slot 0 then begins anew."""
    recorder = CompactionRecorder(1, 3, 1, 3, "cpu")
    assert recorder.evictions(None) == recorder.evictions(0) == Evictions(1, 1)

    def compact(slot: int, length: int, position: int, kept: list[int]) -> None:
        row = Compaction(slot, [], [], length, len(kept), position)
        recorder.compacted([row], torch.tensor([[[kept]]]))

    compact(0, 5, 4, [0, 3, 4])  # of 0 1 2 3 4
    recorder.copy([(0, 1), (1, 0)])  # read before written: slot 0 has nothing now
    recorder.copy([(1, 2)])
    compact(1, 5, 6, [0, 2, 3])  # of 0 3 4 5 6
    recorder.begin([2])
    compact(2, 3, 2, [0, 2])
    want = {0: ((), []), 1: ((4, 6), [0, 1, 1, 2, 0, 0, 2]), 2: ((2,), [0, 1, 0])}
    for slot, (after, numbers) in want.items():
        found = recorder.evictions(slot)
        assert found.after == after
        assert unpack_evictions(found).flatten().tolist() == numbers
