"""Attention with windows, packed, of suffixes and under bounds, against attention written out."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from torch import Tensor

from lowroll.model.attention import AttentionInputs, packed, suffixes, varlen
from tests.fixtures.attention_oracle import attention_of_last, qkv

LENGTHS = [9, 1, 5, 6, 9, 2, 14]


@pytest.mark.parametrize("window", [1, 2, 5, 6, 13, 14, 100])
def test_packed_sequences(window: int) -> None:
    """The second of three layers has the window; gradients too."""
    q, k, v = (x.requires_grad_() for x in qkv(sum(LENGTHS), sum(LENGTHS)))
    inputs = AttentionInputs(q, k, v)
    attend = varlen(LENGTHS, windows=[0, window, 0])
    rows = zip(*(x.split(LENGTHS) for x in (q, k, v)), strict=True)
    want = torch.cat([attention_of_last(*row, window) for row in rows])
    torch.testing.assert_close(attend(1, inputs).double(), want, rtol=0, atol=1e-5)
    for layer in (0, 2):
        assert torch.equal(attend(layer, inputs), varlen(LENGTHS)(0, inputs))
    upstream = torch.randn(q.shape, generator=torch.Generator().manual_seed(7))
    got_grads = torch.autograd.grad(attend(1, inputs), (q, k, v), upstream)
    want_grads = torch.autograd.grad(want, (q, k, v), upstream.double())
    for mine, theirs in zip(got_grads, want_grads, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)
    bounds = torch.tensor([0, *accumulate(LENGTHS), sum(LENGTHS)], dtype=torch.int32)
    with_bounds = packed(inputs, bounds, 14, window)
    assert torch.equal(with_bounds, attend(1, inputs))


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("window", [1, 3, 5, 30, 31])
def test_suffixes_of_sequences(window: int, stacked: bool) -> None:
    lengths, totals = [3, 1, 5, 3, 7], [9, 6, 5, 9, 30]
    q, k, v = qkv(sum(lengths), sum(totals))
    got = suffixes(lengths, totals, stacked=stacked, windows=[window])(0, AttentionInputs(q, k, v))
    rows = zip(q.split(lengths), k.split(totals), v.split(totals), strict=True)
    want = torch.cat([attention_of_last(*row, window) for row in rows])
    torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-5)


def test_a_window_that_hides_nothing_changes_no_bit() -> None:
    q, k, v = qkv(sum(LENGTHS), sum(LENGTHS))
    inputs = AttentionInputs(q, k, v)
    plain = varlen(LENGTHS)(0, inputs)
    assert torch.equal(varlen(LENGTHS, windows=[14])(0, inputs), plain)
    assert not torch.equal(varlen(LENGTHS, windows=[13])(0, inputs), plain)
    inputs = AttentionInputs(q[:3], k[:30], v[:30])
    plain = suffixes([3], [30])(0, inputs)
    assert torch.equal(suffixes([3], [30], windows=[30])(0, inputs), plain)


def test_layers_share_the_mask_of_a_window() -> None:
    """Backward passes keep one for each length, not one for each layer."""
    kept: dict[int, tuple[int, ...]] = {}

    def note(x: Tensor) -> Tensor:
        kept[x.data_ptr()] = tuple(x.shape)
        return x

    inputs = [[x.requires_grad_() for x in qkv(24, 24)] for _ in range(4)]
    attend = varlen([12, 12], windows=[4, 4, 0, 4])
    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        outputs = [attend(layer, AttentionInputs(*x)) for layer, x in enumerate(inputs)]
    assert len(outputs) == 4
    masks = [shape for shape in kept.values() if shape[-2:] == (12, 12)]
    assert len(masks) == 1
