"""Muon for the hidden matrices (Jordan et al. 2024): momentum whose directions are all made equally
long.

For a matrix W [N, K] with gradient G, momentum b and learning rate lr:

    M <- b M + (1 - b) G             U = (1 - b) G + b M           (Nesterov)
    X = U / |U|;   five times  X <- a X + (b2 A + c A^2) X  with A = X X^T,  (a, b2, c) = (3.4445, -4.7750, 2.0315)
    W <- W - lr wd W - lr 0.2 sqrt(max(N, K)) X

The iteration moves every singular value of U / |U| by s <- a s + b2 s^3 + c s^5, towards 1 without
meeting it exactly (about 0.7 to 1.2), so X is nearly the orthogonal factor of U. Its entries then
have RMS 1 / sqrt(max(N, K)), and the factor makes the update's RMS 0.2 lr, that of Adam in practice
(Liu et al. 2025, arXiv 2502.16982, section 2.2): one learning rate serves Muon and the AdamW beside
it. QaRL trains so with lr 1e-6 and wd 0.01; it prints no other detail.

Fused matrices (q, k, v; gate, up) are several, and each is orthogonalised by itself. The iteration
runs in bfloat16 on a GPU and in float32 elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lowroll.model.transformer import Transformer

MOMENTUM = 0.95
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
RMS = 0.2  # of an update, over the learning rate


def hidden_matrices(model: Transformer) -> dict[str, tuple[int, ...]]:
    """What Muon may train: the weights of linear layers and adapters, with the rows of the matrices
    stacked in each.

    Embedding and lm_head are matrices too, but tables of vectors; AdamW trains them, as it does
    norms and biases.
    """
    known: dict[str, tuple[int, ...]] = {}
    for name, linear in model.linears():
        known[f"{name}.weight"] = tuple(linear.parts.values())
        if linear.adapter is not None:
            for side, parts in (("a", linear.adapter.a), ("b", linear.adapter.b)):
                known |= {f"{name}.adapter.{side}.{part}": (len(p),) for part, p in parts.items()}
    return {name: rows for name, rows in known.items() if name in model.trainable_parameters()}


def orthogonalize(x_NK: Tensor) -> Tensor:
    """Nearly the orthogonal factor of a matrix, in its dtype; zero stays zero."""
    a, b, c = COEFFICIENTS
    dtype = x_NK.dtype
    tall = x_NK.shape[0] > x_NK.shape[1]
    x = x_NK.float().t() if tall else x_NK.float()
    x = x / torch.linalg.vector_norm(x).clamp_min(1e-30)
    x = x.bfloat16() if x.is_cuda else x
    for _ in range(ITERATIONS):
        gram = x @ x.t()
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.t() if tall else x).to(dtype)


class Muon:
    """Muon over named float32 matrices; `rows[name]` are the heights of those stacked in one
    tensor."""

    def __init__(
        self, params: Mapping[str, Tensor], rows: Mapping[str, Sequence[int]], weight_decay: float
    ) -> None:
        for name, p in params.items():
            if p.ndim != 2 or sum(rows[name]) != len(p):
                raise ValueError(
                    f"muon: {name} of shape {list(p.shape)} is no stack of matrices of "
                    f"{rows[name]} rows"
                )
        self.params = dict(params)
        self.rows = dict(rows)
        self.weight_decay = weight_decay
        self.momentum: dict[str, Tensor] = {}

    @torch.no_grad()
    def step(self, rate: float) -> Tensor:
        """Update every parameter from its gradient; returns the update's squared 2-norm, weight
        decay left out."""
        total = torch.zeros(())
        for name, p in self.params.items():
            assert p.grad is not None
            m = self.momentum.setdefault(name, torch.zeros_like(p)).lerp_(p.grad, 1 - MOMENTUM)
            direction = p.grad.lerp(m, MOMENTUM)
            p.mul_(1 - rate * self.weight_decay)
            for piece, target in zip(
                direction.split(list(self.rows[name])), p.split(list(self.rows[name])), strict=True
            ):
                size = rate * RMS * max(piece.shape) ** 0.5
                update = orthogonalize(piece).mul_(size)
                target.sub_(update)
                total = total.to(p.device) + torch.linalg.vector_norm(update).square()
        return total
