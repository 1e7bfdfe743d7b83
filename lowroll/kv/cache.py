"""The paged KV cache, and the engine's side of the `attend` seam.

One buffer a layer for keys and one for values, [pages, page, G, d], allocated once. `PagedDecode` is one token a row
over the row's page table: all of it lives on the device, nothing is gathered. `PagedAttention` is built for the
prompts of one step: it writes their keys and values to their slots; prompts that start at position 0 attend over their
own fresh keys exactly as the learner does, later chunks of a prompt gather their pages.

Legend: T tokens of the step, B decode rows, P pages of the longest row, L = P * page, H query heads, G key-value
heads, d head size, C tokens of a chunk.
"""
from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lowroll.kernels.attention import gather_pages, paged_decode, write_pages
from lowroll.kv.arena import Arena, arena_works
from lowroll.model.attention import Attend, varlen
from lowroll.model.spec import ModelSpec


class KVCache:
    """Storage of `num_pages` pages a layer. Zero-filled: a slot that nobody wrote must not hold a NaN.

    `arena` is the memory behind it on CUDA, whose address survives `release`; None where there is no such memory.
    """

    def __init__(self, spec: ModelSpec, num_pages: int, page_size: int, dtype: torch.dtype,
                 device: torch.device | str) -> None:
        shape = (num_pages, page_size, spec.num_kv_heads, spec.head_dim)
        self.page_size, self.released = page_size, False
        buffers, self.arena = _allocate(2 * spec.num_layers, shape, dtype, torch.device(device))
        self.keys, self.values = buffers[:spec.num_layers], buffers[spec.num_layers:]

    @staticmethod
    def bytes_per_token(spec: ModelSpec, dtype: torch.dtype) -> int:
        return 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * dtype.itemsize

    def copy_pages(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole pages (source, target) in every layer."""
        if not pairs:
            return
        sources, targets = torch.tensor(pairs, device=self.keys[0].device).unbind(1)
        for buffer in (*self.keys, *self.values):
            buffer[targets] = buffer[sources]

    def clear(self) -> None:
        """Zero everything, after a forward pass that was not finite. A released cache has nothing to zero."""
        if self.released:
            return
        for buffer in (*self.keys, *self.values):
            buffer.zero_()

    def release(self) -> None:
        """Give the memory back until `restore`, for a learner that runs in between. What the pages held is lost.

        The tensors stay the same objects. With an arena they stay where they are, too; without one they move, and
        whoever holds addresses (a CUDA graph) must let go of them.
        """
        self.released = True
        if self.arena is not None:
            self.arena.release()
            return
        for buffer in (*self.keys, *self.values):
            buffer.untyped_storage().resize_(0)

    def restore(self) -> None:
        """Allocate what `release` gave back, filled with zeros; costs one write of the memory. Else do nothing.

        The cache stays released when the memory is not to be had.
        """
        if not self.released:
            return
        try:
            if self.arena is not None:
                self.arena.restore()
            else:
                for buffer in (*self.keys, *self.values):
                    buffer.untyped_storage().resize_(buffer.nbytes)
                    buffer.zero_()
        except BaseException:
            self.release()
            raise
        self.released = False

    def write(self, layer: int, slots_T: Tensor, k_TGd: Tensor, v_TGd: Tensor) -> None:
        write_pages(self.keys[layer], self.values[layer], slots_T, k_TGd, v_TGd)

    def gather(self, layer: int, table_BP: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of each row's pages, both [B, G, L, d] (views of [B, L, G, d] copies)."""
        return gather_pages(self.keys[layer], table_BP), gather_pages(self.values[layer], table_BP)


def _allocate(count: int, shape: tuple[int, ...], dtype: torch.dtype,
              device: torch.device) -> tuple[list[Tensor], Arena | None]:
    """Buffers of zeros, in one arena where the device has such memory."""
    if device.type != "cuda" or not arena_works(device):
        return [torch.zeros(shape, dtype=dtype, device=device) for _ in range(count)], None
    size = math.prod(shape) * dtype.itemsize
    step = -(-size // 512) * 512
    arena = Arena(count * step, device)
    rows = arena.tensor().view(count, step)[:, :size]
    return [row.view(dtype).view(shape) for row in rows], arena


@dataclass(frozen=True)
class Chunk:
    """Tokens [start, stop) of one sequence in this step, and its page table."""

    start: int
    stop: int
    pages: list[int]

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class PagedDecode:
    """`attend` for rows of one token each. lengths_B counts the new token; 0 is a dead row, which writes nothing."""

    cache: KVCache
    table_BP: Tensor           # int32
    lengths_B: Tensor          # int32

    def __call__(self, layer: int, q_BHd: Tensor, k_BGd: Tensor, v_BGd: Tensor) -> Tensor:
        return paged_decode(q_BHd, k_BGd, v_BGd, self.cache.keys[layer], self.cache.values[layer], self.table_BP,
                            self.lengths_B, q_BHd.shape[-1] ** -0.5)


class PagedAttention:
    """`attend` for the prompts of one step: first the fresh ones, then later chunks."""

    def __init__(self, cache: KVCache, fresh: list[Chunk], later: list[Chunk]) -> None:
        device = cache.keys[0].device
        self.cache, self.later = cache, later
        page_size = cache.page_size
        self.slots_T = torch.tensor(
            [c.pages[t // page_size] * page_size + t % page_size
             for c in (*fresh, *later) for t in range(c.start, c.stop)], device=device)
        self.num_fresh = sum(c.num_tokens for c in fresh)
        self.fresh: Attend | None = varlen([c.num_tokens for c in fresh], device) if fresh else None
        self.tables = [torch.tensor([c.pages[:-(-c.stop // page_size)]], device=device) for c in later]

    def __call__(self, layer: int, q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor) -> Tensor:
        self.cache.write(layer, self.slots_T, k_TGd, v_TGd)
        outputs, first = [], self.num_fresh
        if self.fresh is not None:
            outputs.append(self.fresh(layer, q_THd[:first], k_TGd[:first], v_TGd[:first]))
        for chunk, table_1P in zip(self.later, self.tables, strict=True):
            outputs.append(self.chunk(layer, q_THd[first:first + chunk.num_tokens], chunk, table_1P))
            first += chunk.num_tokens
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def chunk(self, layer: int, q_CHd: Tensor, chunk: Chunk, table_1P: Tensor) -> Tensor:
        """A later chunk of a prompt over everything before it and, causally, itself."""
        k_1GLd, v_1GLd = self.cache.gather(layer, table_1P)
        pos_C = torch.arange(chunk.start, chunk.stop, device=q_CHd.device)
        mask_CL = torch.arange(k_1GLd.shape[2], device=q_CHd.device) <= pos_C[:, None]
        o_1HCd = F.scaled_dot_product_attention(q_CHd.transpose(0, 1)[None], k_1GLd, v_1GLd, attn_mask=mask_CL,
                                                enable_gqa=True)
        return o_1HCd[0].transpose(0, 1)
