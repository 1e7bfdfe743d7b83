"""Recomputation of single tensors in the backward pass (Chen et al. 2016, arXiv 1604.06174).

    with remaking():
        h = norm(x)
        remake(h, norm, x)              # autograd saves (norm, x) in place of h

A saved-tensor hook replaces announced tensors with a recipe: the function and its inputs, possibly
recipes. A result is kept until its last reader, so a function runs once.

The functions must be deterministic and free of side effects; the gradient is then bitwise the same.
A tensor is announced after it was made, so its producer's own saved copy stays.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_Key = tuple[int, torch.Size, tuple[int, ...], torch.dtype]
_active = threading.local()


class _Recipe:
    def __init__(self, function: Callable[..., Any], inputs: tuple[Any, ...]) -> None:
        self.function = function
        self.inputs = inputs
        self.readers = 0
        self.made: Tensor | None = None

    def read(self) -> None:
        """Count a reader. The first makes this recipe a reader of its inputs."""
        if not self.readers:
            for x in self.inputs:
                if isinstance(x, _Recipe):
                    x.read()
        self.readers += 1

    def get(self) -> Tensor:
        result = self.made
        if result is None:
            with torch.no_grad():
                result = self.function(
                    *(x.get() if isinstance(x, _Recipe) else x for x in self.inputs)
                )
        self.readers -= 1
        self.made = result if self.readers > 0 else None
        return result


class _Book:
    """The recipes of a `remaking` block. It holds their outputs so that their ids stay unique."""

    def __init__(self, products: bool) -> None:
        self.products = products
        self.recipes: dict[_Key, _Recipe] = {}
        self.outputs: list[Tensor] = []

    def pack(self, x: Tensor) -> Tensor | _Recipe:
        recipe = self.recipes.get(_key(x))
        if recipe is None:
            return x
        recipe.read()
        return recipe

    def add(self, output: Tensor, function: Callable[..., Any], inputs: tuple[Any, ...]) -> None:
        recipe_inputs = tuple(
            self.recipes.get(_key(x), x.detach()) if isinstance(x, Tensor) else x for x in inputs
        )
        self.recipes[_key(output)] = _Recipe(function, recipe_inputs)
        self.outputs.append(output)

    def close(self) -> None:
        """Release the outputs, as autograd keeps this object."""
        self.recipes.clear()
        self.outputs.clear()


@contextmanager
def remaking(products: bool = False) -> Iterator[None]:
    """Save tensors announced by `remake` as recipes inside the block. products: also matrix
    products. Use it only where gradients are recorded: announced tensors are held until the block
    ends."""
    outer_book = getattr(_active, "book", None)
    _active.book = book = _Book(products)
    try:
        with torch.autograd.graph.saved_tensors_hooks(book.pack, _unpack):
            yield
    finally:
        _active.book = outer_book
        book.close()


def remake(output: Any, function: Callable[..., Any], *inputs: Any, product: bool = False) -> Any:
    """Announce that function(*inputs) recomputes `output`, and return it. No-op outside of
    `remaking`. Inputs are detached in the backward pass. product: a matrix product."""
    book = getattr(_active, "book", None)
    if book is not None and (book.products or not product):
        book.add(output, function, inputs)
    return output


def _unpack(saved: Tensor | _Recipe) -> Tensor:
    return saved.get() if isinstance(saved, _Recipe) else saved


def _key(x: Tensor) -> _Key:
    return x.data_ptr(), x.shape, x.stride(), x.dtype
