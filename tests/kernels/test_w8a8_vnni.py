"""INT8 rows on a CPU with AVX-512 VNNI: the bits of rounding and multiplying one after the other."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from lowroll.kernels import cxx
from lowroll.kernels.matmul import ordered, w8a8_onednn, w8a8_vnni
from lowroll.kernels.quantize.rows import quantize_rows
from lowroll.kernels.support import YES
from lowroll.quant.formats import QTensor, get_format, quantize
from lowroll.quant.int8 import Int8

CPU = torch.device("cpu")
FORMATS = ("int8", "int8_rotated")


@pytest.fixture(autouse=True)
def needs_vnni(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(w8a8_onednn, "has_amx", lambda: False)
    if not (found := w8a8_vnni.supports_device(CPU)):
        pytest.skip(found.why_not)


def weight(format: str, num_out: int, num_in: int) -> QTensor:
    """Channels of many sizes, whose codes reach both ends."""
    return quantize(torch.randn(num_out, num_in) * torch.randn(num_out, 1).exp(), format)


def separate(
    format: str, q: QTensor, x_MK: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """The product by the kernels that it replaces."""
    int8 = get_format(format)
    assert isinstance(int8, Int8)
    return int8.product(quantize_rows(x_MK, int8.rows), q, bias).dense()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", [(96, 576), (33, 1024), (1, 512), (47, 640)])
def test_bits_are_those_of_separate_calls(format: str, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    q = weight(format, *shape)
    for num_rows in (1, 2, 7, 8, 9, 17, 65):
        x_MK = torch.randn(num_rows, shape[1]) * torch.randn(num_rows, 1).exp()
        x_MK[num_rows // 2] = 0
        for bias in (None, torch.randn(shape[0])):
            assert torch.equal(q.linear(x_MK, bias), separate(format, q, x_MK, bias))
    assert "vnni" in q.packed


@pytest.mark.parametrize("format", FORMATS)
def test_blocks_of_rows_have_the_bits_of_all_rows_at_once(
    format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    q, x_MK = weight(format, 47, 640), torch.randn(150, 640)
    bias = torch.randn(47)
    whole = q.linear(x_MK, bias)
    for at_once in (1, 8, 67, 149):
        monkeypatch.setattr(w8a8_vnni, "AT_ONCE", at_once)
        assert torch.equal(q.linear(x_MK, bias), whole)


@pytest.mark.parametrize("format", FORMATS)
def test_a_row_that_is_not_finite_is_nan_alone(format: str) -> None:
    q, x_MK = weight(format, 40, 512), torch.randn(3, 512)
    x_MK[1, 7] = float("nan")
    y_MN = q.linear(x_MK)
    assert y_MN[1].isnan().all() and y_MN[[0, 2]].isfinite().all()


@pytest.mark.parametrize("format", FORMATS)
def test_new_codes_are_packed_again(format: str) -> None:
    q, other, x_MK = weight(format, 40, 512), weight(format, 40, 512), torch.randn(2, 512)
    before = q.linear(x_MK)
    q.copy_(other)
    assert torch.equal(q.linear(x_MK), other.linear(x_MK))
    assert not torch.equal(q.linear(x_MK), before)


def test_many_rows_are_left_to_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    x_MK = torch.randn(w8a8_vnni.MOST_BESIDE_AMX + 1, 512)
    assert w8a8_vnni.supports(x_MK)
    monkeypatch.setattr(w8a8_onednn, "has_amx", lambda: True)
    assert not w8a8_vnni.supports(x_MK) and w8a8_vnni.supports(x_MK[1:])


def test_rows_of_an_interpreted_kernel_are_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert w8a8_vnni.supports(torch.randn(2, 512))
    monkeypatch.setattr(w8a8_vnni, "triton_supports", lambda _: YES)
    assert not w8a8_vnni.supports(torch.randn(2, 512))


def test_other_calls_are_left_to_other_kernels() -> None:
    for x_MK in (
        torch.randn(0, 512),
        torch.randn(2, 480),
        torch.randn(2, 520),
        torch.randn(2, 512, dtype=torch.bfloat16),
        torch.randn(2, 512, requires_grad=True),
    ):
        assert not w8a8_vnni.supports(x_MK), x_MK.shape


@pytest.mark.parametrize(("module", "name"), [(ordered, "has_avx512"), (w8a8_vnni, "_has_vnni")])
def test_nothing_is_built_for_a_cpu_without_it(
    module: ModuleType, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, name, lambda: False)
    monkeypatch.setattr(cxx, "supports", lambda *_: pytest.fail("a build"))
    w8a8_vnni.supports_device.cache_clear()
    try:
        assert not w8a8_vnni.supports_device(CPU)
    finally:
        w8a8_vnni.supports_device.cache_clear()
