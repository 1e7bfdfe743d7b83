"""The paged KV cache: a buffer of keys and one of values a layer, [pages, page, G, d]. `kv.fp8` has
the same methods.

Legend: `kv`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lowroll.kernels.attention.decode import gather_pages, paged_decode, write_pages
from lowroll.kernels.batch_invariant import attention as invariant
from lowroll.kernels.kv_eviction.move import move
from lowroll.kv.batch import DecodeRows
from lowroll.kv.recurrent import RecurrentStates
from lowroll.kv.virtual_memory import VirtualMemory, virtual_memory_works
from lowroll.model.attention import AttentionInputs, upload
from lowroll.model.spec import ModelSpec

if TYPE_CHECKING:
    from lowroll.model.transformer import Transformer


class KVCache:
    """Storage of `num_pages` pages a layer, zero-filled so that an unwritten slot holds no NaN.

    dtype: of the keys and values that it takes and gives. `buffers`: for each of `columns` the
    tensors [pages, page, G, width] of all layers.
    """

    skips_negative_slots = True  # `write` skips tokens with a negative slot
    exact = False  # see `Transformer.be_exact`

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
        self.windows = spec.windows
        self.recurrent: RecurrentStates | None = None
        shapes = []
        for width, column_dtype in self.columns(spec, dtype):
            for has_keys in spec.layers_with_keys:
                num_layer_pages = num_pages if has_keys else 0
                shape = (num_layer_pages, page_size, spec.num_kv_heads, width)
                shapes.append((shape, column_dtype))
        all_buffers, self.virtual_memory = _allocate(shapes, self.device)
        self.buffers = [
            all_buffers[start : start + spec.num_layers]
            for start in range(0, len(all_buffers), spec.num_layers)
        ]
        self.keys, self.values = self.buffers[:2]

    @staticmethod
    def columns(spec: ModelSpec, dtype: torch.dtype) -> list[tuple[int, torch.dtype]]:
        """Return the width and dtype of each stored part of a token and head: keys, then values."""
        return [(spec.head_dim, dtype), (spec.head_dim, dtype)]

    @classmethod
    def bytes_per_token(cls, spec: ModelSpec, dtype: torch.dtype) -> int:
        columns = cls.columns(spec, dtype)
        bytes_per_head = sum(width * column_dtype.itemsize for width, column_dtype in columns)
        return sum(spec.layers_with_keys) * spec.num_kv_heads * bytes_per_head

    def adapt(self, model: Transformer) -> bool:
        """Adapt to the weights. True when stored keys become unreadable."""
        return False

    def _all(self) -> list[Tensor]:
        return [buffer for column in self.buffers for buffer in column if len(buffer)]

    @property
    def virtual_memory_bytes(self) -> int:
        """Device memory outside torch's counters."""
        return 0 if self.virtual_memory is None else self.virtual_memory.nbytes

    def copy_pages(self, pairs: list[tuple[int, int]]) -> None:
        if not pairs:
            return
        sources, targets = upload(torch.tensor(pairs), self.keys[0].device).unbind(1)
        for buffer in self._all():
            buffer[targets] = buffer[sources]

    def clear(self) -> None:
        """Zero everything, after a forward pass that was not finite."""
        if self.released:
            return
        for buffer in self._all():
            buffer.zero_()
        if self.recurrent is not None:
            self.recurrent.clear()

    def release(self) -> None:
        """Free the memory until `restore`. The tensors stay the same objects; without virtual
        memory their addresses change, so CUDA graphs must be dropped."""
        if self.virtual_memory is not None:
            self.virtual_memory.release()
        else:
            for buffer in self._all():
                buffer.untyped_storage().resize_(0)
        self.released = True

    def restore(self) -> None:
        """Allocate zeros again, or stay released if memory is short."""
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
        """Write keys and values, and return them as `read`."""
        write_pages(self.keys[layer], self.values[layer], slots_T, k_TGd, v_TGd)
        return k_TGd, v_TGd

    def read(self, layer: int, slots_T: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values [T, G, d]."""
        return (
            self.keys[layer].flatten(0, 1).index_select(0, slots_T),
            self.values[layer].flatten(0, 1).index_select(0, slots_T),
        )

    def gather_keys(self, layer: int, table_BP: Tensor) -> Tensor:
        """Return keys [B, G, N, d] of these pages, arbitrary but finite beyond a row's length."""
        return gather_pages(self.keys[layer], table_BP)

    def key_pages(self, table_BP: Tensor) -> tuple[Sequence[Tensor], Tensor]:
        """Return the keys of these pages in all layers [p, page, G, d], and tables into them."""
        return self.keys, table_BP

    def decode(self, layer: int, inputs: AttentionInputs, rows: DecodeRows) -> Tensor:
        """Append each row's new key and value, and attend."""
        q_BHd, k_BGd, v_BGd, sinks_H = inputs
        new_rows = (q_BHd, k_BGd, v_BGd)
        cached = (self.keys[layer], self.values[layer], rows.table_BP, rows.lengths_B)
        scale = q_BHd.shape[-1] ** -0.5
        if self.exact:
            return invariant.decode(*new_rows, *cached, scale)
        return paged_decode(*new_rows, *cached, scale, self.window(layer), sinks_H)

    def window(self, layer: int) -> int:
        return self.windows[layer] if self.windows else 0

    def keep(self, table_BP: Tensor, kept_LBGK: Tensor, slots_BK: Tensor) -> None:
        """Move the kept keys and values to new slots (`kernels.kv_eviction.move`). kept_LBGK:
        int64, ascending."""
        move(self.buffers, table_BP, kept_LBGK, slots_BK)


def _allocate(
    shapes: Sequence[tuple[tuple[int, ...], torch.dtype]], device: torch.device
) -> tuple[list[Tensor], VirtualMemory | None]:
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
