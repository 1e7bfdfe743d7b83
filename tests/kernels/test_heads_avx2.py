"""Heads of a CPU's own kernel, normed and rotated: against torch, and who takes it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lowroll.kernels.fused import avx2, rope
from lowroll.model.rope import rotations

CPU = torch.device("cpu")
runs_here = pytest.mark.skipif(not avx2.supports_device(CPU), reason="the kernel does not run here")
# tokens, query heads, key-value heads, head size
SHAPES = [(1, 8, 8, 64), (5, 14, 2, 64), (40, 16, 4, 32), (17, 4, 1, 128), (3, 11, 5, 48)]


def heads(tokens: int, heads: int, kv_heads: int, d: int, normed: bool, wide: int = 0) -> tuple:
    """Return arguments of `rope.rotate_heads`; rows are `wide` numbers further apart than they are
    long."""
    g = torch.Generator().manual_seed(tokens)
    size = (heads + 2 * kv_heads) * d
    qkv_TN = torch.randn(tokens, size + wide, generator=g)[:, :size]
    angles = torch.randint(0, 9000, (tokens,), generator=g)
    cos, sin = rotations(angles, torch.rand(d // 2, generator=g))
    norms = (torch.rand(d, generator=g), torch.rand(d, generator=g)) if normed else (None, None)
    return qkv_TN, cos, sin, heads, kv_heads, d, *norms, 1e-5


def rotated(given: tuple) -> tuple[Tensor, ...]:
    """As an engine calls it."""
    with torch.inference_mode():
        assert avx2.supports(given[0], given[3], given[5], *given[6:8])
        return rope.rotate_heads(*given)


@runs_here
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("normed", [True, False])
def test_heads_are_those_of_torch(shape: tuple[int, ...], normed: bool) -> None:
    for wide in (0, 24):
        given = heads(*shape, normed, wide)
        for got, want in zip(rotated(given), rope.plain_heads(*given), strict=True):
            assert got.shape == want.shape
            torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-6)


@runs_here
def test_a_row_is_the_same_alone_in_any_batch_and_on_any_threads() -> None:
    given = heads(40, 8, 2, 64, True)
    want = rotated(given)
    torch.set_num_threads(3 - min(torch.get_num_threads(), 2))
    assert all(map(torch.equal, rotated(given), want))
    alone = rotated((given[0][33:34], given[1][33:34], given[2][33:34], *given[3:]))
    assert all(torch.equal(got, some[33:34]) for got, some in zip(alone, want, strict=True))


@runs_here
def test_a_learner_has_the_bits_of_an_engine_and_the_gradient_of_torch() -> None:
    given = heads(40, 8, 2, 64, False)
    want = rotated(given)
    plain, mine = (given[0].clone().requires_grad_(True) for _ in range(2))
    weights = [torch.randn_like(x) for x in want]
    for qkv, rotate in ((plain, rope.plain_heads), (mine, rope.rotate_heads)):
        found = rotate(qkv, *given[1:])
        sum((w * x).sum() for w, x in zip(weights, found, strict=True)).backward()
    assert all(map(torch.equal, found, want))
    torch.testing.assert_close(mine.grad, plain.grad, rtol=1e-5, atol=2e-6)


def test_a_learner_never_norms_with_it_and_what_is_left_to_torch_has_a_reason() -> None:
    qkv_TN = torch.randn(2, 12 * 64)
    with torch.no_grad():
        assert "engines" in avx2.supports(qkv_TN, 8, 64, torch.ones(64), torch.ones(64)).why_not
    with torch.inference_mode():
        assert avx2.LEAST == 8 * 64
        assert "rows of 512" in avx2.supports(qkv_TN, 7, 64, None, None).why_not
        assert "multiples of 16" in avx2.supports(qkv_TN, 16, 40, None, None).why_not
        assert "float32" in avx2.supports(qkv_TN.bfloat16(), 8, 64, None, None).why_not
        norm_d = torch.ones(64)
        assert "float32" in avx2.supports(qkv_TN, 8, 64, norm_d, norm_d.bfloat16()).why_not
    assert avx2.supports_device(torch.device("meta")).why_not == "runs on a CPU"
