"""The engine at its edges: what `score` takes, who ends a sample, the limits of a request, what
memory holds."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import lowroll
from lowroll import Engine, Request
from lowroll.engine import runner
from lowroll.engine.decoder import BUCKETS, bucket
from lowroll.engine.sampling_state import DrawMode, draw_of
from lowroll.engine.sequence import LiveGroup, Sequence
from lowroll.kv.cache import KVCache
from lowroll.model import hf
from lowroll.model.spec import read_spec
from lowroll.weights.exploration_noise import Noise
from lowroll.weights.sync.update import WeightUpdate
from tests.fixtures.scheduling import NEED
from tests.fixtures.tiny import COMMON, hf_folder

V, CONTEXT = COMMON["vocab_size"], COMMON["max_position_embeddings"]


def engine_of(source: object, **options: object) -> Engine:
    return Engine(
        source,
        **{"weights": "fp32", "device": "cpu", "cache_tokens": 512, "page_size": 4, **options},
    )


def ids(length: int, seed: int = 0) -> list[int]:
    return torch.randint(2, V, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


# -- score


def test_score_takes_all_that_fits_and_names_what_does_not(folder: Path) -> None:
    engine = engine_of(folder)
    whole, short = ids(CONTEXT), [V - 1, 0]
    got = engine.score([whole, short, whole], [1, 1, CONTEXT - 1], temperature=0.7)
    want = lowroll.score(
        hf.load(folder), [whole, short, whole], [1, 1, CONTEXT - 1], temperature=0.7
    )
    assert [len(x) for x in got] == [CONTEXT - 1, 1, 1]
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)
    (plain_got,) = engine.score([whole], [1])
    torch.testing.assert_close(
        plain_got,
        lowroll.score(hf.load(folder), [whole], [1], temperature=1.0)[0],
        rtol=1e-4,
        atol=1e-4,
    )
    long, outside = (
        "257 tokens with a prompt of 1 cannot be scored in a context of 256",
        "an id is outside the voc",
    )
    for bad, prompt_len, says in (
        (ids(CONTEXT + 1), 1, long),
        (ids(5), 5, "5 tokens with a prompt of 5"),
        (ids(5), 0, "5 tokens with a prompt of 0"),
        ([3, V], 1, outside),
        ([-1, 3], 1, outside),
    ):
        with pytest.raises(ValueError, match=rf"^sequences\[1\]: {says}"):
            engine.score([short, bad], [1, prompt_len])
    with pytest.raises(ValueError):
        engine.score([short, short], [1])
    assert engine.pool.num_used == 0


def test_scoring_takes_no_page_and_reads_none(folder: Path) -> None:
    """Sequences that no cache of this size would hold, beside one that fills it, and while it is
    given away."""
    engine, plain = engine_of(folder, cache_tokens=8), engine_of(folder)
    want = torch.cat(plain.score([ids(8), ids(14)], [3, 5]))
    engine.add(Request(ids(4), max_tokens=4, ignore_eos=True))
    engine.step()
    used = engine.pool.num_used
    for buffer in (*engine.runner.cache.keys, *engine.runner.cache.values):
        buffer.fill_(torch.nan)
    assert torch.cat(engine.score([ids(8), ids(14)], [3, 5])).equal(want)
    assert engine.pool.num_used == used == engine.pool.peak_used
    plain.release()
    assert torch.cat(plain.score([ids(8), ids(14)], [3, 5])).equal(want)
    assert plain.runner.cache.released


@pytest.mark.parametrize("rows", [1, 4, 5, 9])
def test_the_pieces_in_which_logits_exist_change_nothing(
    rows: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(folder)
    whole = engine.score([ids(14)], [5])[0]
    monkeypatch.setattr(runner, "SCORE_ROWS", rows)
    torch.testing.assert_close(engine.score([ids(14)], [5])[0], whole, rtol=1e-5, atol=1e-6)


# -- who ends a sample


def eos_of(engine: Engine, **changes: object) -> tuple[int, ...]:
    engine.add(replace(Request(ids(3)), **changes))
    return list(engine.scheduler.in_flight.values())[-1].stop_ids


def test_the_models_eos_and_the_tokenizers_both_end_a_sample(folder: Path, tmp_path: Path) -> None:
    """config.json says 1. A tokenizer, given or in the folder, may say another; none at all is no
    reason to fail."""
    assert eos_of(engine_of(folder)) == (1,)
    assert eos_of(engine_of(folder), stop_ids=(5, 1)) == (1, 5)
    assert eos_of(engine_of(folder), stop_ids=(5,), ignore_eos=True) == (5,)
    for known, want in ((7, (1, 7)), (0, (0, 1)), (1, (1,)), (None, (1,))):
        assert eos_of(engine_of(folder, tokenizer=SimpleNamespace(eos_token_id=known))) == want
        assert (
            eos_of(engine_of(hf.load(folder), tokenizer=SimpleNamespace(eos_token_id=known)))
            == want
        )
    own = hf_folder(tmp_path / "own")
    (own / "tokenizer.json").write_text(
        json.dumps({"added_tokens": [{"id": 9, "content": "<end>"}]})
    )
    (own / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    assert eos_of(engine_of(own)) == (1, 9)
    assert eos_of(engine_of(own, tokenizer=SimpleNamespace(eos_token_id=7))) == (
        1,
        7,
    )  # the one given, not both


def test_stop_strings_need_a_tokenizer_and_no_other_request_does(folder: Path) -> None:
    with pytest.raises(ValueError, match="stop_strings: this engine has no tokenizer"):
        engine_of(folder).add(Request(ids(3), stop_strings=("x",)))
    for source in (folder, hf.load(folder)):
        bare = engine_of(source)
        assert (
            len(
                bare.generate([Request(ids(3), max_tokens=2, ignore_eos=True)])[0]
                .rollouts[0]
                .token_ids
            )
            == 2
        )
    with pytest.raises(ValueError, match="tokenizer: the engine was made from a loaded model"):
        _ = engine_of(hf.load(folder)).tokenizer
    given = SimpleNamespace(
        eos_token_id=None, decode=lambda drawn: "".join(f"<{i}>" for i in drawn)
    )
    engine = engine_of(folder, tokenizer=given)
    assert engine.tokenizer is given
    free = (
        engine.generate([Request(ids(3), max_tokens=9, seed=3, ignore_eos=True)])[0]
        .rollouts[0]
        .token_ids
    )
    ended = engine.generate(
        [Request(ids(3), max_tokens=9, seed=3, ignore_eos=True, stop_strings=(f"<{free[3]}>",))]
    )
    assert ended[0].rollouts[0].token_ids == free[: free.index(free[3]) + 1]


# -- limits and formats


def test_the_engine_holds_requests_to_its_own_context_and_cache(folder: Path) -> None:
    engine = engine_of(folder, cache_tokens=19)  # four pages of four; three slots are no page
    engine.add(Request(ids(6), max_tokens=10))
    with pytest.raises(ValueError, match="over the KV cache of 16 tokens"):
        engine.add(Request(ids(6), max_tokens=11))
    wide = engine_of(folder, cache_tokens=1024)
    wide.add(Request(ids(6), max_tokens=CONTEXT - 6))
    with pytest.raises(ValueError, match=f"over the model's context of {CONTEXT}"):
        wide.add(Request(ids(6), max_tokens=CONTEXT - 5))
    assert engine_of(folder, cache_tokens=4).pool.num_pages == 1
    with pytest.raises(ValueError, match="^cache_tokens: 3 is less than one page of 4"):
        engine_of(folder, cache_tokens=3)


def test_with_a_second_model_prompts_run_on_it_and_few_rows_on_the_first(folder: Path) -> None:
    engine = engine_of(folder, weights="int4", large_batch_weights="int8")
    few, many = engine.behavior.policy
    assert (
        few.digest != many.digest
        and not engine.runner.decoder.runs_large_batch(8)
        and engine.runner.decoder.runs_large_batch(9)
    )
    (group,) = engine.generate([Request(ids(5), n=2, max_tokens=6, ignore_eos=True)])
    for rollout in group.rollouts:
        assert [(s.start, s.digest) for s in rollout.behavior.policy] == [
            (0, many.digest),
            (1, few.digest),
        ]


def test_many_rows_run_on_the_second_model(folder: Path) -> None:
    request = Request(ids(5), n=12, max_tokens=4, seed=2, ignore_eos=True)
    engine, alone = (
        engine_of(folder, weights="int4", large_batch_weights="int8"),
        engine_of(folder, weights="int8"),
    )
    both, one = engine.generate([request])[0], alone.generate([request])[0]
    for ours, theirs in zip(both.rollouts, one.rollouts, strict=True):
        assert [s.digest for s in ours.behavior.policy] == [engine.behavior.policy[-1].digest]
        assert ours.token_ids == theirs.token_ids and ours.logprobs == theirs.logprobs


def test_a_model_of_one_layer_is_a_model(tmp_path: Path) -> None:
    engine = engine_of(hf_folder(tmp_path / "one", num_hidden_layers=1), prefill_chunk=3)
    rollout = engine.generate([Request(ids(8), max_tokens=4, ignore_eos=True)])[0].rollouts[0]
    (again,) = engine.score([ids(8) + rollout.token_ids], [8])
    torch.testing.assert_close(torch.tensor(rollout.logprobs), again, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a device that is not there")
def test_a_loaded_model_stays_where_it_is(folder: Path) -> None:
    model = hf.load(folder)
    for device in ("auto", "cpu", torch.device("cpu")):
        assert engine_of(model, device=device).model.device == model.device
    with pytest.raises(
        ValueError, match="device: cuda was asked for, and torch sees no CUDA device"
    ):
        engine_of(model, device="cuda")


# -- which rows draw by themselves


@pytest.mark.parametrize(
    ("changes", "drawn", "want"),
    [
        ({}, 0, DrawMode.PLAIN),
        ({"temperature": 0.0}, 0, DrawMode.PLAIN),
        ({"temperature": 0.0, "top_k": 2, "top_p": 0.5, "min_p": 0.1}, 0, DrawMode.PLAIN),
        ({"temperature": 3.0}, 0, DrawMode.PLAIN),
        ({"top_p": 1}, 0, DrawMode.PLAIN),
        ({"top_p": 0.999}, 0, DrawMode.FILTERED),
        ({"top_k": 1}, 0, DrawMode.FILTERED),
        ({"min_p": 0.001}, 0, DrawMode.FILTERED),
        ({"repetition_penalty": 1.01}, 0, DrawMode.MARKED),
        ({"repetition_penalty": 0.99, "top_k": 3}, 0, DrawMode.MARKED),
        ({"temperature": 0.0, "repetition_penalty": 1.1}, 0, DrawMode.MARKED),
        ({"min_tokens": 2}, 1, DrawMode.MARKED),
        ({"min_tokens": 2}, 2, DrawMode.PLAIN),
        ({"min_tokens": 1}, 1, DrawMode.PLAIN),
    ],
)
def test_a_step_does_what_a_row_of_it_needs(changes: dict, drawn: int, want: DrawMode) -> None:
    def row(**fields: object) -> Sequence:
        return Sequence(
            LiveGroup(0, replace(Request([3]), **fields), (1,), NEED), 0, 0, token_ids=[2] * drawn
        )

    assert draw_of([row(**changes)]) == draw_of([row(), row(**changes)]) == want


def test_numbers_of_a_request_may_be_written_as_integers(folder: Path) -> None:
    """Of every row together: one float among them would make floats of all."""
    as_floats = Request(ids(4), n=2, max_tokens=4, temperature=2.0, top_p=1.0, seed=3)
    as_integers = replace(as_floats, temperature=2, top_p=1, min_p=0, repetition_penalty=1)
    many = [
        replace(one, min_p=0.1, repetition_penalty=2) if filtered else one
        for one in (as_integers, as_floats)
        for filtered in (False, True)
    ]
    for request, want in zip(many[:2], many[2:], strict=True):
        (got,), (expected,) = (engine_of(folder).generate([one]) for one in (request, want))
        assert [r.token_ids for r in got.rollouts] == [r.token_ids for r in expected.rollouts]
        assert [r.logprobs for r in got.rollouts] == [r.logprobs for r in expected.rollouts]


def test_sizes_of_batches_on_a_device_are_those_of_its_graphs() -> None:
    assert [bucket(size) for size in BUCKETS] == list(BUCKETS)
    assert [bucket(n) for n in (1, 3, 5, 9, 65, 511)] == [1, 4, 8, 16, 96, 512]
    assert [bucket(n) for n in (513, 640, 641)] == [640, 640, 768]


def test_the_rows_that_a_batch_lacks_are_dead(folder: Path) -> None:
    """A batch of a device is filled up to the size of a graph: length 0, so that a row writes and
    reads nothing."""
    engine = engine_of(folder)
    engine.add(Request(ids(5), n=2, max_tokens=4, temperature=0.0, ignore_eos=True))
    engine.step()
    rows, decoder = engine.scheduler.plan().decodes, engine.runner.decoder
    decoder.upload(rows, 4)
    assert decoder.lengths_B[:4].tolist() == [6, 6, 0, 0]
    assert decoder.greedy_B[:4].tolist() == [True, True, False, False]
    ids_B, pos_B, next_B, end_B, _, _, slots_B, _ = decoder.state[:, :4].tolist()
    assert ids_B == [rows[0].last_token, rows[1].last_token, 0, 0]
    assert (pos_B, next_B, end_B) == ([5, 5, 0, 0], [6, 6, 0, 0], [8, 8, 0, 0])
    assert slots_B[:2] == [row.slot for row in rows] == [0, 1]


def test_a_row_that_loses_its_distribution_while_it_decodes_is_an_error(folder: Path) -> None:
    engine, sick = engine_of(hf.load(folder)), hf.load(folder)
    with torch.no_grad():
        sick.norm.weight[0] = float("nan")
    engine.add(Request(ids(5), n=2, max_tokens=9, ignore_eos=True))
    engine.step()
    engine.step()
    engine.update_weights(WeightUpdate.local(sick, 1))
    with pytest.raises(ValueError, match=r"no distribution to draw from .* in rows \[0, 1\]"):
        engine.step()
    assert not engine.scheduler.has_work and engine.pool.num_used == 0


def test_a_cpu_holds_the_rows_that_it_was_given_and_no_more(folder: Path) -> None:
    decoder = engine_of(folder, max_batch=5).runner.decoder
    assert (
        decoder.state.shape == (8, 5)
        and decoder.table_BP.shape[0] == 5
        and decoder.tokens_SB.shape[1] == 5
    )


def test_page_tables_follow_rows_that_change_places(folder: Path) -> None:
    engine = engine_of(folder)
    engine.add(Request(ids(6), n=2, max_tokens=9, ignore_eos=True))
    engine.step()
    (a, b), decoder = engine.scheduler.plan().decodes, engine.runner.decoder
    for rows in ([a, b], [b, a], [a], [b], [a, b]):  # the numbers of pages are the same in each
        decoder.upload(rows, len(rows))
        assert [decoder.table_BP[i, : len(row.pages)].tolist() for i, row in enumerate(rows)] == [
            r.pages for r in rows
        ]
    assert a.pages != b.pages and len(a.pages) == len(b.pages)


# -- memory


def test_weights_are_int8_unless_the_model_says_otherwise(folder: Path) -> None:
    for source in (folder, hf.load(folder)):
        assert Engine(source, device="cpu", cache_tokens=64).behavior.weights == "int8"
    own = engine_of(folder, weights="int4").model
    assert Engine(own, device="cpu", cache_tokens=64).behavior.weights == "int4"


def test_the_cache_holds_what_bytes_per_token_says(folder: Path) -> None:
    spec = read_spec(folder)
    for dtype in (torch.float32, torch.bfloat16):
        cache = KVCache(spec, 3, 4, dtype, "cpu")
        held = sum(buffer.nbytes for buffer in (*cache.keys, *cache.values))
        assert held == 12 * KVCache.bytes_per_token(spec, dtype)
        assert KVCache.bytes_per_token(spec, dtype) == 2 * 2 * 2 * spec.head_dim * dtype.itemsize
    assert cache.virtual_memory_bytes == 0 and cache.released is False


def test_warming_up_takes_the_memory_back_and_draws_nothing(folder: Path) -> None:
    engine = engine_of(folder)
    engine.release()
    engine.warm_up()
    assert not engine.runner.cache.released and not engine.has_work
    assert not any(bool(buffer.any()) for buffer in engine.runner.cache.keys)


def test_a_rollout_is_tagged_with_the_noise_that_it_was_drawn_under(folder: Path) -> None:
    engine, master = engine_of(folder, noisy=True), hf.load(folder)
    noises = [(Noise(5, 1e-2), (5, 1e-2)), (Noise(6, 0.0), (None, 0.0)), (None, (None, 0.0))]
    for version, (noise, want) in enumerate(noises, 1):
        tag = engine.update_weights(WeightUpdate.local(master, version, noise))
        rollout = engine.generate([Request(ids(4), max_tokens=2)])[0].rollouts[0]
        for told in (tag, rollout.behavior):
            assert (told.noise_seed, told.noise_sigma) == want and told.policy[0].version == version


def test_pages_are_those_of_the_cache_asked_for(folder: Path) -> None:
    engine = engine_of(folder, cache_tokens=43, page_size=8)
    assert (engine.pool.num_pages, engine.pool.page_size) == (5, 8)
    assert engine.runner.cache.keys[0].shape[:2] == (5, 8)
    assert engine.runner.decoder.table_BP.shape[1] == 5  # a row can hold the whole cache,
    assert (
        engine_of(folder, cache_tokens=4096).runner.decoder.table_BP.shape[1] == CONTEXT // 4
    )  # or its context
