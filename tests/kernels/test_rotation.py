"""The blocked Hadamard rotation: its matrix, and the same bits from plain torch, C++ and Triton, alone
and inside every kernel that rounds rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lowroll.kernels.fused import swiglu
from lowroll.kernels.fused.norm import add_rms_norm
from lowroll.kernels.fused.swiglu import silu_mul
from lowroll.kernels.quantize import avx2, quantize8, rows
from lowroll.kernels.quantize.rotation import rotate, width
from lowroll.kernels.quantize.rows import ROTATED, QuantizedRows, quantize_rows
from lowroll.quant.formats import get_format
from tests.fixtures.compiled import built
from tests.fixtures.norms import EPS, plain, product, random

SIZES = (576, 1536, 516, 528, 1028, 4864)  # of blocks of 256, 64, 16 and 4, with rests of 4 and 16


def sylvester(size: int) -> Tensor:
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
    return matrix / size**0.5


def loud(*shape: int) -> Tensor:
    """Rows whose channels differ by orders of magnitude, one row of zeros among them."""
    x = random(*shape) * random(*shape, seed=1).exp()
    x[:, 3] *= 300
    x[1] = 0
    return x


def test_widths_are_powers_of_four_that_divide_the_row() -> None:
    sizes = (1, 2, 4, 12, 16, 32, 37, 48, 64, 128, 576, 896, 1536, 3584, 18944)
    widths = [1, 1, 4, 4, 16, 16, 1, 16, 64, 64, 64, 64, 256, 256, 256]
    assert [width(n) for n in sizes] == widths


def test_by_hand() -> None:
    assert rotate(torch.tensor([[1.0, 0, 0, 0]])).tolist() == [[0.5, 0.5, 0.5, 0.5]]
    assert rotate(torch.tensor([[1.0, 2, 3, 4]])).tolist() == [[5, -1, -2, 0]]
    odd = torch.tensor([[1.0, 2, 3]])
    assert torch.equal(rotate(odd), odd)


@pytest.mark.parametrize("size", [4, 16, 64, 256])
def test_it_is_sylvesters_matrix_over_its_root_and_its_own_inverse(size: int) -> None:
    x = random(5, 3 * size)
    blocks = x.view(5, 3, size).double() @ sylvester(size).double()
    torch.testing.assert_close(rotate(x), blocks.view(5, -1).float())
    torch.testing.assert_close(rotate(rotate(x)), x)
    assert rotate(x.bfloat16()).dtype == torch.float32


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["int8", ROTATED])
def test_one_pass_in_cpp_has_the_bits_of_plain_torch(
    size: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = loud(37, size)
    if not (found := avx2.supports(x)):
        pytest.skip(found.why_not)
    turned, got = rotate(x), quantize_rows(x, kind)
    alone = [quantize_rows(x[i : i + 1], kind).codes_MK for i in range(len(x))]
    monkeypatch.setattr(avx2, "LEAST", 1 << 30)
    want = quantize_rows(x, kind)
    assert torch.equal(turned, rotate(x))
    assert torch.equal(got.codes_MK, want.codes_MK) and torch.equal(got.scale_M1, want.scale_M1)
    assert torch.equal(torch.cat(alone), want.codes_MK)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_shows_in_the_scale(bad: float) -> None:
    x = random(3, 576)
    x[1, 7] = bad
    assert quantize_rows(x, "int8").scale_M1.isfinite().flatten().tolist() == [True, False, True]
    assert quantize_rows(x, ROTATED).scale_M1.isfinite().flatten().tolist() == [True, False, True]


@pytest.mark.interpreted
@pytest.mark.parametrize("size", [36, 48, 192, 512, 37])
def test_kernels_that_round_rotate_before(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norm, gate (in two launches and in one), and rows in one piece and in several."""
    x, update, weight = loud(4, size), random(4, size, seed=3), random(size, seed=2)
    gate_up = random(4, 2 * size, seed=4)
    calls: list[Callable[[], object]] = [
        lambda: quantize_rows(x, ROTATED),
        lambda: quantize_rows(x.half(), ROTATED),
        lambda: add_rms_norm(x, update, weight, EPS, ROTATED)[1],
        lambda: silu_mul(gate_up, ROTATED),
        lambda: silu_mul(product(4, 2 * size, torch.int32, torch.float32), ROTATED),
    ]
    got = [call() for call in calls]
    for name, value in (("LONG", 1), ("MANY", 1), ("PIECE", 256)):
        monkeypatch.setattr(rows, name, value)
    monkeypatch.setattr(swiglu, "WHOLE", 1)
    in_pieces = [call() for call in calls]
    dense = [x, x.half(), add_rms_norm(x, update, weight, EPS)[1], silu_mul(gate_up), None]
    for first, second, wanted in zip(got, in_pieces, dense, strict=True):
        assert isinstance(first, QuantizedRows) and isinstance(second, QuantizedRows)
        assert torch.equal(first.codes_MK, second.codes_MK)
        assert torch.equal(first.scale_M1, second.scale_M1)
        if wanted is not None:
            want = plain(lambda dense=wanted: quantize_rows(dense, ROTATED))
            assert isinstance(want, QuantizedRows)
            assert torch.equal(first.codes_MK, want.codes_MK)
            assert torch.equal(first.scale_M1, want.scale_M1)


@pytest.mark.interpreted
@pytest.mark.parametrize("size", [4, 48, 192, 768])
def test_one_kernel_has_the_bits_of_plain_torch(size: int) -> None:
    """A number of pieces with a rest, columns of a wider matrix, three axes, and nothing."""
    x = loud(37, size)
    for some in (x, x[:, : size // 2 * 2 : 2], x.view(37, 1, size), x[:0], x.bfloat16()):
        want = plain(lambda some=some: rotate(some))
        assert torch.equal(rotate(some), want) and want.dtype == torch.float32


@pytest.mark.interpreted
@pytest.mark.parametrize("longest", [4096, 256])
def test_weights_in_one_launch_are_the_formats_bytes(
    longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantize8, "LONGEST", longest)
    for shape in ((3, 256), (5, 36), (17, 33), (1, 192), (2, 768)):
        w = random(*shape)
        codes, scale = torch.full(shape, 77, dtype=torch.int8), torch.full((shape[0], 1), -1.0)
        quantize8.quantize_rows_into(w, codes, scale, ROTATED)
        want = get_format(ROTATED).encode(w)
        assert torch.equal(codes, want["codes"]) and torch.equal(scale, want["scale"])
    with pytest.raises(ValueError, match="kind: 'int8_rotated' is none of int8, fp8"):
        quantize8.quantize_columns_into(w, codes.t(), scale, ROTATED)


@pytest.mark.slow
def test_long_rows_compile_for_hopper_without_spills() -> None:
    """As long as the down product of a 7B model reads."""
    pytest.importorskip("triton")
    types = {"x": "*bf16", "codes": "*i8", "scale": "*fp32", "size": "i32"}
    pieces = -(-18944 // rows.PIECE)
    constants = rows.encoding(ROTATED, 18944) | {"PIECES": pieces, "BLOCK": rows.PIECE}
    kernel = rows._quantize_long_kernel
    code = built(kernel, types, constants | {"EARLY": False}, num_warps=8).asm["sass"]
    assert "LDG.E.128" in code and "STL" not in code


def test_rows_that_no_block_divides_are_plain_int8() -> None:
    w, x = random(8, 37), random(3, 37, seed=1)
    plain_q, rotated_q = get_format("int8").quantize(w), get_format(ROTATED).quantize(w)
    for name, tensor in plain_q.tensors.items():
        assert torch.equal(tensor, rotated_q.tensors[name])
    assert torch.equal(plain_q.linear(x), rotated_q.linear(x))


def test_an_outlier_costs_its_neighbours_less() -> None:
    """The reason of it all: one loud channel of a row leaves the others a few codes."""
    x, w = random(64, 576), random(32, 576, seed=1)
    x[:, 100] *= 200
    want = x.double() @ w.double().t()
    error = {
        name: float((get_format(name).quantize(w).linear(x) - want).norm() / want.norm())
        for name in ("int8", ROTATED)
    }
    assert error[ROTATED] < 0.3 * error["int8"]
