"""Packing: the worked row of the specification, properties of first-fit, and the alignment of
collated tensors."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowroll.model.families.base import LayerSpec
from lowroll.parallel.ranks import Ranks
from lowroll.trainer.packing import (
    MicrobatchSchedule,
    balance,
    check,
    collate,
    cost,
    first_fit,
    num_fed,
    pack,
    split_groups,
)
from tests.fixtures.learner import tiny_model
from tests.fixtures.ranked import EXPERTS
from tests.fixtures.samples import sample


def test_first_fit_packs_the_worked_row():
    packs = first_fit([700, 1200, 300, 900, 2048, 848, 100], 2048)
    assert [list(p.indices) for p in packs] == [[4], [1, 5], [3, 0, 2, 6]]
    assert [p.num_tokens for p in packs] == [2048, 2048, 2000]


def test_equal_lengths_keep_their_order():
    assert [p.indices for p in first_fit([5, 5, 5, 5, 5], 10)] == [(0, 1), (2, 3), (4,)]


def test_a_sequence_over_the_capacity_is_alone():
    assert [p.indices for p in first_fit([3, 50, 4], 10)] == [(1,), (2, 0)]


@given(st.lists(st.integers(1, 40), max_size=60), st.integers(1, 64))
def test_first_fit_loses_nothing_and_respects_the_capacity(lengths, capacity):
    packs = first_fit(lengths, capacity)
    assert sorted(i for p in packs for i in p.indices) == list(range(len(lengths)))
    for p in packs:
        assert p.num_tokens == sum(lengths[i] for i in p.indices)
        assert p.num_tokens <= capacity or len(p.indices) == 1
    for a, b in zip(
        packs, packs[1:], strict=False
    ):  # first fit: a later bin's opener had no room before
        assert a.num_tokens + lengths[b.indices[0]] > capacity


@given(st.lists(st.integers(1, 40), max_size=30), st.integers(1, 64), st.integers(2, 5))
def test_balanced_packs_lose_nothing_and_respect_the_capacity(lengths, capacity, parts):
    packs = balance(lengths, [float(n * n) for n in lengths], capacity, parts)
    assert sorted(i for p in packs for i in p.indices) == list(range(len(lengths)))
    assert all(p.indices for p in packs)
    for p in packs:
        assert p.num_tokens == sum(lengths[i] for i in p.indices)
        assert p.num_tokens <= capacity or len(p.indices) == 1
    assert len(packs) % parts == 0 or len(packs) == len(lengths)


def test_balanced_packs_cost_the_same():
    packs = balance([3, 1, 1, 1, 2, 2, 2], [9.0, 1.0, 1.0, 1.0, 4.0, 4.0, 4.0], 100, 2)
    assert [p.indices for p in packs] == [(0, 1, 2, 3), (4, 5, 6)]
    assert [p.num_tokens for p in packs] == [6, 6]
    # equal costs leave no room for the last one: two more
    assert [p.indices for p in balance([4, 3, 3], [4.0, 3.0, 3.0], 6, 2)] == [(0,), (1, 2)]
    assert len(balance([3, 3, 2, 2, 2], [3.0, 3.0, 2.0, 2.0, 2.0], 6, 2)) == 4


def test_each_portion_has_its_share_of_the_parts():
    samples = [sample([1] * 4, [2] * 4) for _ in range(12)]
    costs = [1.0] * 12
    packed = pack(samples, [range(9), range(9, 12)], 1000, costs, 4)
    assert [len(each) for each in packed] == [3, 3, 3, 3]
    assert pack(samples, [range(12)], 1000, costs, 3) == pack(samples, [range(12)], 28, costs, 3)
    assert pack(samples, [[], [5]], 1000, costs, 4) == [[5]]


def test_the_cost_of_a_sample_by_hand():
    """Of a layer 32 x (32 + 2 x 16 + 32) and the MLP's 3 x 32 x 48 a token, and 32 for each pair of
    tokens; 64 x 32 a response token."""
    spec = tiny_model().spec
    one = sample([1, 2, 3], [4, 5])
    assert num_fed(one) == 4
    token = 32 * (32 + 16 + 16 + 32) + 3 * 32 * 48
    assert cost(one, spec, spec.vocab_size) == 2 * (4 * token + 4 * 4 * 32) + 2 * 64 * 32
    experts = tiny_model(**EXPERTS).spec
    assert cost(one, experts, 1) == 2 * (4 * token + 4 * 4 * 32) + 2 * 32  # two experts of 24
    windows = replace(spec, layers=(LayerSpec(), LayerSpec(window=3)))
    # half of 4 x 4 pairs, and in the second layer half of 1 x 1 less
    seen = 2 * (8 + 8 - 0.5) * 32
    assert cost(one, windows, spec.vocab_size) == 2 * 4 * token + seen + 2 * 64 * 32
    wide = replace(spec, layers=(LayerSpec(window=4), LayerSpec(window=9)))
    assert cost(one, wide, 1) == cost(one, spec, 1)


class Idle(Ranks):
    """One of two ranks, which has nothing to do in its second pass."""

    size = 2

    def deal(self, costs):
        assert costs == [4.0, 3.0]
        return [1, None]

    def gather(self, values, sizes):
        assert sizes == {2: 3, 0: 1, 1: 1}
        return [{2: torch.tensor([9.0])} | found for found in values]


def test_a_walk_deals_and_gathers():
    """A rank without a part runs the smallest sample, which does not count."""
    samples = [sample([1] * n, [2] * k) for n, k in ((3, 1), (2, 1), (4, 3))]
    walk = MicrobatchSchedule(samples, [[[0, 1, 2]]], 10, [1.0, 2.0, 4.0], Idle())
    ran = [(packed.samples, counts) for packed, counts in walk.dealt(torch.device("cpu"))]
    assert walk.microbatches == [[2], [1, 0]] and ran == [((1, 0), True), ((1,), False)]
    packed = collate(samples, [1, 0])
    first, second = walk.gathered([(packed, torch.tensor([0.5, 0.25]))], [])
    assert {i: x.tolist() for i, x in first.items()} == {2: [9.0], 1: [0.5], 0: [0.25]}
    assert second.keys() == {2}


def test_minibatches_are_whole_groups_in_planned_order():
    groups = [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert split_groups(groups, 1) == [list(range(10))]
    assert split_groups(groups, 2) == [[0, 1, 2, 3], [4, 5, 6, 7, 8, 9]]
    assert split_groups([7, 7, 9], 5) == [[0, 1], [2]]
    assert split_groups([0, 1, 0, 1], 2) == [[0, 2], [1, 3]]
    assert split_groups([], 3) == []


def test_collate_aligns_every_response_token_with_the_state_before_it():
    a = sample([11, 12, 13], [21, 22], [-0.5, -0.25], [1, 0], advantage=2.0)
    b = sample([14], [23, 24, 25], [-1.0, -2.0, -3.0], [0, 1, 1], advantage=-1.0)
    packed = collate([b, a], [1, 0])
    assert packed.samples == (1, 0)
    assert packed.lengths == (4, 3)
    assert packed.ids_T.tolist() == [
        11,
        12,
        13,
        21,
        14,
        23,
        24,
    ]  # the last token of each is not fed
    assert packed.pos_T.tolist() == [0, 1, 2, 3, 0, 1, 2]
    assert packed.index_N.tolist() == [2, 3, 4, 5, 6]
    assert packed.targets_N.tolist() == [21, 22, 23, 24, 25]
    assert packed.mask_N.tolist() == [True, False, False, True, True]
    assert packed.segments_N.tolist() == [0, 0, 1, 1, 1]
    assert packed.behavior_N.tolist() == [-0.5, -0.25, -1, -2, -3]
    assert packed.advantages_N.tolist() == [2, 2, -1, -1, -1]


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (sample([], [1]), "prompt_ids is empty"),
        (sample([1], []), "rollout.token_ids is empty"),
        (sample([1], [1, 2], logprobs=[-1.0]), "rollout.logprobs has 1 entries for 2"),
        (sample([1], [1, 2], mask=[]), "loss_mask has 0 entries for 2"),
        (sample([1, 64], [1]), r"prompt_ids leaves 0..63"),
        (sample([1, 2, 3, 4], [5] * 6), "9 tokens to read, the model's context is 8"),
        (sample([1], [-1]), r"rollout.token_ids leaves 0..63"),
    ],
)
def test_a_wrong_sample_is_named(bad, words):
    good = sample([1], [2])
    check([good, sample([1, 2, 3, 4], [5] * 5)], 64, 8)
    with pytest.raises(ValueError, match=f"sample 1 .*{words}"):
        check([good, bad], 64, 8)


def test_an_empty_batch_is_named():
    with pytest.raises(ValueError, match="samples: the batch is empty"):
        check([], 64, 8)
