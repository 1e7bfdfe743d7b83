"""Tensors that are made again: the same gradient bit for bit, one run of each function, and nothing kept."""
from __future__ import annotations

import weakref

import torch
from torch import Tensor

from lowroll.model.recompute import remake, remaking


class Counted:
    """A function that counts its runs."""

    def __init__(self, function):
        self.function, self.runs = function, 0

    def __call__(self, *args: Tensor) -> Tensor:
        self.runs += 1
        return self.function(*args)


def chain(enabled: bool) -> tuple[list[Tensor], list[int]]:
    """x -> h = tanh(x W) -> g = exp(h) -> y = (g V) (g U): two readers of g, whose recipe reads that of h."""
    torch.manual_seed(0)
    x, w, v, u = (torch.randn(5, 5, requires_grad=True) for _ in range(4))
    first, second = Counted(lambda x: torch.tanh(x @ w)), Counted(torch.exp)
    with remaking(enabled):
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
        with remaking(enabled):
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


def test_no_gradient_no_recipe() -> None:
    x = torch.randn(3)
    with torch.no_grad(), remaking():
        assert remake(x, torch.neg, x) is x
    assert remake(x, torch.neg, x) is x


def test_blocks_nest_and_graphs_may_be_walked_twice() -> None:
    x = torch.randn(6, requires_grad=True)
    with remaking():
        h = remake(x.exp(), torch.exp, x)
        with remaking():
            g = remake(h.sin(), torch.sin, h)
            y = (g * g).sum()
        z = y + (h * h).sum()
    first, = torch.autograd.grad(z, x, retain_graph=True)
    second, = torch.autograd.grad(z, x)
    want, = torch.autograd.grad((x.exp().sin() ** 2).sum() + (x.exp() ** 2).sum(), x)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, want)
