"""The interface of cache policies. A policy is one file with both sides: a `CachePolicy`, which is
arithmetic without torch for the scheduler, and a `Selector`, which selects the keys on the device.

All layers and KV heads share one page table: each head keeps equally many keys, but not the same
ones. Keys and new tokens are rotated by their true positions.

A policy that keeps the last `budget` keys, to be named by a row of `kv.policy.table`:

    class Recent(CachePolicy):
        name = "recent"
        def room(self, cached): return max(0, self.budget + self.buffer - cached)
        def kept(self, cached): return min(cached, self.budget)
        def selector(self, spec, cache, max_batch): return LastKeys()

Legend: `kv`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the scheduler has no torch
    from torch import Tensor

    from lowroll.kv.batch import DecodeRows, PromptChunk
    from lowroll.kv.cache import KVCache
    from lowroll.model.spec import ModelSpec


class CachePolicy(ABC):
    """A policy for the number of keys in a sample's cache, in each layer and head. It must not
    depend on the other samples of a batch.

    Contract: a cache that was just compacted, or just received its prompt, has room for a key:
    room(kept(n)) >= 1 and room(after_prompt(n)) >= 1.
    """

    name: str  # BehaviorTag.kv_policy
    budget: int | None  # BehaviorTag.kv_budget; None keeps every key
    # Tokens at the end of a prompt that run even if their pages are cached, so that a policy
    # observes them. At least 1, for the logits.
    window: int = 1

    @abstractmethod
    def room(self, cached: int) -> int:
        """Return how many keys fit before a compaction; 0: compact now."""

    @abstractmethod
    def kept(self, cached: int) -> int:
        """Return the number of keys after a compaction; at least 1."""

    @abstractmethod
    def selector(self, spec: ModelSpec, cache: KVCache, max_batch: int) -> Selector | None:
        """Create the device side, once an engine, with `num_slots(max_batch)` slots; None: never
        compacts."""

    def state_bytes(self, spec: ModelSpec, max_batch: int, bytes_per_number: int) -> int:
        """Return the bytes of the selector's permanent device memory. bytes_per_number: of
        queries."""
        return 0

    def after_prompt(self, length: int) -> int:
        """Return the number of keys after prefill, which attends to all keys."""
        return length if self.room(length) else self.kept(length)

    def peak(self, cached: int, more: int) -> int:
        """Return the most keys that a cache of `cached` holds while `more` are added. Override it
        if later compactions leave more keys than the first."""
        room = self.room(cached)
        if more <= room:
            return cached + more
        kept = self.kept(cached + room)
        return max(cached + room, kept + self.room(kept))


class Selector(ABC):
    """The device side of a policy, which may keep state for each slot, layer and KV head. Methods
    are called in stream order. Storage that a decode graph reads must not move."""

    watches: bool = False

    def begin(self, slots: Sequence[int]) -> None:  # noqa: B027
        """Reset these slots for new prompts."""

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:  # noqa: B027
        """Copy the state of slots (source, target). All are read before one is written."""

    def prefilled(self, layer: int, q_THd: Tensor, chunks: Sequence[PromptChunk]) -> None:  # noqa: B027
        """Observe a layer's queries of prompt chunks, packed in order, with keys and values already
        in their pages. Tokens from the prefix cache are not observed."""

    def decoded(self, layer: int, q_BHd: Tensor, rows: DecodeRows) -> None:  # noqa: B027
        """Observe a decoded token of each row, after its key was stored. Captured in a CUDA graph:
        no shape or host decision may depend on the rows. Dead rows have the dead slot."""

    @abstractmethod
    def compact(self, rows: DecodeRows, kept: int) -> Tensor:
        """Return the indices int64 [L, B, G, K] of the `kept` keys of each row, ascending from 0,
        the oldest. A state that is stored by key is gathered here too."""


def prompt_slot(max_batch: int) -> int:
    """Return the slot of a prompt, until all its samples are admitted."""
    return max_batch


def dead_slot(max_batch: int) -> int:
    """Return the slot of rows without a token."""
    return max_batch + 1


def num_slots(max_batch: int) -> int:
    return max_batch + 2


def copy_slots(state_LS: Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """Copy a state [L, S, ...] as `Selector.copy`."""
    sources, targets = (list(slots) for slots in zip(*pairs, strict=True))
    state_LS[:, targets] = state_LS[:, sources]


@dataclass(frozen=True)
class Compaction:
    """A compaction of the `cached` keys in `pages` to `kept` keys, which move to `targets`.

    No target is shared or can be served again. Targets among `pages` come first, belong to no other
    compaction and are consecutive in `pages`, so keys can move in place
    (`kernels.kv_eviction.move`).
    """

    slot: int  # in the policy's state
    pages: list[int]
    targets: list[int]
    cached: int
    kept: int
    position: int  # of the last key


@dataclass(frozen=True)
class Footprint:
    """Pages that a request can need under a policy."""

    prompt: int  # while it runs
    base: int  # keys, not pages, that every sample begins with
    compacted: int  # pages of a compacted prompt, in addition to `prompt`; else 0
    evicts: bool  # a sample's cache may be compacted while it decodes
    writer: int  # most pages of a sample that extends the base's last page
    sibling: int  # most pages of a sample that copies that page first

    @property
    def alone(self) -> int:
        """Pages with which one sample runs in an empty cache."""
        return self.prompt + self.compacted + self.writer


def footprint(policy: CachePolicy, prompt: int, response: int, page_size: int) -> Footprint:
    """Return the footprint of a prompt with responses of up to `response` tokens, the last never
    stored. A sample shares the base's pages, which are never edited, until its first compaction."""
    base = policy.after_prompt(prompt)
    peak = policy.peak(base, response - 1)
    evicts = peak < base + response - 1
    pages = num_pages(peak, page_size)
    base_pages = num_pages(base, page_size)
    return Footprint(
        prompt=num_pages(prompt, page_size),
        base=base,
        compacted=base_pages if base < prompt else 0,
        evicts=evicts,
        writer=pages if evicts else pages - base_pages,
        sibling=pages if evicts else pages - base // page_size,
    )


def num_pages(keys: int, page_size: int) -> int:
    return -(-keys // page_size)
