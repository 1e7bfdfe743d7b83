"""The engine against transformers and against itself: P2, P3, P4, and the contract of requests,
versions and noise."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import lowroll
from lowroll import Engine, Request
from lowroll.engine.decoder import Decoder
from lowroll.engine.sequence import Sequence
from lowroll.model import hf
from lowroll.model.attention import varlen
from lowroll.model.device import pick_device
from lowroll.model.logprobs import log_probs
from lowroll.types import Group
from lowroll.weights.publish import quantize_base
from lowroll.weights.sync.update import WeightUpdate
from tests.fixtures.engines import V, engine_of, prompt
from tests.fixtures.tiny import FAMILIES, hf_folder, hf_model


def tokens(group: Group) -> list[list[int]]:
    return [r.token_ids for r in group.rollouts]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_transformers_step_by_step(family: str, tmp_path: Path) -> None:
    """P1 through the cache: the tokens are transformers' argmax, the log-probs within 1e-4 of its
    own."""
    theirs = hf_model(family)
    theirs.save_pretrained(tmp_path / "m")
    engine = engine_of(tmp_path / "m")
    for seed, length in ((1, 9), (2, 1)):
        ids = prompt(length, seed)
        rollout = engine.generate([Request(ids, max_tokens=24, temperature=0.0, ignore_eos=True)])[
            0
        ].rollouts[0]
        for token, logprob in zip(rollout.token_ids, rollout.logprobs, strict=True):
            with torch.no_grad():
                row = log_probs(theirs(torch.tensor([ids])).logits[0, -1:])[0]
            assert token == int(row.argmax()) and abs(logprob - float(row[token])) < 1e-4
            ids = [*ids, token]


@pytest.mark.parametrize("weights", lowroll.formats())
def test_decode_equals_prefill_equals_learner(folder: Path, weights: str) -> None:
    """P3 and P4: what decode recorded is what one forward pass over the whole sequence says."""
    engine = engine_of(folder, weights=weights, prefill_chunk=3)
    group = engine.generate([Request(prompt(11), n=4, max_tokens=20, temperature=0.8, seed=3)])[0]
    sequences = [group.request.prompt_ids + ids for ids in tokens(group)]
    again = lowroll.score(engine.model, sequences, [11] * 4, temperature=0.8)
    bound = {"int8": 0.05, "w4a8": 0.05, "fp8": 0.3, "fp8_block": 0.3, "bf16": 0.2}.get(
        weights, 1e-4
    )
    for rollout, logp in zip(group.rollouts, again, strict=True):
        assert (torch.tensor(rollout.logprobs) - logp).abs().max() < bound
    if (
        weights == "int8"
    ):  # the learner's dense forward differs, and by no more than the format's noise
        dense = lowroll.score(hf.load(folder), sequences, [11] * 4, temperature=0.8)
        gap = torch.cat(
            [torch.tensor(r.logprobs) - d for r, d in zip(group.rollouts, dense, strict=True)]
        ).abs()
        assert 0.005 < gap.mean() < 0.5


def test_int8_logits_are_those_of_the_dequantized_model_nearly(folder: Path) -> None:
    """P5: only the activations' rounding separates the engine from the model with dequantized
    weights."""
    engine = engine_of(folder, weights="int8")
    ids, pos = torch.tensor(prompt(40)), torch.arange(40)
    with torch.no_grad():
        low_bit = engine.model.logits(engine.model(ids, pos, varlen([40])))
        learner = quantize_base(hf.load(folder), "int8")
        dequantized = learner.logits(learner(ids, pos, varlen([40])))
    assert 0 < (low_bit - dequantized).abs().max() < 0.05 * dequantized.abs().max()


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["fp32", "int8"])
def test_a_request_draws_the_same_alone_and_in_any_batch(folder: Path, weights: str) -> None:
    requests = [
        Request(
            prompt(5 + i % 7, i),
            n=1 + i % 3,
            max_tokens=6 + i,
            seed=i,
            temperature=1.0 + 0.1 * (i % 2),
            top_k=20 * (i % 2),
            top_p=1 - 0.2 * (i % 3 == 1),
        )
        for i in range(12)
    ]
    together = engine_of(folder, weights=weights).generate(requests)
    small = engine_of(folder, weights=weights, max_batch=3, cache_tokens=64, prefill_chunk=2)
    crowded = list(reversed(small.generate(list(reversed(requests)))))
    fresh = [engine_of(folder, weights=weights).generate([r])[0] for r in requests[:4]]
    for a, b in zip(together, crowded, strict=True):
        assert tokens(a) == tokens(b)
        for x, y in zip(a.rollouts, b.rollouts, strict=True):
            assert torch.tensor(x.logprobs).sub(torch.tensor(y.logprobs)).abs().max() < 1e-3
    assert [tokens(g) for g in fresh] == [tokens(g) for g in together[:4]]
    other = engine_of(folder, weights=weights).generate([replace(requests[5], seed=99)])[0]
    assert tokens(other) != tokens(together[5])
    assert len({tuple(ids) for ids in tokens(together[11])}) == 3


@pytest.mark.parametrize("options", [{}, {"prefill_chunk": 3, "max_prefill_tokens": 5}])
def test_prompts_that_end_in_one_step_keep_their_own_first_tokens(
    folder: Path, options: dict[str, int]
) -> None:
    """A prefix hit, or the second chunk of a prompt, before a fresh prompt: the runner packs the
    fresh one first."""
    requests = [
        Request(prompt(length, seed), max_tokens=1, temperature=0.0)
        for seed, length in ((1, 5), (2, 3))
    ]
    alone = [engine_of(folder).generate([request])[0].rollouts[0] for request in requests]
    assert alone[0].token_ids != alone[1].token_ids
    engine = engine_of(folder, **options)
    if not options:
        engine.generate(requests[:1])
        assert engine.pool.hits == 0
    for a, group in zip(alone, engine.generate(requests), strict=True):
        assert tokens(group) == [a.token_ids]
        assert abs(group.rollouts[0].logprobs[0] - a.logprobs[0]) < 1e-5
    assert engine.pool.hits == (not options)


def test_samples_follow_the_distribution(folder: Path) -> None:
    """10,000 first tokens against the model's own probabilities (chi-square), and their mean
    log-prob."""
    engine = engine_of(folder, cache_tokens=65536)
    groups = engine.generate([Request(prompt(6), n=1000, max_tokens=1, seed=s) for s in range(10)])
    drawn = torch.tensor([ids[0] for g in groups for ids in tokens(g)])
    with torch.no_grad():
        p = log_probs(hf_model()(torch.tensor([prompt(6)])).logits[0, -1:])[0].exp()
    counts, expected = torch.bincount(drawn, minlength=V).float(), p * len(drawn)
    big = expected > 5
    chi2 = ((counts - expected)[big] ** 2 / expected[big]).sum()
    assert chi2 < 2 * big.sum() + 20
    assert all(
        abs(r.logprobs[0] - float(p[r.token_ids[0]].log())) < 1e-4 for r in groups[0].rollouts
    )


@pytest.mark.parametrize("settings", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 0.999}])
def test_the_first_token_is_drawn_from_what_the_filters_leave(
    folder: Path, settings: dict[str, float]
) -> None:
    engine = engine_of(folder)
    (best,) = tokens(engine.generate([Request(prompt(6), max_tokens=1, temperature=0.0)])[0])
    (hot,) = engine.generate(
        [Request(prompt(6), n=40, max_tokens=1, temperature=2.0, seed=3, **settings)]
    )
    assert tokens(hot) == [best] * 40 and {rollout.logprobs[0] for rollout in hot.rollouts} == {0.0}


def test_stops(folder: Path) -> None:
    engine = engine_of(folder)
    base = Request(prompt(6), n=8, max_tokens=30, seed=5)
    ended = engine.generate([base])[0].rollouts
    assert any(
        r.finish_reason == "stop" and r.token_ids[-1] == 1 and r.stop_reason == 1 for r in ended
    )
    assert all(1 not in r.token_ids[:-1] for r in ended)
    free = engine.generate([replace(base, ignore_eos=True)])[0].rollouts
    assert all(len(r.token_ids) == 30 and r.finish_reason == "length" for r in free)
    third = free[0].token_ids[2]
    stopped = engine.generate([replace(base, n=1, ignore_eos=True, stop_ids=(third,))])[0].rollouts[
        0
    ]
    assert stopped.token_ids == free[0].token_ids[: free[0].token_ids.index(third) + 1]
    long = engine.generate([replace(base, min_tokens=20)])[0].rollouts
    assert all(1 not in r.token_ids[:20] for r in long)


def test_pages_return_and_prompts_are_shared(folder: Path) -> None:
    engine = engine_of(folder)
    engine.generate([Request(prompt(16), n=8, max_tokens=8, seed=1)])
    assert engine.pool.num_used == 0 and engine.pool.hits == 0
    assert engine.pool.peak_used <= 4 + 8 * 2  # 4 prompt pages once, 2 of its own for each sample
    first = engine.generate([Request(prompt(16), n=8, max_tokens=8, seed=1)])[0]
    assert engine.pool.hits == 3  # the prefix cache: every full page but the last token's
    cold = engine_of(folder).generate([Request(prompt(16), n=8, max_tokens=8, seed=1)])[0]
    assert tokens(first) == tokens(cold)


@pytest.mark.parametrize("weights", ["fp32", "int8"])
@pytest.mark.parametrize("n", [1, 8])
def test_later_turns_begin_behind_what_was_drawn(folder: Path, weights: str, n: int) -> None:
    """The same tokens as without, and log-probs but for rounding; fewer tokens run."""
    told, hits = [], []
    for caching in (False, True):
        engine = engine_of(folder, weights=weights, turn_caching=caching)
        first = Request(prompt(9), n=n, max_tokens=11, seed=3, ignore_eos=True)
        (group,) = engine.generate([first])
        before = engine.pool.hits
        later = [
            Request([*prompt(9), *ids, 5, 6], max_tokens=8, seed=3, id=str(i))
            for i, ids in enumerate(tokens(group))
        ]
        found = engine.generate(later)
        told.append([rollout for one in (group, *found) for rollout in one.rollouts])
        hits.append(engine.pool.hits - before)
    assert hits == [2 * n, 4 * n]  # full pages of 9 tokens, and of 19 whose keys there are
    for a, b in zip(*told, strict=True):
        assert a.token_ids == b.token_ids
        assert b.logprobs == pytest.approx(a.logprobs, abs=1e-5 if weights == "fp32" else 0.05)


@pytest.mark.parametrize(
    "options",
    [{"kv_dtype": "fp8"}, {"large_batch_weights": "fp8"}],
    ids=str,
)
def test_turn_caching_is_refused_where_pages_would_be_others(
    folder: Path, options: dict[str, object]
) -> None:
    with pytest.raises(ValueError, match="^turn_caching: it does not go with"):
        engine_of(folder, turn_caching=True, **options)


def test_abort_and_wrong_requests_leave_the_others_alone(folder: Path) -> None:
    alone = engine_of(folder).generate(
        [Request(prompt(7), n=2, max_tokens=25, seed=2, ignore_eos=True)]
    )[0]
    engine = engine_of(folder)
    kept = engine.add(Request(prompt(7), n=2, max_tokens=25, seed=2, ignore_eos=True))
    doomed = engine.add(Request(prompt(9, 1), n=3, max_tokens=25, seed=2, ignore_eos=True))
    done = {}
    for step in range(40):
        done.update(engine.step())
        if step == 5:
            assert engine.abort(doomed) and not engine.abort(12345)
            for bad, field in (
                ({"n": 0}, "n"),
                ({"prompt_ids": []}, "prompt_ids"),
                ({"prompt_ids": [V]}, "prompt_ids"),
                ({"temperature": float("nan")}, "temperature"),
                ({"max_tokens": 300}, "max_tokens"),
                ({"stop_strings": ("x",)}, "stop_strings"),
            ):
                with pytest.raises(ValueError, match=field):
                    engine.add(replace(Request(prompt(7)), **bad))
    assert {r.finish_reason for r in done[doomed].rollouts} == {"abort"}
    assert tokens(done[kept]) == tokens(alone) and not engine.has_work and engine.pool.num_used == 0
    with pytest.raises(ValueError, match=r"requests\[1\]\.n: "):
        engine.generate([Request(prompt(3)), Request(prompt(3), n=0)])


def test_generate_leaves_queued_requests_to_step(folder: Path) -> None:
    queued, mine = (
        Request(prompt(n), max_tokens=tokens, seed=2, ignore_eos=True)
        for n, tokens in ((7, 3), (5, 8))
    )
    engine = engine_of(folder)
    handle, aborted = engine.add(queued), engine.add(queued)
    engine.abort(aborted)
    (group,) = engine.generate([mine])
    assert tokens(group) == tokens(engine_of(folder).generate([mine])[0])
    assert engine.has_work  # nothing is in flight, and two groups are still to be taken
    done = dict(engine.step())
    assert (
        tokens(done[handle]) == tokens(engine_of(folder).generate([queued])[0])
        and not engine.has_work
    )
    assert done[aborted].rollouts[0].finish_reason == "abort"


@pytest.mark.slow
def test_an_update_is_in_place_versioned_and_never_served_from_an_old_prefix(
    folder: Path, tmp_path: Path
) -> None:
    old, new = hf.load(folder), hf.load(hf_folder(tmp_path / "new", seed=9))
    for weights in lowroll.formats():
        engine = engine_of(old, weights=weights)
        request = Request(prompt(16), n=2, max_tokens=8, seed=1, ignore_eos=True)
        before = engine.generate([request])[0]
        pointers = storages(engine)
        digests = [engine.behavior.policy[0].digest]
        for version in (1, 2, 3):
            tag = engine.update_weights(WeightUpdate.local(new if version % 2 else old, version))
            digests.append(tag.policy[0].digest)
            assert storages(engine) == pointers
        assert digests[1] == digests[3] != digests[0] == digests[2]
        hits = engine.pool.hits
        after = engine.generate([request])[0]
        assert engine.pool.hits == hits  # version 3 never met version 0's pages
        assert (
            tokens(after)
            == tokens(engine_of(new, weights=weights).generate([request])[0])
            != tokens(before)
        )
        assert after.rollouts[0].behavior.policy == tag.policy
        assert after.rollouts[0].behavior.weights == weights


def storages(engine: Engine) -> list[int]:
    linears = [
        t.data_ptr() for _, linear in engine.model.linears() for t in linear.weight.tensors.values()
    ]
    return linears + [p.data_ptr() for p in engine.model.parameters()]


def test_a_rollout_in_flight_names_both_versions(folder: Path, tmp_path: Path) -> None:
    engine, new = engine_of(hf.load(folder)), hf.load(hf_folder(tmp_path / "new", seed=9))
    engine.add(Request(prompt(6), n=1, max_tokens=10, seed=1, ignore_eos=True))
    done: list[tuple[int, Group]] = []
    for _ in range(4):
        done += engine.step()
    engine.update_weights(WeightUpdate.local(new, 7))
    while engine.has_work:
        done += engine.step()
    spans = done[0][1].rollouts[0].behavior.policy
    assert [(s.version, s.start) for s in spans] == [(0, 0), (7, 4)] and spans[0].digest != spans[
        1
    ].digest


def test_a_model_without_a_distribution_is_an_error_and_does_not_poison_the_cache(
    folder: Path,
) -> None:
    sick, well = hf.load(folder), hf.load(folder)
    with torch.no_grad():
        sick.norm.weight[0] = float("nan")
        sick.blocks[0].input_norm.weight[0] = float("nan")
    engine = engine_of(well)
    request = Request(prompt(9), n=3, max_tokens=6, seed=4)
    want = tokens(engine.generate([request])[0])
    engine.update_weights(WeightUpdate.local(sick, 1))
    with pytest.raises(ValueError, match="no distribution"):
        engine.generate([request])
    assert not engine.has_work and engine.pool.num_used == 0
    engine.update_weights(WeightUpdate.local(well, 2))
    assert tokens(engine.generate([request])[0]) == want


def test_constructor_refusals(folder: Path) -> None:
    for options, field in (
        ({"kv": "rkv"}, "kv"),
        ({"weights": "int9"}, "int9"),
        ({"cache_tokens": 3}, "cache_tokens"),
        ({"weights": "bf16", "dtype": torch.float32}, "dtype"),
        ({"max_batch": 0}, "max_batch"),
    ):
        with pytest.raises(ValueError, match=field):
            engine_of(folder, **options)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="device"):
            engine_of(folder, device="cuda")


def test_the_device_of_a_run_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first model is loaded there: kernels are launched on the current device."""
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    for asked, index in (("cuda:1", 1), ("cuda", 2), ("auto", 2), (torch.device("cuda", 3), 3)):
        assert pick_device(asked) == torch.device("cuda", index) == current[-1]
    assert pick_device("cpu") == torch.device("cpu") and len(current) == 4


def test_page_tables_are_right_and_only_new_pages_are_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Samples come and go in the middle of the batch; a page is read once in its sequence's life, a
    row moves whole."""

    class Pages(list):
        def __getitem__(self, at: slice | int) -> list[int] | int:
            got = list.__getitem__(self, at)
            read.extend(got if isinstance(at, slice) else [got])
            return got

    read, checked, upload = [], [], Decoder.upload

    def check(decoder: Decoder, sequences: list[Sequence], size: int) -> None:
        for sequence in sequences:
            sequence.pages = Pages(sequence.pages)
        before = {owner: count for owner, _, count in decoder._known}
        paged = decoder._paged
        read.clear()
        upload(decoder, sequences, size)
        assert len(read) == sum(len(s.pages) - before.get(s, 0) for s in sequences)
        for row, sequence in enumerate(sequences):
            assert decoder.table_BP[row, : len(sequence.pages)].tolist() == list(sequence.pages)
        checked.append(any(s in before for s in sequences) and sequences != paged)

    monkeypatch.setattr(Decoder, "upload", check)
    engine = engine_of(folder, max_batch=5)
    requests = [
        Request(
            prompt(3 + i, i),
            n=2,
            max_tokens=4 + 7 * (i % 3),
            seed=i,
            ignore_eos=True,
            min_p=0.01 * (i == 3),
        )
        for i in range(6)
    ]
    engine.generate(requests)
    assert checked.count(True) > 5  # steps with some rows of the step before, in another order
