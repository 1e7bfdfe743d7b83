"""Partial rollouts by replay: what comes out is what the new weights would have drawn from the start,
with the same noise, whatever had been drawn when they came."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from lowroll import Engine, Request
from lowroll.engine import draft_replay
from lowroll.engine.base import replayed
from lowroll.engine.draft_replay import Replays, plan_checks
from lowroll.engine.request import noise_key
from lowroll.engine.sequence import LiveGroup, Sequence
from lowroll.kv.policy.table import make
from lowroll.metrics.names import METRICS
from lowroll.model import hf, lora
from lowroll.model.logprobs import log_probs
from lowroll.model.transformer import Transformer
from lowroll.types import Group
from lowroll.weights.exploration_noise import Noise
from lowroll.weights.sync.update import WeightUpdate
from tests.fixtures.engines import engine_of, prompt
from tests.fixtures.formats import LAYOUTS
from tests.fixtures.scheduling import NEED, letters
from tests.fixtures.tiny import hf_folder, hf_model

# whose products of float32 rows round alike in any batch: the same tokens to the last
EXACT = {"fp32", "nvfp4", "mxfp4", "mxfp4_floor", "int4", "int4_asym", "nf4", "nf4_dq"}
ROUNDING = 3e-5  # nats: of a piece of a draft against tokens one by one, in float32
# nats, of the others (as in test_engine): codes of activations, or bfloat16
ROUNDED = 0.05
BOUND = {
    "int8": ROUNDED,
    "int8_rotated": ROUNDED,
    "w4a8": ROUNDED,
    "fp8": 0.3,
    "fp8_block": 0.3,
    "bf16": 0.2,
}


def moved(folder: Path, size: float, seed: int = 1) -> Transformer:
    """The model after a step of learning: every number is off by about `size` of itself."""
    model = hf.load(folder)
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.data.mul_(1 + size * torch.randn(p.shape, generator=generator))
    return model


def requests(seed: int = 7) -> list[Request]:
    """One sample and eight; some end on their own, some at their length; two with filters."""
    plain = Request(prompt(5, seed), max_tokens=24, seed=seed)
    return [
        plain,
        replace(plain, prompt_ids=prompt(9, seed), n=8),
        replace(plain, prompt_ids=prompt(6, seed), n=2, temperature=0.0, ignore_eos=True),
        replace(plain, prompt_ids=prompt(7, seed), n=3, top_k=20, top_p=0.9, min_p=0.02),
        replace(plain, prompt_ids=prompt(8, seed), n=2, repetition_penalty=1.3, min_tokens=9),
        replace(plain, prompt_ids=prompt(4, seed), stop_ids=(5, 9), top_logprobs=3, id="x"),
    ]


def step(engine: Engine, times: int) -> dict[int, Group]:
    done: dict[int, Group] = {}
    for _ in range(times):
        done |= dict(engine.step())
    return done


def finish(engine: Engine) -> dict[int, Group]:
    done: dict[int, Group] = {}
    while engine.has_work:
        done |= dict(engine.step())
    assert engine.pool.num_used == engine.scheduler.reserved_pages == 0
    return done


def fresh(model: Transformer, some: list[Request], version: int = 1, **options: Any) -> list[Group]:
    engine = engine_of(model, **options)
    engine.update_weights(WeightUpdate.local(model, version))
    return engine.generate(some)


def assert_same(found: Group, wanted: Group, exact: bool = True, version: int = 1) -> int:
    """The same rollouts, of one version from their first token on. Where numbers round otherwise in
    another batch, a token may differ; returns how many samples are the same."""
    same = 0
    for a, b in zip(found.rollouts, wanted.rollouts, strict=True):
        assert {span.version for span in a.behavior.policy} == {version}
        assert a.behavior.policy[0].start == 0
        ours, theirs = (replace(r.behavior, policy=()) for r in (a, b))
        assert ours == theirs
        if exact:
            assert a.token_ids == b.token_ids and a.behavior == b.behavior
        if a.token_ids != b.token_ids:
            continue
        same += 1
        assert (a.finish_reason, a.stop_reason) == (b.finish_reason, b.stop_reason)
        if exact:
            assert a.logprobs == pytest.approx(b.logprobs, abs=ROUNDING)
            assert [[i for i, _ in one] for one in a.top_logprobs or []] == [
                [i for i, _ in one] for one in b.top_logprobs or []
            ]
    return same


@pytest.mark.parametrize("weights", LAYOUTS)
def test_what_comes_out_is_what_the_new_weights_draw_from_the_start(
    folder: Path, weights: str
) -> None:
    """In every format, at many moments: the tokens of a fresh engine, its log-probs, and one span."""
    new, same, samples = moved(folder, 3e-3), 0, 0
    exact = weights in EXACT
    moments = range(0, 24, 3 if exact else 8)
    wanted = fresh(new, requests(), weights=weights)
    for moment in moments:
        engine = engine_of(folder, weights=weights)
        handles = [engine.add(request) for request in requests()]
        done = step(engine, moment)
        tag = engine.update_weights(WeightUpdate.local(new, 1), in_flight="replay")
        assert engine.pool.num_used == 0 and engine.stats().running == 0
        late = finish(engine)
        assert set(done) | set(late) == set(handles) and not set(done) & set(late)
        for handle, group in late.items():
            samples += len(group.rollouts)
            same += assert_same(group, wanted[handle], exact)
            for rollout in group.rollouts:
                assert rollout.behavior.policy == tag.policy
            ids = [group.request.prompt_ids + r.token_ids for r in group.rollouts]
            if handle < 2:  # of the whole distribution
                lens = [len(group.request.prompt_ids)] * len(ids)
                for rollout, logp in zip(group.rollouts, engine.score(ids, lens), strict=True):
                    gap = (torch.tensor(rollout.logprobs) - logp).abs().max()
                    assert gap < BOUND.get(weights, ROUNDING)
        for group in done.values():
            assert {s.version for r in group.rollouts for s in r.behavior.policy} == {0}
    assert same > 0.7 * samples > 0


@pytest.mark.parametrize("options", [{}, {"lookahead": 5}, {"prefill_chunk": 3}])
@pytest.mark.parametrize("moment", [3, 5, 11])
def test_unchanged_weights_draw_nothing_again(
    folder: Path, moment: int, options: dict[str, int]
) -> None:
    engine, twin = engine_of(folder, **options), engine_of(folder, **options)
    for one in (engine, twin):
        for request in requests():
            one.add(replace(request, min_tokens=16, top_k=0, top_p=1.0, min_p=0.0))
        assert step(one, -(-moment // options.get("lookahead", 1))) == {}
    drawn = [len(d.token_ids) for handle in range(6) for d in engine.so_far(handle)]
    before = engine.stats()
    engine.update_weights(WeightUpdate.local(hf.load(folder), 1), in_flight="replay")
    assert all(not d.token_ids for handle in range(6) for d in engine.so_far(handle))
    found, wanted = finish(engine), finish(twin)
    for handle, group in found.items():
        for a, b in zip(group.rollouts, wanted[handle].rollouts, strict=True):
            assert a.token_ids == b.token_ids and a.finish_reason == b.finish_reason
            assert a.logprobs == pytest.approx(b.logprobs, abs=ROUNDING)
            assert [s.version for s in a.behavior.policy] == [1]
    stats = engine.stats()
    assert stats.replays == 17 and stats.replayed_tokens == stats.kept_tokens == sum(drawn)
    assert stats.tokens == twin.stats().tokens
    assert replayed(before, stats) == {
        "rollout/replay_samples": 17,
        "rollout/replay_kept_mean": sum(drawn) / 17,
        "rollout/replay_kept_fraction": 1,
        "rollout/replay_redrawn_tokens": 0,
    }
    assert replayed(stats, stats) == {}
    assert set(replayed(before, stats)) < {metric.name for metric in METRICS}


def test_samples_follow_the_new_distribution_at_every_moment(tmp_path: Path) -> None:
    """Five tokens, three places, 125 responses: their frequencies after a replay at any moment are
    the new model's own (chi-square), and with `keep` they are not."""
    small = {"vocab_size": 5, "eos_token_id": 4}
    old, theirs = hf_model(seed=3, **small), hf_model(seed=8, **small)
    old.save_pretrained(tmp_path / "old")
    theirs.save_pretrained(tmp_path / "new")
    new, ids = hf.load(tmp_path / "new"), [2, 3]
    responses = list(product(range(5), repeat=3))
    with torch.no_grad():
        logits_RTV = theirs(torch.tensor([[*ids, *one] for one in responses])).logits[:, 1:4]
    logp_RTV = log_probs(logits_RTV.flatten(0, 1)).view(logits_RTV.shape)
    p_R = logp_RTV.gather(2, torch.tensor(responses)[..., None])[..., 0].sum(1).double().exp()
    assert p_R.sum().item() == pytest.approx(1, abs=1e-4)

    def surprise(moment: int, in_flight: Any) -> float:
        """Standard deviations by which chi-square is off."""
        engine = engine_of(tmp_path / "old", cache_tokens=1 << 16, max_batch=4000)
        for seed in range(20):
            engine.add(Request(ids, n=200, max_tokens=3, seed=seed, ignore_eos=True))
        assert step(engine, moment) == {}
        engine.update_weights(WeightUpdate.local(new, 1), in_flight=in_flight)
        counts_R = torch.zeros(125, dtype=torch.float64)
        for group in finish(engine).values():
            for rollout in group.rollouts:
                counts_R[responses.index(tuple(rollout.token_ids))] += 1
        assert counts_R.sum() == 4000
        many_R = 4000 * p_R > 5
        got = torch.cat([counts_R[many_R], counts_R[~many_R].sum()[None]])
        want = 4000 * torch.cat([p_R[many_R], p_R[~many_R].sum()[None]])
        chi2, free = ((got - want) ** 2 / want).sum().item(), len(want) - 1
        return (chi2 - free) / (2 * free) ** 0.5

    for moment in range(3):
        assert abs(surprise(moment, "replay")) < 4, moment
    assert surprise(2, "keep") > 40


@pytest.mark.parametrize("lookahead", [None, 4])
def test_several_updates_and_aborts_between_them(folder: Path, lookahead: int | None) -> None:
    """Each replay takes as its draft what is left of the one before; two in a row are one; an
    aborted request has what was checked by then, and the others do not notice."""
    versions = [moved(folder, 2e-3, seed) for seed in range(4)]
    wanted = fresh(versions[3], requests(5), version=3)
    for pauses in ((0, 0), (1, 2), (7, 0), (2, 7), (0, 1)):
        engine = engine_of(folder, prefill_chunk=4, max_batch=5, lookahead=lookahead)
        handles = [engine.add(request) for request in requests(5)]
        done = step(engine, 6)
        for version, pause in enumerate((*pauses, 0), 1):
            update = WeightUpdate.local(versions[version], version)
            engine.update_weights(update, in_flight="replay")
            done |= step(engine, pause)
            if version == 2:
                engine.abort(handles[2])
        late = finish(engine)
        assert len(late) > 2
        for handle, group in late.items():
            if handle != handles[2]:
                assert_same(group, wanted[handle], version=3)
        aborted = (done | late)[handles[2]].rollouts
        assert {r.finish_reason for r in aborted} == {"abort"}
        for rollout in aborted:
            assert {span.version for span in rollout.behavior.policy} <= {1, 2}


def test_after_a_replay_weights_may_change_under_what_is_kept(folder: Path) -> None:
    """`keep` on top of `replay`: the spans say which tokens had been checked by then."""
    engine = engine_of(folder, prefill_chunk=2)
    handle = engine.add(Request(prompt(5), max_tokens=20, seed=3, ignore_eos=True))
    step(engine, 12)
    engine.update_weights(WeightUpdate.local(hf.load(folder), 1), in_flight="replay")
    step(engine, 5)
    (drawn,) = engine.so_far(handle)
    checked = len(drawn.token_ids)
    assert 1 < checked < 10
    engine.update_weights(WeightUpdate.local(moved(folder, 1e-2), 2))
    (rollout,) = finish(engine)[handle].rollouts
    assert [(s.version, s.start) for s in rollout.behavior.policy] == [(1, 0), (2, checked)]


def test_samples_that_had_ended_are_drawn_anew_while_their_group_is_open(folder: Path) -> None:
    """Some go on behind their old end, some end sooner; a group that was complete stays as it is."""
    new, longer, shorter = moved(folder, 2e-2), 0, 0
    for seed in range(6):
        request = Request(prompt(6, seed), n=8, max_tokens=30, seed=seed)
        engine = engine_of(folder)
        handle = engine.add(request)
        step(engine, 20)
        before = engine.so_far(handle)
        if not before:
            continue
        engine.update_weights(WeightUpdate.local(new, 1), in_flight="replay")
        assert all(d.finish_reason is None and not d.token_ids for d in engine.so_far(handle))
        group = finish(engine)[handle]
        assert_same(group, fresh(new, [request])[0])
        for was, now in zip(before, group.rollouts, strict=True):
            if was.finish_reason:
                longer += len(now.token_ids) > len(was.token_ids)
            shorter += len(now.token_ids) < len(was.token_ids)
    assert longer and shorter


def test_a_complete_group_that_nobody_has_taken_is_not_replayed(folder: Path) -> None:
    engine = engine_of(folder)
    done = engine.add(Request(prompt(4), n=2, max_tokens=3, seed=1, ignore_eos=True))
    update = WeightUpdate.local(moved(folder, 1e-2), 1)

    def on_progress(_: int, __: int) -> None:
        if engine.scheduler.has_finished and not engine.behavior.policy[0].version:
            engine.update_weights(update, in_flight="replay")

    mine = Request(prompt(5), max_tokens=12, ignore_eos=True)
    (group,) = engine.generate([mine], on_progress)
    assert [s.version for s in group.rollouts[0].behavior.policy] == [1]
    ((handle, old),) = engine.step()
    assert handle == done
    assert {s.version for r in old.rollouts for s in r.behavior.policy} == {0}


@pytest.mark.parametrize("budget_pages", [24, 12])
def test_a_full_cache_takes_replayed_samples_in_the_order_in_which_they_came(
    folder: Path, budget_pages: int
) -> None:
    """As many as fit; the others wait with their drafts."""
    options = {"cache_tokens": 4 * budget_pages, "max_batch": 6}
    new, some = moved(folder, 3e-3), [replace(r, max_tokens=16) for r in requests(2)]
    engine = engine_of(folder, **options)
    for request in some:
        engine.add(request)
    done = step(engine, 14)
    engine.update_weights(WeightUpdate.local(new, 1), in_flight="replay")
    late = finish(engine)
    wanted = fresh(new, some)
    assert len(late) > 2 and not set(done) & set(late)
    for handle, group in late.items():
        assert_same(group, wanted[handle])


def test_noise_adapters_and_a_second_format_go_along(folder: Path) -> None:
    """Noise on the norms: the replayed samples have the new one's alone. Adapters: by their weights.
    A second format for many rows: it checks the drafts, and the spans say so. The seed is one whose
    samples are all open when the weights come."""
    noisy = engine_of(folder, noisy=True)
    wanted = engine_of(folder, noisy=True)
    model, noise = hf.load(folder), Noise(5, 0.05)
    for request in requests(3):
        noisy.add(request)
    noisy.update_weights(WeightUpdate.local(model, 0, Noise(3, 0.1)))
    step(noisy, 5)
    for engine in (noisy, wanted):
        engine.update_weights(WeightUpdate.local(model, 1, noise), in_flight="replay")
    for handle, group in enumerate(wanted.generate(requests(3))):
        if handle == 0:
            late = finish(noisy)
        assert_same(late[handle], group)
        assert {r.behavior.noise_sigma for r in late[handle].rollouts} == {0.05}

    adapted = hf.load(folder)
    lora.attach(adapted, rank=3, alpha=6)
    engine = engine_of(adapted)
    for request in requests(3):
        engine.add(request)
    step(engine, 5)
    for _, linear in adapted.linears():
        for p in linear.adapter.parameters() if linear.adapter is not None else ():
            p.data.add_(0.02 * torch.randn(p.shape, generator=torch.Generator().manual_seed(2)))
    engine.update_weights(WeightUpdate.local(adapted, 1), in_flight="replay")
    late, again = finish(engine), fresh(adapted, requests(3))
    for handle, group in late.items():
        assert_same(group, again[handle])

    two = engine_of(folder, large_batch_weights="nf4")
    for request in requests(3):
        two.add(request)
    done = step(two, 9)
    tag = two.update_weights(WeightUpdate.local(moved(folder, 1e-3), 1), in_flight="replay")
    many = tag.policy[1]
    for handle, group in finish(two).items():
        assert handle not in done
        for rollout in group.rollouts:
            first = rollout.behavior.policy[0]
            assert (first.version, first.digest, first.start) == (1, many.digest, 0)
            assert {s.version for s in rollout.behavior.policy} == {1}


def test_a_cache_in_8_bits_is_read_by_a_draft_as_by_its_tokens(folder: Path) -> None:
    new = moved(folder, 3e-3)
    wanted = fresh(new, requests(), kv_dtype="fp8")
    engine = engine_of(folder, kv_dtype="fp8")
    for request in requests():
        engine.add(request)
    step(engine, 8)
    engine.update_weights(WeightUpdate.local(new, 1), in_flight="replay")
    found = [(group, wanted[handle]) for handle, group in finish(engine).items()]
    same = sum(assert_same(a, b, exact=False) for a, b in found)
    assert same >= 0.7 * sum(len(group.rollouts) for group, _ in found) > 0


def test_samples_in_flight_need_no_cache_between_release_and_the_next_step(folder: Path) -> None:
    """One process, learner and engine in turns: the cache goes while samples are open."""
    new, wanted = moved(folder, 3e-3), fresh(moved(folder, 3e-3), requests(3))
    engine = engine_of(folder)
    for request in requests(3):
        engine.add(request)
    step(engine, 7)
    with pytest.raises(RuntimeError, match="finish, abort or replay them first"):
        engine.release()
    assert engine.stats().running and not engine.runner.cache.released
    engine.release(in_flight="replay")
    assert engine.runner.cache.released and engine.pool.num_used == 0
    engine.release(in_flight="replay")
    engine.update_weights(WeightUpdate.local(new, 1), in_flight="replay")
    assert engine.runner.cache.released
    for handle, group in finish(engine).items():
        assert_same(group, wanted[handle])
    assert engine.stats().replays == 17


def test_a_bounded_cache_replays_nothing_and_says_so(folder: Path) -> None:
    engine = engine_of(folder, kv=make("streaming", budget=8, buffer=4, sinks=2))
    assert not engine.capabilities.replays and engine_of(folder).capabilities.replays
    handle = engine.add(Request(prompt(5), max_tokens=20, seed=3, ignore_eos=True))
    step(engine, 6)
    drawn, before = list(engine.so_far(handle)[0].token_ids), engine.behavior
    refused = "^in_flight: replay needs every key of a sample; .* policy is 'streaming';"
    with pytest.raises(ValueError, match=refused):
        engine.update_weights(WeightUpdate.local(moved(folder, 1e-2), 1), in_flight="replay")
    with pytest.raises(ValueError, match=refused):
        engine.release(in_flight="replay")
    assert engine.behavior == before and engine.so_far(handle)[0].token_ids == drawn
    twin = engine_of(folder, kv=make("streaming", budget=8, buffer=4, sinks=2))
    assert (
        finish(engine)[handle]
        == twin.generate([Request(prompt(5), max_tokens=20, seed=3, ignore_eos=True)])[0]
    )


def test_an_update_that_does_not_fit_leaves_what_is_in_flight_alone(
    folder: Path, tmp_path: Path
) -> None:
    engine, twin = engine_of(folder), engine_of(folder)
    wrong = hf.load(hf_folder(tmp_path / "wide", hidden_size=64))
    for one in (engine, twin):
        one.add(Request(prompt(5), n=2, max_tokens=20, seed=3))
        step(one, 6)
    with pytest.raises(ValueError):
        engine.update_weights(WeightUpdate.local(wrong, 1), in_flight="replay")
    assert engine.stats().replays == 0 and finish(engine) == finish(twin)


# -- the pieces of a draft ---------------------------------------------------------------------------


def sample_with(draft: list[int], drawn: int = 1, **fields: Any) -> Sequence:
    request = Request([1, 2], **{"max_tokens": 2000, **fields})
    group = LiveGroup(0, request, (), NEED)
    draft_replay.begin(group, [draft])
    group.leader.token_ids = draft[:drawn]
    return group.leader


@pytest.mark.parametrize(
    ("drawn", "chunk", "length"),
    [(1, None, 256), (200, None, 256), (300, None, 300), (300, 7, 7), (995, None, 6)],
)
def test_a_piece_is_as_long_as_what_has_been_kept(
    drawn: int, chunk: int | None, length: int
) -> None:
    draft = list(range(1000))
    checks, tokens = plan_checks([sample_with(draft, drawn)], 8192, chunk)
    assert checks[0].ids == draft[drawn - 1 :][:length] and tokens == length
    ends = sample_with(draft, drawn, max_tokens=1000)
    (check,), _ = plan_checks([ends], 8192, chunk)
    assert len(check.ids) == min(length, 1000 - drawn)  # nothing is drawn behind the last token


def test_pieces_of_a_step_are_bounded_and_one_always_runs() -> None:
    rows = [sample_with(list(range(100))) for _ in range(4)]
    plain = sample_with([])
    plain.token_ids = [3]
    assert [len(plan_checks([plain, *rows], budget, None)[0]) for budget in (1, 200, 250, 400)] == [
        1,
        2,
        2,
        4,
    ]
    assert plan_checks([plain], 10, None) == ([], 0)


def test_counts_of_what_was_kept() -> None:
    replays = Replays()

    def follow(draft: list[int], drawn: list[int]) -> tuple[int, int, int, bool]:
        sequence = sample_with(draft, 0)
        for token in drawn:
            sequence.token_ids.append(token)
            if sequence.draft:
                replays.follow(sequence)
        return replays.samples, replays.tokens, replays.kept, bool(sequence.draft)

    assert follow([5, 6, 7], [5, 6]) == (0, 0, 0, True)
    assert follow([5, 6, 7], [5, 9, 7]) == (1, 3, 1, False)
    assert follow([5, 6, 7], [9]) == (2, 6, 1, False)
    assert follow([5, 6, 7], [5, 6, 7, 8]) == (3, 9, 4, False)


def test_long_drafts_run_in_pieces_and_stop_where_they_differ(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces of 4, then of as much as has been kept; logits of 3 rows at a time."""
    monkeypatch.setattr(draft_replay, "FIRST", 4)
    monkeypatch.setattr("lowroll.engine.runner.SCORE_ROWS", 3)
    pieces: list[int] = []
    engine = engine_of(folder)
    run = engine.runner.run

    def watched(plan: Any, *args: Any) -> Any:
        pieces.extend(len(check.ids) for check in plan.checks)
        return run(plan, *args)

    engine.runner.run = watched  # type: ignore[method-assign]
    request = Request(prompt(5), max_tokens=60, seed=1, ignore_eos=True, top_logprobs=2)
    handle = engine.add(request)
    first = step(engine, 41)
    engine.update_weights(WeightUpdate.local(hf.load(folder), 1), in_flight="replay")
    group = finish(engine)[handle]
    assert not first and pieces == [4, 5, 10, 20, 2]
    assert_same(group, fresh(hf.load(folder), [request])[0])
    pieces.clear()
    handle = engine.add(request)
    step(engine, 41)
    new = moved(folder, 3e-3, 2)
    engine.update_weights(WeightUpdate.local(new, 2), in_flight="replay")
    group = finish(engine)[handle]
    assert_same(group, fresh(new, [request], version=2)[0], version=2)
    kept = engine.stats().kept_tokens - 41
    assert 4 < kept < 40 and sum(pieces) <= 2 * kept + 4


def test_stop_strings_are_found_along_a_draft(folder: Path) -> None:
    """Also where the new draw completes one."""

    class Letters:
        eos_token_id = 1

        def decode(self, ids: list[int]) -> str:
            return letters([i % 12 for i in ids])

    def ended(size: float, seed: int) -> str:
        request = Request(
            prompt(6, seed), n=8, max_tokens=40, seed=seed, stop_strings=("ab", "c"), min_tokens=4
        )
        new = moved(folder, size)
        engine = engine_of(folder, tokenizer=Letters())
        handle = engine.add(request)
        if step(engine, 7):
            return "complete"
        engine.update_weights(WeightUpdate.local(new, 1), in_flight="replay")
        group = finish(engine)[handle]
        assert_same(group, fresh(new, [request], tokenizer=Letters())[0])
        return "".join(str(r.stop_reason) for r in group.rollouts)

    assert {"ab", "c"} <= {s for seed in range(3) for s in ("ab", "c") if s in ended(1e-2, seed)}


def test_noise_goes_by_request_sample_and_position(folder: Path) -> None:
    """What a replay draws is of the very noise of its place."""
    engine = engine_of(folder)
    handle = engine.add(Request(prompt(5), n=3, max_tokens=9, seed=4, ignore_eos=True))
    step(engine, 5)
    keys = [s.noise_key for s in engine.scheduler.in_flight[handle].sequences]
    engine.release(in_flight="replay")
    again = engine.scheduler.in_flight[handle]
    assert keys == [s.noise_key for s in again.sequences]
    assert keys == [noise_key(again.request, i) for i in range(3)]
    assert [len(s.draft) for s in again.sequences] == [5, 5, 5]
