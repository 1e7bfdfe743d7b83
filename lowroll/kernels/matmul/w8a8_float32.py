"""int8 rows times int8 weights by exact float32 products, for CPUs with slow or saturating integer
products. `quant.int8` chooses among this, `w8a8_vnni` and `w8a8_onednn`.

A product of two codes is at most 2^14, so a partial sum of 1,024 is at most 2^24, which float32
holds exactly in every order. Parts are added in int32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

COLUMNS = 1024  # the most columns whose sums float32 holds exactly

Parts = tuple[Tensor, ...]  # float32 [N, up to COLUMNS]


def split(codes_NK: Tensor) -> Parts:
    """Return the codes as float32 parts of COLUMNS columns."""
    return tuple(part.to(torch.float32) for part in codes_NK.split(COLUMNS, dim=1))


def multiply(codes_MK: Tensor, weight: Parts) -> Tensor:
    """Return float32 sums [M, N], rounded once above 2^24, as by oneDNN."""
    rows = codes_MK.to(torch.float32).split(COLUMNS, dim=1)
    if len(weight) == 1:
        return F.linear(rows[0], weight[0])
    sums_MN = F.linear(rows[0], weight[0]).to(torch.int32)
    for x_MK, w_NK in zip(rows[1:], weight[1:], strict=True):
        sums_MN += F.linear(x_MK, w_NK).to(torch.int32)
    return sums_MN.to(torch.float32)
