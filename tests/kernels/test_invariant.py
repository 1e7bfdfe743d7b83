"""`kernels.batch_invariant`: plain torch up to rounding, with its gradients, and rows that have the same bits
in any batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from lowroll.kernels.batch_invariant import heads, product, rows
from lowroll.kernels.fused import rope
from lowroll.model.attention import AttentionInputs, exact_varlen, varlen
from tests.fixtures.tensors import normal

pytestmark = pytest.mark.skipif(
    not rows.supports_device(torch.device("cpu")), reason="needs a CPU with AVX2 and a C++ compiler"
)
SIZES = (1, 7, 8, 9, 16, 31, 48, 576)
Op = Callable[..., Tensor | tuple[Tensor, ...]]


def normed(x: Tensor, update: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    return rows.add_rms_norm(x, update, weight, 1e-5)


def plain_normed(x: Tensor, update: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    total = x + update
    return total, torch.nn.functional.rms_norm(total, weight.shape, weight, 1e-5)


def first_normed(x: Tensor, weight: Tensor) -> Tensor:
    return rows.add_rms_norm(x, None, weight, 1e-5)[1]


def plain_first(x: Tensor, weight: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(x, weight.shape, weight, 1e-5)


def gated(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def cases(size: int) -> Iterator[tuple[str, Op, Op, list[Tensor]]]:
    """Name, ours, plain, inputs; the first ones have a row a token."""
    x, update, weight = normal(37, size), normal(37, size, seed=1), normal(size, seed=2)
    yield "norm", first_normed, plain_first, [x, weight]
    yield "add and norm", normed, plain_normed, [x, update, weight]
    yield "gate", rows.silu_mul, gated, [4 * normal(37, 2 * size)]
    plain = torch.nn.functional.linear
    yield "product", product.linear, plain, [x, normal(19, size, seed=3), normal(19, seed=4)]


def as_tuple(made: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return made if isinstance(made, tuple) else (made,)


@pytest.mark.parametrize("size", SIZES)
def test_values_and_gradients_are_those_of_torch(size: int) -> None:
    for name, ours, plain, inputs in cases(size):
        mine, theirs = ([x.clone().requires_grad_() for x in inputs] for _ in range(2))
        got, want = as_tuple(ours(*mine)), as_tuple(plain(*theirs))
        weights = [normal(*y.shape, seed=9) for y in want]
        sum((y * w).sum() for y, w in zip(got, weights, strict=True)).backward()
        sum((y * w).sum() for y, w in zip(want, weights, strict=True)).backward()
        for a, b in zip(
            (*got, *(x.grad for x in mine)), (*want, *(x.grad for x in theirs)), strict=True
        ):
            torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5, msg=lambda m: f"{name}: {m}")  # noqa: B023


@pytest.mark.parametrize("size", SIZES)
def test_a_row_is_the_same_in_any_batch(size: int) -> None:
    for name, ours, _, inputs in cases(size):
        by_token = [x for x in inputs if x.shape[:1] == (37,)]
        others = inputs[len(by_token) :]
        torch.set_num_threads(1)
        whole = as_tuple(ours(*inputs))
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            for start, stop in ((0, 1), (3, 4), (0, 20), (5, 37), (36, 37)):
                part = as_tuple(ours(*(x[start:stop] for x in by_token), *others))
                for a, b in zip(part, whole, strict=True):
                    assert torch.equal(a, b[start:stop]), name
            strided = [torch.cat((x, x), -1)[:, : x.shape[1]] for x in by_token]
            for a, b in zip(as_tuple(ours(*strided, *others)), whole, strict=True):
                assert torch.equal(a, b), name


def test_a_gate_takes_any_number() -> None:
    gate = torch.tensor(
        [0.0, -0.0, 1e-30, -1e-30, 20.0, -20.0, 88.0, -88.0, 1e30, -1e30, torch.inf]
    )
    up = torch.ones_like(gate)
    made = rows.silu_mul(torch.cat((gate, up))[None])[0]
    torch.testing.assert_close(made, torch.nn.functional.silu(gate) * up, rtol=1e-6, atol=1e-30)
    assert rows.silu_mul(torch.tensor([[torch.nan, 1.0]])).isnan().all()


@pytest.mark.parametrize("norms", [False, True])
def test_heads_have_the_gradients_of_plain_ones(norms: bool) -> None:
    tokens, num, kv, d = 11, 4, 2, 16
    qkv, angle = normal(tokens, (num + 2 * kv) * d), normal(tokens, 1, d // 2)
    gains = (normal(d, seed=1), normal(d, seed=2)) if norms else (None, None)
    grads = []
    for rotate in (heads.rotate_heads, rope.plain_heads):
        x = qkv.clone().requires_grad_()
        ws = [None if g is None else g.clone().requires_grad_() for g in gains]
        made = rotate(x, angle.cos(), angle.sin(), num, kv, d, *ws, 1e-6)
        sum((y * normal(*y.shape, seed=7)).sum() for y in made).backward()
        grads.append([*made, x.grad, *(w.grad for w in ws if w is not None)])
    torch.testing.assert_close(*grads, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(("num", "kv"), [(4, 4), (6, 2), (5, 1)])
def test_attention_is_causal_and_has_the_gradients_of_plain_attention(num: int, kv: int) -> None:
    lengths = [1, 5, 70, 5]
    q, k, v = (normal(sum(lengths), n, 16, seed=i) for i, n in enumerate((num, kv, kv)))
    grads = []
    for attend in (exact_varlen(lengths), varlen(lengths)):
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        made = attend(0, AttentionInputs(*inputs))
        (made * normal(*made.shape, seed=8)).sum().backward()
        grads.append([made, *(x.grad for x in inputs)])
    torch.testing.assert_close(*grads, rtol=2e-5, atol=2e-5)
    together = AttentionInputs(q, k, v)
    alone = exact_varlen([70])(0, together.tokens(slice(6, 76)))
    assert torch.equal(alone, exact_varlen(lengths)(0, together)[6:76])
    start = exact_varlen([40])(0, together.tokens(slice(6, 46)))
    assert torch.equal(start, alone[:40])
