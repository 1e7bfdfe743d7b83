"""The interface of cache policies: which of a sample's keys stay, how many, and from when on.

`CachePolicy` is arithmetic without torch, for the scheduler's admission. `Selector` is the device
side, for the runner: it may watch queries, and selects the keys.

A cache has one length, hence one page table, for all layers and KV heads: every head keeps equally
many keys, but not the same ones. Keys and new tokens are rotated by their true positions.

A new policy is one file that defines both sides:

    class Recent(CachePolicy):                     keep the last `budget` keys
        name = "recent"
        def room(self, cached): return max(0, self.budget + self.buffer - cached)
        def kept(self, cached): return min(cached, self.budget)
        def selector(self, spec, cache, max_batch): return LastKeys()

Legend: L layers, S slots, B rows, T tokens, H query heads, G key-value heads, d head size, K keys
that stay.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the scheduler imports this file without torch
    from torch import Tensor

    from lowroll.kv.batch import DecodeRows, PromptChunk
    from lowroll.kv.cache import KVCache
    from lowroll.model.spec import ModelSpec


class CachePolicy(ABC):
    """A policy for the number of keys in a sample's cache, of each layer and head.

    What a sample keeps does not depend on its batch. Contract: a cache that was just compacted, or
    has just got its prompt, takes at least one more key: room(kept(n)) >= 1 and
    room(after_prompt(n)) >= 1.
    """

    name: str  # BehaviorTag.kv_policy
    budget: int | None  # BehaviorTag.kv_budget; None keeps every key
    # Tokens at the end of a prompt that run even if their pages are cached: a policy may watch
    # their queries. At least 1, for the logits.
    window: int = 1

    @abstractmethod
    def room(self, cached: int) -> int:
        """Return the keys that a cache of `cached` keys takes before a compaction; 0: compact
        now."""

    @abstractmethod
    def kept(self, cached: int) -> int:
        """Return the keys that a compaction leaves of `cached`; at least 1."""

    @abstractmethod
    def selector(self, spec: ModelSpec, cache: KVCache, max_batch: int) -> Selector | None:
        """Create the device side, once an engine, with `num_slots(max_batch)` slots; None for a
        policy that never compacts."""

    def state_bytes(self, spec: ModelSpec, max_batch: int, bytes_per_number: int) -> int:
        """Return the selector's permanent device memory. bytes_per_number: of queries."""
        return 0

    def after_prompt(self, length: int) -> int:
        """Return the keys that remain before the first decode step. Prefill attends to all of
        them."""
        return length if self.room(length) else self.kept(length)

    def peak(self, cached: int, more: int) -> int:
        """Return the most keys that a cache of `cached` holds while `more` are added one by one.

        This default is for a policy whose later compactions leave no more than the first one.
        """
        room = self.room(cached)
        if more <= room:
            return cached + more
        kept = self.kept(cached + room)
        return max(cached + room, kept + self.room(kept))


class Selector(ABC):
    """The device side of a policy, which selects keys and may keep a state for each slot, layer and
    KV head. What a decode graph reads must keep its storage. All methods are called in stream
    order."""

    watches: bool = False

    def begin(self, slots: Sequence[int]) -> None:  # noqa: B027
        """Reset these slots for new prompts."""

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:  # noqa: B027
        """Copy the state of slots (source, target). All are read before one is written."""

    def prefilled(self, layer: int, q_THd: Tensor, chunks: Sequence[PromptChunk]) -> None:  # noqa: B027
        """Observe the queries of prompt chunks in a layer, packed in the chunks' order. Keys and
        values are in the chunks' pages. Queries of tokens from the prefix cache are never seen."""

    def decoded(self, layer: int, q_BHd: Tensor, rows: DecodeRows) -> None:  # noqa: B027
        """Observe a decoded token of each row in a layer; its key is the row's last. Captured in
        a CUDA graph: no shape or host decision may depend on the rows. Dead rows have the dead
        slot."""

    @abstractmethod
    def compact(self, rows: DecodeRows, kept: int) -> Tensor:
        """Return indices int64 [L, B, G, K] of the `kept` keys of each layer, ascending from 0, the
        oldest. A state that goes by key is gathered here too."""


def prompt_slot(max_batch: int) -> int:
    """Return the slot of a prompt whose samples are not all admitted; they copy its state later."""
    return max_batch


def dead_slot(max_batch: int) -> int:
    """Return the slot that rows without a token write to."""
    return max_batch + 1


def num_slots(max_batch: int) -> int:
    return max_batch + 2


def copy_slots(state_LS: Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """Copy a state [L, S, ...] of slots (source, target). All are read before one is written."""
    sources, targets = (list(slots) for slots in zip(*pairs, strict=True))
    state_LS[:, targets] = state_LS[:, sources]


@dataclass(frozen=True)
class Compaction:
    """The policy keeps `kept` of the `cached` keys in `pages`, which move to `targets`.

    No target is shared or can be served again. Targets that are among `pages`, and then of no other
    compaction, come first and are consecutive in `pages`, so that keys can move in place
    (`kernels.kv_eviction.move`).
    """

    slot: int  # of the sample or prompt, in the policy's state
    pages: list[int]
    targets: list[int]
    cached: int
    kept: int
    position: int  # of the last key


@dataclass(frozen=True)
class Footprint:
    """Pages that a request can need under a policy."""

    prompt: int  # pages of the prompt as it runs
    base: int  # keys, not pages, that every sample begins with
    compacted: int  # pages of a compacted prompt's base, in addition to `prompt`; else 0
    evicts: bool  # a sample's cache may be compacted while it decodes
    writer: int  # a sample's own pages, at worst, if it appends to the base's last page
    sibling: int  # and if it copies that page first

    @property
    def alone(self) -> int:
        """Pages with which one sample runs in an empty cache."""
        return self.prompt + self.compacted + self.writer


def footprint(policy: CachePolicy, prompt: int, response: int, page_size: int) -> Footprint:
    """Return the footprint of a prompt of so many tokens with responses of up to `response`, whose
    last token is never stored.

    A sample shares the base's pages until its first compaction. Shared pages are never edited, so
    after it all pages are the sample's own.
    """
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
