"""The data of a step: samples and their groups while they are in the engine, and the plan of what
to run."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lowroll.kv.policy.base import Footprint
from lowroll.types import BehaviorTag, Evictions, FinishReason, PolicySpan, Request

if TYPE_CHECKING:
    from lowroll.engine.grammar import Grammar


@dataclass(eq=False)
class Sequence:
    """One sample while it is generated. Position t counts from the first prompt token.

    Its place on the device is its slot, from admission to its end. Its cache holds `cached_len`
    keys, which is not its position: a policy may have dropped some.
    """

    group: LiveGroup = field(repr=False)
    sample: int
    noise_key: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[tuple[int, float]]] | None = None  # where the request has them
    spans: list[PolicySpan] = field(default_factory=list)
    # of a replay: what it had drawn from the prompt on under earlier weights. Empty once its own
    # tokens have left the draft or have come to its end (`engine.drafts`)
    draft: list[int] = field(default_factory=list)
    slot: int = -1
    pages: list[int] = field(default_factory=list)  # its page table: of its cached keys, in order
    num_shared: int = 0  # pages at the table's front that came with the prompt: never edited
    forked: bool = False  # whether it has what it needs of the group's prompt
    cached_len: int = 0  # keys that its cache holds
    num_compactions: int = 0  # of its page table, which is another one after each
    until: int = 0  # the position at which it has ended or must be compacted
    reserved_pages: int = 0  # pages reserved for it and not yet given out
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    behavior: BehaviorTag | None = None  # how its last token was drawn
    evictions: Evictions | None = None  # what its cache dropped, once it has ended

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
        """The position of the last token. A decode row runs that token and stores its K/V there."""
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
        return banned_ids(self.group, len(self.token_ids))


@dataclass(eq=False)
class LiveGroup:
    """A request in the engine."""

    handle: int
    request: Request
    stop_ids: tuple[int, ...]
    footprint: Footprint
    grammar: Grammar | None = None  # that the response is held to
    sequences: list[Sequence] = field(default_factory=list)
    waiting: deque[Sequence] = field(default_factory=deque)  # samples not admitted yet, in order
    # held from admission until the last sample has forked
    prompt_pages: list[int] = field(default_factory=list)
    # where the keys of a prompt that is compacted will lie; they become its prompt_pages
    compacted_pages: list[int] = field(default_factory=list)
    state_slot: int = -1  # where the policy's state after the prompt lies
    num_unforked: int = 0  # samples that have no page table yet and have not ended
    # prompt positions given to a prefill chunk (or served by the prefix cache)
    num_prefilled: int = 0
    num_open: int = 0  # samples that have not ended
    tail_writer: Sequence | None = None  # who may append to the partial last prompt page
    salt: bytes = b""  # the prefix cache's salt when the prompt was admitted
    page_keys: list[bytes] | None = None  # of its full prompt pages under that salt

    @property
    def leader(self) -> Sequence:
        return self.sequences[0]


def banned_ids(group: LiveGroup, drawn: int) -> tuple[int, ...]:
    """Ids that must not be drawn behind `drawn` tokens of a response."""
    return group.stop_ids if drawn < group.request.min_tokens else ()


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
class Check:
    """Run the last token of a sample and the next ones of its draft, `ids` together, store their
    K/V in its pages, and draw behind each of them."""

    sequence: Sequence
    ids: list[int]


@dataclass(frozen=True)
class DrawnPosition:
    """The position where one token of a check is drawn: the sample, as it is once it has drawn the
    first `count` of `tokens`."""

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

    def banned_ids(self) -> tuple[int, ...]:
        return banned_ids(self.sequence.group, self.count)


def places_of(check: Check) -> list[DrawnPosition]:
    """Return the positions where a check's tokens are drawn, in order."""
    first = len(check.sequence.token_ids)
    tokens = check.sequence.token_ids + check.ids[1:]
    return [DrawnPosition(check.sequence, tokens, first + i) for i in range(len(check.ids))]


@dataclass(frozen=True)
class Compaction:
    """A compaction: of the `cached` keys in `pages` the policy keeps `kept`, which move to
    `targets`.

    No target is shared or can be served again. Those that are among `pages`, and then of no other
    compaction's, come first, and stand in `pages` one behind the other: what stays can move in
    place (`kernels.compact.move`).
    """

    slot: int  # of the sample or prompt, in the policy's state
    pages: list[int]
    targets: list[int]
    cached: int
    kept: int
    position: int  # of the last key


@dataclass(frozen=True)
class StepPlan:
    """One step's work, in the order in which it is done.

    No page is both a source and a target of `copies`. The decode rows take up to `steps` steps
    before the next plan, each at most its number in `limits`: it has the pages for that, and what
    is drawn for it behind that means nothing. The passes over prompts run one after the other;
    checks run in the first, beside its prompts or alone.
    """

    compactions: list[Compaction]
    forks: list[tuple[int, int]]  # slots (source, target) whose policy state is copied
    copies: list[tuple[int, int]]  # pages (source, target)
    decodes: list[Sequence]
    steps: int
    limits: list[int]
    begun: list[int]  # slots in which a prompt begins
    passes: list[list[PrefillChunk]]
    checks: list[Check]  # of drafts

    @property
    def prefills(self) -> list[PrefillChunk]:
        """The chunks of all passes, in their order."""
        return [chunk for chunks in self.passes for chunk in chunks]
