"""Muon for the hidden matrices (Jordan et al. 2024): orthogonalized momentum.

For a matrix W [N, K] with gradient G, momentum b and learning rate lr:

    M <- b M + (1 - b) G           U = (1 - b) G + b M             (Nesterov)
    X = U / |U|;   five times  X <- a X + (b2 A + c A^2) X  with A = X X^T,  (a, b2, c) = (3.4445, -4.7750, 2.0315)
    W <- W - lr wd W - lr 0.2 sqrt(max(N, K)) X

X is nearly the orthogonal factor of U (singular values of 0.7 to 1.2). The factor 0.2 sqrt(max(N,
K)) gives the update Adam's RMS, 0.2 lr (Liu et al. 2025, arXiv 2502.16982, section 2.2), so that
one learning rate serves Muon and AdamW.

Fused matrices (q, k, v; gate, up) are orthogonalized separately, in bfloat16 on a GPU, else in
float32. With sharded parameters each round gathers one matrix of like cost on every rank: 1/n of
the arithmetic for 8 bytes of traffic an entry.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lowroll.model.transformer import Transformer
from lowroll.parallel.ranks import ALONE, Ranks

MOMENTUM = 0.95
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
RMS = 0.2  # of an update, relative to the learning rate


def hidden_matrices(model: Transformer) -> dict[str, tuple[int, ...]]:
    """Return the names of the weights that Muon trains, each with the heights of the matrices
    stacked in it. AdamW trains the rest."""
    heights_by_name: dict[str, tuple[int, ...]] = {}
    for name, linear in model.linears():
        heights_by_name[f"{name}.weight"] = tuple(linear.parts.values())
        if linear.adapter is not None:
            for side, parts in (("a", linear.adapter.a), ("b", linear.adapter.b)):
                heights_by_name |= {
                    f"{name}.adapter.{side}.{part}": (len(p),) for part, p in parts.items()
                }
    trainable = model.trainable_parameters()
    return {name: heights for name, heights in heights_by_name.items() if name in trainable}


def orthogonalize(x_NK: Tensor) -> Tensor:
    """Return nearly the orthogonal factor of a matrix, in its dtype; zero stays zero."""
    a, b, c = COEFFICIENTS
    is_tall = x_NK.shape[0] > x_NK.shape[1]
    x = x_NK.float().t() if is_tall else x_NK.float()  # wide, for the smaller Gram matrix
    x = x / torch.linalg.vector_norm(x).clamp_min(1e-30)
    x = x.bfloat16() if x.is_cuda else x
    for _ in range(ITERATIONS):
        gram = x @ x.t()
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.t() if is_tall else x).to(x_NK.dtype)


class Muon:
    """Muon over named float32 matrices, which may be sharded over `ranks`. `rows` are the heights
    from `hidden_matrices`."""

    def __init__(
        self,
        params: Mapping[str, Tensor],
        rows: Mapping[str, Sequence[int]],
        weight_decay: float,
        ranks: Ranks = ALONE,
    ) -> None:
        for name, p in params.items():
            if p.ndim != 2 or (ranks.size == 1 and sum(rows[name]) != len(p)):
                raise ValueError(
                    f"muon: {name} of shape {list(p.shape)} is no stack of matrices of "
                    f"{rows[name]} rows"
                )
        self.params = dict(params)
        self.rows = dict(rows)
        self.weight_decay = weight_decay
        self.ranks = ranks
        self.momentum: dict[str, Tensor] = {}

    @torch.no_grad()
    def step(self, rate: float) -> Tensor:
        """Update every parameter. Return the squared 2-norm of this rank's updates, without weight
        decay."""
        squares: list[Tensor] = []
        for names in self._rounds():
            for name, update_NK in zip(names, self._updates(names, rate, squares), strict=True):
                self.params[name].mul_(1 - rate * self.weight_decay).sub_(update_NK)
        if not squares:
            return torch.zeros(())
        return functools.reduce(torch.add, squares)

    def _updates(self, names: Sequence[str], rate: float, squares: list[Tensor]) -> list[Tensor]:
        """Return this rank's shards of one round's updates. Append to `squares` the squared 2-norm
        of each matrix that this rank orthogonalizes."""

        def update(i: int, direction_NK: Tensor) -> Tensor:
            update_NK = torch.empty_like(direction_NK)
            heights = list(self.rows[names[i]])
            directions = direction_NK.split(heights)
            targets = update_NK.split(heights)
            for direction, target in zip(directions, targets, strict=True):
                size = rate * RMS * max(direction.shape) ** 0.5
                target.copy_(orthogonalize(direction).mul_(size))
                squares.append(torch.linalg.vector_norm(target).square())
            return update_NK

        directions = [self._direction(name) for name in names]
        heights = [sum(self.rows[name]) for name in names]
        return self.ranks.on_whole(update, directions, heights)

    def _rounds(self) -> list[list[str]]:
        names = list(self.params)
        if self.ranks.size > 1:
            names.sort(key=self._cost)
        return [names[i : i + self.ranks.size] for i in range(0, len(names), self.ranks.size)]

    def _cost(self, name: str) -> int:
        width = self.params[name].shape[1]
        return sum(height * width * min(height, width) for height in self.rows[name])

    def _direction(self, name: str) -> Tensor:
        p = self.params[name]
        assert p.grad is not None
        m = self.momentum.setdefault(name, torch.zeros_like(p)).lerp_(p.grad, 1 - MOMENTUM)
        return p.grad.lerp(m, MOMENTUM)
