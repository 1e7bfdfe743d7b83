"""Samples and their groups in the engine, and the plan of a step."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lowroll.kv.policy.base import Compaction, Footprint
from lowroll.types import BehaviorTag, Evictions, FinishReason, PolicySpan, Request

if TYPE_CHECKING:
    from lowroll.engine.grammar import Grammar


@dataclass(eq=False)
class Sequence:
    """One sample while it is generated. A policy may drop keys, so `cached_len` is not the
    position."""

    group: LiveGroup = field(repr=False)
    sample: int
    noise_key: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[tuple[int, float]]] | None = None
    spans: list[PolicySpan] = field(default_factory=list)
    # tokens of earlier weights (`engine.draft_replay`), until its own tokens differ or reach their
    # end
    draft: list[int] = field(default_factory=list)
    slot: int = -1
    pages: list[int] = field(default_factory=list)  # in order of keys
    num_shared: int = 0  # pages at the table's front that came with the prompt: never edited
    forked: bool = False  # has its page table
    cached_len: int = 0
    num_compactions: int = 0  # each one replaces the page table
    until: int = 0  # where it has ended or must be compacted
    reserved_pages: int = 0  # and not yet allocated
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    behavior: BehaviorTag | None = None
    evictions: Evictions | None = None

    @property
    def request(self) -> Request:
        return self.group.request

    @property
    def prompt_ids(self) -> list[int]:
        return self.group.request.prompt_ids

    @property
    def length(self) -> int:
        """The position of the next token, its noise counter."""
        return len(self.prompt_ids) + len(self.token_ids)

    @property
    def position(self) -> int:
        """The position of the last token, where a decode row stores its K/V."""
        return self.length - 1

    @property
    def last_token(self) -> int:
        return self.token_ids[-1]

    @property
    def num_left(self) -> int:
        return self.request.max_tokens - len(self.token_ids)


@dataclass(eq=False)
class LiveGroup:
    handle: int
    request: Request
    stop_ids: tuple[int, ...]
    footprint: Footprint
    grammar: Grammar | None = None
    sequences: list[Sequence] = field(default_factory=list)
    waiting: deque[Sequence] = field(default_factory=deque)
    # held from admission until the last sample has forked
    prompt_pages: list[int] = field(default_factory=list)
    # targets of the prompt's compaction, which become prompt_pages
    compacted_pages: list[int] = field(default_factory=list)
    state_slot: int = -1  # of the policy's state after the prompt
    num_unforked: int = 0  # samples without a page table that have not ended
    # prompt positions run, or served by the prefix cache
    num_prefilled: int = 0
    num_open: int = 0
    tail_writer: Sequence | None = None
    salt: bytes = b""  # of the prefix cache at admission
    page_keys: list[bytes] | None = None  # of full prompt pages under that salt

    @property
    def leader(self) -> Sequence:
        return self.sequences[0]


@dataclass(frozen=True)
class PrefillChunk:
    """Prompt tokens [start, stop) to run, with K/V in the leader's pages."""

    sequence: Sequence  # the group's leader
    start: int
    stop: int
    samples: tuple[Sequence, ...]  # those that draw after the last chunk; else none


@dataclass(frozen=True)
class Check:
    """The last token of a sample and the next ones of its draft, with a draw behind each."""

    sequence: Sequence
    ids: list[int]


@dataclass(frozen=True)
class DrawnPosition:
    """The sample of a check once it has drawn the first `count` of `tokens`."""

    sequence: Sequence
    tokens: list[int]
    count: int

    @property
    def request(self) -> Request:
        return self.sequence.request

    @property
    def group(self) -> LiveGroup:
        return self.sequence.group

    @property
    def sample(self) -> int:
        return self.sequence.sample

    @property
    def prompt_ids(self) -> list[int]:
        return self.sequence.prompt_ids

    @property
    def token_ids(self) -> list[int]:
        return self.tokens[: self.count]

    @property
    def noise_key(self) -> int:
        return self.sequence.noise_key

    @property
    def top_logprobs(self) -> list[list[tuple[int, float]]] | None:
        return self.sequence.top_logprobs

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + self.count


def banned_ids(s: Sequence | DrawnPosition) -> tuple[int, ...]:
    """Return the ids that would end a sample before its `min_tokens` are drawn."""
    drawn = s.length - len(s.prompt_ids)
    return s.group.stop_ids if drawn < s.request.min_tokens else ()


def places_of(check: Check) -> list[DrawnPosition]:
    num_drawn = len(check.sequence.token_ids)
    tokens = check.sequence.token_ids + check.ids[1:]
    return [DrawnPosition(check.sequence, tokens, num_drawn + i) for i in range(len(check.ids))]


@dataclass(frozen=True)
class StepPlan:
    """The work of one step, in order.

    No page is both a source and a target of `copies`. Each decode row has pages for its number in
    `limits`; later draws are ignored. The first pass also runs the checks.
    """

    compactions: list[Compaction]
    forks: list[tuple[int, int]]  # slots (source, target) whose policy state is copied
    copies: list[tuple[int, int]]  # pages (source, target)
    decodes: list[Sequence]
    steps: int
    limits: list[int]
    begun: list[int]  # slots in which a prompt begins
    passes: list[list[PrefillChunk]]
    checks: list[Check]

    @property
    def prefills(self) -> list[PrefillChunk]:
        return [chunk for chunks in self.passes for chunk in chunks]
