"""Helpers of the group-wise 4-bit formats: groups of a row, two codes a byte, and e2m1's levels.

A row that the group does not divide is padded with zeros for encoding only. Two 4-bit codes share a
byte, the first in the low half (compressed-tensors) or the high half (bitsandbytes).

e2m1 (OCP Microscaling Formats 1.0, section 5.3.3) is a sign bit over the eight magnitudes 0.5 1 1.5
2 3 4 6. Ties go to the code whose last bit is 0: .25 -> 0, .75 -> 1, 1.25 -> 1, 1.75 -> 2, 2.5 -> 2,
3.5 -> 4, 5 -> 4. A negative number that rounds to zero keeps its sign (code 8).

Legend: N out features, K in features, G groups of a row, S weights of a group, B bytes of a row.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_LEVELS = (*E2M1, *(-level for level in E2M1))  # by code


def split(w_NK: Tensor, size: int) -> Tensor:
    """Split rows into zero-padded groups of `size`: float32 [N, G, S]."""
    w_NK = F.pad(w_NK.float(), (0, -w_NK.shape[1] % size))
    return w_NK.reshape(w_NK.shape[0], -1, size)


def join(w_NGS: Tensor, num_in: int) -> Tensor:
    """Undo `split`: [N, K]."""
    return w_NGS.flatten(1)[:, :num_in]


def pack(codes_NK: Tensor, first_high: bool = False) -> Tensor:
    """Pack codes 0..15 (uint8) two a byte: uint8 [N, ceil(K / 2)]. A row of odd length ends with a
    0."""
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
    """Return the codes (uint8) of the nearest e2m1 levels; what exceeds 6 saturates."""
    magnitude, codes = x.abs(), (x < 0).to(torch.uint8) * 8
    for code, (low, high) in enumerate(zip(E2M1, E2M1[1:], strict=False)):
        midpoint = (low + high) / 2  # a tie belongs to the even code
        codes += (magnitude > midpoint if code % 2 == 0 else magnitude >= midpoint).view(
            torch.uint8
        )
    return codes


def nearest_e2m1(x: Tensor) -> Tensor:
    """Round to the levels of `encode_e2m1`, as float32."""
    magnitude = x.abs()
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))  # between levels
    return (torch.round(x / step) * step).clamp_(-6, 6)


@cache
def _byte_levels(levels: tuple[float, ...], first_high: bool, device: torch.device) -> Tensor:
    """Return the two levels of every byte, float32 [256, 2]: one look-up unpacks two codes."""
    byte, table = torch.arange(256), torch.tensor(levels)
    low, high = table[byte & 15], table[byte >> 4]
    return torch.stack((high, low) if first_high else (low, high), dim=-1).to(device)
