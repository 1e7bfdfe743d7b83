"""The types that the packages exchange. Standard library only.

A token id is an int, a log-prob a float in nats under the distribution that the token was drawn
from. Every type survives `lowroll.transport.codec` byte for byte.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Literal

FinishReason = Literal["stop", "length", "abort"]
Message = dict[str, Any]  # of a chat: {"role": ..., "content": ..., and further keys by role}
# done: by the environment; turns: their limit; length: a turn was cut; tokens: no room for another
# turn; error: the environment failed; abort: given up
Ended = Literal["done", "turns", "length", "tokens", "error", "abort"]

# The limits of a request, which a configuration must also keep.
MAX_SAMPLES = 1024  # of one prompt
TEMPERATURES = (1e-4, 1e4)  # beyond these, logits / temperature can leave float32
PENALTIES = (1e-2, 1e2)
COUNTED = (-2.0, 2.0)  # presence and frequency penalties, as OpenAI has them
BIASES = (-100.0, 100.0)
MAX_BIASES = 1024
HUB_NAME = r"^[\w.-]+/[\w.-]+$"  # of a model or data set, as a regular expression
MAX_TOP_LOGPROBS = 20  # likeliest tokens reported at one position


# A field that a message omits where it is None, so that older messages stay readable.
OMITTED: dict[str, Any] = {"omitted": True}


class RunFailed(RuntimeError):
    """A failure of a run that its user can act on; commands show it as one line."""


def nearest(
    word: str, known: Iterable[str], show: Callable[[str], str] = str, cutoff: float = 0.6
) -> str:
    """Return " (did you mean x?)" with `show(x)`, or "" when nothing is near."""
    found = get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return f" (did you mean {show(found[0])}?)" if found else ""


def printable(text: object, most: int = 500) -> str:
    """Return untrusted text as one line for a terminal, with control characters escaped and the
    middle of a long text left out."""
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))
    return line if len(line) <= most else f"{line[: most // 2]} ... {line[-most // 2 :]}"


@dataclass(frozen=True)
class Prompt:
    """One task of an environment. `info` is its scorer's JSON data, such as the gold answer."""

    id: str  # stable and unique within its environment: seeds and ledgers use it
    env: str  # of the environment that made it
    messages: list[Message]
    info: dict[str, Any] = field(default_factory=dict)

    def answered(self, text: str, said: list[Message] | None) -> str | list[Message]:
        """Return the text, or all messages of a conversation, for a scorer."""
        return text if said is None else [*self.messages, *said]


@dataclass(frozen=True)
class Score:
    """A computed reward. `metrics` are averaged in the log; `extra` is JSON data for the record."""

    reward: float
    metrics: dict[str, float] = field(default_factory=dict)
    extra: dict[str, Any] | None = field(default=None, metadata=OMITTED)


@dataclass(frozen=True)
class ScoreError:
    """A failure to score. It is never a reward of 0: the rollout leaves its group's statistics.
    `inapplicable` is no failure: no scorer applies to this response."""

    kind: Literal["exception", "timeout", "memory", "crash", "invalid", "inapplicable"]
    message: str
    metrics: dict[str, float] | None = field(default=None, metadata=OMITTED)
    extra: dict[str, Any] | None = field(default=None, metadata=OMITTED)

    @property
    def failed(self) -> bool:
        return self.kind != "inapplicable"


@dataclass(frozen=True)
class Request:
    """A request for `n` rollouts of one prompt, checked by `engine.request.validate`.

    The noise of sample i at position t depends on (seed, id, i, t) alone. An empty `id` becomes the
    prompt's digest.
    """

    prompt_ids: list[int]
    n: int = 1
    max_tokens: int = 64
    min_tokens: int = 0
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 is off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop_ids: tuple[int, ...] = ()  # beside the model's end-of-sequence ids
    stop_strings: tuple[str, ...] = ()
    ignore_eos: bool = False
    seed: int = 0
    id: str = ""
    top_logprobs: int = 0  # likeliest tokens to report at each position
    # (token id, addition to its logit)
    logit_bias: tuple[tuple[int, float], ...] | None = field(default=None, metadata=OMITTED)
    # subtracted from the logit of a token in the response: once, or once for each occurrence
    presence_penalty: float | None = field(default=None, metadata=OMITTED)
    frequency_penalty: float | None = field(default=None, metadata=OMITTED)
    # what the response must be, in llguidance's language (`engine.grammar`)
    grammar: str | None = field(default=None, metadata=OMITTED)
    # id of the request that this prompt continues: its engine may have the pages
    follows: str | None = field(default=None, metadata=OMITTED)


@dataclass(frozen=True)
class PolicySpan:
    """The policy that drew the tokens from `start` on."""

    version: int
    digest: str
    start: int = 0


@dataclass(frozen=True)
class BehaviorTag:
    """The policy that a rollout was drawn from."""

    policy: tuple[PolicySpan, ...]  # at least one; several after updates in flight
    weights: str  # format of the linear weights: "int8", "bf16", ...
    kv_policy: str = "dense"
    kv_budget: int | None = None
    kv_dtype: str | None = None  # of stored keys and values; None: the model's dtype
    noise_seed: int | None = None
    noise_sigma: float = 0.0
    sampler: dict[str, float] = field(default_factory=dict)  # temperature, top_k, top_p, ...
    seed: int | None = None  # determines the tokens' noise, with request_id and sample
    request_id: str = ""
    sample: int = 0

    @property
    def exact_kv(self) -> bool:
        """Return whether the cache kept every key and value unchanged."""
        return self.kv_policy == "dense" and self.kv_dtype is None


@dataclass(frozen=True)
class Evictions:
    """The keys that a bounded cache dropped of one sample, for a learner that scores the sampler's
    policy (`model.evicted_attention`).

    Compaction i = 1, 2, ... ran after the query at position `after[i - 1]`; later queries do not
    see what it dropped. `numbers` has shape [layers, heads, after[-1] + 1]: i for a key that
    compaction i dropped, 0 for one that stayed. An entry is one byte, or two (little-endian) with
    more than 255 compactions, compressed by zlib. Empty without compactions.
    """

    layers: int
    heads: int
    after: tuple[int, ...] = ()
    numbers: bytes = b""


@dataclass(frozen=True)
class Turn:
    """The drawn tokens [start, end) of one turn in a conversation's rollout. Turn i > 0 of sample s
    was requested as "<request id>/s/i"."""

    start: int
    end: int
    finish_reason: FinishReason
    stop_reason: int | str | None = None  # the stop id or stop string that ended it


@dataclass
class Rollout:
    """One sampled response. `logprobs[t]` is of `token_ids[t]`; a drawn end-of-sequence id is
    included. `evictions` is None where the engine did not record them. `top_logprobs`, if
    requested, has at each position the likeliest tokens that could be drawn with their log-probs,
    likeliest first and ties by the lower id.

    `turns` are a conversation's, else None. Tokens between them are the environment's, with
    log-probs of 0.0; they are neither counted nor learned.
    """

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    behavior: BehaviorTag
    stop_reason: int | str | None = None  # the stop id or stop string that ended it
    evictions: Evictions | None = field(default=None, metadata=OMITTED)
    top_logprobs: list[list[tuple[int, float]]] | None = field(default=None, metadata=OMITTED)
    turns: tuple[Turn, ...] | None = field(default=None, metadata=OMITTED)

    @property
    def drawn(self) -> list[int]:
        """Return 1 for each drawn token and 0 for the environment's."""
        if self.turns is None:
            return [1] * len(self.token_ids)
        mask = [0] * len(self.token_ids)
        for turn in self.turns:
            mask[turn.start : turn.end] = [1] * (turn.end - turn.start)
        return mask

    @property
    def turn_lengths(self) -> list[int]:
        if self.turns is None:
            return [len(self.token_ids)]
        return [turn.end - turn.start for turn in self.turns]

    @property
    def num_drawn(self) -> int:
        return sum(self.turn_lengths)

    @property
    def drawn_logprobs(self) -> list[float]:
        if self.turns is None:
            return self.logprobs
        return [p for turn in self.turns for p in self.logprobs[turn.start : turn.end]]


@dataclass
class Conversation:
    """The messages after a prompt, and why the conversation ended."""

    messages: list[Message] = field(default_factory=list)
    ended: Ended = "abort"
    error: ScoreError | None = None  # of the environment


@dataclass
class Group:
    """The rollouts of one request, in sample order."""

    request: Request
    rollouts: list[Rollout]
    conversations: list[Conversation] | None = None


@dataclass
class Sample:
    """A scored rollout for the learner. `loss_mask` is by response token."""

    prompt: Prompt
    prompt_ids: list[int]
    rollout: Rollout
    # the decoded response (of a conversation its last turn) for scorers; the learner reads ids only
    text: str
    score: Score | ScoreError
    advantage: float = 0.0
    loss_mask: list[int] = field(default_factory=list)
    group: int = 0  # index of the group within the batch
    # the shaped reward in the group's statistics; None after a ScoreError
    reward: float | None = None
    # of its sampling, where it differs from the batch's
    temperature: float | None = field(default=None, metadata=OMITTED)
    # of a conversation, after the prompt
    messages: list[Message] | None = field(default=None, metadata=OMITTED)
    ended: str | None = field(default=None, metadata=OMITTED)  # one of `Ended`


@dataclass
class Batch:
    """The data of one training step: whole groups, in planned order. `orchestrator` is its JSON
    state after this batch, for the learner's checkpoint."""

    step: int
    samples: list[Sample]
    temperature: float  # of sampling; the learner divides its logits by it
    stats: dict[str, float] = field(default_factory=dict)  # the orchestrator's metrics
    orchestrator: dict[str, Any] | None = field(default=None, metadata=OMITTED)


@dataclass(frozen=True)
class MicroBatch:
    """Indices of the samples in one forward pass, and their token count."""

    indices: tuple[int, ...]
    num_tokens: int
