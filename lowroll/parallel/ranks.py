"""Learner ranks: processes that learn one model together, a step at a time.

Every rank has the whole batch, runs the passes that it is dealt, and tells the others what it found
of its samples. From there on all go on with the same numbers: counts, metrics and whether an update
is refused are worked out by each, and are the same. Two things are done by all together: the sum of
the gradients, and, where the weights are sharded, every pass.

    Ranks        one process alone: exactly the plain path
    Group        n processes, each with the whole model (plain data parallel)
    parallel.sharding.Sharded     n processes, each with a part of it (FSDP2)

Values travel as tensors of known sizes, never as pickles.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

PerToken = dict[int, Tensor]  # sample index -> float32 [tokens of its response], on the host


def rows_of(rank: int, size: int, height: int) -> slice:
    """Which rows of a matrix (entries of a vector) a rank of `size` holds: equally many from the
    first rank on, so that the last ones may have fewer, or none."""
    most = -(-height // size)
    return slice(min(rank * most, height), min((rank + 1) * most, height))


class Ranks:
    """One process that learns alone."""

    rank = 0
    size = 1
    lockstep = False  # whether every pass needs all ranks

    @property
    def leads(self) -> bool:
        """Whether this is the rank that reads, writes and decides."""
        return self.rank == 0

    def deal(self, costs: Sequence[float]) -> list[int | None]:
        """Which of the passes, with their costs in any unit, this rank runs, in order; None: one
        without a part of the gradient, so that others may run theirs. Every rank gets as many where
        passes go in lockstep."""
        return list(range(len(costs)))

    def gather(self, values: Sequence[PerToken], sizes: dict[int, int]) -> list[PerToken]:
        """What all ranks have found: of each kind the values of all samples of `sizes` (sample ->
        tokens). Every sample was a part of one rank's passes."""
        return list(values)

    def add(self, gradients: Sequence[Tensor]) -> None:
        """Make every gradient (float32) the sum over the ranks, in place."""

    def total(self, squares: Tensor) -> Tensor:
        """The squared norm of tensors, of which this rank has seen its part."""
        return squares

    def forget(self) -> None:
        """Parts of parameters are about to change: whole copies of them are dropped."""

    def is_part(self, p: Tensor) -> bool:
        """Whether ranks hold a parameter in parts: each some of its rows."""
        return False

    def part(self, p: Tensor) -> Tensor:
        """What this rank holds of a parameter or its gradient, in the storage that it has."""
        return p

    def cut(self, whole: Tensor, p: Tensor) -> Tensor:
        """What this rank holds of a parameter, out of a whole tensor of as many rows (or of what
        gives its rows to a slice)."""
        return whole[:]

    def dtype(self, p: Tensor) -> torch.dtype:
        """In which passes read a parameter; its own, or what a float32 part is rounded to."""
        return p.dtype

    def on_whole(
        self, work: Callable[[int, Tensor], Tensor], parts: Sequence[Tensor], heights: Sequence[int]
    ) -> list[Tensor]:
        """work(i, whole) of matrices [heights[i], K] that ranks hold parts of, at most `size` of
        them; this rank's parts of what it gives, which has the same shape. One rank does a
        matrix."""
        return [work(i, whole) for i, whole in enumerate(parts)]

    def tell(self, data: bytes | None = None) -> bytes:
        """What the rank that leads says, on every rank."""
        assert data is not None
        return data

    def meet(self, what: str) -> None:
        """Wait until all ranks are here. DeadlineExceeded names what for."""

    def close(self) -> None:
        """Leave the others."""


ALONE = Ranks()
