"""AdamW of any number of tensors in one launch, with everything that belongs to an update in one pass.

    g <- clip * g        m <- b1 m + (1-b1) g        v <- b2 v + (1-b2) g^2
    s = lr m / (1-b1^t) / (sqrt(v / (1-b2^t)) + eps)        p <- p - lr * wd * p - s        low <- round(p)

(Loshchilov & Hutter 2019, algorithm 2.) `clip` stays on the device, `low` is the model's own copy of a float32 master
in half precision, and sum s^2 comes out too: 30 bytes a parameter move where the steps one by one would move 90.

A launch knows its tensors by a table of addresses; its blocks are fixed by the tensors' sizes, and no block adds to
what another wrote, so a step repeats bit for bit.
"""
from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

BLOCK = 4096
ALIGNMENT = 16       # bytes


class Tensors:
    """The fixed part of an update: which float32 tensors, their moments, their low-precision copies, their decay."""

    def __init__(self, masters: Sequence[Tensor], firsts: Sequence[Tensor], seconds: Sequence[Tensor],
                 lows: Sequence[Tensor | None], decays: Sequence[float]) -> None:
        """ValueError for a tensor that is not float32 and contiguous, or copies of two dtypes."""
        for x in (*masters, *firsts, *seconds):
            _check(x)
        dtypes = {low.dtype for low in lows if low is not None}
        if len(dtypes) > 1:
            raise ValueError(f"lows: expected one dtype, got {', '.join(map(str, dtypes))}")
        self.device, self.low_dtype = masters[0].device, next(iter(dtypes), torch.bfloat16)
        self.kept = list(zip(masters, firsts, seconds, lows, strict=True))
        self.decay = torch.tensor(list(decays), dtype=torch.float32, device=self.device)
        blocks = [-(-x.numel() // BLOCK) for x in masters]
        counts = torch.tensor(blocks, device=self.device)
        self.tensor = torch.arange(len(blocks), device=self.device, dtype=torch.int32).repeat_interleave(counts)
        firsts_of = (counts.cumsum(0) - counts)[self.tensor.long()]
        self.start = (torch.arange(sum(blocks), device=self.device) - firsts_of) * BLOCK

    def step(self, gradients: Sequence[Tensor], clip: Tensor, *, rate: float, betas: tuple[float, float], eps: float,
             t: int) -> Tensor:
        """Apply update number t (from 1) in place; returns sum s^2, a float64 scalar on the device.

        gradients: float32, one a tensor, in order. clip: a float32 scalar on the device that multiplies them."""
        from lowroll.kernels import triton_adamw as kernels

        gradients = [_plain(gradient) for gradient in gradients]
        rows = [[p.data_ptr(), g.data_ptr(), m.data_ptr(), v.data_ptr(), 0 if low is None else low.data_ptr(), p.numel()]
                for (p, m, v, low), g in zip(self.kept, gradients, strict=True)]
        table = torch.tensor(rows, dtype=torch.int64)
        table = table.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else table
        moved = torch.empty(len(self.tensor), dtype=torch.float32, device=self.device)
        low_dtype = kernels.tl.bfloat16 if self.low_dtype == torch.bfloat16 else kernels.tl.float16
        kernels.adamw[(len(self.tensor),)](
            table, self.decay, self.tensor, self.start, clip, moved, rate, betas[0], betas[1], eps, 1 - betas[0] ** t,
            1 - betas[1] ** t, COLUMNS=table.shape[1], LOW=low_dtype, BLOCK=BLOCK, num_warps=8)
        return moved.double().sum()


def _plain(gradient: Tensor) -> Tensor:
    """The gradient as the kernel reads it: a copy where it is a slice that begins or strides otherwise."""
    plain = gradient.is_contiguous() and gradient.data_ptr() % ALIGNMENT == 0
    gradient = gradient if plain else gradient.clone(memory_format=torch.contiguous_format)
    _check(gradient)
    return gradient


def _check(x: Tensor) -> None:
    if x.dtype != torch.float32 or not x.is_contiguous() or x.data_ptr() % ALIGNMENT:
        raise ValueError(f"tensors: expected contiguous float32 at a multiple of {ALIGNMENT} bytes, got {x.dtype} "
                         f"{list(x.shape)} with strides {list(x.stride())}")
