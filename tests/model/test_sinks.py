"""Attention with sinks, packed, of suffixes and under bounds, against attention written out."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch

from lowroll.model.attention import (
    AttentionInputs,
    attend_with_a_key_of_sinks,
    attend_with_sinks,
    packed,
    suffixes,
    varlen,
)
from tests.fixtures.attention_oracle import attention_of_last, qkv

LENGTHS = [9, 1, 5, 9, 14]
SINKS = torch.tensor([0.0, 3.0, -2.0, 30.0, -30.0, 1.0])


@pytest.mark.parametrize("lengths", [LENGTHS, [6, 6]])
@pytest.mark.parametrize("window", [0, 1, 5, 13])
def test_packed_sequences_and_their_gradients(lengths: list[int], window: int) -> None:
    """Those of the sinks too; a sink of 30 leaves nothing to attend to, one of -30 changes nothing."""
    q, k, v = (x.requires_grad_() for x in qkv(sum(lengths), sum(lengths)))
    sinks = SINKS.clone().requires_grad_()
    got = varlen(lengths, windows=[window])(0, AttentionInputs(q, k, v, sinks))
    rows = zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
    want = torch.cat([attention_of_last(*row, window, sinks) for row in rows])
    torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-5)
    assert got[:, 3].abs().max() < 1e-6
    upstream = torch.randn(q.shape, generator=torch.Generator().manual_seed(7))
    mine = torch.autograd.grad(got, (q, k, v, sinks), upstream)
    theirs = torch.autograd.grad(want, (q, k, v, sinks), upstream.double())
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b.to(a.dtype), rtol=0, atol=2e-5)
    bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    assert torch.equal(packed(AttentionInputs(q, k, v, sinks), bounds, max(lengths), window), got)


@pytest.mark.parametrize("window", [0, 1, 3, 30])
def test_suffixes_of_sequences(window: int) -> None:
    lengths, totals = [3, 1, 5, 7], [9, 6, 5, 30]
    q, k, v = qkv(sum(lengths), sum(totals))
    got = suffixes(lengths, totals, windows=[window])(0, AttentionInputs(q, k, v, SINKS))
    rows = zip(q.split(lengths), k.split(totals), v.split(totals), strict=True)
    want = torch.cat([attention_of_last(*row, window, SINKS) for row in rows])
    torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_a_key_of_sinks_is_the_same(causal: bool) -> None:
    """The way of devices without log-sum-exps, with its gradients."""
    q, k, v = (x.unflatten(0, (2, -1)).transpose(1, 2).requires_grad_() for x in qkv(12, 12))
    sinks = SINKS.clone().requires_grad_()
    mask = None if causal else torch.zeros(6, 6).masked_fill(~torch.ones(6, 6).tril().bool(), -1e9)
    got = attend_with_a_key_of_sinks(q, k, v, mask, sinks)
    want = attend_with_sinks(q, k, v, mask, sinks)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-6)
    upstream = torch.randn(q.shape, generator=torch.Generator().manual_seed(7))
    mine, theirs = (torch.autograd.grad(o, (q, k, v, sinks), upstream) for o in (got, want))
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)


def test_half_precision_is_near() -> None:
    q, k, v = qkv(9, 9, torch.bfloat16)
    got = varlen([9])(0, AttentionInputs(q, k, v, SINKS.bfloat16()))
    want = attention_of_last(q, k, v, 0, SINKS)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), want, rtol=0.02, atol=0.02)
