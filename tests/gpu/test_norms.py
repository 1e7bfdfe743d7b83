"""On a CUDA device: norm, heads, gate and codes against plain torch at real sizes, captured in
graphs, and repeated."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lowroll.kernels.fused.norm import add_rms_norm
from lowroll.kernels.fused.rope import rotate_heads
from lowroll.kernels.fused.swiglu import silu_mul
from lowroll.kernels.quantize.rows import Product, QuantizedRows, quantize_rows
from tests.fixtures.norms import EPS, agree, angles, flat, gradients_agree, plain, product, random

pytestmark = pytest.mark.gpu

DTYPES = [(torch.float32, 3e-6), (torch.bfloat16, 1.6e-2)]
CODES = [
    ("int8", torch.bfloat16),
    ("int8", torch.float32),
    ("int8_rotated", torch.bfloat16),
    ("int8_rotated", torch.float32),
    ("fp8", torch.bfloat16),
    ("fp8", torch.float32),
]


def cuda(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return random(*shape, seed=seed, dtype=dtype).cuda()


def cuda_product(num_rows: int, size: int, kind: torch.dtype, dtype: torch.dtype) -> Product:
    made = product(num_rows, size, kind, dtype)
    assert made.row_M1 is not None and made.column_N is not None and made.bias_N is not None
    return Product(
        made.sums_MN.cuda(), made.row_M1.cuda(), made.column_N.cuda(), made.bias_N.cuda(), dtype
    )


def calls(
    num_tokens: int, dtype: torch.dtype, learn: bool = False
) -> list[tuple[list[Tensor], Callable[[], object]]]:
    """(leaves, call) of every public function at a 7B model's sizes, and with QK-norm."""

    def leaf(*shape: int, seed: int) -> Tensor:
        return cuda(*shape, seed=seed, dtype=dtype).requires_grad_(learn)

    x, update, weight = (
        leaf(num_tokens, 3584, seed=0),
        leaf(num_tokens, 3584, seed=1),
        leaf(3584, seed=2),
    )
    qkv, q_norm, k_norm = leaf(num_tokens, 36 * 128, seed=3), leaf(128, seed=4), leaf(128, seed=5)
    gate_up, (cos, sin) = (
        leaf(num_tokens, 2 * 18944, seed=6),
        (t.cuda() for t in angles(num_tokens, 128)),
    )
    return [
        ([x, update, weight], lambda: add_rms_norm(x, update, weight, EPS)),
        ([x, weight], lambda: add_rms_norm(x, None, weight, EPS)),
        ([qkv], lambda: rotate_heads(qkv, cos, sin, 28, 4, 128, None, None, EPS)),
        (
            [qkv, q_norm, k_norm],
            lambda: rotate_heads(qkv, cos, sin, 28, 4, 128, q_norm, k_norm, EPS),
        ),
        ([gate_up], lambda: silu_mul(gate_up)),
    ]


@pytest.mark.parametrize("dtype, tolerance", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 77])
def test_forward(num_tokens: int, dtype: torch.dtype, tolerance: float) -> None:
    for _, call in calls(num_tokens, dtype):
        agree(call, tolerance)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 3e-6), (torch.bfloat16, 6e-3)])
def test_gradients(dtype: torch.dtype, tolerance: float) -> None:
    for leaves, call in calls(701, dtype, learn=True):
        gradients_agree(call, leaves, tolerance)


def test_gradients_repeat_bit_for_bit() -> None:
    for leaves, call in calls(701, torch.bfloat16, learn=True):
        first, second = (
            torch.autograd.grad([t.float().square().sum() for t in flat(call())], leaves)
            for _ in range(2)
        )
        assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("kind, dtype", CODES)
def test_codes_are_those_of_the_dense_result(kind: str, dtype: torch.dtype) -> None:
    x, gate_up = cuda(33, 3584, dtype=dtype), cuda_product(33, 2 * 18944, torch.int32, dtype)
    x[3] = 0
    for got, dense in [(quantize_rows(x, kind), x), (silu_mul(gate_up, kind), silu_mul(gate_up))]:
        wanted = plain(lambda: quantize_rows(dense, kind))
        assert (
            isinstance(got, QuantizedRows)
            and isinstance(wanted, QuantizedRows)
            and got.dtype == dtype
        )
        assert torch.equal(got.scale_M1, wanted.scale_M1)
        assert (got.codes_MK.float() != wanted.codes_MK.float()).sum() == 0


@pytest.mark.parametrize("kind, dtype", CODES)
def test_the_norms_codes_are_those_of_the_dense_norm(kind: str, dtype: torch.dtype) -> None:
    """Up to the order of its sum of squares, which may differ between the two kernels: rarely a
    neighbouring code."""
    x, weight = cuda(33, 3584, dtype=dtype), cuda(3584, seed=2, dtype=dtype)
    got, dense = add_rms_norm(x, x, weight, EPS, kind)[1], add_rms_norm(x, x, weight, EPS)[1]
    wanted = plain(lambda: quantize_rows(dense, kind))  # type: ignore[arg-type]
    assert (
        isinstance(got, QuantizedRows) and isinstance(wanted, QuantizedRows) and got.dtype == dtype
    )
    torch.testing.assert_close(got.scale_M1, wanted.scale_M1, rtol=2**-7, atol=0.0)
    assert (got.codes_MK.float() != wanted.codes_MK.float()).float().mean() < 1e-2


@pytest.mark.parametrize("dtype, tolerance", DTYPES)
@pytest.mark.parametrize("kind", [torch.int32, torch.float32, torch.bfloat16])
def test_products_are_read_as_their_dense_values(
    kind: torch.dtype, dtype: torch.dtype, tolerance: float
) -> None:
    x, weight, (cos, sin) = (
        cuda(9, 3584, dtype=dtype),
        cuda(3584, seed=2, dtype=dtype),
        angles(9, 128),
    )
    hidden, qkv, gate_up = (
        cuda_product(9, size, kind, dtype) for size in (3584, 36 * 128, 2 * 18944)
    )
    agree(lambda: add_rms_norm(x, hidden, weight, EPS), tolerance)
    agree(
        lambda: rotate_heads(
            qkv, cos.cuda(), sin.cuda(), 28, 4, 128, weight[:128], weight[128:256], EPS
        ),
        tolerance,
    )
    agree(lambda: silu_mul(gate_up), tolerance)


def test_a_graph_replays_them_all() -> None:
    with torch.no_grad():
        ours = [call for _, call in calls(8, torch.bfloat16)]
        eager = [tensor.clone() for call in ours for tensor in flat(call())]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = [tensor for call in ours for tensor in flat(call())]
        graph.replay()
        assert all(map(torch.equal, eager, captured))
