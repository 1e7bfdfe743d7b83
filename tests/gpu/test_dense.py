"""Products of 16-bit numbers on a CUDA device: rows alone, and shares that the next norm adds."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lowroll.kernels.fused.norm import add_rms_norm
from lowroll.kernels.launch import overlapping
from lowroll.kernels.matmul import gemv, shares

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "shape", [(4608, 3584), (37888, 3584), (3584, 18944), (37, 264), (1, 8)], ids=str
)
@pytest.mark.parametrize("rows", [1, 2])
def test_few_rows(rows: int, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Against float64, and captured: an early start between two others changes nothing."""
    generator = torch.Generator("cuda").manual_seed(0)
    w, bias, x = (
        torch.randn(size, generator=generator, device="cuda").to(dtype)
        for size in (shape, (shape[0],), (rows, shape[1]))
    )
    assert gemv.supports(x, w)
    want = x.double() @ w.double().t() + bias.double()
    got = gemv.linear(x, w, bias)
    assert float((got.double() - want).norm() / want.norm()) < 4e-3
    graph = torch.cuda.CUDAGraph()
    with overlapping(x.device):
        for _ in range(2):
            gemv.linear(x + 0, w, bias)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            captured = [gemv.linear(x + 0, w, bias) for _ in range(3)]
    graph.replay()
    assert all(torch.equal(one, got) for one in captured)


@pytest.mark.parametrize("rows", [shares.ROWS[0], 96, 128, 129, shares.ROWS[-1]])
@pytest.mark.parametrize("shape", [(3584, 18944), (264, 1600)], ids=str)
def test_shares_and_the_norm_that_adds_them(rows: int, shape: tuple[int, int]) -> None:
    generator = torch.Generator("cuda").manual_seed(rows)
    x, w, old, gain = (
        torch.randn(size, generator=generator, device="cuda").bfloat16()
        for size in ((rows, shape[1]), shape, (rows, shape[0]), (shape[0],))
    )
    assert shares.supports(x, w)
    left = shares.multiply(x, w, None)
    want = x.double() @ w.double().t()
    assert float((left.dense(torch.float32).double() - want).norm() / want.norm()) < 1e-4
    got = add_rms_norm(old, left, gain, 1e-6)
    plain = add_rms_norm(old, want.to(x.dtype), gain, 1e-6)
    for a, b in zip(got, plain, strict=True):
        assert isinstance(a, Tensor) and isinstance(b, Tensor)
        assert float((a.double() - b.double()).norm() / b.double().norm()) < 1e-3
    again = add_rms_norm(old, shares.multiply(x, w, None), gain, 1e-6)
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))
