"""The paged KV cache: one buffer a layer for keys and one for values, [pages, page, G, d], allocated
once.

Where a cache policy drops keys, `KVCache.keep` moves those that stay, between two runs of steps.
How keys and values are stored is known to `KVCache` alone: another storage (`kv.fp8`) has the same
verbs.

Legend: T tokens, B decode rows, P pages of the longest row, G key-value heads, d head size, K keys
that stay.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lowroll.kernels.attention.decode import gather_pages, paged_decode, write_pages
from lowroll.kernels.compact.move import move
from lowroll.kernels.invariant import attention as invariant
from lowroll.kv.virtual_memory import VirtualMemory, virtual_memory_works
from lowroll.model.attention import upload
from lowroll.model.spec import ModelSpec

if TYPE_CHECKING:
    from lowroll.model.transformer import Transformer


class KVCache:
    """Storage of `num_pages` pages a layer. Zero-filled: a slot that nobody wrote must not hold a
    NaN.

    dtype: of the keys and values that it takes and gives. `buffers` are lists of a tensor [pages,
    page, G, width] a layer, one for each of `columns`. `virtual_memory` is the memory behind it on
    CUDA, whose address survives `release`; None where there is no such memory.
    """

    skips_negative_slots = True  # `write` leaves out tokens with such
    exact = False  # a query's bits are those of any batch and any chunk, see `Transformer.be_exact`

    def __init__(
        self,
        spec: ModelSpec,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.page_size, self.dtype, self.device = page_size, dtype, torch.device(device)
        self.released = False
        head = (num_pages, page_size, spec.num_kv_heads)
        columns = self.columns(spec, dtype)
        shapes = [((*head, width), kind) for width, kind in columns for _ in range(spec.num_layers)]
        flat, self.virtual_memory = _allocate(shapes, self.device)
        self.buffers = [flat[i : i + spec.num_layers] for i in range(0, len(flat), spec.num_layers)]
        self.keys, self.values = self.buffers[:2]

    @staticmethod
    def columns(spec: ModelSpec, dtype: torch.dtype) -> list[tuple[int, torch.dtype]]:
        """Return what is stored of a token, layer and KV head, as counts of numbers and their
        dtype. Keys come first, then values."""
        return [(spec.head_dim, dtype), (spec.head_dim, dtype)]

    @classmethod
    def bytes_per_token(cls, spec: ModelSpec, dtype: torch.dtype) -> int:
        columns = cls.columns(spec, dtype)
        head = sum(width * kind.itemsize for width, kind in columns)
        return spec.num_layers * spec.num_kv_heads * head

    def adapt(self, model: Transformer) -> bool:
        """Take from the weights what the storage wants to know of the keys to come. True when what
        was stored before cannot be read any more."""
        return False

    def _all(self) -> list[Tensor]:
        return [buffer for column in self.buffers for buffer in column]

    @property
    def virtual_memory_bytes(self) -> int:
        """Device memory that torch's own counters do not see."""
        return 0 if self.virtual_memory is None else self.virtual_memory.nbytes

    def copy_pages(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole pages (source, target) in every layer."""
        if not pairs:
            return
        sources, targets = upload(torch.tensor(pairs), self.keys[0].device).unbind(1)
        for buffer in self._all():
            buffer[targets] = buffer[sources]

    def clear(self) -> None:
        """Zero everything, after a forward pass that was not finite. A released cache has nothing
        to zero."""
        if self.released:
            return
        for buffer in self._all():
            buffer.zero_()

    def release(self) -> None:
        """Give the memory back until `restore`, for a learner that runs in between. What the pages
        held is lost.

        The tensors stay the same objects. With virtual memory they stay where they are, too;
        without one they move, and whoever holds addresses (a CUDA graph) must let go of them.
        """
        if self.virtual_memory is not None:
            self.virtual_memory.release()
        else:
            for buffer in self._all():
                buffer.untyped_storage().resize_(0)
        self.released = True

    def restore(self) -> None:
        """Allocate what `release` gave back, filled with zeros; costs one write of the memory. Else
        do nothing.

        The cache stays released when the memory is not to be had.
        """
        if not self.released:
            return
        try:
            if self.virtual_memory is not None:
                self.virtual_memory.restore()
            else:
                for buffer in self._all():
                    buffer.untyped_storage().resize_(buffer.nbytes)
                    buffer.zero_()
        except BaseException:
            self.release()
            raise
        self.released = False

    def write(
        self, layer: int, slots_T: Tensor, k_TGd: Tensor, v_TGd: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns the keys and values that `read` would give."""
        write_pages(self.keys[layer], self.values[layer], slots_T, k_TGd, v_TGd)
        return k_TGd, v_TGd

    def read(self, layer: int, slots_T: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [T, G, d] of these slots."""
        return (
            self.keys[layer].flatten(0, 1).index_select(0, slots_T),
            self.values[layer].flatten(0, 1).index_select(0, slots_T),
        )

    def gather_keys(self, layer: int, table_BP: Tensor) -> Tensor:
        """Keys [B, G, N, d] of these pages, N = P * page; behind a row's length they are anything
        finite."""
        return gather_pages(self.keys[layer], table_BP)

    def key_pages(self, table_BP: Tensor) -> tuple[Sequence[Tensor], Tensor]:
        """The keys of these pages in all layers, as pages [p, page, G, d] of numbers, and the rows'
        tables of those: the buffers themselves, where keys are stored as they are."""
        return self.keys, table_BP

    def decode(
        self, layer: int, q_BHd: Tensor, k_BGd: Tensor, v_BGd: Tensor, rows: DecodeRows
    ) -> Tensor:
        """Write the new key and value of each row behind its others, and attend over them all."""
        decode = invariant.decode if self.exact else paged_decode
        return decode(
            q_BHd,
            k_BGd,
            v_BGd,
            self.keys[layer],
            self.values[layer],
            rows.table_BP,
            rows.lengths_B,
            q_BHd.shape[-1] ** -0.5,
        )

    def keep(self, table_BP: Tensor, kept_LBGK: Tensor, slots_BK: Tensor) -> None:
        """Move the kept keys and values of each layer, row and KV head to new slots
        (`kernels.compact.move`).

        kept_LBGK: int64, ascending indices into the keys of a row, whose pages `table_BP` lists.
        """
        move(self.buffers, table_BP, kept_LBGK, slots_BK)


def _allocate(
    shapes: Sequence[tuple[tuple[int, ...], torch.dtype]], device: torch.device
) -> tuple[list[Tensor], VirtualMemory | None]:
    """Buffers of zeros, in one piece of virtual memory where the device has such."""
    if device.type != "cuda" or not virtual_memory_works(device):
        return [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype in shapes], None
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in shapes]
    starts = [0, *accumulate(-(-size // 512) * 512 for size in sizes)]
    virtual_memory = VirtualMemory(starts[-1], device)
    memory = virtual_memory.tensor()
    return [
        memory[start : start + size].view(dtype).view(shape)
        for start, size, (shape, dtype) in zip(starts, sizes, shapes, strict=False)
    ], virtual_memory


@dataclass(frozen=True)
class PromptChunk:
    """Tokens [start, stop) of one sequence in this step, its page table and slot (-1: none)."""

    start: int
    stop: int
    pages: list[int]
    slot: int = -1

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start

    def slots(self, page_size: int) -> Tensor:
        """Return the slots of the sequence's tokens, from its first to the chunk's last."""
        slots_PS = torch.tensor(self.pages)[:, None] * page_size + torch.arange(page_size)
        return slots_PS.flatten()[: self.stop]


@dataclass(frozen=True)
class DecodeRows:
    """Samples on the device. A length is of the keys in the cache: not a position, where a policy
    drops keys."""

    slots_B: Tensor  # int64: of the policy's state
    table_BP: Tensor  # int32
    lengths_B: Tensor  # int32; 0 is a dead row
    positions_B: Tensor  # int64: of the last key
