"""Packing: the worked row of the specification, properties of first-fit, and the alignment of
collated tensors."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowroll.trainer.packing import check, collate, first_fit, split_groups
from tests.fixtures.samples import sample


def test_first_fit_packs_the_worked_row():
    packs = first_fit([700, 1200, 300, 900, 2048, 848, 100], 2048)
    assert [list(p.indices) for p in packs] == [[4], [1, 5], [3, 0, 2, 6]]
    assert [p.num_tokens for p in packs] == [2048, 2048, 2000]


def test_equal_lengths_keep_their_order():
    assert [p.indices for p in first_fit([5, 5, 5, 5, 5], 10)] == [(0, 1), (2, 3), (4,)]


def test_a_sequence_over_the_capacity_is_alone():
    assert [p.indices for p in first_fit([3, 50, 4], 10)] == [(1,), (2, 0)]


@pytest.mark.parametrize(
    ("lengths", "capacity", "words"), [([1], 0, "tokens_per_microbatch"), ([1, 0], 4, "sequence 1")]
)
def test_first_fit_names_the_wrong_input(lengths, capacity, words):
    with pytest.raises(ValueError, match=words):
        first_fit(lengths, capacity)


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


def test_minibatches_are_whole_groups_in_planned_order():
    groups = [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert split_groups(groups, 1) == [list(range(10))]
    assert split_groups(groups, 2) == [[0, 1, 2, 3], [4, 5, 6, 7, 8, 9]]
    assert split_groups([7, 7, 9], 5) == [[0, 1], [2]]
    assert split_groups([0, 1, 0, 1], 2) == [[0, 2], [1, 3]]
    assert split_groups([], 3) == []
    with pytest.raises(ValueError, match="minibatches"):
        split_groups(groups, 0)


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
