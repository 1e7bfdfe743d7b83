"""Batch-invariant attention: `kernels.attention.avx2` on a CPU, `kernels.attention.tiled` on CUDA.

Legend: `kernels.attention`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from lowroll.kernels.attention import avx2, tiled
from lowroll.kernels.launch import triton_supports

Causal = Callable[[Tensor, Tensor, Tensor], Tensor]  # (q [T, H, d], k [T, G, d], v [T, G, d]) -> o


def packed(lengths_S: Tensor, tokens: int) -> Causal:
    """Return causal attention over packed sequences, without a gradient or a wait. lengths_S:
    int32, `tokens` in all."""
    starts_S = (lengths_S.cumsum(0) - lengths_S).int()
    if not triton_supports(lengths_S):
        every_T = torch.arange(tokens, dtype=torch.int32)
        return listed(every_T, lengths_S, torch.zeros_like(lengths_S), starts_S, tokens)

    @cache
    def tiles(queries: int) -> tiled.QueryTiles:
        max_tiles = -(-tokens // queries) + len(lengths_S)
        return tiled.tile(lengths_S, torch.zeros_like(lengths_S), starts_S, queries, max_tiles)

    def attend(q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor) -> Tensor:
        sizes = q_THd.shape[1], k_TGd.shape[1], q_THd.shape[2], q_THd.element_size()
        queries = tiled.queries_of(*sizes)
        return tiled.attend(q_THd, k_TGd, v_TGd, None, tiles(queries), q_THd.shape[-1] ** -0.5)

    return attend


def listed(
    tokens_L: Tensor, lengths_S: Tensor, before_S: Tensor, starts_S: Tensor, tokens: int
) -> Causal:
    """Return causal attention of packed pieces over the keys of listed tokens.

    tokens_L: the tokens of one sequence after the other. lengths_S: queries, `tokens` in all.
    before_S: keys before the first. starts_S: of a piece's sequence in tokens_L. All int32.
    """
    table_L1 = tokens_L[:, None]  # pages of one token, in rows that overlap
    attention: Causal | None = None

    def attend(q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor) -> Tensor:
        nonlocal attention
        keys_T1Gd, values_T1Gd = (x_TGd.contiguous()[:, None] for x_TGd in (k_TGd, v_TGd))
        if attention is None:
            heads = q_THd.shape[1]
            attention = paged(keys_T1Gd, table_L1, lengths_S, before_S, tokens, heads, starts_S)
        return attention(q_THd, keys_T1Gd, values_T1Gd)

    return attend


def paged(
    keys_pPGd: Tensor,
    table_SN: Tensor,
    lengths_S: Tensor,
    before_S: Tensor,
    tokens: int,
    heads: int,
    rows_S: Tensor | None = None,
) -> Causal:
    """Return attention (q, keys, values) -> o over pages, without a wait.

    keys_pPGd: any layer's. lengths_S: queries, `tokens` in all. before_S: keys before the first.
    rows_S: of the table, in order by default. All int32.
    """
    if rows_S is None:
        rows_S = torch.arange(len(lengths_S), dtype=torch.int32, device=lengths_S.device)
    if triton_supports(keys_pPGd):
        kv_heads, d = keys_pPGd.shape[2:]
        queries = tiled.queries_of(heads, kv_heads, d, keys_pPGd.element_size())
        max_tiles = -(-tokens // queries) + len(lengths_S)
        tiles = tiled.tile(lengths_S, before_S, rows_S, queries, max_tiles)
        return lambda q, keys, values: tiled.attend(
            q, keys, values, table_SN, tiles, q.shape[-1] ** -0.5
        )
    rows_T = rows_S.repeat_interleave(lengths_S)
    spans = zip(before_S.tolist(), lengths_S.tolist(), strict=True)
    lengths_T = torch.cat([torch.arange(b + 1, b + n + 1, dtype=torch.int32) for b, n in spans])
    return lambda q, keys, values: avx2.attend(
        q, keys, values, table_SN, rows_T, lengths_T, q.shape[-1] ** -0.5
    )


def decode(
    q_BHd: Tensor,
    k_BGd: Tensor,
    v_BGd: Tensor,
    keys_pPGd: Tensor,
    values_pPGd: Tensor,
    table_BN: Tensor,
    lengths_B: Tensor,
    scale: float,
) -> Tensor:
    """Compute `kernels.attention.decode.paged_decode`."""
    run = tiled.decode if triton_supports(q_BHd) else avx2.decode
    return run(q_BHd, k_BGd, v_BGd, keys_pPGd, values_pPGd, table_BN, lengths_B, scale)
