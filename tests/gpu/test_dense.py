"""Products of few bfloat16 rows on a CUDA device."""

from __future__ import annotations

import pytest
import torch

from lowroll.kernels.launch import overlapping
from lowroll.kernels.matmul import gemv

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "shape", [(4608, 3584), (37888, 3584), (3584, 18944), (37, 264), (1, 8)], ids=str
)
@pytest.mark.parametrize("rows", [1, 2])
def test_few_rows(rows: int, shape: tuple[int, int]) -> None:
    """Against float64, and captured: an early start between two others changes nothing."""
    generator = torch.Generator("cuda").manual_seed(0)
    w, bias, x = (
        torch.randn(size, generator=generator, device="cuda").bfloat16()
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
