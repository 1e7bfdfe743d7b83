"""Products in shares of the features: what is left, and the norm that adds it."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from lowroll.kernels.fused.norm import add_rms_norm
from lowroll.kernels.matmul import shares
from lowroll.kernels.quantize.rows import Product, Rows, parts
from lowroll.kernels.support import YES


def bmm(a: Tensor, b: Tensor, out_dtype: Any) -> Tensor:
    """As CUDA's, which alone gives the float32 sums of 16-bit products."""
    return (a.double() @ b.double()).to(out_dtype)


@pytest.mark.parametrize("rows", [65, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_shares_add_up(rows: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(rows)
    x, w, bias = (
        torch.randn(size, generator=generator).to(dtype) for size in ((rows, 96), (20, 96), (20,))
    )
    with patch("torch.bmm", bmm):
        left = shares.multiply(x, w, bias)
    assert left.sums_MN.shape == (shares.shares(rows), rows, 20)
    assert left.sums_MN.dtype == torch.float32 and left.dtype == dtype
    want = x.double() @ w.double().t() + bias.double()
    torch.testing.assert_close(left.dense(torch.float32).double(), want, rtol=1e-5, atol=1e-4)
    sums, row, column, added = parts(left)
    assert torch.equal(sums, left.sums_MN.sum(0)) and row is None and column is None
    assert added is not None and torch.equal(added, bias)


@pytest.mark.interpreted
@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("rows", [None, "int8"])
def test_the_norm_adds_shares_in_their_order(count: int, rows: str | None) -> None:
    generator = torch.Generator().manual_seed(count)
    x, weight, bias = (torch.randn(size, generator=generator) for size in ((3, 40), (40,), (40,)))
    sums = torch.randn(count, 3, 40, generator=generator)
    whole = sums[0].clone()
    for share in sums[1:]:
        whole += share
    (sum_, normed), (want_sum, want) = (
        add_rms_norm(x, Product(one, bias_N=bias), weight, 1e-6, rows) for one in (sums, whole)
    )
    assert torch.equal(sum_, want_sum)
    if isinstance(normed, Rows) and isinstance(want, Rows):
        assert torch.equal(normed.codes_MK, want.codes_MK)
        assert torch.equal(normed.scale_M1, want.scale_M1)
    else:
        assert isinstance(normed, Tensor) and isinstance(want, Tensor)
        assert torch.equal(normed, want)


class OnCuda(torch.Tensor):
    is_cuda = True


def test_what_is_not_cut() -> None:
    x = torch.zeros(128, 1024, dtype=torch.bfloat16).as_subclass(OnCuda)
    w = torch.zeros(256, 1024, dtype=torch.bfloat16)
    with patch("lowroll.kernels.matmul.shares.triton_supports", lambda x: YES):
        assert shares.supports(x, w)
        first, last = shares.ROWS[0], shares.ROWS[-1]
        for refused, told in (
            ((torch.zeros(128, 1024), w), "CUDA"),
            ((x[: first - 1], w), "rows"),
            ((torch.cat([x] * (last // 128 + 1)), w), "rows"),
            ((x.float(), w.float()), "bfloat16"),
            ((x, w.half()), "bfloat16"),
            ((x, torch.cat([w, w])), "times as many"),
            ((x[:, :1012], w[:, :1012]), "times as many"),
            ((x.clone().requires_grad_(), w), "gradient"),
        ):
            support = shares.supports(*refused)
            assert not support and told in support.why_not, told
