"""Data that a cache policy records in each decode step: the last queries, and each key's attention,
recomputed as attention's kernel does not expose probabilities."""

from __future__ import annotations

from torch import Tensor

from lowroll.kernels.attention.decode import packed_heads
from lowroll.kernels.kv_eviction.score import TYPES, load_keys
from lowroll.kernels.launch import after_others, block, early_start, jit, tl, triton_supports
from lowroll.kernels.support import Support, no


def remember(ring_SAHd: Tensor, slots_B: Tensor, positions_B: Tensor, q_BHd: Tensor) -> None:
    """Write each row's query to its slot, at its position modulo A. Indices are int64."""
    window = ring_SAHd.shape[1]
    if not triton_supports(q_BHd):
        ring_SAHd[slots_B, positions_B % window] = q_BHd.to(ring_SAHd.dtype)
        return
    rows, numbers = q_BHd.shape[0], q_BHd[0].numel()
    q_BHd = packed_heads(q_BHd)
    _remember_kernel[(rows, -(-numbers // 1024))](
        ring_SAHd,
        slots_B,
        positions_B,
        q_BHd,
        q_BHd.stride(0),
        ring_SAHd.stride(0),
        A=window,
        NUMBERS=numbers,
        BLOCK=min(1024, block(numbers)),
        num_warps=4,
        **early_start(),
    )


def add_supports(keys_pPGd: Tensor, num_heads: int) -> Support:
    kv_heads, d = keys_pPGd.shape[2:]
    if keys_pPGd.dtype not in TYPES:
        return no("takes keys in bfloat16, float16 or float32")
    if num_heads > 64 * kv_heads or d > 256:
        return no("takes up to 64 query heads a key-value head, and heads of up to 256")
    return triton_supports(keys_pPGd)


def add_attended(
    score_SGN: Tensor,
    q_BHd: Tensor,
    keys_pPGd: Tensor,
    slots_B: Tensor,
    table_BP: Tensor,
    lengths_B: Tensor,
) -> None:
    """Add each row's attention to its `lengths_B` (at most N) keys, summed over a group's heads, to
    its slot's float32 scores. No two rows with keys share a slot."""
    rows, num_heads, d = q_BHd.shape
    page, kv_heads = keys_pPGd.shape[1:3]
    q_BHd = packed_heads(q_BHd)
    _add_kernel[(rows * kv_heads,)](
        score_SGN,
        q_BHd,
        keys_pPGd,
        slots_B,
        table_BP,
        lengths_B,
        q_BHd.stride(0),
        score_SGN.stride(0),
        score_SGN.stride(1),
        table_BP.stride(0),
        d**-0.5,
        H=num_heads,
        G=kv_heads,
        d=d,
        PAGE=page,
        D=max(16, block(d)),
        R=max(16, block(num_heads // kv_heads)),
        BLOCK=64 if keys_pPGd.element_size() == 2 else 32,
        num_warps=4,
        num_stages=3,
        **early_start(),
    )


# -- Triton ----------------------------------------------------------------------------------------


@jit
def _remember_kernel(
    ring_ptr,
    slots_ptr,
    positions_ptr,
    q_ptr,
    q_stride,
    slot_stride,
    A: tl.constexpr,
    NUMBERS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    after_others(EARLY)
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row_offset = tl.load(slots_ptr + row) * slot_stride + tl.load(positions_ptr + row) % A * NUMBERS
    numbers = tl.load(q_ptr + row * q_stride + offs, mask=offs < NUMBERS)
    tl.store(
        ring_ptr + row_offset + offs, numbers.to(ring_ptr.dtype.element_ty), mask=offs < NUMBERS
    )


@jit
def _add_kernel(
    score_ptr,
    q_ptr,
    keys_ptr,
    slots_ptr,
    table_ptr,
    lengths_ptr,
    q_stride,
    slot_stride,
    head_stride,
    table_stride,
    scale,
    H: tl.constexpr,
    G: tl.constexpr,
    d: tl.constexpr,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    after_others(EARLY)
    pid = tl.program_id(0)
    head, row = pid % G, (pid // G).to(tl.int64)
    PER: tl.constexpr = H // G
    length = tl.load(lengths_ptr + row)
    if length <= 0:
        return
    table_ptr += row * table_stride
    score_ptr += tl.load(slots_ptr + row) * slot_stride + head * head_stride
    offs_r = tl.arange(0, R)
    offs_d = tl.arange(0, D)
    q_rd = tl.load(
        q_ptr + row * q_stride + (head * PER + offs_r[:, None]) * d + offs_d[None, :],
        mask=(offs_r < PER)[:, None] & (offs_d < d)[None, :],
        other=0.0,
    )
    m_r = tl.full([R], float("-inf"), tl.float32)
    l_r = tl.zeros([R], tl.float32)
    for start in range(0, length, BLOCK):
        n_N = start + tl.arange(0, BLOCK)
        s_rn = _logits(q_rd, keys_ptr, table_ptr, n_N, length, head, scale, G, d, PAGE, D)
        new_r = tl.maximum(m_r, tl.max(s_rn, 1))
        l_r = l_r * tl.exp(m_r - new_r) + tl.sum(tl.exp(s_rn - new_r[:, None]), 1)
        m_r = new_r
    share_r = tl.where(offs_r < PER, 1.0 / l_r, 0.0)
    for start in range(0, length, BLOCK):
        n_N = start + tl.arange(0, BLOCK)
        s_rn = _logits(q_rd, keys_ptr, table_ptr, n_N, length, head, scale, G, d, PAGE, D)
        p_N = tl.sum(tl.exp(s_rn - m_r[:, None]) * share_r[:, None], 0)
        score_N = tl.load(score_ptr + n_N, mask=n_N < length, other=0.0)
        tl.store(score_ptr + n_N, score_N + p_N, mask=n_N < length)


@jit
def _logits(
    q_rd,
    keys_ptr,
    table_ptr,
    n_N,
    length,
    head,
    scale,
    G: tl.constexpr,
    d: tl.constexpr,
    PAGE: tl.constexpr,
    D: tl.constexpr,
):
    k_nd = load_keys(keys_ptr, table_ptr, n_N, length, head, G, d, PAGE, D)
    s_rn = tl.dot(q_rd, tl.trans(k_nd), input_precision="ieee") * scale
    return tl.where((n_N < length)[None, :], s_rn, float("-inf"))
