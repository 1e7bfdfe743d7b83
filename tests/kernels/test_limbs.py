"""float32 rows times int8 codes by products of bytes, against float64 and against the matrix that the
codes stand for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lowroll.kernels.matmul import float32_by_int8, w8a8_onednn
from lowroll.model import frozen_product
from lowroll.model.learner_linear import LearnerLinear
from lowroll.quant.formats import get_format

CPU = torch.device("cpu")
runs_here = pytest.mark.skipif(
    not float32_by_int8.supports_device(CPU), reason=float32_by_int8.supports_device(CPU).why_not
)


def product(x_MK: Tensor, codes_NK: Tensor, scale_N: Tensor, **more: Tensor) -> Tensor:
    y_MN = torch.zeros(len(x_MK), len(codes_NK))
    return float32_by_int8.add_product(y_MN, x_MK, w8a8_onednn.pack(codes_NK, scale_N), **more)


@runs_here
@pytest.mark.parametrize(("m", "k", "n"), [(1, 576, 960), (300, 1536, 576), (5, 100, 37)])
def test_as_exact_as_float32_on_rows_with_a_massive_number(m: int, k: int, n: int) -> None:
    x, scale = torch.randn(m, k), torch.rand(n) + 0.5
    x[:, 3] *= 300
    codes = torch.randint(-128, 128, (n, k), dtype=torch.int8)
    column = torch.rand(k) + 0.5
    want = (x * column).double() @ codes.double().t() * scale.double()
    got = product(x, codes, scale, scale_K=column)
    assert (got - want).abs().max() < 5e-5 * want.std()
    both = float32_by_int8.add_product(got.clone(), x, w8a8_onednn.pack(codes, scale), column)
    torch.testing.assert_close(both, 2 * got)  # it adds


@runs_here
def test_a_row_is_the_same_alone_and_odd_rows_stay_where_they_are() -> None:
    x = torch.randn(float32_by_int8.AT_ONCE + 9, 576)
    codes, scale = torch.randint(-128, 128, (64, 576), dtype=torch.int8), torch.ones(64)
    x[2], x[3], x[4, 5], x[5, 1] = 0, 1e-42, float("inf"), float("nan")
    got = product(x, codes, scale)
    assert torch.equal(product(x[300:], codes, scale), got[300:]) if len(x) > 300 else True
    assert torch.equal(product(x[7:8], codes, scale), got[7:8])
    assert torch.equal(got[2:4], torch.zeros(2, 64))
    assert got[4:6].isnan().all() and got[6:].isfinite().all() and got[:4].isfinite().all()


def test_what_it_leaves_to_torch_has_a_reason() -> None:
    small, large = (torch.zeros(size, 512, dtype=torch.int8) for size in (8, 512))
    x = torch.zeros(2, 512)
    assert "small" in float32_by_int8.supports(x, small).why_not
    assert "float32" in float32_by_int8.supports(x.bfloat16(), large).why_not
    assert float32_by_int8.supports(x.clone().requires_grad_(True), large).why_not
    assert float32_by_int8.supports_device(torch.device("meta")).why_not


@runs_here
@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("format", ["int8", "int8_rotated"])
def test_a_frozen_layer_multiplies_as_its_dequantized_matrix(
    format: str, adapted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward, the gradient of x, and those of an adapter."""
    from lowroll.model.adapter import Adapter

    layer = LearnerLinear(512, {"q": 512, "k": 256}, True, "cpu", torch.float32)
    layer.set_weight(get_format(format).quantize(torch.randn(768, 512) * 0.05))
    layer.bias = torch.nn.Parameter(torch.randn(768))
    if adapted:
        layer.adapter = Adapter(8, 16.0)
        for part, rows in layer.parts.items():
            layer.adapter.a[part] = torch.nn.Parameter(torch.randn(8, 512) * 0.1)
            layer.adapter.b[part] = torch.nn.Parameter(torch.randn(rows, 8) * 0.1)
    given, out = torch.randn(70, 512), torch.randn(70, 768)

    def found() -> list[Tensor]:
        layer.zero_grad()
        x = given.clone().requires_grad_(True)
        y = layer(x)
        (y * out).sum().backward()
        assert x.grad is not None
        learnt = [p.grad for p in layer.parameters() if p.grad is not None]
        return [y.detach(), x.grad, *learnt]

    mine = found()
    assert "onednn of the transpose" in layer.weight.packed
    with torch.no_grad():
        assert torch.equal(layer(given), mine[0])  # with gradients and without: the same bits
    monkeypatch.setattr(frozen_product, "_in_bytes", lambda x, weight: False)
    for got, want in zip(mine, found(), strict=True):
        assert (got - want).abs().max() < 2e-5 * want.abs().max()


def test_other_formats_are_dequantized() -> None:
    """Their codes stand for more than codes times scales."""
    weight = get_format("fp8").quantize(torch.randn(512, 512))
    x = torch.randn(3, 512)
    want = x @ weight.dequantize(torch.float32).t()
    torch.testing.assert_close(frozen_product.multiply(x, weight, None), want)
