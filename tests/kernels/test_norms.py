"""Norm, heads and gate: the kernels against plain torch, forward and backward, dense and in codes,
at awkward sizes."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from lowroll.kernels.fused import norm, rope, swiglu
from lowroll.kernels.fused.norm import add_rms_norm
from lowroll.kernels.fused.rope import rotate_heads
from lowroll.kernels.fused.swiglu import silu_mul
from lowroll.kernels.quantize.rows import Product, QuantizedRows, quantize_rows
from tests.fixtures.compiled import compiled
from tests.fixtures.norms import EPS, agree, angles, gradients_agree, plain, product, random

HEADS = [(5, 2, 12), (3, 1, 16), (9, 4, 6)]  # heads, kv heads, head size


# -- forward ---------------------------------------------------------------------------------------


@pytest.mark.interpreted
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-6), (torch.float16, 2e-3)])
@pytest.mark.parametrize("update", [None, "tensor", torch.int32, torch.float32])
def test_norm(dtype: torch.dtype, tolerance: float, update: object) -> None:
    x, weight = random(3, 37, dtype=dtype), random(37, seed=2, dtype=dtype)
    added = (
        None
        if update is None
        else random(3, 37, seed=1, dtype=dtype)
        if update == "tensor"
        else product(3, 37, update, dtype)
    )
    agree(lambda: add_rms_norm(x, added, weight, EPS), tolerance)
    if update is None:
        assert add_rms_norm(x, None, weight, EPS)[0] is x


@pytest.mark.interpreted
@pytest.mark.parametrize("heads, kv_heads, size", HEADS)
@pytest.mark.parametrize("normed", [False, True])
def test_heads(heads: int, kv_heads: int, size: int, normed: bool) -> None:
    cos, sin = angles(3, size)
    norms = (random(size, seed=8), random(size, seed=9)) if normed else (None, None)
    wide = (heads + 2 * kv_heads) * size
    for qkv in (
        random(3, wide),
        random(3, wide, dtype=torch.float16),
        product(3, wide, torch.int32, torch.float32),
        product(3, wide, torch.float32, torch.float16, bias=False),
    ):
        tolerance = 2e-3 if qkv.dtype == torch.float16 else 2e-6
        agree(lambda: rotate_heads(qkv, cos, sin, heads, kv_heads, size, *norms, EPS), tolerance)


@pytest.mark.interpreted
def test_heads_without_norms_are_bitwise_those_of_plain_torch() -> None:
    qkv, (cos, sin) = random(4, 9 * 12), angles(4, 12)
    agree(lambda: rotate_heads(qkv, cos, sin, 5, 2, 12, None, None, EPS), 0.0)


@pytest.mark.interpreted
@pytest.mark.parametrize("size", [7, 1030])
def test_gate(size: int) -> None:
    agree(lambda: silu_mul(random(3, 2 * size)), 2e-6)
    agree(lambda: silu_mul(random(3, 2 * size, dtype=torch.float16)), 2e-3)
    agree(lambda: silu_mul(product(3, 2 * size, torch.int32, torch.float32)), 2e-5)
    extreme = torch.tensor([[-200.0, 200.0, 0.0, 3.0, 3.0, 3.0]])
    assert silu_mul(extreme).tolist() == [[0.0, 600.0, 0.0]]


# -- codes -----------------------------------------------------------------------------------------


@pytest.mark.interpreted
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_codes_are_those_of_the_dense_result(kind: str) -> None:
    x, update, weight = random(4, 37), random(4, 37, seed=1), random(37, seed=2)
    x[1] = update[1] = 0
    cases = [
        (add_rms_norm(x, update, weight, EPS, kind)[1], add_rms_norm(x, update, weight, EPS)[1]),
        (silu_mul(random(3, 74), kind), silu_mul(random(3, 74))),
        (silu_mul(random(2, 9000), kind), silu_mul(random(2, 9000))),
        (quantize_rows(x, kind), x),
    ]
    for got, dense in cases:
        wanted = plain(lambda: quantize_rows(dense, kind))
        assert (
            isinstance(got, QuantizedRows)
            and isinstance(wanted, QuantizedRows)
            and got.dtype == torch.float32
        )
        assert torch.equal(got.scale_M1, wanted.scale_M1)
        if kind == "int8":
            assert torch.equal(got.codes_MK, wanted.codes_MK)
        else:  # the interpreter's cast drops the carry into the exponent; the device is held to every code
            assert (got.codes_MK.float() == wanted.codes_MK.float()).float().mean() > 0.9


@pytest.mark.interpreted
@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("size", [37, 5000])
def test_a_gate_of_whole_rows_makes_the_same_codes(
    kind: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate_up = random(3, 2 * size)
    gate_up[1] = 0
    cases = [
        gate_up,
        random(3, 2 * size, dtype=torch.float16),
        random(3, 3 * size)[:, : 2 * size],
        Product(gate_up, dtype=torch.float32),
        product(3, 2 * size, torch.float32, torch.float32),
    ]
    made: list[object] = []
    monkeypatch.setattr(
        swiglu, "_whole_rows", lambda *a, make=swiglu._whole_rows: made.append(0) or make(*a)
    )
    for case in cases:
        monkeypatch.setattr(swiglu, "WHOLE", 4)
        in_pieces = silu_mul(case, kind)
        monkeypatch.setattr(swiglu, "WHOLE", 3)
        whole = silu_mul(case, kind)
        assert (
            isinstance(whole, QuantizedRows)
            and isinstance(in_pieces, QuantizedRows)
            and whole.dtype == in_pieces.dtype == case.dtype
        )
        assert torch.equal(whole.codes_MK.view(torch.uint8), in_pieces.codes_MK.view(torch.uint8))
        assert torch.equal(whole.scale_M1, in_pieces.scale_M1)
    assert len(made) == 4  # all but the last, whose scales are still to be applied


@pytest.mark.interpreted
def test_a_row_that_is_not_a_number_keeps_its_scale_so() -> None:
    x = random(3, 37)
    x[1, 5] = float("nan")
    for kind in ("int8", "fp8"):
        assert quantize_rows(x, kind).scale_M1.isnan().flatten().tolist() == [False, True, False]


# -- backward --------------------------------------------------------------------------------------


@pytest.mark.interpreted
def test_norm_gradients() -> None:
    for dtype, tolerance in ((torch.float32, 2e-6), (torch.float16, 2e-3)):
        x, update, weight = (
            random(*shape, seed=i, dtype=dtype).requires_grad_()
            for i, shape in enumerate([(7, 37), (7, 37), (37,)])
        )
        gradients_agree(
            lambda: add_rms_norm(x, update, weight, EPS), [x, update, weight], tolerance
        )
        gradients_agree(lambda: add_rms_norm(x, None, weight, EPS), [x, weight], tolerance)
        gradients_agree(
            lambda: add_rms_norm(x, update, weight, EPS)[1], [x, update, weight], tolerance
        )
        sum_only = torch.autograd.grad(add_rms_norm(x, update, weight, EPS)[0].sum(), [x, update])
        assert all(torch.equal(g, torch.ones_like(g)) for g in sum_only)


@pytest.mark.interpreted
def test_programs_take_several_tokens_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norm, "PROGRAMS", 3)
    monkeypatch.setattr(rope, "PROGRAMS", 3)
    x, weight = random(8, 37).requires_grad_(), random(37, seed=2).requires_grad_()
    gradients_agree(lambda: add_rms_norm(x, None, weight, EPS), [x, weight], 2e-6)
    qkv, (cos, sin) = random(8, 11 * 6).requires_grad_(), angles(8, 6)
    norms = [random(6, seed=i).requires_grad_() for i in (8, 9)]
    gradients_agree(lambda: rotate_heads(qkv, cos, sin, 5, 3, 6, *norms, EPS), [qkv, *norms], 2e-6)


@pytest.mark.interpreted
@pytest.mark.parametrize("heads, kv_heads, size", HEADS)
def test_head_gradients(heads: int, kv_heads: int, size: int) -> None:
    qkv, (cos, sin) = random(3, (heads + 2 * kv_heads) * size).requires_grad_(), angles(3, size)
    norms = [random(size, seed=i).requires_grad_() for i in (8, 9)]
    gradients_agree(
        lambda: rotate_heads(qkv, cos, sin, heads, kv_heads, size, None, None, EPS), [qkv], 2e-6
    )
    gradients_agree(
        lambda: rotate_heads(qkv, cos, sin, heads, kv_heads, size, *norms, EPS), [qkv, *norms], 2e-6
    )


@pytest.mark.interpreted
def test_gate_gradients() -> None:
    for size in (7, 1030):
        gate_up = random(3, 2 * size).requires_grad_()
        gradients_agree(lambda: silu_mul(gate_up), [gate_up], 2e-6)


@pytest.mark.interpreted
def test_what_has_no_gradient_says_so() -> None:
    x, weight = random(3, 16).requires_grad_(), random(16)
    for call in (
        lambda: add_rms_norm(x, None, weight, EPS, "int8"),
        lambda: add_rms_norm(x, product(3, 16, torch.int32, torch.float32), weight, EPS),
        lambda: silu_mul(x, "fp8"),
        lambda: rotate_heads(
            product(3, 16, torch.int32, torch.float32),
            *angles(3, 4),
            2,
            1,
            4,
            weight[:4].requires_grad_(),
            weight[:4],
            EPS,
        ),
    ):
        with pytest.raises(ValueError, match="no gradient"):
            call()
    with torch.no_grad():
        assert isinstance(add_rms_norm(x, None, weight, EPS, "int8")[1], QuantizedRows)


# -- compiled for Hopper ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton, which this machine has not")
@pytest.mark.parametrize(
    "call",
    [
        lambda x, w: add_rms_norm(x, x, w, EPS, "fp8"),
        lambda x, w: add_rms_norm(x, wide_product(x.shape[1]), w, EPS, "int8"),
        lambda x, w: add_rms_norm(x, x, w, EPS)[1].sum().backward(),
        lambda x, w: silu_mul(wide_product(37888), "fp8"),
        lambda x, w: silu_mul(random(swiglu.WHOLE, 37888, dtype=torch.bfloat16), "fp8"),
        lambda x, w: silu_mul(random(swiglu.WHOLE, 37888, dtype=torch.bfloat16), "int8"),
        lambda x, w: silu_mul(x).sum().backward(),
        lambda x, w: (
            rotate_heads(x, *angles(4, 128), 24, 2, 128, w[:128], w[:128], EPS)[0].sum().backward()
        ),
    ],
    ids=[
        "norm-fp8",
        "norm-product-int8",
        "norm-backward",
        "gate-fp8",
        "gate-whole-fp8",
        "gate-whole-int8",
        "gate-backward",
        "heads-backward",
    ],
)
def test_nothing_spills(call: Callable[[Tensor, Tensor], object]) -> None:
    """Every kernel of the call, compiled for sm_90 at a 7B model's sizes, stays in registers."""
    x, w = (random(*shape, dtype=torch.bfloat16).requires_grad_() for shape in ((4, 3584), (3584,)))
    with torch.enable_grad() if call.__code__.co_names[-1] == "backward" else torch.no_grad():
        for name, listing in compiled(lambda: call(x, w)):
            assert "STL" not in listing, f"{name} spills"


def wide_product(size: int) -> Product:
    return product(4, size, torch.int32, torch.bfloat16)


# -- the lines of plain torch, by their formulas in float64 ----------------------------------------


def test_plain_norm_and_gate_by_formula() -> None:
    x, update, weight = random(3, 37), random(3, 37, seed=1), random(37, seed=2)
    total, normed = add_rms_norm(x, update, weight, EPS)
    assert isinstance(normed, Tensor) and torch.equal(total, x + update)
    wide = total.double()
    torch.testing.assert_close(
        normed.double(),
        wide / ((wide**2).mean(-1, True) + EPS).sqrt() * weight,
        rtol=1e-6,
        atol=1e-6,
        check_dtype=False,
    )
    gate, up = x[:, :36].double().chunk(2, -1)
    gated = silu_mul(x[:, :36])
    assert isinstance(gated, Tensor)
    torch.testing.assert_close(
        gated.double(), gate / (1 + (-gate).exp()) * up, rtol=1e-6, atol=1e-6
    )


def test_plain_heads_turn_as_complex_numbers_do() -> None:
    cos, sin = angles(3, 6)
    qkv, norms = random(3, 4 * 6), (random(6, seed=8), random(6, seed=9))
    q, k, v = rotate_heads(qkv, cos, sin, 2, 1, 6, *norms, EPS)
    heads = qkv.double().view(3, 4, 6)
    assert torch.equal(v.double(), heads[:, 3:])
    normed = heads / ((heads**2).mean(-1, True) + EPS).sqrt()
    for got, wanted in ((q, normed[:, :2] * norms[0]), (k, normed[:, 2:3] * norms[1])):
        turned = torch.complex(wanted[..., :3], wanted[..., 3:]) * torch.complex(cos, sin)
        torch.testing.assert_close(
            torch.complex(got[..., :3], got[..., 3:]).to(turned.dtype), turned, rtol=1e-6, atol=1e-6
        )


def test_no_tokens_are_no_error() -> None:
    none = torch.empty(0, 16)  # no tokens
    assert quantize_rows(none, "int8").codes_MK.shape == (0, 16)
    assert (
        add_rms_norm(none, none, torch.ones(16), EPS)[1].shape
        == silu_mul(torch.empty(0, 32)).shape
        == (0, 16)
    )
    assert rotate_heads(none, *angles(0, 4), 2, 1, 4, None, None, EPS)[0].shape == (0, 2, 4)
