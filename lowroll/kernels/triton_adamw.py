"""Triton side of `adamw.py`. It is imported only where it runs, so the room needs no Triton to be imported."""
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def adamw(table_ptr, decay_ptr, tensor_ptr, start_ptr, clip_ptr, moved_ptr, rate, beta1, beta2, eps, correction1,
          correction2, COLUMNS: tl.constexpr, LOW: tl.constexpr, BLOCK: tl.constexpr):
    """One block of one tensor. A row of the table: addresses of p, g, m, v and the low-precision copy, and the size."""
    block = tl.program_id(0)
    i, start = tl.load(tensor_ptr + block), tl.load(start_ptr + block)
    row_ptr = table_ptr + i.to(tl.int64) * COLUMNS
    p_ptr = tl.multiple_of(tl.load(row_ptr).to(tl.pointer_type(tl.float32)), 16)
    g_ptr = tl.multiple_of(tl.load(row_ptr + 1).to(tl.pointer_type(tl.float32)), 16)
    m_ptr = tl.multiple_of(tl.load(row_ptr + 2).to(tl.pointer_type(tl.float32)), 16)
    v_ptr = tl.multiple_of(tl.load(row_ptr + 3).to(tl.pointer_type(tl.float32)), 16)
    low, size = tl.load(row_ptr + 4), tl.load(row_ptr + 5)
    offs_n = start + tl.arange(0, BLOCK)
    inside_n = offs_n < size
    clip, decay = tl.load(clip_ptr), tl.load(decay_ptr + i)
    g_n = tl.load(g_ptr + offs_n, mask=inside_n, other=0.0) * clip
    m_n = tl.load(m_ptr + offs_n, mask=inside_n, other=0.0)
    v_n = tl.load(v_ptr + offs_n, mask=inside_n, other=0.0)
    p_n = tl.load(p_ptr + offs_n, mask=inside_n, other=0.0)
    m_n = beta1 * m_n + (1 - beta1) * g_n
    v_n = beta2 * v_n + (1 - beta2) * g_n * g_n
    step_n = rate / correction1 * m_n / (tl.sqrt_rn(v_n / correction2) + eps)
    p_n = p_n * (1 - rate * decay) - step_n
    tl.store(m_ptr + offs_n, m_n, mask=inside_n)
    tl.store(v_ptr + offs_n, v_n, mask=inside_n)
    tl.store(p_ptr + offs_n, p_n, mask=inside_n)
    if low != 0:
        low_ptr = tl.multiple_of(low.to(tl.pointer_type(LOW)), 16)
        tl.store(low_ptr + offs_n, p_n.to(LOW), mask=inside_n)
    tl.store(moved_ptr + block, tl.sum(tl.where(inside_n, step_n * step_n, 0.0), 0))
