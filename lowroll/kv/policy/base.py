"""A cache policy: which of a sample's keys stay in its cache, how many, and from when on.

It has two sides. `CachePolicy` is arithmetic without torch, for the scheduler: when a cache must be
compacted, how many keys that leaves, and the most that a sample ever holds, which is what admission
reserves. `Selector` is the device's side, for the runner: it may watch queries, and says which keys
stay.

A cache has one length for all layers and KV heads, hence one page table: every head of every layer
keeps equally many keys, but not the same ones. Keys are stored rotated by their true positions, and
a new token stands at its true position, however few keys are left before it.

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

if TYPE_CHECKING:  # the scheduler imports this file, and runs without torch
    from torch import Tensor

    from lowroll.kv.cache import DecodeRows, KVCache, PromptChunk
    from lowroll.model.spec import ModelSpec


class CachePolicy(ABC):
    """A policy that decides how many keys a sample's cache holds. All numbers are keys (of a layer
    and head).

    The scheduler asks every sample alone, so what a sample keeps does not depend on its batch.
    Contract: a cache that was just compacted, or has just got its prompt, takes at least one more
    key: room(kept(n)) >= 1 and room(after_prompt(n)) >= 1.
    """

    name: str  # BehaviorTag.kv_policy
    budget: int | None  # BehaviorTag.kv_budget; None keeps every key
    # Tokens at the end of a prompt that always run, though their pages may be in the prefix cache:
    # a policy that watches queries must see theirs. At least 1, for the logits.
    window: int = 1

    @abstractmethod
    def room(self, cached: int) -> int:
        """Keys that a cache of `cached` keys takes before it must be compacted; 0 is now."""

    @abstractmethod
    def kept(self, cached: int) -> int:
        """Keys that a compaction leaves of `cached`; at least 1."""

    @abstractmethod
    def selector(self, spec: ModelSpec, cache: KVCache, max_batch: int) -> Selector | None:
        """The device's side, made once an engine; None for a policy that never compacts.

        Its state has a place for each of `num_slots(max_batch)` slots.
        """

    def state_bytes(self, spec: ModelSpec, max_batch: int, bytes_per_number: int) -> int:
        """Device memory that the selector holds from its beginning to its end, beside the cache.

        bytes_per_number: of the queries that it may keep, in the model's dtype.
        """
        return 0

    def after_prompt(self, length: int) -> int:
        """Keys that a prompt of `length` tokens keeps when all of it has run; `length` is all.

        Prefill attends to the whole prompt. What is dropped is dropped before the first decode
        step.
        """
        return length if self.room(length) else self.kept(length)

    def peak(self, cached: int, more: int) -> int:
        """The most keys that a cache of `cached` holds while `more` are added one by one.

        Here for a policy whose later compactions leave no more than the first one.
        """
        room = self.room(cached)
        if more <= room:
            return cached + more
        left = self.kept(cached + room)
        return max(cached + room, left + self.room(left))


class Selector(ABC):
    """Says which keys stay, and may keep a state for each slot, layer and KV head.

    A slot is a sample's place in that state from its admission to its end; see `num_slots` for two
    more. What a graph of decoding reads must keep its storage. All is called in stream order.
    """

    watches: bool = False  # whether `prefilled` and `decoded` are to be called, in every layer

    def begin(self, slots: Sequence[int]) -> None:  # noqa: B027
        """A new prompt begins in each of these slots: nothing of an earlier one may be left."""

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:  # noqa: B027
        """Copy the state of slots (source, target). All are read before one is written."""

    def prefilled(self, layer: int, q_THd: Tensor, chunks: Sequence[PromptChunk]) -> None:  # noqa: B027
        """Chunks of prompts have run in this layer: their queries, packed in the chunks' order.

        Keys and values lie in the chunks' pages. A prompt's first chunk may start behind tokens
        that the prefix cache served: their queries are never seen, their keys lie in the pages.
        """

    def decoded(self, layer: int, q_BHd: Tensor, rows: DecodeRows) -> None:  # noqa: B027
        """A token of each row has run in this layer; its key is the last of the row's.

        Captured in a graph on CUDA: no shape and no host decision may depend on the rows. Rows
        without a token (length 0) have the slot that nobody reads.
        """

    @abstractmethod
    def compact(self, rows: DecodeRows, kept: int) -> Tensor:
        """Indices int64 [L, B, G, K] of the `kept` keys that stay in each layer, ascending along K;
        0 is the oldest key in the cache.

        rows: `lengths_B` keys each, of which those in `positions_B` are the last. A state that goes
        by key is gathered here too, for these slots.
        """


def prompt_slot(max_batch: int) -> int:
    """The slot of the one prompt whose samples are not all admitted; they copy its state later."""
    return max_batch


def dead_slot(max_batch: int) -> int:
    """The slot that rows without a token write to."""
    return max_batch + 1


def num_slots(max_batch: int) -> int:
    """Samples 0..max_batch - 1, then the two above."""
    return max_batch + 2


def copy_slots(state_LS: Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """Copy a state [L, S, ...] of slots (source, target). All are read before one is written."""
    sources, targets = (list(slots) for slots in zip(*pairs, strict=True))
    state_LS[:, targets] = state_LS[:, sources]


@dataclass(frozen=True)
class Footprint:
    """The pages that a request can need under a policy."""

    prompt: int  # of the prompt as it runs
    base: int  # keys, not pages, that every sample begins with
    compacted: int  # of the base where the prompt is compacted (beside the prompt's own); else 0
    evicts: bool  # whether a sample's cache may be compacted while it decodes
    writer: int  # of a sample's own, at worst, when it appends to the last page of the base
    sibling: int  # and when it copies that page first

    @property
    def alone(self) -> int:
        """Pages with which one sample of the request runs in an empty cache."""
        return self.prompt + self.compacted + self.writer


def footprint(policy: CachePolicy, prompt: int, response: int, page_size: int) -> Footprint:
    """Return the footprint of a prompt of so many tokens with responses of up to `response`, whose
    last token is never stored.

    A sample shares the base's pages until its first compaction. Shared pages are never edited, so
    from then on all of its pages are its own: where it evicts, sharing saves nothing at worst.
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
    """Pages that so many keys fill."""
    return -(-keys // page_size)
