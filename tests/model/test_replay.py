"""Replayed attention against attention under a mask that is written out, and what is refused."""

from __future__ import annotations

import dataclasses
import zlib

import pytest
import torch
from torch import Tensor

from lowroll.model import evicted_attention
from lowroll.model.attention import AttentionInputs, varlen
from lowroll.model.evicted_attention import (
    check_evictions,
    pack_evictions,
    replayed,
    unpack_evictions,
)
from lowroll.types import Evictions
from tests.fixtures.evictions import random_evictions, sees
from tests.fixtures.policies import masked_attention

LENGTHS = [23, 7, 31, 14, 23]
PROMPTS = [12, 5, 4, 14, 3]  # over budget + buffer, under it, and all that ran
HEADS = 2


def packed(seed: int = 0, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """q [T, 6, 4], k, v [T, 2, 4] of all sequences, with gradients."""
    g = torch.Generator().manual_seed(seed)
    shapes = [(sum(LENGTHS), heads, 4) for heads in (6, HEADS, HEADS)]
    return [torch.randn(s, generator=g, dtype=dtype).requires_grad_() for s in shapes]


def dropped(seed: int = 0) -> list[Evictions | None]:
    """One of the sequences is not bounded."""
    found: list[Evictions | None] = [
        random_evictions(length, prompt, seed=seed + i)
        for i, (length, prompt) in enumerate(zip(LENGTHS, PROMPTS, strict=True))
    ]
    found[1] = None
    return found


def plain(layer: int, q: Tensor, k: Tensor, v: Tensor, evictions: list) -> Tensor:
    """Each sequence alone, under its mask."""
    outputs = []
    parts = zip(*(x.split(LENGTHS) for x in (q, k, v)), strict=True)
    for (q_THd, k_TGd, v_TGd), one, length in zip(parts, evictions, LENGTHS, strict=True):
        seen = sees(one, length, layer, HEADS)
        outputs.append(masked_attention(q_THd, k_TGd, v_TGd, seen))
    return torch.cat(outputs)


@pytest.mark.parametrize("marked", [1 << 20, 200, 1])
@pytest.mark.parametrize("seed", [0, 10])
def test_outputs_and_gradients_are_those_of_a_mask(
    seed: int, marked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is looked up at once; with and without a gradient."""
    monkeypatch.setattr(evicted_attention, "MOST_MARKED", marked)
    evictions = dropped(seed)
    attend = replayed(LENGTHS, evictions)
    for layer in (0, 1):
        inputs, wanted = packed(seed), packed(seed)
        want = plain(layer, *wanted, evictions)
        got = attend(layer, AttentionInputs(*inputs))
        torch.testing.assert_close(got, want, rtol=0, atol=1e-6)  # the mask's is in float32
        with torch.no_grad():
            assert torch.equal(attend(layer, AttentionInputs(*inputs)), got)
        weight = torch.randn(got.shape, generator=torch.Generator().manual_seed(5)).double()
        (got * weight).sum().backward()
        (want * weight).sum().backward()
        for x, y in zip(inputs, wanted, strict=True):
            torch.testing.assert_close(x.grad, y.grad, rtol=0, atol=1e-5)


def test_a_mask_that_is_off_by_one_is_another() -> None:
    """The oracle can tell: compactions one position later, and the other layer's."""
    evictions = dropped()
    inputs = packed()
    want = plain(0, *inputs, evictions).detach()
    shifted = []
    for one in evictions:
        if one is None or not one.after:
            shifted.append(one)
            continue
        numbers_LGT = torch.cat([unpack_evictions(one), unpack_evictions(one)[..., :1] * 0], 2)
        shifted.append(pack_evictions(numbers_LGT, [p + 1 for p in one.after]))
    inputs = [x.detach() for x in inputs]
    for wrong in (
        replayed(LENGTHS, shifted)(0, AttentionInputs(*inputs)),
        replayed(LENGTHS, evictions)(1, AttentionInputs(*inputs)),
    ):
        assert float((wrong - want).abs().max()) > 1e-2
    assert float((varlen(LENGTHS)(0, AttentionInputs(*inputs)) - want).abs().max()) > 1e-2


def test_no_compaction_is_bitwise_the_dense_attention() -> None:
    """None recorded, none made, and none that a query came after."""
    inputs = packed(dtype=torch.float32)
    want = varlen(LENGTHS)(0, AttentionInputs(*inputs))
    late = []
    for length in LENGTHS:
        numbers = torch.zeros(2, HEADS, length, dtype=torch.uint8)
        numbers[..., :3] = 1
        late.append(pack_evictions(numbers, [length - 1]))
    for evictions in ([None] * 5, [Evictions(2, HEADS)] * 5, late):
        assert torch.equal(replayed(LENGTHS, evictions)(0, AttentionInputs(*inputs)), want)


def test_a_sequence_that_was_not_bounded_is_dense_beside_others() -> None:
    inputs = packed(dtype=torch.float32)
    got = replayed(LENGTHS, dropped())(0, AttentionInputs(*inputs))
    want = varlen(LENGTHS)(0, AttentionInputs(*inputs))
    assert torch.equal(got[23:30], want[23:30])
    assert not torch.equal(got[:23], want[:23])


@pytest.mark.parametrize("count", [1, 255, 256, 300])
def test_numbers_of_one_and_two_bytes_come_back(count: int) -> None:
    """Every position drops the one before it."""
    numbers = torch.arange(1, count + 1, dtype=torch.int16).expand(2, 3, -1)
    evictions = pack_evictions(torch.cat([numbers, numbers[..., :1] * 0], 2), range(1, count + 1))
    back = unpack_evictions(evictions)
    assert back.dtype == (torch.uint8 if count < 256 else torch.int16)
    assert torch.equal(back[..., :-1].short(), numbers) and not back[..., -1].any()
    check_evictions(evictions, 2, 3, 400)
    assert len(zlib.decompress(evictions.numbers)) == 6 * (count + 1) * (1 + (count > 255))


def changed(**changes: object) -> Evictions:
    return dataclasses.replace(random_evictions(31, 4), **changes)


def with_numbers(place: tuple[int, int, int], number: int) -> Evictions:
    found = random_evictions(31, 4)
    numbers = unpack_evictions(found).clone()
    numbers[place] = number
    return pack_evictions(numbers, found.after)


@pytest.mark.parametrize(
    ("evictions", "message"),
    [
        (changed(layers=3), "layers, heads: 3 and 2, the model has 2 and 2"),
        (changed(after=(8, 8)), "after: .* do not ascend"),
        (changed(after=(8, 64)), "after: .* within a context of 64"),
        (changed(after=(-1, 8)), "after: .* do not ascend"),
        (changed(numbers=b"abc"), "numbers: not compressed by zlib"),
        (changed(numbers=zlib.compress(b"\0" * 10**7)), "numbers: expected"),
        (changed(numbers=zlib.compress(b"\0")), "numbers: expected"),
        (changed(numbers=random_evictions(31, 4).numbers + b"x"), "numbers: expected"),
        (with_numbers((0, 1, 3), 200), "numbers: leave 0"),
        (with_numbers((0, 1, 26), 1), "dropped before it is there"),
    ],
)
def test_what_is_not_a_replay_is_refused(evictions: Evictions, message: str) -> None:
    check_evictions(random_evictions(31, 4), 2, 2, 64)
    with pytest.raises(ValueError, match=message):
        check_evictions(evictions, 2, 2, 64)


def test_heads_that_drop_different_numbers_of_keys_are_refused() -> None:
    numbers = unpack_evictions(random_evictions(31, 4))
    first = int((numbers[0, 0] == 1).nonzero()[0])
    with pytest.raises(ValueError, match="the heads drop different numbers"):
        check_evictions(with_numbers((0, 0, first), 0), 2, 2, 64)
