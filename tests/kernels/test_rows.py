"""Quantized rows and unscaled products."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from lowroll.kernels.quantize import rows
from lowroll.kernels.quantize.rows import Product, quantize_rows
from tests.fixtures.compiled import built
from tests.fixtures.interpreted import both_paths


def integers(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    """The definition: float32 steps of numpy, one row at a time."""
    codes, scales = [], []
    for row in x_MK.float().numpy():
        amax = np.abs(row).max()
        codes.append(np.rint(row * (np.float32(127) / max(amax, np.float32(1e-30)))))
        scales.append([amax / np.float32(127)])
    return torch.tensor(np.array(codes)).to(torch.int8), torch.tensor(np.array(scales))


@both_paths
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_int8_rows_are_those_of_the_format(dtype: torch.dtype, path: str) -> None:
    x_MK = torch.randn(5, 37, generator=torch.Generator().manual_seed(0)).to(dtype)
    x_MK[2] = 0
    got, (codes_MK, scale_M1) = quantize_rows(x_MK, "int8"), integers(x_MK)
    assert torch.equal(got.codes_MK, codes_MK) and torch.equal(got.scale_M1, scale_M1)


def test_plain_fp8_rows_are_those_of_the_format() -> None:
    x_MK = torch.randn(5, 37, generator=torch.Generator().manual_seed(0)).bfloat16()
    x_MK[2] = 0
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


@pytest.mark.interpreted
@pytest.mark.parametrize("kind", ["int8", "fp8", "gradient"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_long_rows_in_pieces_are_the_same(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, kind: str
) -> None:
    x_MK = torch.randn(5, 75, generator=torch.Generator().manual_seed(0)).to(dtype)
    x_MK[2], x_MK[3, 70] = 0, 1e3
    whole, launched = quantize_rows(x_MK, kind), []
    kernel = rows._quantize_long_kernel

    class Watched:
        def __getitem__(self, grid: tuple[int]) -> object:
            launched.append(grid)
            return kernel[grid]

    monkeypatch.setattr(rows, "_quantize_long_kernel", Watched())
    for name, value in (("LONG", 74), ("MANY", 5), ("PIECE", 16)):
        monkeypatch.setattr(rows, name, value)
    in_pieces = quantize_rows(x_MK, kind)
    assert launched == [(5,)]
    assert torch.equal(in_pieces.scale_M1, whole.scale_M1)
    assert torch.equal(in_pieces.codes_MK.view(torch.uint8), whole.codes_MK.view(torch.uint8))
    quantize_rows(x_MK[:4], kind), quantize_rows(x_MK[:, :74], kind)
    assert len(launched) == 1


@pytest.mark.interpreted
def test_a_gradients_scale_has_no_floor_that_it_could_meet() -> None:
    x_MK = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    x_MK *= torch.tensor([[1.0], [2.0**-60], [2.0**-140], [0.0]])
    scale = quantize_rows(x_MK, "gradient").scale_M1
    amax_M1 = x_MK.abs().amax(1, keepdim=True)
    assert torch.equal(scale[:2], amax_M1[:2] / torch.full((2, 1), 448.0))
    assert scale[2:].flatten().tolist() == [2.0**-100] * 2
    want = rows._plain(x_MK, "gradient")
    assert torch.equal(scale, want.scale_M1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", "fp8", "gradient"])
def test_long_rows_compile_for_hopper_without_spills(kind: str) -> None:
    """As long as the widest gradient of a 7B model."""
    pytest.importorskip("triton")
    codes = "*i8" if kind == "int8" else "*fp8e4nv"
    types = {"x": "*bf16", "codes": codes, "scale": "*fp32", "size": "i32"}
    constants = dict(
        **rows.encoding(kind, 37888), PIECES=-(-37888 // rows.PIECE), BLOCK=rows.PIECE, EARLY=False
    )
    code = built(rows._quantize_long_kernel, types, constants, num_warps=8).asm["sass"]
    assert "LDG.E.128" in code and "STL" not in code


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
