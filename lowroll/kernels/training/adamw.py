"""AdamW of any number of tensors in one launch and one pass.

    g <- clip * g        m <- b1 m + (1-b1) g        v <- b2 v + (1-b2) g^2
    s = lr m / (1-b1^t) / (sqrt(v / (1-b2^t)) + eps)
    p <- p - lr * wd * p - s        low <- round(p)

(Loshchilov & Hutter 2019, algorithm 2.) `clip` stays on the device; `low` is the model's
half-precision copy of a float32 master. One pass moves 30 bytes a parameter instead of 90. Every
update makes its table of addresses anew, as storages may move.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lowroll.kernels.launch import aligned, jit, tl, triton_supports
from lowroll.kernels.support import NO_CUDA, Support

BLOCK, WARPS = 1024, 4
ALIGNMENT = 16  # bytes


def supports(x: Tensor) -> Support:
    return triton_supports(x) if x.is_cuda else NO_CUDA


class Addresses(NamedTuple):
    """Device addresses of an update's tensors and gradients, which it keeps alive."""

    table: Tensor
    gradients: Sequence[Tensor]


class Tensors:
    """The fixed part of an update: float32 tensors, moments, low-precision copies and decay."""

    def __init__(
        self,
        masters: Sequence[Tensor],
        firsts: Sequence[Tensor],
        seconds: Sequence[Tensor],
        lows: Sequence[Tensor | None],
        decays: Sequence[float],
    ) -> None:
        """Raise ValueError unless tensors are float32 and contiguous, and copies match them in size
        and share a dtype."""
        for x in (*masters, *firsts, *seconds):
            _check(x, torch.float32)
        for master, low in zip(masters, lows, strict=True):
            if low is not None:
                _check(low, low.dtype)
                if low.shape != master.shape:
                    raise ValueError(
                        f"lows: expected {list(master.shape)} like its master, got "
                        f"{list(low.shape)}"
                    )
        dtypes = {low.dtype for low in lows if low is not None}
        if len(dtypes) > 1:
            raise ValueError(f"lows: expected one dtype, got {', '.join(map(str, dtypes))}")
        self.device, self.low_dtype = masters[0].device, next(iter(dtypes), torch.bfloat16)
        self.kept = list(zip(masters, firsts, seconds, lows, strict=True))
        self.decay = torch.tensor(list(decays), dtype=torch.float32, device=self.device)
        blocks = [-(-x.numel() // BLOCK) for x in masters]
        counts = torch.tensor(blocks, device=self.device)
        self.tensor = torch.arange(
            len(blocks), device=self.device, dtype=torch.int32
        ).repeat_interleave(counts)
        first_blocks = (counts.cumsum(0) - counts)[self.tensor.long()]
        self.start = (torch.arange(sum(blocks), device=self.device) - first_blocks) * BLOCK

    def addresses(self, gradients: Sequence[Tensor]) -> Addresses:
        """Return the launch's table, without a wait. gradients: in order, all float32 or all of the
        copies' dtype, else ValueError."""
        gradients = [aligned(gradient) for gradient in gradients]
        if {g.dtype for g in gradients} not in ({torch.float32}, {self.low_dtype}):
            raise ValueError(
                "gradients: expected all of them in float32, or all in the dtype of the copies"
            )
        rows = []
        for (master, first, second, low), gradient in zip(self.kept, gradients, strict=True):
            pointers = [x.data_ptr() for x in (master, gradient, first, second)]
            low_pointer = 0 if low is None else low.data_ptr()
            rows.append([*pointers, low_pointer, master.numel()])
        table = torch.tensor(rows, dtype=torch.int64)
        if self.device.type == "cuda":
            table = table.pin_memory().to(self.device, non_blocking=True)
        return Addresses(table, gradients)

    def step(
        self,
        at: Addresses,
        clip: Tensor,
        *,
        rate: float,
        betas: tuple[float, float],
        eps: float,
        t: int,
    ) -> Tensor:
        """Apply update t (from 1) in place; return sum s^2, a float64 scalar on the device. clip: a
        float32 scalar on the device."""
        moved = torch.empty(len(self.tensor), dtype=torch.float32, device=self.device)
        names = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
        _adamw_kernel[(len(self.tensor),)](
            at.table,
            self.decay,
            self.tensor,
            self.start,
            clip,
            moved,
            rate,
            betas[0],
            1 - betas[0],
            betas[1],
            1 - betas[1],
            eps,
            1 - betas[0] ** t,
            1 - betas[1] ** t,
            COLUMNS=at.table.shape[1],
            GRADIENT=names[at.gradients[0].dtype],
            LOW=names[self.low_dtype],
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
        return moved.double().sum()


def _check(x: Tensor, dtype: torch.dtype) -> None:
    if x.dtype != dtype or not x.is_contiguous() or x.data_ptr() % ALIGNMENT:
        raise ValueError(
            f"tensors: expected contiguous {str(dtype).removeprefix('torch.')} at a multiple of "
            f"{ALIGNMENT} bytes, got {x.dtype} {list(x.shape)} with strides {list(x.stride())}"
        )


# -- Triton ----------------------------------------------------------------------------------------


@jit
def _adamw_kernel(
    table_ptr,
    decay_ptr,
    tensor_ptr,
    start_ptr,
    clip_ptr,
    moved_ptr,
    rate,
    beta1,
    new1,
    beta2,
    new2,
    eps,
    correction1,
    correction2,
    COLUMNS: tl.constexpr,
    GRADIENT: tl.constexpr,
    LOW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Update one block. A table entry: addresses of p, g, m, v and low, and the size. new1, new2: 1
    - beta, which float32's beta2 of 0.999 gives to five digits only."""
    block = tl.program_id(0)
    i, start = tl.load(tensor_ptr + block), tl.multiple_of(tl.load(start_ptr + block), BLOCK)
    entry_ptr = table_ptr + i.to(tl.int64) * COLUMNS
    clip, decay = tl.load(clip_ptr), 1 - rate * tl.load(decay_ptr + i)
    if start + BLOCK <= tl.load(entry_ptr + 5):  # unmasked loads are 16 bytes wide
        moved = _update(
            entry_ptr,
            start,
            clip,
            decay,
            rate,
            beta1,
            new1,
            beta2,
            new2,
            eps,
            correction1,
            correction2,
            GRADIENT,
            LOW,
            BLOCK,
            False,
        )
    else:
        moved = _update(
            entry_ptr,
            start,
            clip,
            decay,
            rate,
            beta1,
            new1,
            beta2,
            new2,
            eps,
            correction1,
            correction2,
            GRADIENT,
            LOW,
            BLOCK,
            True,
        )
    tl.store(moved_ptr + block, moved)


@jit
def _update(
    entry_ptr,
    start,
    clip,
    decay,
    rate,
    beta1,
    new1,
    beta2,
    new2,
    eps,
    correction1,
    correction2,
    GRADIENT: tl.constexpr,
    LOW: tl.constexpr,
    BLOCK: tl.constexpr,
    ENDS: tl.constexpr,
):
    """Return the block's sum of s^2. ENDS: the tensor ends within it."""
    offs_n = start + tl.arange(0, BLOCK)
    mask_n = offs_n < tl.load(entry_ptr + 5) if ENDS else tl.full((BLOCK,), True, tl.int1)
    p_ptr = _address(entry_ptr, tl.float32) + offs_n
    g_ptr = _address(entry_ptr + 1, GRADIENT) + offs_n
    m_ptr = _address(entry_ptr + 2, tl.float32) + offs_n
    v_ptr = _address(entry_ptr + 3, tl.float32) + offs_n
    g_n = tl.load(g_ptr, mask=mask_n, other=0.0).to(tl.float32) * clip
    m_n = beta1 * tl.load(m_ptr, mask=mask_n, other=0.0) + new1 * g_n
    v_n = beta2 * tl.load(v_ptr, mask=mask_n, other=0.0) + new2 * g_n * g_n
    step_n = rate / correction1 * m_n / (tl.sqrt_rn(v_n / correction2) + eps)
    p_n = tl.load(p_ptr, mask=mask_n, other=0.0) * decay - step_n
    tl.store(m_ptr, m_n, mask=mask_n)
    tl.store(v_ptr, v_n, mask=mask_n)
    tl.store(p_ptr, p_n, mask=mask_n)
    if tl.load(entry_ptr + 4) != 0:
        tl.store(_address(entry_ptr + 4, LOW) + offs_n, p_n.to(LOW), mask=mask_n)
    return tl.sum(tl.where(mask_n, step_n * step_n, 0.0), 0)


@jit
def _address(at_ptr, TYPE: tl.constexpr):
    return tl.multiple_of(tl.load(at_ptr).to(tl.pointer_type(TYPE)), 16)
