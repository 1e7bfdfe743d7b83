"""Formats whose codes are the nearest levels under scales chosen beforehand.

    w^ = (level - zero) step        a step, and maybe a zero point, for the weights of a group

Error-compensating rounding (`weights.gptq`) keeps the scales and moves the weights before they are
rounded.

Legend: `quant`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from lowroll.quant.formats import Format

Stretch = Tensor | float


@dataclass(frozen=True)
class Grid:
    """The values of a matrix's codes. level: rounds numbers in steps, with the format's tie rule.
    size: columns of a group."""

    step_NG: Tensor
    level: Callable[[Tensor], Tensor]
    size: int
    zero_NG: Tensor | None = None

    def nearest(self, w_N: Tensor, column: int) -> Tensor:
        group = slice(column // self.size, column // self.size + 1)
        zero_N1 = None if self.zero_NG is None else self.zero_NG[:, group]
        column_grid = Grid(self.step_NG[:, group], self.level, self.size, zero_N1)
        return column_grid.nearest_groups(w_N[:, None, None]).flatten()

    def nearest_groups(self, w_NGS: Tensor) -> Tensor:
        return self.from_steps(self.level(self.in_steps(w_NGS)))

    def in_steps(self, w_NGS: Tensor) -> Tensor:
        """Return weights in steps: w / step + zero."""
        w_NGS = w_NGS / self.step_NG[..., None]
        return w_NGS if self.zero_NG is None else w_NGS + self.zero_NG[..., None]

    def from_steps(self, level_NGS: Tensor) -> Tensor:
        if self.zero_NG is not None:
            level_NGS = level_NGS - self.zero_NG[..., None]
        return level_NGS * self.step_NG[..., None]


class Gridded(Format):
    """A format with a grid. floating: another range does not reduce the error, as the relative
    resolution stays."""

    floating = False

    def encode(self, w_NK: Tensor) -> dict[str, Tensor]:
        w_NK = self.turned(w_NK)
        scales = self.scales(w_NK)
        return self.codes(w_NK, scales) | scales

    def turned(self, w_NK: Tensor) -> Tensor:
        """Return the matrix in the basis of its codes (`quant.int8_rotated`)."""
        return w_NK

    @abstractmethod
    def scales(self, w_NK: Tensor, stretch_NG: Stretch = 1.0) -> dict[str, Tensor]:
        """Return the stored tensors except codes. stretch: the range of a group's codes over its
        weights'."""

    @abstractmethod
    def codes(self, w_NK: Tensor, scales: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the codes of the nearest values."""

    @abstractmethod
    def grid(self, scales: dict[str, Tensor], shape: tuple[int, int]) -> Grid:
        """Return the values that a matrix [N, K] can have. ValueError if rows share a group."""
