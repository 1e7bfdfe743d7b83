"""The interface of a rollout engine, in this process (`engine.native`) or on a server
(`engine.remote`). It includes `orchestrator.interfaces.EngineClient`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from lowroll.kv.policy.base import CachePolicy
from lowroll.kv.policy.dense import DENSE
from lowroll.types import BehaviorTag, FinishReason, Group, Request

if TYPE_CHECKING:
    from torch import Tensor

    from lowroll.model.transformer import Transformer
    from lowroll.quant.formats import QTensor
    from lowroll.weights.sync.base import Kind
    from lowroll.weights.sync.update import WeightUpdate


# The fate of samples in flight when the weights change or the cache is freed. "keep": they
# continue with their older tokens and keys. "replay": they begin again with the same noise and
# their tokens as drafts (`engine.draft_replay`), and become what the newest weights would have
# drawn.
InFlight = Literal["keep", "replay"]


@dataclass(frozen=True)
class Capabilities:
    context_length: int  # most tokens of a prompt with its response
    updates: frozenset[Kind]  # kinds of weight update that it takes as a stream
    updates_in_flight: bool  # takes new weights while requests run
    noise: bool  # an update may put noise on the norms
    scores: bool
    exact_logprobs: bool  # of the distribution after top-k, top-p and penalties
    sampler: frozenset[str]  # respected fields of `Request`
    kv: CachePolicy = DENSE
    kv_dtype: str | None = None  # None: the model's
    records_evictions: bool = False
    replays: bool = False  # supports "replay" (`InFlight`)
    vocab_size: int | None = None  # number of logits; None: unknown
    lora_rank: int | None = None  # largest rank of an adapter; 0: no adapters; None: unknown

    @property
    def kv_policy(self) -> str:
        return self.kv.name


@dataclass(frozen=True)
class EngineStats:
    weights: str  # format of the linear weights
    weight_bits: float  # bits of one weight, with the scales of its group
    cache_tokens: int  # capacity of the KV cache
    cache_bytes: int = 0
    policy_bytes: int = 0  # of the cache policy and the record of evictions
    virtual_memory_bytes: int = 0  # of the cache, which torch does not count
    pages_peak: int = 0  # most pages ever held at once
    prefix_hits: int = 0  # pages that requests found in the cache
    running: int = 0  # samples that hold pages
    waiting: int = 0  # samples that wait for pages
    tokens: int = 0  # drawn since the start
    cache_used: int = 0  # tokens in pages that requests hold
    replays: int = 0  # samples whose drafts ended or changed
    replayed_tokens: int = 0  # in those drafts
    kept_tokens: int = 0  # in front of the first change


@dataclass(frozen=True)
class PartialSample:
    """The drawn tokens of one sample. The lists grow: read them before the next `step`."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: FinishReason | None  # None while it runs
    top_logprobs: Sequence[list[tuple[int, float]]] | None = None
    stop_reason: int | str | None = None  # stop id or stop string


@dataclass(frozen=True)
class Ranked:
    """The log-probs of a response of T tokens, and the K likeliest tokens at each position,
    likeliest first, the lower id first among equals. On the CPU, float32 and int64."""

    logprobs_T: Tensor
    top_ids_TK: Tensor
    top_logprobs_TK: Tensor


class Engine(Protocol):
    """An engine, used by one thread, whose rollouts have its own log-probs."""

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def behavior(self) -> BehaviorTag:
        """Return the tag of the policy that draws the next token."""
        ...

    def stats(self) -> EngineStats: ...

    def add(self, request: Request) -> int:
        """Queue a request and return its handle. ValueError names the wrong field."""
        ...

    def step(self, meanwhile: Callable[[], None] = lambda: None) -> list[tuple[int, Group]]:
        """Run one step, and return the ended requests, by handle. meanwhile: called at most once,
        instead of a wait."""
        ...

    def so_far(self, handle: int) -> list[PartialSample]:
        """Return what each sample of a request has drawn, in sample order; [] once `step` has
        returned its group. Samples only grow, except that a replay takes back tokens that it has
        not verified. ValueError for an unknown handle."""
        ...

    def abort(self, handle: int) -> bool:
        """End a request now; `step` returns its group with finish reason "abort". Return False if
        it had ended."""
        ...

    def generate(
        self, requests: list[Request], on_progress: Callable[[int, int], None] | None = None
    ) -> list[Group]:
        """Return the groups of all requests, in their order. An exception in on_progress(done,
        total) ends the call. ValueError names the request and the field."""
        ...

    def score(
        self,
        sequences: Sequence[list[int]],
        prompt_lens: Sequence[int],
        temperature: float = 1.0,
    ) -> list[Tensor]:
        """Return the log-probs of each response with the engine's weights and kernels, under a
        dense, unrounded cache: nats, float32 [response tokens] on the CPU. ValueError names a
        sequence that does not fit."""
        ...

    def score_top(
        self,
        sequences: Sequence[list[int]],
        prompt_lens: Sequence[int],
        top: int,
        temperature: float = 1.0,
    ) -> list[Ranked]:
        """Score, with the `top` likeliest tokens at each position."""
        ...

    def update_weights(self, update: WeightUpdate, in_flight: InFlight = "keep") -> BehaviorTag:
        """Take new weights between two steps and return the new `behavior`. ValueError, before
        anything is written, names what does not fit."""
        ...

    def linear_weights(self) -> Mapping[str, QTensor]:
        """Return the linear weights by name, for reading only: updates refill their storages. Empty
        for an engine in another process."""
        ...

    def first_difference(self, master: Transformer, block: int) -> str | None:
        """Return the first tensor of a block that differs from what the learner `master` would
        publish, or None. An engine in another process returns None."""
        ...

    def reset_prefix_cache(self) -> None:
        """Forget the pages of shared prompts: later requests have the bits of a fresh engine."""
        ...

    def warm_up(self) -> None:
        """Compile and capture steps of all sizes without filters and penalties, which takes seconds
        on CUDA. Does nothing for an engine in another process."""
        ...

    def release(self, in_flight: InFlight = "keep") -> None:
        """Free the KV cache until the next step, from which requests in flight are replayed.
        RuntimeError for requests in flight with "keep"."""
        ...

    def close(self) -> None:
        """Free processes, connections and files. Call no other method afterwards. Idempotent."""
        ...


def replayed(before: EngineStats, after: EngineStats) -> dict[str, float]:
    """Return the metrics of the replays between two `stats`; {} for none."""
    samples = after.replays - before.replays
    if samples <= 0:  # a restarted engine counts from zero
        return {}
    tokens = after.replayed_tokens - before.replayed_tokens
    kept_tokens = after.kept_tokens - before.kept_tokens
    return {
        "rollout/replay_samples": float(samples),
        "rollout/replay_kept_mean": kept_tokens / samples,
        "rollout/replay_kept_fraction": kept_tokens / tokens,
        "rollout/replay_redrawn_tokens": float(tokens - kept_tokens),
    }
