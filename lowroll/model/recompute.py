"""Tensors that the backward pass makes again instead of keeping (Chen et al. 2016, arXiv
1604.06174), one by one.

    with remaking():
        h = norm(x)
        remake(h, norm, x)              # whoever saves h for its backward pass saves (norm, x) in its place

Autograd hands every tensor that it is about to save to a hook. The hook knows those that were
announced by `remake`, and keeps the recipe: the function and its inputs, which may be recipes
themselves. What the recipe gives is kept until its last reader had it, so a function runs once in
the backward pass however many saved its output.

The functions must be deterministic and free of side effects; the gradient is then bit for bit what
it is without. A tensor is announced after it was made, so what its own maker saved of it stays.

Outside of `remaking`, `remake` does nothing. A block announces what can be made again and decides
nothing: whoever trains the model opens the book around it (`trainer.recompute`), and only where
gradients are recorded, since a book holds what is announced until it is closed.
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
    """A function and its inputs, for `readers` that will ask for what it gives."""

    def __init__(self, function: Callable[..., Any], inputs: tuple[Any, ...]) -> None:
        self.function = function
        self.inputs = inputs
        self.readers = 0
        self.made: Tensor | None = None

    def read(self) -> None:
        """Count a reader. The first one makes this recipe a reader of its inputs."""
        if not self.readers:
            for x in self.inputs:
                if isinstance(x, _Recipe):
                    x.read()
        self.readers += 1

    def get(self) -> Tensor:
        made = self.made
        if made is None:
            with torch.no_grad():
                made = self.function(
                    *(x.get() if isinstance(x, _Recipe) else x for x in self.inputs)
                )
        self.readers -= 1
        self.made = made if self.readers > 0 else None
        return made


class _Book:
    """The recipes of one `remaking` block. It holds their outputs, so that no other tensor takes
    their place."""

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
        kept = tuple(
            self.recipes.get(_key(x), x.detach()) if isinstance(x, Tensor) else x for x in inputs
        )
        self.recipes[_key(output)] = _Recipe(function, kept)
        self.outputs.append(output)

    def close(self) -> None:
        """Let go of the outputs: autograd holds the hook, and so this book, as long as the graph
        lives."""
        self.recipes.clear()
        self.outputs.clear()


@contextmanager
def remaking(products: bool = False) -> Iterator[None]:
    """Inside, tensors announced by `remake` are saved as recipes. products: those, too, that cost a
    matrix product to make again."""
    before = getattr(_active, "book", None)
    _active.book = book = _Book(products)
    try:
        with torch.autograd.graph.saved_tensors_hooks(book.pack, _unpack):
            yield
    finally:
        _active.book = before
        book.close()


def remake(output: Any, function: Callable[..., Any], *inputs: Any, product: bool = False) -> Any:
    """Announce that function(*inputs) gives `output` again; returns it. Inputs are detached in the
    backward pass. product: the function is a matrix product."""
    book = getattr(_active, "book", None)
    if book is not None and (book.products or not product):
        book.add(output, function, inputs)
    return output


def _unpack(saved: Tensor | _Recipe) -> Tensor:
    return saved.get() if isinstance(saved, _Recipe) else saved


def _key(x: Tensor) -> _Key:
    return x.data_ptr(), x.shape, x.stride(), x.dtype
