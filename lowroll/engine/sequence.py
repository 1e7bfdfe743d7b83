"""The nouns of a step: samples and their groups while they are in the engine, and the plan of what
to run."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from lowroll.types import BehaviorTag, FinishReason, PolicySpan, Request


@dataclass(eq=False)
class Sequence:
    """One sample while it is generated. Position t counts from the first prompt token."""

    group: LiveGroup = field(repr=False)
    sample: int
    noise_key: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[PolicySpan] = field(default_factory=list)
    pages: list[int] = field(
        default_factory=list
    )  # its page table; empty until it forks and after it ends
    num_cached: int = 0  # positions whose K/V are stored
    reserved_pages: int = 0  # pages reserved for it and not yet given out
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    behavior: BehaviorTag | None = None  # how its last token was drawn

    @property
    def request(self) -> Request:
        return self.group.request

    @property
    def prompt_ids(self) -> list[int]:
        return self.group.request.prompt_ids

    @property
    def length(self) -> int:
        """Prompt and sampled tokens: the position at which the next token will stand (the noise
        counter)."""
        return len(self.prompt_ids) + len(self.token_ids)

    @property
    def position(self) -> int:
        """Where the last token stands. A decode row runs that token and stores its K/V there."""
        return self.length - 1

    @property
    def last_token(self) -> int:
        return self.token_ids[-1]

    @property
    def num_left(self) -> int:
        """Tokens that it may still draw."""
        return self.request.max_tokens - len(self.token_ids)

    def banned_ids(self) -> tuple[int, ...]:
        """Ids that must not be drawn next: those that would end the sample before `min_tokens`
        tokens."""
        return self.group.stop_ids if len(self.token_ids) < self.request.min_tokens else ()


@dataclass(eq=False)
class LiveGroup:
    """A request in the engine."""

    handle: int
    request: Request
    stop_ids: tuple[int, ...]
    sequences: list[Sequence] = field(default_factory=list)
    waiting: deque[Sequence] = field(default_factory=deque)  # samples not admitted yet, in order
    prompt_pages: list[int] = field(
        default_factory=list
    )  # held from admission until the last sample has forked
    num_unforked: int = 0  # samples that have no page table yet and have not ended
    # prompt positions given to a prefill chunk (or served by the prefix cache)
    num_prefilled: int = 0
    num_open: int = 0  # samples that have not ended
    tail_writer: Sequence | None = None  # who may append to the partial last prompt page
    salt: bytes = b""  # the prefix cache's salt when the prompt was admitted

    @property
    def leader(self) -> Sequence:
        return self.sequences[0]


@dataclass(frozen=True)
class PrefillChunk:
    """Run prompt tokens [start, stop) and store their K/V in the leader's pages.

    If `is_last`, the last hidden state gives the first token's logits: sample and commit all of
    `samples`.
    """

    sequence: Sequence  # the group's leader
    start: int
    stop: int
    is_last: bool
    samples: tuple[Sequence, ...]  # the group's sequences if is_last, else none


@dataclass(frozen=True)
class Plan:
    """One step's work. `copies` (source page, target page) come first; no page is both a source and
    a target.

    The decode rows may take up to `steps` steps before the next plan: they have the pages for it.
    """

    prefills: list[PrefillChunk]
    decodes: list[Sequence]
    copies: list[tuple[int, int]]
    steps: int = 1
