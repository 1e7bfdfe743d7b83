"""8-bit products on a CUDA device: int8's integers exactly, e4m3 within its bound, eagerly and in
CUDA graphs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lowroll.kernels.matmul import gemv, w8a8_cuda, w8a8_triton
from lowroll.kernels.quantize.quantize8 import quantize_columns_into, quantize_rows_into
from lowroll.kernels.quantize.rows import E4M3, QuantizedRows, quantize_rows
from lowroll.kernels.quantize.rows import _plain as rows_of
from lowroll.quant import fp8
from lowroll.quant.formats import get_format

pytestmark = pytest.mark.gpu

ROWS = [1, 2, 3, 4, 5, 16, 17, 33, 64, 100, 128, 200, 256, 300, 700, 1100]
SHAPES = [(512, 2048), (1000, 3584), (264, 1104), (4608, 3584), (3584, 18944), (130, 257), (33, 48)]


def problem(
    kind: str, num_rows: int, shape: tuple[int, int], dtype: torch.dtype
) -> tuple[QuantizedRows, Tensor, Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(num_rows)
    sizes = (num_rows, shape[1]), shape
    if kind == "int8":
        x, w = (
            torch.randint(-128, 128, s, generator=generator, device="cuda", dtype=torch.int8)
            for s in sizes
        )
    else:
        x, w = (
            torch.randn(s, generator=generator, device="cuda").mul(90).clamp(-448, 448).to(E4M3)
            for s in sizes
        )
    row, scale, bias = (
        torch.rand(s, generator=generator, device="cuda")
        for s in ((num_rows, 1), (shape[0], 1), shape[0])
    )
    return QuantizedRows(x, row, dtype), w, scale, bias


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        *((shape, torch.bfloat16) for shape in SHAPES),
        *(  # to compile few
            (shape, dtype) for shape in SHAPES[1:3] for dtype in (torch.float32, torch.float16)
        ),
    ],
)
def test_integer_products_are_exact(shape: tuple[int, int], dtype: torch.dtype) -> None:
    for num_rows in ROWS:
        rows, codes, scale, bias = problem("int8", num_rows, shape, dtype)
        want = (
            (rows.codes_MK.double() @ codes.double().t()).float() * scale.t() * rows.scale_M1 + bias
        ).to(dtype)
        for _ in range(2):
            assert torch.equal(w8a8_cuda.multiply(rows, codes, scale, bias).dense(), want), num_rows
    assert all(not counters.any() for counters in w8a8_triton._TURNS.values())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_e4m3_products(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """The bound: what the device's sums lose, and two roundings to the dtype."""
    if not w8a8_cuda.scaled_mm_supports(torch.device("cuda", 0)):
        pytest.skip("this device has no e4m3 product")
    for num_rows in ROWS:
        rows, codes, scale, bias = problem("fp8", num_rows, shape, dtype)
        x, w = rows.codes_MK.double() * rows.scale_M1, codes.double() * scale
        exact, norms = x @ w.t() + bias, x.norm(dim=1, keepdim=True) * w.norm(dim=1)
        error = (w8a8_cuda.multiply(rows, codes, scale, bias).dense().double() - exact).abs()
        assert (error <= 2 * torch.finfo(dtype).eps * (exact.abs() + bias) + 1e-3 * norms).all(), (
            num_rows
        )


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("num_rows", [1, 16, 64, 256])
def test_products_replay_in_a_graph(kind: str, num_rows: int) -> None:
    rows, codes, scale, bias = problem(kind, num_rows, (3584, 1024), torch.bfloat16)
    eager = w8a8_cuda.multiply(rows, codes, scale, bias).dense()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first = w8a8_cuda.multiply(rows, codes, scale, bias).dense()
        second = w8a8_cuda.multiply(rows, codes, scale, bias).dense()
    for _ in range(3):
        first.zero_(), second.zero_()
        graph.replay()
        assert torch.equal(first, eager) and torch.equal(second, eager)
    rows.codes_MK.copy_(rows.codes_MK.flip(1))
    graph.replay()
    assert torch.equal(
        first, w8a8_cuda.multiply(rows, codes, scale, bias).dense()
    ) and not torch.equal(first, eager)


def test_few_rows_are_those_of_more() -> None:
    """A row of int8 alone is the row in a batch, though two kernels take part."""
    rows, codes, scale, bias = problem("int8", 64, (4608, 3584), torch.bfloat16)
    batch = w8a8_cuda.multiply(rows, codes, scale, bias).dense()
    for size in (1, 2, 4, 5, 16, 32):
        part = QuantizedRows(rows.codes_MK[:size], rows.scale_M1[:size])
        assert gemv.supports(part.codes_MK, codes) == (size <= gemv.MOST[torch.int8])
        assert torch.equal(w8a8_cuda.multiply(part, codes, scale, bias).dense(), batch[:size])


@pytest.mark.parametrize("kind", ["int8", "int8_rotated", "fp8"])
@pytest.mark.parametrize("shape", [(33, 7), (130, 257), (64, 4096), (96, 3584), (16, 18944)])
def test_weights_in_one_launch_are_the_formats_bytes(kind: str, shape: tuple[int, int]) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    w = torch.randn(shape, generator=generator, device="cuda") * torch.rand(
        shape[0], 1, device="cuda"
    )
    w[0] = 0
    w[1] = torch.randint(-255, 256, shape[1:], generator=generator, device="cuda") / 2
    for case in (
        w,
        w.bfloat16(),
        *([w.half()] if shape[0] < 64 else []),
        w * 1e-37,
        w * 1e30,
        w[:, :3],
    ):
        codes, scale = get_format(kind).encode(case).values()
        got = (
            torch.full_like(codes.view(torch.uint8), 77).view(codes.dtype),
            torch.full_like(scale, -1),
        )
        quantize_rows_into(case, *got, kind)
        assert torch.equal(got[0].view(torch.uint8), codes.view(torch.uint8)) and torch.equal(
            got[1], scale
        )
        if kind == "int8_rotated":
            continue  # no gradient is multiplied with it
        # plain torch leaves the codes of a transpose in the order of the matrix
        turned, steps = (t.contiguous() for t in get_format(kind).encode(case.t()).values())
        got = torch.empty_like(turned), torch.empty_like(steps)
        quantize_columns_into(case.contiguous(), *got, kind)
        assert torch.equal(got[0].view(torch.uint8), turned.view(torch.uint8))
        assert torch.equal(got[1], steps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 8, 300, 1100])
def test_gradients_in_fp8(rows: int, dtype: torch.dtype) -> None:
    """As on the CPU, but for the order and the bits of sums; sizes as of a batch's mean."""
    w = torch.randn(384, 512, device="cuda").to(dtype)
    transposed = get_format("fp8").quantize(w.t())
    grad = (
        torch.randn(rows, 384, device="cuda")
        * torch.logspace(-12, -3, rows, device="cuda")[:, None]
    )
    got = fp8.gradient(grad.to(dtype), transposed)
    want = fp8.gradient(grad.to(dtype).cpu(), transposed.to("cpu")).cuda()
    assert got.dtype == dtype
    error = (got.double() - want.double()).norm(dim=1) / want.double().norm(dim=1)
    assert error.max() < (1e-3 if dtype == torch.float32 else 6e-3)
    exact = grad.to(dtype).double() @ w.double()
    assert ((got.double() - exact).norm(dim=1) / exact.norm(dim=1)).max() < 0.06


@pytest.mark.parametrize("kind", ["int8", "int8_rotated", "fp8", "gradient"])
@pytest.mark.parametrize("size", [8960, 18944, 37888])
def test_long_rows_are_those_of_plain_torch(kind: str, size: int) -> None:
    x = (
        torch.randn(520, size, device="cuda").bfloat16()
        * torch.rand(520, 1, device="cuda").bfloat16()
    )
    x[3] = 0
    got, want = quantize_rows(x, kind), rows_of(x, kind)
    assert torch.equal(got.scale_M1, want.scale_M1)
    assert torch.equal(got.codes_MK.view(torch.uint8), want.codes_MK.view(torch.uint8))
