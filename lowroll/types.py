"""The types that the packages exchange. Standard library only.

A token id is an int, a log-prob a float in nats under the distribution that the token was drawn
from. Everything here is plain data: it survives `lowroll.transport.codec` byte for byte.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Literal

FinishReason = Literal["stop", "length", "abort"]
Message = dict[
    str, Any
]  # of a chat: {"role": ..., "content": ...}, and what a role has beside them
# why a conversation goes on no more: the environment said so, it has had its turns, a turn was cut,
# the whole sequence has no room for another, the environment failed, somebody gave it up
Ended = Literal["done", "turns", "length", "tokens", "error", "abort"]

# What the engine can be asked for; a configuration is held to it before anything is loaded.
MAX_SAMPLES = 1024  # of one prompt
TEMPERATURES = (1e-4, 1e4)  # beyond these, logits / temperature can leave float32
PENALTIES = (1e-2, 1e2)
COUNTED = (-2.0, 2.0)  # presence and frequency penalties, as OpenAI has them
BIASES = (-100.0, 100.0)
MAX_BIASES = 1024
HUB_NAME = r"^[\w.-]+/[\w.-]+$"  # of a model or data set of the hub, as a regular expression
MAX_TOP_LOGPROBS = 20  # likeliest tokens that are reported at one place


# a field that is left out of a message where it is None: what was written before it was there still
# reads, and what has no use for it keeps its bytes
OMITTED: dict[str, Any] = {"omitted": True}


class RunFailed(RuntimeError):
    """A run that cannot go on, for a reason that people can read and act on; commands show it as
    one line."""


def nearest(
    word: str, known: Iterable[str], show: Callable[[str], str] = str, cutoff: float = 0.6
) -> str:
    """Return " (did you mean x?)", x as `show` has it; "" when nothing is near."""
    found = get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return f" (did you mean {show(found[0])}?)" if found else ""


def printable(text: object, most: int = 500) -> str:
    """Return untrusted text (of a file, a model, an error about them) as one line for a terminal:
    what would steer the terminal is escaped, and of more than `most` characters the middle is left
    out."""
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))
    return line if len(line) <= most else f"{line[: most // 2]} ... {line[-most // 2 :]}"


@dataclass(frozen=True)
class Prompt:
    """One task of an environment. `info` is JSON data that the environment's scorer needs (the gold
    answer, ...)."""

    id: str  # stable and unique within its environment: seeds and ledgers use it
    env: str  # name of the environment that made it and will score it
    messages: list[Message]
    info: dict[str, Any] = field(default_factory=dict)

    def answered(self, text: str, said: list[Message] | None) -> str | list[Message]:
        """Return what a scorer is to judge of a response: its text, or all messages of a
        conversation, of which `said` has what came after the prompt."""
        return text if said is None else [*self.messages, *said]


@dataclass(frozen=True)
class Score:
    """A reward that was really computed. `metrics` are extra numbers to average in the log, `extra`
    is JSON data to be kept with the sample, by name."""

    reward: float
    metrics: dict[str, float] = field(default_factory=dict)
    extra: dict[str, Any] | None = field(default=None, metadata=OMITTED)


@dataclass(frozen=True)
class ScoreError:
    """The scorer could not score. It is never a reward of 0: the rollout leaves its group's
    statistics. `inapplicable` is no failure: nothing that scores says anything of this response;
    `metrics` and `extra` are what it reported beside, as of a Score."""

    kind: Literal["exception", "timeout", "memory", "crash", "invalid", "inapplicable"]
    message: str
    metrics: dict[str, float] | None = field(default=None, metadata=OMITTED)
    extra: dict[str, Any] | None = field(default=None, metadata=OMITTED)

    @property
    def failed(self) -> bool:
        """Return whether something went wrong."""
        return self.kind != "inapplicable"


@dataclass(frozen=True)
class Request:
    """A request to the engine for `n` rollouts of one prompt. Checked by `engine.request.validate`.

    The noise of sample i at position t depends on (seed, id, i, t) alone. `id` defaults to a digest
    of the prompt.
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
    top_logprobs: int = 0  # likeliest tokens to report at each place, of what is drawn from
    # (token id, what is added to its logit)
    logit_bias: tuple[tuple[int, float], ...] | None = field(default=None, metadata=OMITTED)
    # taken from the logit of a token that the response has, once or for each time that it stands there
    presence_penalty: float | None = field(default=None, metadata=OMITTED)
    frequency_penalty: float | None = field(default=None, metadata=OMITTED)
    # in llguidance's language: what the response must be (`engine.grammar`)
    grammar: str | None = field(default=None, metadata=OMITTED)
    # id of the request whose sequence this prompt goes on from: its engine may have the pages
    follows: str | None = field(default=None, metadata=OMITTED)


@dataclass(frozen=True)
class PolicySpan:
    """The policy version under which the tokens from `start` on were drawn."""

    version: int
    digest: str
    start: int = 0


@dataclass(frozen=True)
class BehaviorTag:
    """The policy that a rollout was really drawn from."""

    policy: tuple[PolicySpan, ...]  # at least one; several when weights changed in flight
    weights: str  # format of the linear weights: "int8", "bf16", ...
    kv_policy: str = "dense"
    kv_budget: int | None = None
    kv_dtype: str | None = None  # of the stored keys and values; None is the model's own
    noise_seed: int | None = None
    noise_sigma: float = 0.0
    sampler: dict[str, float] = field(default_factory=dict)  # temperature, top_k, top_p, ...
    seed: int | None = None  # with request_id and sample: the noise that the tokens were drawn with
    request_id: str = ""
    sample: int = 0

    @property
    def exact_kv(self) -> bool:
        """Return whether the cache behind it kept every key and value as it was made."""
        return self.kv_policy == "dense" and self.kv_dtype is None


@dataclass(frozen=True)
class Evictions:
    """The keys that a bounded cache dropped of one sample, by layer, KV head and position, and
    when: a learner that attends to the others only scores the policy that the sampler was
    (`model.replay`).

    Compaction i = 1, 2, ... took place when the query at position `after[i - 1]` had run: later
    queries do not see what it dropped. `numbers` has a number for each layer, head and position 0
    .. after[-1], the position changing fastest: i for a key that compaction i dropped, 0 for one
    that stayed; in a byte each, or two (little-endian) where there are more than 255 compactions;
    all of it compressed by zlib. Empty without compactions.
    """

    layers: int
    heads: int
    after: tuple[int, ...] = ()
    numbers: bytes = b""


@dataclass(frozen=True)
class Turn:
    """The tokens [start, end) of a conversation's rollout that were drawn in one turn. Turn i > 0
    of sample s was requested as "<request id>/s/i"."""

    start: int
    end: int
    finish_reason: FinishReason
    stop_reason: int | str | None = None  # the stop id or stop string that ended it


@dataclass
class Rollout:
    """One sampled response. `logprobs[t]` is of `token_ids[t]`; the end-of-sequence id, when drawn,
    is included. `evictions` is None where the engine did not record them. `top_logprobs`, where the
    request asked for them: at each place the likeliest tokens that could be drawn, with their
    log-probs, likeliest first and the lower id before an equal one.

    `turns`: of a conversation. Tokens between two turns are the environment's: their log-probs are
    0.0, and code that counts or learns passes over them. None: one turn, all of it drawn."""

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
        """1 for each token that was drawn, 0 for one of the environment."""
        if self.turns is None:
            return [1] * len(self.token_ids)
        mask = [0] * len(self.token_ids)
        for turn in self.turns:
            mask[turn.start : turn.end] = [1] * (turn.end - turn.start)
        return mask

    @property
    def turn_lengths(self) -> list[int]:
        """Tokens drawn in each turn."""
        if self.turns is None:
            return [len(self.token_ids)]
        return [turn.end - turn.start for turn in self.turns]

    @property
    def num_drawn(self) -> int:
        """Tokens that were drawn."""
        return sum(self.turn_lengths)

    @property
    def drawn_logprobs(self) -> list[float]:
        """Log-probs of the tokens that were drawn."""
        if self.turns is None:
            return self.logprobs
        return [p for turn in self.turns for p in self.logprobs[turn.start : turn.end]]


@dataclass
class Conversation:
    """The messages after a prompt, by turns, and why there are no more."""

    messages: list[Message] = field(default_factory=list)
    ended: Ended = "abort"
    error: ScoreError | None = None  # of the environment


@dataclass
class Group:
    """The rollouts of one request, in sample order; where they are conversations, what was said."""

    request: Request
    rollouts: list[Rollout]
    conversations: list[Conversation] | None = None


@dataclass
class Sample:
    """A scored rollout as the learner consumes it. `loss_mask` has one entry a response token."""

    prompt: Prompt
    prompt_ids: list[int]
    rollout: Rollout
    # the decoded response (of a conversation its last turn), for people and scorers; the learner
    # uses ids only
    text: str
    score: Score | ScoreError
    advantage: float = 0.0
    loss_mask: list[int] = field(default_factory=list)
    group: int = 0  # index of the group within the batch
    # shaped reward that entered the group's statistics; None after a ScoreError
    reward: float | None = None
    # where it was drawn at another temperature than the batch's
    temperature: float | None = field(default=None, metadata=OMITTED)
    # of a conversation: what was said after the prompt, and why no more
    messages: list[Message] | None = field(default=None, metadata=OMITTED)
    ended: str | None = field(default=None, metadata=OMITTED)  # one of `Ended`


@dataclass
class Batch:
    """The data of one training step: whole groups, in planned order. `orchestrator` is the
    orchestrator's state after this batch, JSON data, where it travels with it: a checkpoint of the
    learner then holds both halves of a run."""

    step: int
    samples: list[Sample]
    temperature: float  # sampling temperature: the learner divides its logits by it
    stats: dict[str, float] = field(default_factory=dict)  # the orchestrator's numbers of this step
    orchestrator: dict[str, Any] | None = field(default=None, metadata=OMITTED)


@dataclass(frozen=True)
class MicroBatch:
    """Indices of a batch's samples that are packed into one forward pass, and their token count."""

    indices: tuple[int, ...]
    num_tokens: int
