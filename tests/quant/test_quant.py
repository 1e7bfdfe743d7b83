"""INT8 against B1's vectors by hand, a float64 oracle, and rung P2 (a row alone is that row in a
batch)."""

from __future__ import annotations

import pytest
import torch

import lowroll
from lowroll.kernels.quantize.rows import quantize_rows
from lowroll.quant.formats import get_format

ROWS = torch.tensor([[0.5, -1, 0.25, 0.003], [2, 0.1, -0.7, -2], [0, 0, 0, 0]])


def test_int8_weight_vectors() -> None:
    q = lowroll.quantize(ROWS, "int8")
    assert q.tensors["codes"].tolist() == [[64, -127, 32, 0], [127, 6, -45, -127], [0, 0, 0, 0]]
    torch.testing.assert_close(
        q.tensors["scale"].flatten(),
        torch.tensor([0.0078431377, 0.0156862754, 1.1920929e-07]),
        rtol=1e-7,
        atol=0,
    )
    assert q.nbytes == 12 + 3 * 4


def test_int8_activation_and_product_vector() -> None:
    rows = quantize_rows(torch.tensor([[1.0, 2.0, -3.0, 0.5]]), "int8")
    assert rows.codes_MK.tolist() == [[42, 85, -127, 21]]
    assert rows.scale_M1.item() == pytest.approx(0.0236220472, abs=1e-9)
    q = lowroll.quantize(ROWS, "int8")
    y = q.linear(torch.tensor([[1.0, 2.0, -3.0, 0.5]]))
    assert y[0, 0].item() == pytest.approx(-2.2549329642, abs=1e-6)  # integer sum -12171


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_row_alone_is_row_in_batch_bitwise(dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    q = lowroll.quantize(torch.randn(200, 320), "int8")
    x, bias = (torch.randn(67, 320) * torch.rand(67, 1) * 5).to(dtype), torch.randn(200).to(dtype)
    batch = q.linear(x, bias)
    for i in range(67):
        assert torch.equal(q.linear(x[i : i + 1], bias)[0], batch[i])
    assert torch.equal(q.linear(x[torch.arange(66, -1, -1)], bias).flip(0), batch)


def test_extreme_values() -> None:
    q = lowroll.quantize(torch.tensor([[1e-30, -1e-30], [1e30, 3e29]]), "int8")
    assert q.tensors["codes"].tolist() == [[127, -128], [127, 38]]
    assert torch.isfinite(q.linear(torch.tensor([[0.0, 0.0], [1e-38, 0.0], [1e3, 1.0]]))).all()
    assert torch.equal(q.linear(torch.zeros(1, 2)), torch.zeros(1, 2))


def test_table() -> None:
    assert list(lowroll.formats())[:3] == ["fp32", "bf16", "int8"]
    with pytest.raises(ValueError, match="unknown weight format 'int9'; known: fp32, bf16, int8"):
        get_format("int9")


def test_dense_formats_are_the_baseline() -> None:
    torch.manual_seed(4)
    w, x = torch.randn(6, 5), torch.randn(3, 5)
    assert torch.equal(lowroll.quantize(w, "fp32").linear(x), torch.nn.functional.linear(x, w))
    assert torch.equal(lowroll.quantize(w, "bf16").dequantize(), w.bfloat16().float())
