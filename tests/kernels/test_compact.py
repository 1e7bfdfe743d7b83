"""The kernels of compaction: what Triton does, run by its interpreter, against plain torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lowroll.kernels.kv_eviction import score
from lowroll.kernels.kv_eviction.choose import best_and_last
from lowroll.kernels.kv_eviction.move import move
from lowroll.kernels.kv_eviction.recording import add_attended, add_supports, remember
from lowroll.kernels.launch import INTERPRETED
from lowroll.kv.policy.h2o import attended
from lowroll.kv.policy.rkv import RKV
from lowroll.kv.policy.snapkv import importance
from tests.fixtures.compact import Moves, Pages
from tests.fixtures.interpreted import both_paths
from tests.fixtures.policies import plain_kept

interpreted = pytest.mark.interpreted
CASES = [
    ([40, 12], 3, 3, 16, 4, torch.float32),
    ([150, 9], 6, 2, 24, 16, torch.float16),
    ([65, 130], 7, 1, 64, 16, torch.float16),
    ([33, 128], 8, 1, 128, 32, torch.float16),
    ([21], 4, 2, 40, 1, torch.float32),
    ([1100], 2, 1, 32, 16, torch.float16),
]


@interpreted
@pytest.mark.parametrize("case", CASES)
def test_importance_is_that_of_plain_torch(case: tuple) -> None:
    pages, kernel = Pages(*case), 1 if case[3] == 24 else 7
    assert score.supports(pages.ring, case[2])
    got = score.join(
        score.importance(pages.ring, pages.keys, *pages.at), None, pages.lengths, 8, kernel
    )
    for layer in range(2):
        want = importance(*pages.plain(layer), pages.lengths, kernel)
        check(got[layer], want, case[0], 8)


@interpreted
@pytest.mark.parametrize(
    "case, zero_first",
    [
        *((case, False) for case in CASES[:-1]),
        pytest.param(CASES[-1], False, marks=pytest.mark.long),  # a second block of many
        (CASES[0], True),
        (CASES[2], True),
    ],
)
def test_scores_are_those_of_plain_torch_and_choose_the_same_keys(
    case: tuple, zero_first: bool
) -> None:
    pages, kept = Pages(*case, layers=1), 10 if min(case[0]) > 10 else 9
    policy = RKV(kept, 1, window=8, mix=0.3, zero_first=zero_first)
    got = score.join(
        score.importance(pages.ring, pages.keys, *pages.at),
        score.redundancy(pages.keys, pages.table, pages.lengths, zero_first),
        pages.lengths,
        8,
        7,
        0.3,
    )
    chosen = best_and_last(got, pages.lengths, kept, 8)
    want = policy.scores(*pages.plain(0, torch.float64), pages.lengths)
    check(got[0], want, case[0], 8)
    check_chosen(chosen[0], want, case[0], kept, 8)


def check(got: Tensor, want: Tensor, lengths: list[int], window: int) -> None:
    for row, length in enumerate(lengths):
        old = length - window
        torch.testing.assert_close(
            got[row, :, :old].double().cpu(),
            want[row, :, :old].double().cpu(),
            rtol=2e-5,
            atol=2e-7,
        )


def check_chosen(got: Tensor, want: Tensor, lengths: list[int], kept: int, window: int) -> None:
    """The keys that a sort of the oracle's scores keeps, unless rounding decides."""
    decided = 0
    for row, length in enumerate(lengths):
        for head in range(want.shape[1]):
            scores = want[row, head, : length - window].tolist()
            ranked = sorted(scores, reverse=True)
            most = kept - window
            if most < len(ranked) and abs(ranked[most - 1] - ranked[most]) < 1e-7:
                continue
            decided += 1
            assert got[row, head].tolist() == plain_kept(scores, length, kept, window)
    assert decided


@interpreted
def test_a_window_of_other_queries_than_eight() -> None:
    """Rows of the product are padded by query and by head."""
    for heads, kv_heads, window in ((3, 1, 1), (6, 2, 5), (5, 5, 3), (4, 1, 17)):
        pages = Pages([40, 23], heads, kv_heads, 16, 4, torch.float32, window=window)
        important = score.importance(pages.ring, pages.keys, *pages.at)
        got = score.join(important, None, pages.lengths, window, 3)
        for layer in range(2):
            want = importance(*pages.plain(layer), pages.lengths, 3)
            check(got[layer], want, [40, 23], window)


@interpreted
def test_a_row_has_the_same_scores_alone() -> None:
    pages = Pages([40, 90], 6, 2, 16, 4, torch.float32)
    both = score.importance(pages.ring, pages.keys, *pages.at)
    alone = score.importance(
        pages.ring, pages.keys, pages.slots[:1], pages.table[:1], pages.lengths[:1]
    )
    assert torch.equal(both[:, :1, :, :32], alone[..., :32])
    for zero_first in (False, True):
        both = score.redundancy(pages.keys, pages.table, pages.lengths, zero_first)
        alone = score.redundancy(pages.keys, pages.table[:1], pages.lengths[:1], zero_first)
        assert torch.equal(both[:, :1, :, :40], alone[..., :40])


@both_paths
def test_equal_scores_are_the_older_keys(path: str) -> None:
    lengths = torch.tensor([7, 5], dtype=torch.int32)
    scores = torch.tensor([[[1.0, 1, 2, 1, 1, 9, 9]], [[0.0, -0.0, 0, 5, 5, torch.nan, 5]]])
    assert best_and_last(scores, lengths, 4, 2).tolist() == [[[0, 2, 5, 6]], [[0, 1, 3, 4]]]
    assert best_and_last(scores, lengths, 5, 2).tolist()[1] == [[0, 1, 2, 3, 4]]
    assert best_and_last(scores, lengths, 1, 0).tolist() == [[[5]], [[3]]]


@both_paths
@pytest.mark.parametrize("widest", [30, 1500])
def test_the_best_are_those_of_a_stable_sort(widest: int, path: str) -> None:
    g = torch.Generator().manual_seed(widest)
    lengths = torch.tensor([widest, widest // 2 + 10, 20], dtype=torch.int32)
    scores = torch.randn(2, 3, 1, widest, generator=g).mul(3).round().div(3)  # ties
    scores[0, 0, 0, 3], scores[1, 0, 0, 5], scores[1, 0, 0, 6] = torch.inf, 1e-42, -torch.inf
    for kept, window in ((19, 8), (20, 1)):
        got = best_and_last(scores, lengths, kept, window)
        assert got.shape == (2, 3, 1, kept) and got.dtype == torch.int64
        for layer in range(2):
            for row, length in enumerate(lengths.tolist()):
                some = scores[layer, row, 0, : length - window].tolist()
                assert got[layer, row, 0].tolist() == plain_kept(some, length, kept, window)


@both_paths
@pytest.mark.parametrize(
    "seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(4, 8))]
)
def test_what_stays_moves_in_place(seed: int, path: str) -> None:
    """Keys of several bytes, in layers; shared pages, own pages and new ones; the others stay."""
    g = torch.Generator().manual_seed(seed)
    page, heads, layers = (4, 16, 1, 32)[seed % 4], 1 + seed % 3, 2
    moves = Moves(seed, page, heads, layers, "cpu")
    widths = ((8, torch.bfloat16), (8, torch.bfloat16), (12, torch.uint8), (1, torch.float32))
    kinds = []
    for width, dtype in widths:
        shape = (layers, 1000, page, heads, width)
        kinds.append(list(torch.randint(100, shape, generator=g).to(dtype).unbind()))
    want = [[moves.expected(layer, x) for layer, x in enumerate(buffers)] for buffers in kinds]
    move(kinds, moves.table, moves.kept, moves.slots)
    for got, expected in zip(kinds, want, strict=True):
        assert all(map(torch.equal, got, expected))


@both_paths
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_queries_are_remembered_by_position(dtype: torch.dtype, path: str) -> None:
    q = torch.randn(3, 8, 40)[:, :6].to(dtype)
    ring, slots, positions = (
        torch.zeros(5, 4, 6, 40),
        torch.tensor([4, 0, 1]),
        torch.tensor([9, 3, 4]),
    )
    ring = ring.to(dtype)
    want = ring.clone()
    for row, (slot, place) in enumerate(((4, 1), (0, 3), (1, 0))):
        want[slot, place] = q[row]
    remember(ring, slots, positions, q)
    assert torch.equal(ring, want)


@interpreted
@pytest.mark.parametrize("case", CASES)
def test_attention_is_added_to_the_slots_scores(case: tuple) -> None:
    pages, (lengths, heads, kv_heads, d, *_) = Pages(*case), case
    assert add_supports(pages.keys[0], heads)
    g = torch.Generator().manual_seed(3)
    q = torch.randn(len(lengths), heads, d, generator=g).to(pages.keys[0].dtype)
    before = torch.rand(len(lengths) + 3, kv_heads, pages.table.shape[1] * case[4], generator=g)
    live = pages.lengths.clone()
    live[0] -= live[0] if len(lengths) > 1 else 0  # a dead row
    got = before.clone()
    add_attended(got, q, pages.keys[1], pages.slots, pages.table, live)
    want = before.clone()
    _, k_BGNd = pages.plain(1)
    want[pages.slots] += attended(q[:, None], k_BGNd, live[:, None] - 1)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    dead = live == 0
    assert torch.equal(got[pages.slots[dead]], before[pages.slots[dead]])


def test_what_the_kernels_leave_to_plain_torch() -> None:
    ring, keys = torch.zeros(1, 1, 16, 8, 64), torch.zeros(1, 16, 1, 64)
    assert "bfloat16" in score.supports(ring.to(torch.float8_e4m3fn), 1).why_not
    assert "bfloat16" in add_supports(keys.to(torch.uint8), 4).why_not
    assert "128 queries" in score.supports(ring.repeat(1, 1, 2, 1, 1), 1).why_not
    assert "64 query heads" in add_supports(keys, 65).why_not
    assert bool(score.supports(ring, 1)) == bool(add_supports(keys, 64)) == INTERPRETED
