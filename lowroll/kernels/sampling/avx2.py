"""The token of each row by Gumbel-max on a CPU with AVX2: `avx2.cpp` for torch.

Noise and winner take one pass, without noise where none can win. Logarithms are within 1e-6 of
exact; AVX2 and AVX-512 give the same bits.

Legend: B rows, V vocabulary.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from lowroll.kernels import cxx
from lowroll.kernels.build import pointer
from lowroll.kernels.support import Support

SOURCE = Path(__file__).with_suffix(".cpp")


class DrawProblem(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "keys", "positions", "greedy", "tokens")),
        ("stride", ctypes.c_int64),
        ("stream", ctypes.c_uint32),
        *((name, ctypes.c_int) for name in ("B", "V", "threads")),
    ]


def supports_device(device: torch.device) -> Support:
    if device.type != "cpu":
        return cxx.NO_CPU
    return cxx.supports(SOURCE, "the noise of draws is made by torch")


def winners(
    scaled_BV: Tensor, keys_B: Tensor, positions_B: Tensor, greedy_B: Tensor | None, stream: int
) -> Tensor:
    """Return the winning id of each row, int64 [B], of float32 logits over temperature."""
    if scaled_BV.stride(1) != 1:
        scaled_BV = scaled_BV.contiguous()
    inputs = [keys_B.contiguous(), positions_B.contiguous()]
    inputs.extend([] if greedy_B is None else [greedy_B.contiguous()])
    tokens_B = torch.empty(len(scaled_BV), dtype=torch.int64)
    arguments = DrawProblem(
        pointer(scaled_BV),
        pointer(inputs[0]),
        pointer(inputs[1]),
        None if greedy_B is None else pointer(inputs[2]),
        pointer(tokens_B),
        scaled_BV.stride(0),
        stream,
        *scaled_BV.shape,
        torch.get_num_threads(),
    )
    cxx.run(SOURCE, "avx2_draw", arguments)
    return tokens_B
