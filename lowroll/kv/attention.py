"""Attention over the paged cache: the engine's `attend`.

Legend: `kv`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lowroll.kernels.batch_invariant import attention as invariant
from lowroll.kv.batch import DecodeRows, PromptChunk
from lowroll.kv.cache import KVCache
from lowroll.kv.policy.base import Selector
from lowroll.model.attention import Attend, AttentionInputs, packed, suffixes, upload, varlen
from lowroll.model.delta_net import DeltaInputs

# tokens gathered at once
MOST_GATHERED = 1 << 17


@dataclass(frozen=True)
class PagedDecode:
    """`attend` for rows of one token, without a gather. `rows.lengths_B` counts the token; dead
    rows write nothing."""

    cache: KVCache
    rows: DecodeRows
    selector: Selector | None = None

    def __call__(self, layer: int, inputs: AttentionInputs) -> Tensor:
        o_BHd = self.cache.decode(layer, inputs, self.rows)
        if self.selector is not None:
            self.selector.decoded(layer, inputs.q_THd, self.rows)
        return o_BHd

    def recur(self, layer: int, inputs: DeltaInputs) -> Tensor:
        assert self.cache.recurrent is not None
        return self.cache.recurrent.decoded(layer, inputs, self.rows)


@dataclass(frozen=True)
class _LaterChunks:
    num_queries: int
    slots_T: Tensor  # of their sequences, up to the chunks' ends
    attend: Attend


class PagedAttention:
    """`attend` for the prompts of one step. fresh: chunks from position 0, which come first and
    attend over their own keys as stored. later: chunks behind stored keys, which are gathered."""

    def __init__(
        self,
        cache: KVCache,
        fresh: list[PromptChunk],
        later: list[PromptChunk],
        selector: Selector | None = None,
    ) -> None:
        device = cache.device
        self.cache = cache
        self.selector = selector
        self.chunks = [*fresh, *later]
        page_size = cache.page_size
        slots = [c.slots(page_size)[c.start :] for c in self.chunks]
        self.slots_T = upload(torch.cat(slots), device)
        self.exact = _ExactAttention(cache, self.chunks) if cache.exact else None
        if self.exact is not None:
            fresh, later = [], []
        self.num_fresh = sum(c.num_tokens for c in fresh)
        self.fresh: Attend | None = None
        if fresh:
            self.fresh = varlen([c.num_tokens for c in fresh], device, cache.windows)
        self.later: list[_LaterChunks] = []
        for portion in portions(later):
            lengths = [c.num_tokens for c in portion]
            totals = [c.stop for c in portion]
            slots_T = upload(torch.cat([c.slots(page_size) for c in portion]), device)
            attend = suffixes(lengths, totals, device, windows=cache.windows)
            self.later.append(_LaterChunks(sum(lengths), slots_T, attend))

    def __call__(self, layer: int, inputs: AttentionInputs) -> Tensor:
        q_THd = inputs.q_THd
        # as stored, perhaps rounded
        k_TGd, v_TGd = self.cache.write(layer, self.slots_T, inputs.k_TGd, inputs.v_TGd)
        if self.exact is not None:
            return self.exact(layer, q_THd)
        outputs = []
        start = self.num_fresh
        if self.fresh is not None:
            stored = inputs._replace(k_TGd=k_TGd, v_TGd=v_TGd)
            outputs.append(self.fresh(layer, stored.tokens(slice(start))))
        for chunks in self.later:
            stop = start + chunks.num_queries
            gathered_k, gathered_v = self.cache.read(layer, chunks.slots_T)
            chunk_inputs = inputs._replace(
                q_THd=q_THd[start:stop], k_TGd=gathered_k, v_TGd=gathered_v
            )
            outputs.append(chunks.attend(layer, chunk_inputs))
            start = stop
        if self.selector is not None:
            self.selector.prefilled(layer, q_THd, self.chunks)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def recur(self, layer: int, inputs: DeltaInputs) -> Tensor:
        assert self.cache.recurrent is not None
        return self.cache.recurrent.prefilled(layer, inputs, self.chunks)


class _ExactAttention:
    """Attention of chunks, bitwise as of decoded rows."""

    def __init__(self, cache: KVCache, chunks: list[PromptChunk]) -> None:
        self.cache = cache
        max_pages = max(len(c.pages) for c in chunks)
        padded_tables = [c.pages + [0] * (max_pages - len(c.pages)) for c in chunks]
        counts = [c.num_tokens for c in chunks]
        starts = [c.start for c in chunks]
        self.table_SP, self.lengths_S, self.before_S = (
            upload(torch.tensor(values, dtype=torch.int32), cache.device)
            for values in (padded_tables, counts, starts)
        )
        self.attend: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None

    def __call__(self, layer: int, q_THd: Tensor) -> Tensor:
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        if self.attend is None:
            self.attend = invariant.paged(
                keys, self.table_SP, self.lengths_S, self.before_S, *q_THd.shape[:2]
            )
        return self.attend(q_THd, keys, values)


@dataclass(frozen=True)
class PackedPrompts:
    """`attend` for whole prompts with bounds, int32 [prompts + 1], on the device. Never waits for
    the host. A negative slot is none."""

    cache: KVCache
    slots_T: Tensor
    bounds: Tensor
    longest: int

    def __call__(self, layer: int, inputs: AttentionInputs) -> Tensor:
        k_TGd, v_TGd = self.cache.write(layer, self.slots_T, inputs.k_TGd, inputs.v_TGd)
        if self.cache.exact:
            return self._exact(inputs.q_THd, k_TGd, v_TGd)
        stored = inputs._replace(k_TGd=k_TGd, v_TGd=v_TGd)
        return packed(stored, self.bounds, self.longest, self.cache.window(layer))

    @cached_property
    def _exact(self) -> invariant.Causal:
        return invariant.packed(self.bounds.diff(), len(self.slots_T))


@dataclass(frozen=True)
class MixedAttention:
    """`attend` for rows of one token, then prompts."""

    rows: PagedDecode
    prompts: PagedAttention

    def __call__(self, layer: int, inputs: AttentionInputs) -> Tensor:
        num_rows = len(self.rows.rows.lengths_B)
        decoded = self.rows(layer, inputs.tokens(slice(num_rows)))
        prefilled = self.prompts(layer, inputs.tokens(slice(num_rows, None)))
        return torch.cat([decoded, prefilled])


def portions(chunks: list[PromptChunk]) -> Iterator[list[PromptChunk]]:
    """Group chunks of MOST_GATHERED tokens, or single ones."""
    portion: list[PromptChunk] = []
    for chunk in chunks:
        if portion and sum(c.stop for c in portion) + chunk.stop > MOST_GATHERED:
            yield portion
            portion = []
        portion.append(chunk)
    if portion:
        yield portion
