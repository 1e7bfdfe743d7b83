"""Products of 8-bit codes and 8-bit weights: in Triton's interpreter, in plain torch, and compiled
for a GPU."""

from __future__ import annotations

import re
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from lowroll.kernels.matmul import gemv, w8a8_cuda, w8a8_triton
from lowroll.kernels.quantize import quantize8
from lowroll.kernels.quantize.rows import E4M3, QuantizedRows
from lowroll.kernels.support import YES
from lowroll.quant.formats import get_format
from tests.fixtures.compiled import arguments, built

SHAPES = [(1, 96, 500), (5, 33, 37), (17, 130, 1300), (40, 70, 96), (70, 64, 256)]
LARGE = [
    (4608, 3584),
    (3584, 3584),
    (37888, 3584),
    (3584, 18944),
    (1536, 1536),
    (55296, 5120),
    (96, 64),
    (33, 7),
]


def problem(
    num_rows: int, num_out: int, num_in: int
) -> tuple[QuantizedRows, Tensor, Tensor, Tensor, Tensor]:
    """(rows, codes, scales, bias, and y, computed in float64 up to the scales)."""
    generator = torch.Generator().manual_seed(num_in)
    x, w = (
        torch.randint(-128, 128, (n, num_in), generator=generator, dtype=torch.int8)
        for n in (num_rows, num_out)
    )
    row_M1, scale_N1, bias_N = (
        torch.rand(shape, generator=generator) for shape in ((num_rows, 1), (num_out, 1), num_out)
    )
    sums_MN = x.double() @ w.double().t()
    return (
        QuantizedRows(x, row_M1, torch.float32),
        w,
        scale_N1,
        bias_N,
        sums_MN.float() * scale_N1.t() * row_M1 + bias_N,
    )


@pytest.mark.interpreted
@pytest.mark.parametrize("shape", [*SHAPES, (50, 200, 592)])
# whole tiles alone, with parts of others, and parts alone; without the copy engine one of them, for it
# only loads
@pytest.mark.parametrize(
    ("dealt", "engine"), [(None, True), ((1, 3), True), ((0, 2), True), ((1, 3), False)]
)
def test_integer_products_are_exact(
    shape: tuple[int, int, int],
    dealt: tuple[int, int] | None,
    engine: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Twice: the counters of finished parts are zero again after the first product."""
    rows, codes, scale, bias, want = problem(*shape)
    small = w8a8_triton.Tile(16, 64, 64, 2, 4, 1, True)
    monkeypatch.setattr(w8a8_triton, "choose", lambda *sizes: small)
    monkeypatch.setattr(w8a8_triton, "copy_engine_supports", lambda device: engine)
    if dealt:
        monkeypatch.setattr(w8a8_triton, "deal", lambda *sizes: dealt)
    for _ in range(2):
        assert torch.equal(w8a8_cuda.multiply(rows, codes, scale, bias).dense(), want)
    without = w8a8_cuda.multiply(rows, codes, scale.flatten(), None).dense(torch.float64)
    torch.testing.assert_close(without, want.double() - bias, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize(
    ("tiles", "steps", "at_once"),
    [
        (296, 28, 264),
        (592, 28, 264),
        (28, 148, 132),
        (264, 28, 264),
        (1, 3, 264),
        (1, 1000, 264),
        (265, 28, 264),
        (200, 50, 264),
    ],
)
def test_tiles_are_dealt_in_full_rounds_and_no_part_is_empty(
    tiles: int, steps: int, at_once: int
) -> None:
    whole, splits = w8a8_triton.deal(tiles, steps, at_once, 4)
    if splits == 1:
        assert whole == tiles and (
            tiles % at_once == 0 or 2 * (tiles % at_once) > at_once or steps < 8
        )
    else:
        assert whole % at_once == 0 and 0 < (tiles - whole) * splits <= at_once
        assert -(-steps // splits) >= 4 and (splits - 1) * -(-steps // splits) < steps


@pytest.mark.interpreted
@pytest.mark.parametrize("shape", [(1, 9, 48), (2, 37, 528), (1, 5, 2048), (2, 6, 2576)])
def test_few_rows_are_exact(shape: tuple[int, int, int]) -> None:
    rows, codes, scale, bias, want = problem(*shape)
    assert gemv.supports(rows.codes_MK, codes)
    assert torch.equal(w8a8_cuda.multiply(rows, codes, scale, bias).dense(), want)
    assert torch.equal(
        gemv.multiply(rows, codes, scale.flatten(), None),
        gemv.multiply(rows, codes, scale, bias * 0),
    )


@pytest.mark.interpreted
def test_few_e4m3_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(n, 2064, generator=generator).mul(90).to(E4M3) for n in (1, 7))
    row, scale, bias = (torch.rand(shape, generator=generator) for shape in ((1, 1), (7, 1), 7))
    assert gemv.supports(x, w)
    got = gemv.multiply(QuantizedRows(x, row, torch.float32), w, scale, bias)
    want = (x.double() @ w.double().t()) * row * scale.t() + bias
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1)


@pytest.mark.interpreted
@pytest.mark.parametrize("shape", [(1, 9, 48), (1, 5, 2056), (2, 7, 1024)])
def test_few_rows_of_numbers(shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemv, "MANY", 9)
    rows, out, width = shape
    generator = torch.Generator().manual_seed(0)
    x, w, bias = (
        torch.randn(size, generator=generator).bfloat16()
        for size in ((rows, width), (out, width), (out,))
    )
    assert gemv.supports(x, w)
    for added in (None, bias):
        got = gemv.linear(x, w, added)
        want = x.double() @ w.double().t() + (0 if added is None else added.double())
        assert got.dtype == torch.bfloat16
        torch.testing.assert_close(got.double(), want, rtol=1e-2, atol=2e-2)
        alone = gemv.linear(x[-1:], w, added)
        assert torch.equal(got[-1:], alone), "a row does not depend on its neighbours"


def test_what_the_product_of_few_rows_refuses() -> None:
    with patch("lowroll.kernels.matmul.gemv.triton_supports", lambda x: YES):
        x, w = torch.zeros(1, 64, dtype=torch.bfloat16), torch.zeros(3, 64, dtype=torch.bfloat16)
        assert gemv.supports(x, w)
        many = gemv.MOST[torch.bfloat16] + 1
        for refused, told in (
            ((x.float(), w.float()), "bfloat16"),
            ((x.expand(many, -1).contiguous(), w), "row"),
            ((x[:, :60], w[:, :60]), "16 bytes"),
            ((x[:, ::2], w[:, ::2]), "contiguous"),
            ((x.clone().requires_grad_(), w), "gradient"),
        ):
            support = gemv.supports(*refused)
            assert not support and told in support.why_not


@pytest.mark.parametrize("shape", SHAPES)
def test_plain_integer_products_are_exact(shape: tuple[int, int, int]) -> None:
    rows, codes, scale, bias, want = problem(*shape)
    assert torch.equal(w8a8_cuda.multiply(rows, codes, scale, bias).dense(), want)


def test_plain_e4m3_products() -> None:
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(n, 48, generator=generator).mul(90).to(E4M3) for n in (5, 7))
    row, scale, bias = (torch.rand(shape, generator=generator) for shape in ((5, 1), (7, 1), 7))
    got = w8a8_cuda.multiply(QuantizedRows(x, row, torch.float32), w, scale, bias).dense()
    want = (x.double() @ w.double().t()) * row * scale.t() + bias
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-2)


@pytest.mark.parametrize("shape", LARGE)
@pytest.mark.parametrize("num_rows", [1, 2, 16, 17, 64, 65, 128, 200, 256, 512, 4096])
def test_a_tile_fits_the_device(num_rows: int, shape: tuple[int, int]) -> None:
    tile = w8a8_triton.choose(num_rows, *shape)
    tiles = -(-num_rows // tile.rows) * -(-shape[0] // tile.columns)
    assert (tile.rows + tile.columns) * tile.depth * tile.stages * tile.blocks <= 227 * 1024
    assert (
        tile.columns >= 64
        and tile.blocks * w8a8_triton.MULTIPROCESSORS <= w8a8_triton.MOST_TURNS
        and tiles > 0
    )


@pytest.mark.interpreted
@pytest.mark.parametrize("longest", [4096, 32])
def test_weights_in_one_launch_are_the_formats_bytes(
    longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of zeros, ties, both ends of float32; whole rows in registers and rows in pieces."""
    monkeypatch.setattr(quantize8, "LONGEST", longest)
    generator = torch.Generator().manual_seed(0)
    for shape in ((5, 7), (3, 256), (1, 1), (17, 33)):
        w = torch.randn(shape, generator=generator)
        w[0] = 0
        w[1:2] = torch.randint(-255, 256, w[1:2].shape, generator=generator) / 2
        for case in (w, w.half(), w * 1e-37, w * 1e30):
            codes, scale = torch.full(shape, 77, dtype=torch.int8), torch.full((shape[0], 1), -1.0)
            quantize8.quantize_rows_into(case, codes, scale, "int8")
            want = get_format("int8").encode(case)
            assert torch.equal(codes, want["codes"]) and torch.equal(scale, want["scale"])
    with pytest.raises(ValueError, match="kind: 'int4'"):
        quantize8.quantize_rows_into(w, codes, scale, "int4")


@pytest.mark.interpreted
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_shows_in_its_scale(bad: float) -> None:
    w, codes, scale = torch.randn(3, 40), torch.empty(3, 40, dtype=torch.int8), torch.empty(3, 1)
    w[1, 3] = bad
    quantize8.quantize_rows_into(w, codes, scale, "int8")
    assert scale.isfinite().flatten().tolist() == [True, False, True]


@pytest.mark.slow
@pytest.mark.parametrize("engine", [True, False])
@pytest.mark.parametrize(
    ("num_rows", "num_out", "num_in"),
    [
        (1, 3584, 18944),
        (64, 37888, 3584),
        (96, 3584, 18944),
        (96, 4608, 3584),
        (96, 37888, 3584),
        (256, 4608, 3584),
        (256, 37888, 3584),
        (512, 37888, 3584),
        (2048, 3584, 3584),
    ],
)
def test_the_product_compiles_for_hopper_and_fits(
    num_rows: int, num_out: int, num_in: int, engine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing spills, and the registers of the blocks that are to run at once are there."""
    pytest.importorskip("triton")
    tile = w8a8_triton.choose(num_rows, num_out, num_in)
    engine = engine and tile.engine
    types = arguments(
        {
            "*i8": "x w",
            "*fp32": "row column",
            "*bf16": "bias y",
            "i32": "M N K whole splits",
            "*i32": "parts turns",
        }
    )
    if engine:
        types |= {
            "x_box": f"tensordesc<i8[{tile.rows}, {tile.depth}]>",
            "w_box": f"tensordesc<i8[{tile.columns}, {tile.depth}]>",
        }
    constants = dict(ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=tile.depth, EVEN=True, EARLY=False)
    constants |= {} if engine else {"x_box": None, "w_box": None}
    code = built(
        w8a8_triton._integers_kernel,
        types,
        constants,
        ("M", "whole", "splits"),
        num_warps=tile.warps,
        num_stages=tile.stages,
        maxnreg=w8a8_triton.registers(tile),
    )
    assert re.search(r"wgmma\S+s32\.s8\.s8", code.asm["ptx"]) and "STL" not in code.asm["sass"]
    assert ("UTMALDG" if engine else "LDGSTS.E.BYPASS.128") in code.asm["sass"]
    assert code.metadata.shared * tile.blocks <= 227 * 1024


@pytest.mark.interpreted
def test_a_transpose_has_the_bytes_of_its_own() -> None:
    generator = torch.Generator().manual_seed(0)
    for shape in ((5, 7), (1, 1), (130, 70), (515, 65)):
        w = torch.randn(shape, generator=generator)
        w[:, 0] = 0
        for case in (w, w.half(), w * 1e-37, w * 1e30):
            codes = torch.full(shape[::-1], 77, dtype=torch.int8)
            scale = torch.full((shape[1], 1), -1.0)
            quantize8.quantize_columns_into(case, codes, scale, "int8")
            want = get_format("int8").encode(case.t())
            assert torch.equal(codes, want["codes"]) and torch.equal(scale, want["scale"])
    w[3, 2] = float("nan")
    quantize8.quantize_columns_into(w, codes, scale, "int8")
    assert [i for i, x in enumerate(scale.isfinite().flatten()) if not x] == [2]
    with pytest.raises(ValueError, match="kind: 'int4'"):
        quantize8.quantize_columns_into(w, codes, scale, "int4")


@pytest.mark.slow
@pytest.mark.parametrize("integer", [True, False])
def test_the_quantizer_of_a_transpose_compiles_for_hopper(integer: bool) -> None:
    pytest.importorskip("triton")
    types = {"w": "*bf16", "amaxes": "*i32", "N": "i32", "K": "i32"}
    tile = dict(ROWS=quantize8.ROWS, COLUMNS=quantize8.COLUMNS)
    looking = built(quantize8._column_amax_kernel, types, dict(MANY=quantize8.MANY, **tile)).asm
    types |= {"codes": "*i8" if integer else "*fp8e4nv", "scales": "*fp32"}
    writing = built(quantize8._quantize8_columns_kernel, types, dict(INTEGER=integer, **tile)).asm
    for code in (looking, writing):
        assert "LDG.E.128" in code["sass"] and "STL" not in code["sass"]
    assert "STG.E.128" in writing["sass"]


@pytest.mark.slow
@pytest.mark.parametrize("integer", [True, False])
def test_the_quantizer_compiles_for_hopper_without_spills(integer: bool) -> None:
    pytest.importorskip("triton")
    types = {"w": "*bf16", "codes": "*i8" if integer else "*fp8e4nv", "scales": "*fp32", "K": "i32"}
    constants = dict(WIDTH=quantize8.LONGEST, WHOLE=False, INTEGER=integer)
    code = built(quantize8._quantize8_kernel, types, constants, num_warps=8).asm
    assert "LDG.E.128" in code["sass"] and "STL" not in code["sass"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", "fp8", "bf16"])
def test_few_rows_compile_for_hopper_without_spills(kind: str) -> None:
    pytest.importorskip("triton")
    dtype = {"int8": torch.int8, "fp8": E4M3, "bf16": torch.bfloat16}[kind]
    codes = {"int8": "*i32", "fp8": "*fp8e4nv", "bf16": "*bf16"}[kind]
    rows = gemv.MOST[dtype]
    types = arguments({codes: "x w", "*fp32": "row column", "i32": "N K"})
    types |= {"bias": "*bf16", "y": "*bf16"}
    channels, step, warps = gemv.schedule(rows, 37888, dtype)
    constants = dict(
        ROWS=rows,
        COLUMNS=channels,
        DEPTH=step // (4 if kind == "int8" else 1),
        EACH=16 // dtype.itemsize,
        EVEN=False,
        DP4A=True,
    )
    code = built(gemv._gemv_kernel, types, constants, num_warps=warps).asm
    assert (
        "LDG.E.128" in code["sass"]
        and "STL" not in code["sass"]
        and ("IDP" in code["sass"]) == (kind == "int8")
    )
