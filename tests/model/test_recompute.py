"""Tensors that are made again: the same gradient bit for bit, one run of each function, and nothing
kept."""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from lowroll.model import lora
from lowroll.model.attention import varlen
from lowroll.model.recompute import remake, remaking
from lowroll.trainer import recompute
from tests.fixtures.learner import tiny_model


class Counted:
    """A function that counts its runs."""

    def __init__(self, function):
        self.function, self.runs = function, 0

    def __call__(self, *args: Tensor) -> Tensor:
        self.runs += 1
        return self.function(*args)


def chain(enabled: bool) -> tuple[list[Tensor], list[int]]:
    """x -> h = tanh(x W) -> g = exp(h) -> y = (g V) (g U): two readers of g, whose recipe reads
    that of h."""
    torch.manual_seed(0)
    x, w, v, u = (torch.randn(5, 5, requires_grad=True) for _ in range(4))
    first, second = Counted(lambda x: torch.tanh(x @ w)), Counted(torch.exp)
    with remaking() if enabled else nullcontext():
        h = remake(first(x), first, x)
        g = remake(second(h), second, h)
        y = (g @ v) * (g @ u)
    gradients = torch.autograd.grad(y.sum(), (x, w, v, u))
    return list(gradients), [first.runs, second.runs]


def test_the_gradient_is_the_same_bit_for_bit_and_each_function_runs_once_more() -> None:
    plain, runs = chain(False)
    again, more = chain(True)
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
    assert runs == [1, 1] and more == [2, 2]


def test_nothing_is_kept_of_what_is_made_again() -> None:
    x, w = torch.randn(30, 30, requires_grad=True), torch.randn(30, 30)
    for enabled in (True, False):
        with remaking() if enabled else nullcontext():
            h = remake(x @ w, torch.matmul, x, w)
            y = (h * h).sum()
            storage = weakref.ref(h.untyped_storage())
            del h
        assert (storage() is None) == enabled
        y.backward()
        assert storage() is None


def test_views_and_strangers_are_kept_as_they_are() -> None:
    """A transposed reader has another layout than the announced tensor, and saves itself."""
    x = torch.randn(4, 4, requires_grad=True)
    runs = Counted(torch.sin)
    with remaking():
        h = remake(runs(x), runs, x)
        y = (h.t() @ torch.randn(4, 4)).sum() + (h * 2).sum()
    y.backward()
    assert runs.runs == 1


def test_outside_of_a_book_and_without_gradients_nothing_is_held() -> None:
    x = torch.randn(3)
    assert remake(x, torch.neg, x) is x
    model, books = recompute.apply(tiny_model()), []
    with patch("lowroll.model.recompute._Book", lambda *_: books.append(1)), torch.no_grad():
        model(torch.arange(5), torch.arange(5), varlen([5]))
    assert not books


@pytest.mark.parametrize("products", [False, True])
def test_products_are_made_again_only_where_the_book_says_so(products: bool) -> None:
    x, w = torch.randn(3, 3, requires_grad=True), torch.randn(3, 3)
    runs = Counted(torch.matmul)
    with remaking(products):
        y = remake(runs(x, w), runs, x, w, product=True)
        z = (y * y).sum()
    z.backward()
    assert runs.runs == 1 + products


def test_blocks_nest_and_graphs_may_be_walked_twice() -> None:
    x = torch.randn(6, requires_grad=True)
    with remaking():
        h = remake(x.exp(), torch.exp, x)
        with remaking():
            g = remake(h.sin(), torch.sin, h)
            y = (g * g).sum()
        z = y + (h * h).sum()
    (first,) = torch.autograd.grad(z, x, retain_graph=True)
    (second,) = torch.autograd.grad(z, x)
    (want,) = torch.autograd.grad((x.exp().sin() ** 2).sum() + (x.exp() ** 2).sum(), x)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, want)


@pytest.mark.parametrize("adapter", [False, True])
@pytest.mark.parametrize("interpreted", [pytest.param(True, marks=pytest.mark.interpreted), False])
def test_a_model_has_the_same_gradient_whatever_is_made_again(
    adapter: bool, interpreted: bool
) -> None:
    ids, pos = (
        torch.randint(0, 64, (11,), generator=torch.Generator().manual_seed(1)),
        torch.arange(11) % 7,
    )
    found, products = [], []
    for share in (False, 0.5, 1.0, True):
        model = tiny_model()
        if adapter:
            lora.attach(model, 4, 8.0)
            for p in model.trainable_parameters().values():
                p.data.normal_(generator=torch.Generator().manual_seed(p.numel()))
        recompute.apply(model, share)
        runs = []
        for block in model.blocks:
            block.gate_up.base_and_update = Counted(block.gate_up.base_and_update)
            runs.append(block.gate_up.base_and_update)
        hidden = model(ids, pos, varlen([7, 4]))
        (
            hidden * torch.randn(hidden.shape, generator=torch.Generator().manual_seed(2))
        ).sum().backward()
        found.append([p.grad for p in model.trainable_parameters().values()])
        products.append([f.runs for f in runs])
    assert products == [[1, 1], [2, 1], [2, 2], [2, 2]]
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
