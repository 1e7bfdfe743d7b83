"""The base of the group-wise 4-bit formats: groups of a row, and two codes a byte.

The first code of a byte is in the low half (compressed-tensors) or the high half (bitsandbytes).

e2m1 (OCP Microscaling Formats 1.0, section 5.3.3) is a sign bit over the magnitudes 0 0.5 1 1.5 2 3
4 6. Ties go to the even code: .25 -> 0, .75 -> 1, 1.25 -> 1, 1.75 -> 2, 2.5 -> 2, 3.5 -> 4, 5 -> 4.
A negative number that rounds to zero keeps its sign (code 8).

Legend: `quant`.
"""

from __future__ import annotations

from abc import abstractmethod
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from lowroll.kernels.launch import triton_supports
from lowroll.kernels.matmul import w4a16
from lowroll.quant.formats import QTensor, WeightOnly
from lowroll.quant.grid import Grid, Gridded

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_LEVELS = (*E2M1, *(-level for level in E2M1))  # by code


def split(w_NK: Tensor, size: int) -> Tensor:
    """Split rows into zero-padded groups: float32 [N, G, S]."""
    w_NK = F.pad(w_NK.float(), (0, -w_NK.shape[1] % size))
    return w_NK.reshape(w_NK.shape[0], -1, size)


def join(w_NGS: Tensor, num_in: int) -> Tensor:
    """Undo `split`: [N, K]."""
    return w_NGS.flatten(1)[:, :num_in]


def pack(codes_NK: Tensor, first_high: bool = False) -> Tensor:
    """Pack codes 0..15 (uint8) two a byte, a 0 at the end of odd rows: uint8 [N, ceil(K / 2)]."""
    codes_NK = F.pad(codes_NK, (0, codes_NK.shape[1] % 2))
    first_NB, second_NB = codes_NK[:, ::2], codes_NK[:, 1::2]
    return first_NB << 4 | second_NB if first_high else second_NB << 4 | first_NB


def unpack(
    packed_NB: Tensor, levels: tuple[float, ...], num_in: int, first_high: bool = False
) -> Tensor:
    """Return the levels of packed codes: float32 [N, K]."""
    pairs = _byte_levels(levels, first_high, packed_NB.device)
    return F.embedding(packed_NB.int(), pairs).flatten(1)[:, :num_in]


def encode_e2m1(x: Tensor) -> Tensor:
    """Return the codes (uint8) of the nearest e2m1 levels, saturating."""
    magnitude, codes = x.abs(), (x < 0).to(torch.uint8) * 8
    for code, (low, high) in enumerate(zip(E2M1, E2M1[1:], strict=False)):
        midpoint = (low + high) / 2
        codes += (magnitude > midpoint if code % 2 == 0 else magnitude >= midpoint).view(
            torch.uint8
        )
    return codes


def nearest_e2m1(x: Tensor) -> Tensor:
    magnitude = x.abs()
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))  # between levels
    return (torch.round(x / step) * step).clamp_(-6, 6)


@cache
def _byte_levels(levels: tuple[float, ...], first_high: bool, device: torch.device) -> Tensor:
    byte, table = torch.arange(256), torch.tensor(levels)
    low, high = table[byte & 15], table[byte >> 4]
    return torch.stack((high, low) if first_high else (low, high), dim=-1).to(device)


class Packed4(Gridded):
    """A format of 4-bit codes in groups, stored as `weight_packed`."""

    group: int

    @abstractmethod
    def pack(self, x_NK: Tensor) -> Tensor:
        """Return the stored codes of numbers in steps."""

    @abstractmethod
    def unpack(self, packed: Tensor, num_in: int) -> Tensor:
        """Return the levels of stored codes: float32 [N, K]."""

    @abstractmethod
    def encode_by_kernel(self, w_NK: Tensor, amax_1: Tensor, tensors: dict[str, Tensor]) -> None:
        """Compute `encode_into` where Triton runs."""

    def codes(self, w_NK: Tensor, scales: dict[str, Tensor]) -> dict[str, Tensor]:
        grid = self.grid(scales, (w_NK.shape[0], w_NK.shape[1]))
        x_NGS = grid.in_steps(split(w_NK, self.group))
        return {"weight_packed": self.pack(join(x_NGS, w_NK.shape[1]))}

    def encode_into(self, w_NK: Tensor, amax_1: Tensor, tensors: dict[str, Tensor]) -> None:
        if triton_supports(w_NK):
            self.encode_by_kernel(w_NK, amax_1, tensors)
        else:
            super().encode_into(w_NK, amax_1, tensors)

    def dequantize(self, q: QTensor, dtype: torch.dtype) -> Tensor:
        if w4a16.supports_dequantize(self.kernel, q.tensors, q.shape, dtype):
            return w4a16.dequantize(self.kernel, q.tensors, q.shape, dtype)
        level_NGS = split(self.unpack(q.tensors["weight_packed"], q.shape[1]), self.group)
        return join(self.grid(q.tensors, q.shape).from_steps(level_NGS), q.shape[1]).to(dtype)


class PackedE2M1(Packed4, WeightOnly):
    """A format of e2m1 codes, two a byte."""

    @abstractmethod
    def steps(self, scales: dict[str, Tensor]) -> Tensor:
        """Return the factor of each group's levels: float32 [N, G]."""

    def grid(self, scales: dict[str, Tensor], shape: tuple[int, int]) -> Grid:
        return Grid(self.steps(scales), nearest_e2m1, self.group)

    def pack(self, x_NK: Tensor) -> Tensor:
        return pack(encode_e2m1(x_NK))

    def unpack(self, packed: Tensor, num_in: int) -> Tensor:
        return unpack(packed, E2M1_LEVELS, num_in)
