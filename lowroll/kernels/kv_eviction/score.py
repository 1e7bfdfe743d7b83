"""A cache policy's scores of each key, for all layers at once, from the pages.

Definitions and plain torch: `kv.policy.snapkv` (importance I), `kv.policy.rkv` (redundancy R). The
cosines C exist only in tiles, as exact products of 16-bit keys over norms in float32. C is
symmetric, so a column's sum is that of its row, less the fix for duplicates:

    sum_i, newest_i, C of the newest     one pass of tiles, by row
    S_j = sum_j - sum over i with newest_i = j of C_ij
    R   = softmax of S / n

A program has only one row, so a row's numbers do not depend on its batch.

Legend: `kernels.kv_eviction`; Q query heads of a group.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lowroll.kernels.launch import block, jit, tl, triton, triton_supports
from lowroll.kernels.support import Support, no

DUPLICATE = 0.5  # cosine above which keys are duplicates
EPS = 1e-8  # added to a key's norm
QUERIES = 128  # of a program: window times group, both padded to powers of two
TYPES = (torch.bfloat16, torch.float16, torch.float32)


def supports(ring_LSAHd: Tensor, num_heads: int) -> Support:
    _, _, window, num_queries, d = ring_LSAHd.shape
    if ring_LSAHd.dtype not in TYPES:
        return no("takes queries and keys in bfloat16, float16 or float32")
    if block(window) * block(num_queries // num_heads) > QUERIES or d > 256:
        return no(f"takes up to {QUERIES} queries of a group's window, and heads of up to 256")
    return triton_supports(ring_LSAHd)


def importance(
    ring_LSAHd: Tensor,
    keys: Sequence[Tensor],
    slots_B: Tensor,
    table_BP: Tensor,
    lengths_B: Tensor,
) -> Tensor:
    """Return the attention of a row's last A queries to each earlier key, before spreading: float32
    [L, B, G, N], undefined from key length - A on.

    ring_LSAHd: each slot's queries, in the keys' dtype. keys: [p, page, G, d] a layer. slots_B:
    int64. table_BP, lengths_B: int32.
    """
    _, _, window, num_heads, d = ring_LSAHd.shape
    page, kv_heads = keys[0].shape[1:3]
    mean_LBGN = _empty_scores(keys, table_BP)
    queries = block(num_heads // kv_heads)
    tile, _, _ = _tile_sizes(keys[0])
    _importance_kernel[(mean_LBGN[..., 0].numel(),)](
        ring_LSAHd,
        addresses(keys),
        slots_B,
        table_BP,
        lengths_B,
        mean_LBGN,
        len(slots_B),
        mean_LBGN.shape[3],
        ring_LSAHd.stride(0),
        ring_LSAHd.stride(1),
        table_BP.stride(0),
        d**-0.5,
        TYPE=_triton_type(keys[0]),
        A=window,
        H=num_heads,
        G=kv_heads,
        d=d,
        PAGE=page,
        AP=max(block(window), 16 // queries),
        QP=queries,
        D=max(16, block(d)),
        BLOCK=tile,
        num_warps=4 if tile == 64 else 8,
        num_stages=2,
    )
    return mean_LBGN


def redundancy(
    keys: Sequence[Tensor], table_BP: Tensor, lengths_B: Tensor, zero_first: bool
) -> Tensor:
    """Return S / n, before the softmax: float32 [L, B, G, N], undefined beyond the row's end."""
    page, kv_heads, d = keys[0].shape[1:]
    sum_LBGN, value_LBGN, mean_LBGN = (_empty_scores(keys, table_BP) for _ in range(3))
    newest_LBGN = torch.empty_like(sum_LBGN, dtype=torch.int32)
    heads, widest = sum_LBGN[..., 0].numel(), sum_LBGN.shape[3]
    tile, rows, warps = _tile_sizes(keys[0])
    tiles = triton.cdiv(widest, rows)
    _newest_kernel[(heads * tiles,)](
        addresses(keys),
        table_BP,
        lengths_B,
        sum_LBGN,
        newest_LBGN,
        value_LBGN,
        len(lengths_B),
        tiles,
        widest,
        table_BP.stride(0),
        TYPE=_triton_type(keys[0]),
        ZERO_FIRST=zero_first,
        DUPLICATE=DUPLICATE,
        EPS=EPS,
        G=kv_heads,
        d=d,
        PAGE=page,
        D=max(16, block(d)),
        ROWS=rows,
        BLOCK=tile,
        num_warps=warps,
        num_stages=3,
    )
    tiles = triton.cdiv(widest, 64)
    _mean_kernel[(heads * tiles,)](
        lengths_B,
        sum_LBGN,
        newest_LBGN,
        value_LBGN,
        mean_LBGN,
        len(lengths_B),
        tiles,
        widest,
        G=kv_heads,
        BLOCK=64,
        num_warps=4,
    )
    return mean_LBGN


def join(
    important_LBGN: Tensor,
    redundant_LBGN: Tensor | None,
    lengths_B: Tensor,
    window: int,
    kernel: int,
    mix: float = 1.0,
) -> Tensor:
    """Return mix I - (1 - mix) R, float32 [L, B, G, N], with I spread over `kernel` keys; without
    `redundant_LBGN` I alone. Undefined from key length - window on."""
    score_LBGN = torch.empty_like(important_LBGN)
    num_rows, kv_heads, widest = score_LBGN.shape[1:]
    _join_kernel[(score_LBGN[..., 0].numel(),)](
        important_LBGN,
        important_LBGN if redundant_LBGN is None else redundant_LBGN,
        lengths_B,
        score_LBGN,
        num_rows,
        widest,
        float(mix),
        float(1 - mix),
        A=window,
        KERNEL=kernel,
        MIXED=redundant_LBGN is not None,
        G=kv_heads,
        BLOCK=min(1024, block(widest)),
        num_warps=4,
    )
    return score_LBGN


def addresses(buffers: Sequence[Tensor]) -> Tensor:
    """Return the buffers' addresses, int64, on their device."""
    return torch.tensor([buffer.data_ptr() for buffer in buffers]).to(buffers[0].device)


def _empty_scores(keys: Sequence[Tensor], table_BP: Tensor) -> Tensor:
    page, kv_heads = keys[0].shape[1:3]
    shape = (len(keys), table_BP.shape[0], kv_heads, table_BP.shape[1] * page)
    return torch.empty(shape, dtype=torch.float32, device=table_BP.device)


def _tile_sizes(keys_pPGd: Tensor) -> tuple[int, int, int]:
    if keys_pPGd.element_size() == 2 and keys_pPGd.shape[3] <= 128:
        return 64, 128, 8
    return 32, 32, 4


def _triton_type(keys_pPGd: Tensor) -> object:
    names = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
    return names[keys_pPGd.dtype]


# -- Triton ----------------------------------------------------------------------------------------


@jit
def load_keys(
    keys_ptr,
    table_ptr,
    n_N,
    length,
    head,
    G: tl.constexpr,
    d: tl.constexpr,
    PAGE: tl.constexpr,
    D: tl.constexpr,
):
    """Load the keys n of a row and KV head from its pages, 0 beyond `length`."""
    offs_d = tl.arange(0, D)
    in_N = n_N < length
    page_N = tl.load(table_ptr + n_N // PAGE, mask=in_N, other=0).to(tl.int64)
    base_N = (page_N * PAGE + n_N % PAGE) * (G * d) + head * d
    if D == d:
        in_ND = in_N[:, None]
    else:
        in_ND = in_N[:, None] & (offs_d < d)[None, :]
    return tl.load(keys_ptr + base_N[:, None] + offs_d[None, :], mask=in_ND, other=0.0)


@jit
def _logits(q_rd, k_nd, n_N, old, scale, PER: tl.constexpr, AP: tl.constexpr, QP: tl.constexpr):
    """Return each query's largest logit over a group's heads [AP, N]."""
    s_rn = tl.dot(q_rd, tl.trans(k_nd), input_precision="ieee")
    is_head_r = tl.arange(0, AP * QP) % QP < PER
    s_rn = tl.where(is_head_r[:, None], s_rn, float("-inf"))
    s_an = tl.max(tl.reshape(s_rn, (AP, QP, n_N.shape[0])), 1) * scale
    return tl.where((n_N < old)[None, :], s_an, float("-inf"))


@jit
def _importance_kernel(
    ring_ptr,
    addresses,
    slots_ptr,
    table_ptr,
    lengths_ptr,
    mean_ptr,
    rows,
    widest,
    layer_stride,
    slot_stride,
    table_stride,
    scale,
    TYPE: tl.constexpr,
    A: tl.constexpr,
    H: tl.constexpr,
    G: tl.constexpr,
    d: tl.constexpr,
    PAGE: tl.constexpr,
    AP: tl.constexpr,
    QP: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    pid = tl.program_id(0)
    head, row, layer = pid % G, (pid // G) % rows, pid // (G * rows)
    PER: tl.constexpr = H // G
    keys_ptr = tl.multiple_of(tl.load(addresses + layer).to(tl.pointer_type(TYPE)), 16)
    table_ptr += row.to(tl.int64) * table_stride
    old = tl.load(lengths_ptr + row) - A
    ring_ptr += layer.to(tl.int64) * layer_stride + tl.load(slots_ptr + row) * slot_stride
    offs_r = tl.arange(0, AP * QP)
    offs_d = tl.arange(0, D)
    is_query_r = (offs_r // QP < A) & (offs_r % QP < PER)
    offset_r = (offs_r // QP * H + head * PER + offs_r % QP) * d
    q_rd = tl.load(
        ring_ptr + offset_r[:, None] + offs_d[None, :],
        mask=is_query_r[:, None] & (offs_d < d)[None, :],
        other=0.0,
    )
    m_a = tl.full([AP], float("-inf"), tl.float32)
    l_a = tl.zeros([AP], tl.float32)
    for start in range(0, old, BLOCK):
        n_N = start + tl.arange(0, BLOCK)
        k_nd = load_keys(keys_ptr, table_ptr, n_N, old, head, G, d, PAGE, D)
        s_an = _logits(q_rd, k_nd, n_N, old, scale, PER, AP, QP)
        new_a = tl.maximum(m_a, tl.max(s_an, 1))
        l_a = l_a * tl.exp(m_a - new_a) + tl.sum(tl.exp(s_an - new_a[:, None]), 1)
        m_a = new_a
    share_a = tl.where(tl.arange(0, AP) < A, 1.0 / (l_a * A), 0.0)
    mean_ptr += pid.to(tl.int64) * widest
    for start in range(0, old, BLOCK):
        n_N = start + tl.arange(0, BLOCK)
        k_nd = load_keys(keys_ptr, table_ptr, n_N, old, head, G, d, PAGE, D)
        s_an = _logits(q_rd, k_nd, n_N, old, scale, PER, AP, QP)
        p_n = tl.sum(tl.exp(s_an - m_a[:, None]) * share_a[:, None], 0)
        tl.store(mean_ptr + n_N, p_n, mask=n_N < old)


@jit
def _inverse_norm(k_nd, EPS: tl.constexpr):
    k_nd = k_nd.to(tl.float32)
    return 1.0 / (tl.sqrt(tl.sum(k_nd * k_nd, 1)) + EPS)


@jit
def _newest_kernel(
    addresses,
    table_ptr,
    lengths_ptr,
    sum_ptr,
    newest_ptr,
    value_ptr,
    rows,
    tiles,
    widest,
    table_stride,
    TYPE: tl.constexpr,
    ZERO_FIRST: tl.constexpr,
    DUPLICATE: tl.constexpr,
    EPS: tl.constexpr,
    G: tl.constexpr,
    d: tl.constexpr,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute sums of rows i of C, their newest duplicates j (-1: none), and C_ij."""
    pid, first_row = tl.program_id(0) // tiles, tl.program_id(0) % tiles * ROWS
    head, row, layer = pid % G, (pid // G) % rows, pid // (G * rows)
    length = tl.load(lengths_ptr + row)
    if first_row >= length:
        return
    keys_ptr = tl.multiple_of(tl.load(addresses + layer).to(tl.pointer_type(TYPE)), 16)
    table_ptr += row.to(tl.int64) * table_stride
    i_R = first_row + tl.arange(0, ROWS)
    k_rd = load_keys(keys_ptr, table_ptr, i_R, length, head, G, d, PAGE, D)
    inverse_R = _inverse_norm(k_rd, EPS)
    sum_R = tl.zeros([ROWS], tl.float32)
    value_R = tl.zeros([ROWS], tl.float32)
    newest_R = tl.full([ROWS], -1, tl.int32)
    for start in range(0, length, BLOCK):
        j_N = start + tl.arange(0, BLOCK)
        k_nd = load_keys(keys_ptr, table_ptr, j_N, length, head, G, d, PAGE, D)
        inverse_N = _inverse_norm(k_nd, EPS)
        cos_RN = tl.dot(k_rd, tl.trans(k_nd), input_precision="ieee")
        cos_RN *= inverse_R[:, None] * inverse_N[None, :]
        is_pair_RN = (i_R[:, None] != j_N[None, :]) & (j_N < length)[None, :]
        cos_RN = tl.where(is_pair_RN, cos_RN, 0.0)
        is_duplicate_RN = cos_RN > DUPLICATE
        if ZERO_FIRST:
            is_duplicate_RN = is_duplicate_RN | (j_N == 0)[None, :]
        last_in_block_R = tl.max(tl.where(is_duplicate_RN, j_N[None, :], -1), 1)
        cos_R = tl.sum(tl.where(j_N[None, :] == last_in_block_R[:, None], cos_RN, 0.0), 1)
        value_R = tl.where(last_in_block_R >= 0, cos_R, value_R)
        newest_R = tl.maximum(newest_R, last_in_block_R)
        sum_R += tl.sum(cos_RN, 1)
    index_R = pid.to(tl.int64) * widest + i_R
    tl.store(sum_ptr + index_R, sum_R, mask=i_R < length)
    tl.store(newest_ptr + index_R, newest_R, mask=i_R < length)
    tl.store(value_ptr + index_R, value_R, mask=i_R < length)


@jit
def _mean_kernel(
    lengths_ptr,
    sum_ptr,
    newest_ptr,
    value_ptr,
    mean_ptr,
    rows,
    tiles,
    widest,
    G: tl.constexpr,
    BLOCK: tl.constexpr,
):
    pid, first_column = tl.program_id(0) // tiles, tl.program_id(0) % tiles * BLOCK
    length = tl.load(lengths_ptr + (pid // G) % rows)
    if first_column >= length:
        return
    base = pid.to(tl.int64) * widest
    j_N = first_column + tl.arange(0, BLOCK)
    duplicate_N = tl.zeros([BLOCK], tl.float32)
    for start in range(0, length, BLOCK):
        i_R = start + tl.arange(0, BLOCK)
        newest_R = tl.load(newest_ptr + base + i_R, mask=i_R < length, other=-1)
        value_R = tl.load(value_ptr + base + i_R, mask=i_R < length, other=0.0)
        duplicate_RN = tl.where(newest_R[:, None] == j_N[None, :], value_R[:, None], 0.0)
        duplicate_N += tl.sum(duplicate_RN, 0)
    sum_N = tl.load(sum_ptr + base + j_N, mask=j_N < length, other=0.0)
    tl.store(mean_ptr + base + j_N, (sum_N - duplicate_N) / length, mask=j_N < length)


@jit
def _join_kernel(
    important_ptr,
    redundant_ptr,
    lengths_ptr,
    score_ptr,
    rows,
    widest,
    mix,
    rest,
    A: tl.constexpr,
    KERNEL: tl.constexpr,
    MIXED: tl.constexpr,
    G: tl.constexpr,
    BLOCK: tl.constexpr,
):
    pid = tl.program_id(0)
    length = tl.load(lengths_ptr + (pid // G) % rows)
    old = length - A
    base = pid.to(tl.int64) * widest
    largest, total = float("-inf"), 0.0
    if MIXED:
        for start in range(0, length, BLOCK):
            n_N = start + tl.arange(0, BLOCK)
            r_N = tl.load(redundant_ptr + base + n_N, mask=n_N < length, other=float("-inf"))
            new = tl.maximum(largest, tl.max(r_N, 0))
            total = total * tl.exp(largest - new) + tl.sum(tl.exp(r_N - new), 0)
            largest = new
    for start in range(0, old, BLOCK):
        n_N = start + tl.arange(0, BLOCK)
        score_N = tl.full([BLOCK], float("-inf"), tl.float32)
        for offset in tl.static_range(KERNEL):
            neighbour_N = n_N + offset - KERNEL // 2
            is_old_N = (neighbour_N >= 0) & (neighbour_N < old)
            neighbour_score_N = tl.load(
                important_ptr + base + neighbour_N, mask=is_old_N, other=float("-inf")
            )
            score_N = tl.maximum(score_N, neighbour_score_N)
        if MIXED:
            r_N = tl.load(redundant_ptr + base + n_N, mask=n_N < old, other=float("-inf"))
            score_N = mix * score_N - rest * (tl.exp(r_N - largest) / total)
        tl.store(score_ptr + base + n_N, score_N, mask=n_N < old)
