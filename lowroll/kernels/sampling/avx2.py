"""Gumbel-max on a CPU with AVX2: `avx2.cpp` for torch.

Ids that cannot win get no noise. Logarithms are within 1e-6 of exact; AVX2 and AVX-512 give the
same bits.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from lowroll.kernels import cxx
from lowroll.kernels.build import fields, pointer
from lowroll.kernels.launch import contiguous_rows
from lowroll.kernels.support import Support

SOURCE = Path(__file__).with_suffix(".cpp")


class DrawArguments(ctypes.Structure):
    _fields_ = [
        *fields(ctypes.c_void_p, "x", "keys", "positions", "greedy", "tokens"),
        ("stride", ctypes.c_int64),
        ("stream", ctypes.c_uint32),
        *fields(ctypes.c_int, "B", "V", "threads"),
    ]


def supports_device(device: torch.device) -> Support:
    return cxx.supports(SOURCE, device, "the noise of draws is made by torch")


def winners(
    scaled_BV: Tensor, keys_B: Tensor, positions_B: Tensor, greedy_B: Tensor | None, stream: int
) -> Tensor:
    """Return the winning id of each row, int64 [B], of float32 logits over temperature."""
    scaled_BV = contiguous_rows(scaled_BV)
    keys_B, positions_B = keys_B.contiguous(), positions_B.contiguous()
    greedy_B = None if greedy_B is None else greedy_B.contiguous()
    tokens_B = torch.empty(len(scaled_BV), dtype=torch.int64)
    pointers = [pointer(t) for t in (scaled_BV, keys_B, positions_B, greedy_B, tokens_B)]
    arguments = DrawArguments(*pointers, scaled_BV.stride(0), stream, *scaled_BV.shape)
    cxx.run(SOURCE, "avx2_draw", arguments)
    return tokens_B
