"""Quantized rows and unscaled products."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from lowroll.kernels.quantize.rows import Product, quantize_rows


def integers(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    """The definition: float32 steps of numpy, one row at a time."""
    codes, scales = [], []
    for row in x_MK.float().numpy():
        amax = np.abs(row).max()
        codes.append(np.rint(row * (np.float32(127) / max(amax, np.float32(1e-30)))))
        scales.append([amax / np.float32(127)])
    return torch.tensor(np.array(codes)).to(torch.int8), torch.tensor(np.array(scales))


@pytest.mark.interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_int8_rows_are_those_of_the_format(dtype: torch.dtype) -> None:
    x_MK = torch.randn(5, 37, generator=torch.Generator().manual_seed(0)).to(dtype)
    x_MK[2] = 0
    got, (codes_MK, scale_M1) = quantize_rows(x_MK, "int8"), integers(x_MK)
    assert torch.equal(got.codes_MK, codes_MK) and torch.equal(got.scale_M1, scale_M1)


def test_plain_rows_are_those_of_the_formats() -> None:
    x_MK = torch.randn(5, 37, generator=torch.Generator().manual_seed(0)).bfloat16()
    x_MK[2] = 0
    got, (codes_MK, scale_M1) = quantize_rows(x_MK, "int8"), integers(x_MK)
    assert torch.equal(got.codes_MK, codes_MK) and torch.equal(got.scale_M1, scale_M1)
    got, x_MK = quantize_rows(x_MK, "fp8"), x_MK.float()
    scale_M1 = torch.tensor(
        [max(float(np.float32(row.abs().max()) / np.float32(448)), 1 / (448 * 512)) for row in x_MK]
    )
    assert torch.equal(got.scale_M1, scale_M1[:, None])
    assert torch.equal(
        got.codes_MK.float(), (x_MK / scale_M1[:, None]).to(torch.float8_e4m3fn).float()
    )
    with pytest.raises(ValueError, match="rows: 'fp4'"):
        quantize_rows(x_MK, "fp4")


def test_a_product_by_hand() -> None:
    product = Product(
        torch.tensor([[1, 2], [3, 4]], dtype=torch.int32),
        torch.tensor([[2.0], [0.5]]),
        torch.tensor([[10.0], [100.0]]),
        torch.tensor([1.0, -1.0]),
        torch.float32,
    )
    assert product.dense().tolist() == [[21.0, 399.0], [16.0, 199.0]]
    assert product.dense(torch.float16).dtype == torch.float16
