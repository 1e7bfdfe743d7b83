"""The bounded policies' arithmetic and scores: by hand, and against each head written out."""

from __future__ import annotations

import math
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lowroll.kernels.kv_eviction.choose import best_and_last
from lowroll.kv.batch import DecodeRows, PromptChunk
from lowroll.kv.cache import KVCache
from lowroll.kv.policy import snapkv
from lowroll.kv.policy.base import CachePolicy, Selector, footprint
from lowroll.kv.policy.h2o import H2O, attended
from lowroll.kv.policy.rkv import RKV, redundancy
from lowroll.kv.policy.snapkv import SnapKV, importance
from lowroll.kv.policy.streaming import Streaming, first_and_last
from lowroll.kv.policy.table import POLICIES, filled, make
from lowroll.model.spec import read_spec
from tests.fixtures.policies import (
    Undecided,
    plain_importance,
    plain_kept,
    plain_redundancy,
)
from tests.fixtures.tiny import hf_folder

# two query heads of one KV head, six keys
KEYS = [[1, 0], [0.9, 0.1], [0, 1], [-1, 0], [1, 0.05], [0.1, 1]]
QUERIES = [[[1, 0], [0.5, 0.5]], [[0, 1], [1, 1]]]  # by token, by head


def tensors() -> tuple[Tensor, Tensor, Tensor]:
    """q [1, 2, 2, 2], k [1, 1, 6, 2], lengths."""
    return torch.tensor([QUERIES]), torch.tensor([[KEYS]]), torch.tensor([6], dtype=torch.int32)


def four(numbers: Tensor) -> list[float]:
    """Of the keys before the window."""
    return [round(x, 8) for x in numbers.double().flatten()[:4].tolist()]


IMPORTANCE = [0.31091757, 0.29946367, 0.26095166, 0.12866709]
IMPORTANCE_3 = [0.31091757, 0.31091757, 0.29946367, 0.26095166]
REDUNDANCY = [0.20628972, 0.18135564, 0.17661752, 0.10270920]
REDUNDANCY_CODE = [0.23491373, 0.17481531, 0.17024806, 0.09900514]


@pytest.mark.parametrize(
    ("kernel", "zero_first", "important", "redundant", "z"),
    [
        (
            1,
            True,
            IMPORTANCE,
            REDUNDANCY_CODE,
            [-0.18033060, -0.12738741, -0.12712809, -0.07623792],
        ),
        (
            3,
            True,
            IMPORTANCE_3,
            REDUNDANCY_CODE,
            [-0.18033060, -0.12624203, -0.12327689, -0.06300946],
        ),
        (1, False, IMPORTANCE, REDUNDANCY, [-0.15456899, -0.13327371, -0.13286060, -0.07957157]),
        (3, False, IMPORTANCE_3, REDUNDANCY, [-0.15456899, -0.13212832, -0.12900940, -0.06634311]),
    ],
)
def test_rkv_by_hand(
    kernel: int, zero_first: bool, important: list[float], redundant: list[float], z: list[float]
) -> None:
    q, k, lengths = tensors()
    kv = RKV(4, 1, window=2, kernel=kernel, zero_first=zero_first)
    score = kv.scores(q, k, lengths)
    for got, want in (
        (importance(q, k, lengths, kernel), important),
        (redundancy(k, lengths, zero_first), redundant),
        (score, z),
    ):
        assert four(got) == pytest.approx(want, abs=4e-8)
    assert best_and_last(score, lengths, 4, 2).tolist() == [[[2, 3, 4, 5]]]


@pytest.mark.parametrize(("kernel", "want"), [(1, IMPORTANCE), (3, IMPORTANCE_3)])
def test_snapkv_by_hand(kernel: int, want: list[float]) -> None:
    q, k, lengths = tensors()
    score = SnapKV(4, 1, window=2, kernel=kernel).scores(q, k, lengths)
    assert four(score) == pytest.approx(want, abs=4e-8)
    assert best_and_last(score, lengths, 4, 2).tolist() == [[[0, 1, 4, 5]]]


def test_streaming_by_hand() -> None:
    lengths = torch.tensor([12, 9], dtype=torch.int32)
    want = [[0, 1, 2, 3, 9, 10, 11], [0, 1, 2, 3, 6, 7, 8]]
    assert first_and_last(lengths, 7, 4).tolist() == want
    assert first_and_last(lengths, 3, 0).tolist() == [[9, 10, 11], [6, 7, 8]]
    assert first_and_last(lengths[1:], 9, 4).tolist() == [list(range(9))]


def test_equal_scores_are_the_older_keys() -> None:
    lengths = torch.tensor([7, 5])
    score = torch.tensor([[[1.0, 1, 2, 1, 1, 9, 9]], [[0.0, 0, 0, 5, 5, 5, 5]]])
    assert best_and_last(score, lengths, 4, 2).tolist() == [[[0, 2, 5, 6]], [[0, 1, 3, 4]]]
    assert best_and_last(score, lengths, 5, 2).tolist()[1] == [[0, 1, 2, 3, 4]]  # all of them


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (4, 1)], ids=["MHA", "GQA", "MQA"])
@pytest.mark.parametrize("zero_first", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_rows_of_other_lengths_against_each_head_written_out(
    heads: tuple[int, int], zero_first: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What stands behind a row's end is garbage; C is made in pieces."""
    g = torch.Generator().manual_seed(seed)
    (num_queries, num_heads), window, kernel = heads, 5, (1, 3, 7)[seed]
    lengths = [40, 17, 29, 12]
    q = torch.randn(len(lengths), window, num_queries, 8, generator=g)
    base = torch.randn(len(lengths), num_heads, 6, 8, generator=g)  # few directions: duplicates
    near = base[:, :, torch.randint(6, (48,), generator=g)]
    k = near + 0.4 * torch.randn(near.shape, generator=g)
    monkeypatch.setattr("lowroll.kv.policy.rkv.MOST_SCORED", 7 * k[..., 0].numel())
    lengths_B = torch.tensor(lengths, dtype=torch.int32)
    kv = RKV(11, 1, window=window, kernel=kernel, mix=0.3, zero_first=zero_first)
    important, redundant = importance(q, k, lengths_B, kernel), redundancy(k, lengths_B, zero_first)
    chosen = best_and_last(kv.scores(q, k, lengths_B), lengths_B, 11, window)
    some_differ = False
    for row, n in enumerate(lengths):
        for head in range(num_heads):
            group = q[row].unflatten(1, (num_heads, -1))[:, head].double()
            keys = k[row, head, :n].double()
            want_i = plain_importance(group, keys, kernel)
            want_r = plain_redundancy(keys, zero_first)
            got_i = important[row, head, : n - window].double()
            torch.testing.assert_close(got_i, want_i, rtol=1e-5, atol=1e-7)
            got_r = redundant[row, head, :n].double()
            torch.testing.assert_close(got_r, want_r, rtol=1e-5, atol=1e-7)
            z = 0.3 * want_i - 0.7 * want_r[: n - window]
            assert chosen[row, head].tolist() == plain_kept(z.tolist(), n, 11, window)
            some_differ |= chosen[row, head].tolist() != chosen[row, 0].tolist()
    assert some_differ or num_heads == 1


@pytest.mark.slow
@pytest.mark.parametrize("zero_first", [False, True])
@pytest.mark.parametrize("mix", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("kernel", [1, 3, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_rkv_keeps_by_its_definition(
    dtype: torch.dtype, kernel: int, mix: float, zero_first: bool
) -> None:
    """Lengths from one key over the window on, keys without any duplicate, and equal scores: a wide
    kernel gives its neighbours one and the same importance, which decides alone at mix 1."""
    g = torch.Generator().manual_seed(kernel)
    window, lengths, checked = 5, [6, 7, 8, 13, 31, 32], 0
    q = torch.randn(len(lengths), window, 6, 8, generator=g).to(dtype)
    near = torch.randn(len(lengths), 2, 5, 8, generator=g)[:, :, torch.arange(32) % 5]
    k = near + 0.5 * torch.randn(near.shape, generator=g)
    k[3] = torch.eye(32)[:, :8].roll(3, 1)  # at right angles, or nothing at all
    k, lengths_B = k.to(dtype), torch.tensor(lengths, dtype=torch.int32)
    for budget in (6, 7, 12):
        kv = RKV(budget, 1, window=window, kernel=kernel, mix=mix, zero_first=zero_first)
        rows = [row for row, n in enumerate(lengths) if n >= budget]
        score = kv.scores(q[rows], k[rows], lengths_B[rows])
        chosen = best_and_last(score, lengths_B[rows], budget, window)
        for i, row in enumerate(rows):
            for head in range(2):
                group, n = q[row].unflatten(1, (2, -1))[:, head].double(), lengths[row]
                keys = k[row, head, :n].double()
                redundant = plain_redundancy(keys, zero_first)[: n - window]
                z = mix * plain_importance(group, keys, kernel) - (1 - mix) * redundant
                torch.testing.assert_close(
                    score[i, head, : n - window].double(), z, rtol=1e-5, atol=1e-7
                )
                try:
                    want = plain_kept(z.tolist(), n, budget, window)
                except Undecided:
                    continue
                checked += 1
                assert chosen[i, head].tolist() == want
    assert checked > 20


@pytest.mark.parametrize("kind", [SnapKV, RKV])
def test_the_selector_scores_the_last_queries_of_each_slot(
    kind: type[SnapKV], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Queries come by prompts in chunks, from another slot, and one by one; rows go in portions."""
    spec = read_spec(hf_folder(tmp_path / "m", num_attention_heads=4, num_key_value_heads=2))
    cache = KVCache(spec, 32, 4, torch.float32, "cpu")
    g = torch.Generator().manual_seed(3)
    for buffer in cache.keys:
        buffer.copy_(torch.randn(buffer.shape, generator=g))
    kv = kind(9, 4, window=3, kernel=3)
    selector = kv.selector(spec, cache, 6)
    assert selector.watches and kv.window == 3
    lengths, slots, layer = [13, 13, 17], [4, 0, 2], spec.num_layers - 1
    q = torch.randn(3, 17, spec.num_heads, spec.head_dim, generator=g)
    pages = [list(range(8 * row, 8 * row + 8)) for row in range(3)]
    feed(selector, layer, q, lengths, slots, pages)
    rows = DecodeRows(
        torch.tensor(slots),
        torch.tensor(pages, dtype=torch.int32)[:, :5],
        torch.tensor(lengths, dtype=torch.int32),
        torch.tensor(lengths) - 1,
    )
    got = selector.compact(rows, 9)[layer]
    monkeypatch.setattr(snapkv, "MOST_SCORED", 1)
    assert torch.equal(selector.compact(rows, 9)[layer], got)
    last_q = torch.stack([q[row, n - 3 : n] for row, n in enumerate(lengths)])
    score = kv.scores(last_q, cache.gather_keys(layer, rows.table_BP), rows.lengths_B)
    assert torch.equal(best_and_last(score, rows.lengths_B, 9, 3), got)
    flat = cache.keys[layer].flatten(0, 1)
    keys = torch.stack([flat[32 * row : 32 * row + 20].transpose(0, 1) for row in range(3)])
    assert torch.equal(cache.gather_keys(layer, rows.table_BP), keys)


def test_h2o_by_hand() -> None:
    """Two steps over three keys, each with two query heads; then 2 of 3 stay, and their scores."""
    q = (
        torch.tensor([[[[0.0, 0], [0, 0]], [[0, 0], [math.log(2), 0]]]]) * 2**0.5
    )  # scale is 1/sqrt 2
    k = torch.tensor([[[[0.0, 0], [1, 0], [0, 1]]]])
    got = attended(q, k, torch.tensor([[1, 2]]))
    # step 1 sees two keys: 1/2 each, by both heads; step 2: 1/3 each, and 1/4, 1/2, 1/4
    want = [1 + 1 / 3 + 1 / 4, 1 + 1 / 3 + 1 / 2, 1 / 3 + 1 / 4]
    assert got.flatten().tolist() == pytest.approx(want)
    assert attended(q, k, torch.tensor([[-1, -1]])).tolist() == [[[0, 0, 0]]]
    assert best_and_last(got, torch.tensor([3]), 2, 1).tolist() == [[[1, 2]]]


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (4, 1)], ids=["MHA", "GQA", "MQA"])
def test_what_keys_are_given_against_each_head_written_out(heads: tuple[int, int]) -> None:
    g = torch.Generator().manual_seed(5)
    num_queries, num_heads = heads
    q = torch.randn(3, 4, num_queries, 8, generator=g)
    k = torch.randn(3, num_heads, 20, 8, generator=g)
    last = torch.tensor([[4, 9, 19, 0], [7, 7, 7, 7], [-1, 0, 1, 12]])
    got = attended(q, k, last)
    for row in range(3):
        for head in range(num_heads):
            want = torch.zeros(20, dtype=torch.float64)
            for step, most in enumerate(last[row].tolist()):
                for one in q[row, step].unflatten(0, (num_heads, -1))[head].double():
                    seen = k[row, head, : most + 1].double()
                    want[: most + 1] += (seen @ one / 8**0.5).softmax(0)
            torch.testing.assert_close(got[row, head].double(), want, rtol=1e-5, atol=1e-6)


def test_h2o_carries_the_scores_of_what_stays(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A prompt over the limit in chunks, two compactions, and a slot that begins anew. The scores
    are those of attention over the keys that stay, and queries go in portions."""
    spec = read_spec(hf_folder(tmp_path / "m", num_attention_heads=4, num_key_value_heads=2))
    cache = KVCache(spec, 8, 4, torch.float32, "cpu")
    g = torch.Generator().manual_seed(3)
    for buffer in cache.keys:
        buffer.copy_(torch.randn(buffer.shape, generator=g))
    monkeypatch.setattr("lowroll.kv.policy.h2o.MOST_SCORED", 100)
    selector, layer, pages = H2O(5, 2).selector(spec, cache, 3), 1, [3, 1, 6]
    q = torch.randn(13, spec.num_heads, spec.head_dim, generator=g)
    table, k = torch.tensor([pages]), cache.gather_keys(1, torch.tensor([pages]))
    selector.begin([2])
    for start, stop in ((0, 3), (3, 9), (9, 11)):
        selector.prefilled(layer, q[start:stop], [PromptChunk(start, stop, pages, 2)])
    given = attended(q[None, :11], k, torch.arange(11)[None])
    lengths = torch.tensor([11], dtype=torch.int32)
    rows = DecodeRows(torch.tensor([2]), table.int(), lengths, torch.tensor([10]))
    first = selector.compact(rows, 5)[layer]
    assert torch.equal(first, best_and_last(given, lengths, 5, 2)) and not selector.long
    # the kept keys would move; here the cache is as it was, and the row has its first five keys
    given = given.gather(2, first)
    for length in (6, 7):
        lengths = torch.tensor([length], dtype=torch.int32)
        rows = DecodeRows(torch.tensor([2]), table.int(), lengths, torch.tensor([length + 5]))
        selector.decoded(layer, q[length + 5][None], rows)
        added = attended(
            q[None, length + 5][:, None], k[:, :, :length], torch.tensor([[length - 1]])
        )
        added[..., : given.shape[2]] += given
        given = added
    selector.prefilled(layer, q[:11], [PromptChunk(0, 11, pages, 0)])  # a prompt that is aborted
    selector.copy([(2, 0)])
    rows = DecodeRows(torch.tensor([0]), table.int(), lengths, torch.tensor([12]))
    torch.testing.assert_close(selector.score_LSGN[layer, 0], given[0])
    second = selector.compact(rows, 5)[layer]
    assert torch.equal(second, best_and_last(given, lengths, 5, 2))
    want = torch.cat([given.gather(2, second), torch.zeros(1, 2, 2)], 2)
    torch.testing.assert_close(selector.score_LSGN[layer, 0], want[0])
    selector.prefilled(layer, q[:11], [PromptChunk(0, 11, pages, 2)])
    selector.begin([2])
    assert not selector.long and not selector.score_LSGN[:, 2].any()


def feed(
    selector: Selector,
    layer: int,
    q: Tensor,
    lengths: list[int],
    slots: list[int],
    pages: list[list[int]],
) -> None:
    """Row 0: chunks of 2, 6 and 1, then four steps. Row 1: a prompt of 9 of another slot, copied,
    then steps. Row 2: a prompt alone, the slot of an earlier sample."""
    noise = torch.randn_like(q)
    selector.prefilled(layer, noise[2], [PromptChunk(0, 17, pages[2], slots[2])])
    selector.begin(slots)
    for start, stop in ((0, 2), (2, 8), (8, 9)):
        chunks = [
            PromptChunk(start, stop, pages[0], slots[0]),
            PromptChunk(start, stop, pages[1], 6),
        ]
        selector.prefilled(layer, torch.cat([q[0, start:stop], q[1, start:stop]]), chunks)
    selector.copy([(6, slots[1])])
    for t in range(9, 13):
        rows = DecodeRows(
            torch.tensor([slots[0], 7, slots[1]]),
            torch.tensor([pages[0], [0] * 8, pages[1]], dtype=torch.int32),
            torch.tensor([t + 1, 0, t + 1], dtype=torch.int32),
            torch.tensor([t, 5, t]),
        )
        selector.decoded(layer, torch.stack([q[0, t], noise[0, t], q[1, t]]), rows)
    selector.prefilled(layer, q[2], [PromptChunk(0, 17, pages[2], slots[2])])


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "dense"])
def test_savings_of_the_paper_by_hand(name: str) -> None:
    """A prompt of 100 and responses of 200, 900 and 1900: a cache at its limit is compacted at
    once, as the paper counts."""
    kv = make(name)
    assert (kv.name, kv.budget, kv.buffer) == (name, 512, 128)
    totals, evictions, final, peaks, sums = [300, 1000, 2000], [], [], [], []
    for total in totals:
        cached, count, stored = kv.after_prompt(100), 0, []
        for _ in range(total - 100):
            cached += 1
            peak = max(cached, *stored, 0)
            if kv.room(cached) == 0:
                cached, count = kv.kept(cached), count + 1
            stored.append(cached)
        evictions.append(count)
        final.append(cached)
        peaks.append(kv.peak(100, total - 100))
        sums.append(sum(stored))
        assert peak <= peaks[-1]
    dense = sum(totals)
    assert evictions == [0, 3, 11] and final == [300, 616, 592] and peaks == [300, 640, 640]
    assert 1 - sum(final) / dense == pytest.approx(0.543030, abs=1e-6)
    assert 1 - sum(peaks) / dense == pytest.approx(0.521212, abs=1e-6)
    in_time = sum(sum(range(101, total + 1)) for total in totals)
    assert 1 - sum(sums) / in_time == pytest.approx(0.436358, abs=1e-6)


def test_when_a_cache_is_compacted() -> None:
    for kv in (
        Streaming(6, 3),
        SnapKV(9, 3),
        RKV(9, 3),
        H2O(6, 3),
        make("streaming", budget=6, buffer=3),
    ):
        limit = kv.budget + kv.buffer
        assert [kv.room(n) for n in (1, limit - 1, limit, limit + 9)] == [limit - 1, 1, 0, 0]
        assert [kv.kept(n) for n in (1, kv.budget, limit)] == [1, kv.budget, kv.budget]
        # a prompt at the limit takes no other key: it is compacted as one over the limit is
        for length, base in ((limit - 1, limit - 1), (limit, kv.budget), (99, kv.budget)):
            assert kv.after_prompt(length) == base and kv.room(base) >= 1
        assert kv.peak(5, 10**6) == limit and kv.peak(5, 2) == 7
    assert footprint(Streaming(), 100, 4000, 16).sibling == 40
    assert (make("rkv").window, make("snapkv").kernel, make("rkv").mix) == (8, 7, 0.1)
    assert make("streaming").sinks == 4 and make("streaming").window == 1
    assert not make("rkv").zero_first
    assert make("dense").budget is None and make("dense").room(9) == sys.maxsize


BAD = [
    ("lru", {}, r"kv.policy: unknown policy 'lru'; known: dense, streaming, "),
    ("dense", {"budget": 9}, r"kv.budget: dense has no options"),
    ("rkv", {"sinks": 4}, r"kv.sinks: rkv has no such option; its options: budget, buffer, window"),
    ("rkv", {"budget": 8}, r"kv.budget: rkv expects at least 9 \(window 8 and 1\), got 8"),
    ("snapkv", {"budget": 3, "window": 3}, r"kv.budget: snapkv expects at least 4 \(window 3 and"),
    ("streaming", {"budget": 4}, r"kv.budget: streaming expects at least 5 \(sinks 4 and 1\), got"),
    ("streaming", {"budget": 0, "sinks": 0}, r"kv.budget: streaming expects at least 1, got 0"),
    ("streaming", {"sinks": -1}, r"kv.sinks: streaming expects at least 0, got -1"),
    ("snapkv", {"buffer": -1}, r"kv.buffer: snapkv expects at least 1, got -1"),
    ("snapkv", {"buffer": 0}, r"kv.buffer: snapkv expects at least 1, got 0"),
    ("h2o", {"budget": 1}, r"kv.budget: h2o expects at least 2, got 1"),
    ("rkv", {"window": 0}, r"kv.window: rkv expects at least 1, got 0"),
    ("rkv", {"kernel": 4}, r"kv.kernel: rkv expects an odd number, got 4"),
    ("rkv", {"kernel": 0}, r"kv.kernel: rkv expects at least 1, got 0"),
    ("rkv", {"mix": 1.5}, r"kv.mix: rkv expects a number of 0 to 1, got 1.5"),
    ("rkv", {"mix": math.nan}, r"kv.mix: rkv expects a number of 0 to 1, got nan"),
    ("rkv", {"mix": "1"}, r"kv.mix: rkv expects a number of 0 to 1, got '1'"),
    ("rkv", {"budget": 512.0}, r"kv.budget: rkv expects a whole number, got 512.0"),
    ("rkv", {"buffer": True}, r"kv.buffer: rkv expects a whole number, got True"),
    ("rkv", {"zero_first": 1}, r"kv.zero_first: rkv expects true or false, got 1"),
]


@pytest.mark.parametrize(("name", "options", "message"), BAD)
def test_bad_options_are_one_error_that_names_them(
    name: str, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as error:
        make(name, **options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "dense"])
def test_a_class_and_its_row_have_the_same_options_and_checks(name: str) -> None:
    kind, row = type(make(name)), POLICIES[name]
    assert {field.name: field.default for field in fields(kind)} == filled(name, {})
    assert row.options.keys() >= {"budget", "buffer"}
    for wrong in ({"budget": 0}, {"buffer": True}):
        with pytest.raises(ValueError, match=rf"^kv.{next(iter(wrong))}: {name} expects"):
            kind(**wrong)


def test_the_least_options_that_work() -> None:
    least = [
        make("streaming", budget=5, buffer=1),
        make("streaming", budget=1, buffer=1, sinks=0),
        make("snapkv", budget=2, buffer=1, window=1, kernel=1),
        make("rkv", budget=9, buffer=1, mix=0),
        make("h2o", budget=2, buffer=1),
        make("rkv", mix=1.0, zero_first=True),
    ]
    assert all(isinstance(kv, CachePolicy) and kv.room(kv.kept(10**6)) >= 1 for kv in least)
