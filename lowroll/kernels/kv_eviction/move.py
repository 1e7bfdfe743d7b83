"""The move of the keys that stay: in place within the pages, for all layers at once.

A program moves one KV head of one row in one buffer, some keys at a time, all read before the first
is written. No key is overwritten unread. Let s be the position of the first target page in the
row's own table. Key k moves from i_k to s + k (or to a new page). Indices ascend, so i_k - k never
falls: keys before some k' move up, the others down or not at all. Those before k' go last to first,
as unread keys lie below s + k; the others go first to last, as unread keys lie above. The first
range reads and writes below s + k', the second does not.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lowroll.kernels.kv_eviction.score import addresses
from lowroll.kernels.launch import block, jit, tl, triton_supports

Buffers = Sequence[Tensor]  # one a layer, [pages, page, G, ...]


def move(kinds: Sequence[Buffers], table_BP: Tensor, kept_LBGK: Tensor, slots_BK: Tensor) -> None:
    """Move the kept keys of each row and head, in all layers' buffers, to new slots.

    kept_LBGK: int64, ascending along K, into a row's keys in the pages `table_BP` (int32).
    slots_BK: int64, page * page_size + offset, in order; whole pages but the last. A row's new
    pages may be the first of its old ones in order, but no other row's.
    """
    if not triton_supports(kept_LBGK):
        for layer, kept_BGK in enumerate(kept_LBGK):
            _plain([buffers[layer] for buffers in kinds], table_BP, kept_BGK, slots_BK)
        return
    by_width: dict[int, list[Tensor]] = {}
    for buffers in kinds:
        by_width.setdefault(buffers[0][0, 0, 0].nbytes, []).extend(buffers)
    for nbytes, same_width in by_width.items():
        _launch(same_width, nbytes, table_BP, kept_LBGK.contiguous(), slots_BK)


def _launch(
    buffers: list[Tensor], nbytes: int, table_BP: Tensor, kept_LBGK: Tensor, slots_BK: Tensor
) -> None:
    layers, rows, heads, kept = kept_LBGK.shape
    item_size = next(item_size for item_size in (4, 2, 1) if nbytes % item_size == 0)
    width = nbytes // item_size
    _move_kernel[(len(buffers) * rows * heads,)](
        addresses(buffers),
        table_BP,
        kept_LBGK,
        slots_BK,
        rows,
        layers,
        table_BP.shape[1],
        kept,
        table_BP.stride(0),
        SIZE=item_size,
        W=width,
        WIDTH=block(width),
        G=heads,
        PAGE=buffers[0].shape[1],
        BLOCK=min(64, max(16, 4096 // block(width))),
        num_warps=4,
    )


def _plain(buffers: Buffers, table_BP: Tensor, kept_BGK: Tensor, slots_BK: Tensor) -> None:
    page_size, num_heads = buffers[0].shape[1:3]
    pages_BGP = table_BP[:, None].expand(-1, num_heads, -1)
    pages_BGK = pages_BGP.gather(2, kept_BGK // page_size).long()
    source_BGK = pages_BGK * page_size + kept_BGK % page_size
    heads_G1 = torch.arange(num_heads, device=kept_BGK.device)[:, None]
    for buffer in buffers:
        numbers_TG = buffer.flatten(0, 1)
        numbers_TG[slots_BK] = numbers_TG[source_BGK, heads_G1].transpose(1, 2)


# -- Triton ----------------------------------------------------------------------------------------


@jit
def _first_index(table_ptr, page, pages, BLOCK: tl.constexpr):
    first_index = pages
    for start in range(0, pages, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        page_P = tl.load(table_ptr + offs, mask=offs < pages, other=-1)
        first_index = tl.minimum(first_index, tl.min(tl.where(page_P == page, offs, pages), 0))
    return first_index


@jit
def _move_kernel(
    addresses,
    table_ptr,
    kept_ptr,
    slots_ptr,
    rows,
    layers,
    pages,
    kept,
    table_stride,
    SIZE: tl.constexpr,
    W: tl.constexpr,
    WIDTH: tl.constexpr,
    G: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Move keys of W numbers of SIZE bytes."""
    pid = tl.program_id(0)
    head, row, buffer = pid % G, (pid // G) % rows, pid // (G * rows)
    integer: tl.constexpr = tl.int32 if SIZE == 4 else tl.int16 if SIZE == 2 else tl.int8
    numbers_ptr = tl.load(addresses + buffer).to(tl.pointer_type(integer))
    numbers_ptr = tl.multiple_of(numbers_ptr, 16)
    table_ptr += row.to(tl.int64) * table_stride
    kept_ptr += (((buffer % layers) * rows + row).to(tl.int64) * G + head) * kept
    slots_ptr += row.to(tl.int64) * kept
    first_key = _first_index(table_ptr, tl.load(slots_ptr) // PAGE, pages, 64) * PAGE
    num_rising = 0
    for start in range(0, kept, 1024):
        offs_k = start + tl.arange(0, 1024)
        source_k = tl.load(kept_ptr + offs_k, mask=offs_k < kept, other=0)
        num_rising += tl.sum(((source_k < first_key + offs_k) & (offs_k < kept)).to(tl.int32), 0)
    last_rising_block = tl.minimum(num_rising, kept - 1) // BLOCK
    offs_w = tl.arange(0, WIDTH)
    for step in range(0, tl.cdiv(kept, BLOCK)):
        offs_k = tl.where(
            step <= last_rising_block, last_rising_block - step, step
        ) * BLOCK + tl.arange(0, BLOCK)
        in_k = offs_k < kept
        source_k = tl.load(kept_ptr + offs_k, mask=in_k, other=0)
        page_k = tl.load(table_ptr + source_k // PAGE, mask=in_k, other=0).to(tl.int64)
        source_k = page_k * PAGE + source_k % PAGE
        target_k = tl.load(slots_ptr + offs_k, mask=in_k, other=0)
        moves_kw = (in_k & (source_k != target_k))[:, None] & (offs_w < W)[None, :]
        source_kw = (source_k * G + head)[:, None] * W + offs_w[None, :]
        numbers_kw = tl.load(numbers_ptr + source_kw, mask=moves_kw)
        tl.debug_barrier()
        target_kw = (target_k * G + head)[:, None] * W + offs_w[None, :]
        tl.store(numbers_ptr + target_kw, numbers_kw, mask=moves_kw)
