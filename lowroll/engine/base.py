"""The interface of a rollout engine, in this process or on a server.

Runs, evaluation and diagnosis know `Engine` and nothing behind it: what it can do is said by
`capabilities`, what it holds and has done by `stats()`, and which policy it draws from by
`behavior`. Implementations: `engine.native`, `engine.remote`. The orchestrator, which may not
import this package, needs less (`orchestrator.client.EngineClient`), and every `Engine` is one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from lowroll.kv.policy.base import CachePolicy
from lowroll.kv.policy.dense import DENSE
from lowroll.types import BehaviorTag, FinishReason, Group, Request

if TYPE_CHECKING:
    from torch import Tensor

    from lowroll.quant.formats import QTensor
    from lowroll.weights.sync.base import Kind
    from lowroll.weights.sync.update import WeightUpdate


# What becomes of the samples in flight when the weights change, or the cache goes. "keep": they go
# on, their older tokens and keys stay, and their spans say who drew what. "replay": they begin again
# with the same noise and what they have drawn as a guess (`engine.drafts`); what comes out is what
# the newest weights would have drawn from the start
InFlight = Literal["keep", "replay"]


@dataclass(frozen=True)
class Capabilities:
    """The features that an engine supports, known before the first request."""

    context_length: int  # tokens of a prompt and its response
    updates: frozenset[Kind]  # kinds of weight update that it takes as a stream
    updates_in_flight: bool  # new weights while requests run; their spans say which token is whose
    noise: bool  # an update may put noise on the norms
    scores: bool  # `score`: log-probs of given tokens under its own weights and kernels
    exact_logprobs: bool  # of the distribution that was drawn from, after top-k, top-p, penalties
    sampler: frozenset[str]  # fields of `Request` that it respects
    kv: CachePolicy = DENSE  # which keys a sample's cache keeps, by arithmetic
    kv_dtype: str | None = None  # of the stored keys and values; None is the model's own
    records_evictions: bool = False  # its rollouts say what a bounded cache dropped
    replays: bool = False  # it can begin what is in flight again under new weights (`InFlight`)
    vocab_size: int | None = None  # logits of a token; None where it is not told
    lora_rank: int | None = None  # of adapters at most; 0: it takes none; None: it is not told

    @property
    def kv_policy(self) -> str:
        """The name of its cache policy."""
        return self.kv.name


@dataclass(frozen=True)
class EngineStats:
    """The figures that a report shows of an engine."""

    weights: str  # format of the linear weights
    weight_bits: float  # bits of one of them, with the scales of its group
    cache_tokens: int  # that the KV cache holds
    cache_bytes: int = 0
    policy_bytes: int = 0  # beside the cache: of its policy's state, and of what records evictions
    virtual_memory_bytes: int = 0  # of the cache, in device memory that torch does not count
    pages_peak: int = 0  # most pages of the cache ever held at once
    prefix_hits: int = 0  # pages that a request found in the cache
    running: int = 0  # samples that hold pages
    waiting: int = 0  # samples that wait for pages
    tokens: int = 0  # drawn since the engine was made
    cache_used: int = 0  # tokens of the cache in pages that requests hold
    replays: int = 0  # samples that were replayed to the end of what they had drawn, or to a change
    replayed_tokens: int = 0  # that they had drawn
    kept_tokens: int = (
        0  # of those: the ones that the newer weights draw too, up to the first change
    )


@dataclass(frozen=True)
class PartialSample:
    """The tokens that one sample of a request has drawn so far. The lists are the engine's own and
    grow: read them before the next `step`."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: FinishReason | None  # None while it goes on
    top_logprobs: Sequence[list[tuple[int, float]]] | None = None  # where the request has them
    stop_reason: int | str | None = None  # the stop id or stop string that ended it


@dataclass(frozen=True)
class Ranked:
    """Log-probs of a response of T tokens, and the K likeliest tokens at each of its places, likeliest
    first and the lower id before an equal one. On the CPU, in float32 and int64."""

    logprobs_T: Tensor
    top_ids_TK: Tensor
    top_logprobs_TK: Tensor


class Engine(Protocol):
    """Requests in, rollouts with their own log-probs out. One thread calls everything."""

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def behavior(self) -> BehaviorTag:
        """The policy that the next token is drawn from."""
        ...

    def stats(self) -> EngineStats: ...

    def add(self, request: Request) -> int:
        """Queue a request; returns its handle. ValueError names the wrong field."""
        ...

    def step(self, meanwhile: Callable[[], None] = lambda: None) -> list[tuple[int, Group]]:
        """One step for everything in flight. Returns the requests that ended, by handle. meanwhile:
        what this thread may do while it would wait, called at most once."""
        ...

    def so_far(self, handle: int) -> list[PartialSample]:
        """Return what each sample of a request has drawn so far, in sample order; [] once `step`
        has returned its group. Samples only grow, except that a replay takes back what it has not
        checked yet. ValueError for a handle that `add` never returned."""
        ...

    def abort(self, handle: int) -> bool:
        """End a request now; its group comes back with finish reason "abort". False if it had
        ended."""
        ...

    def generate(
        self, requests: list[Request], on_progress: Callable[[int, int], None] | None = None
    ) -> list[Group]:
        """The groups of all requests, in their order. on_progress(done, total) counts them; what it
        raises ends the call. ValueError names the request and the field."""
        ...

    def score(
        self,
        sequences: Sequence[list[int]],
        prompt_lens: Sequence[int],
        temperature: float = 1.0,
    ) -> list[Tensor]:
        """Log-probs of each sequence's response under a cache that forgets and rounds nothing,
        whatever the engine's own: weights and kernels are the engine's. In nats, [response tokens]
        in float32 on the CPU. ValueError names a sequence that does not fit."""
        ...

    def score_top(
        self,
        sequences: Sequence[list[int]],
        prompt_lens: Sequence[int],
        top: int,
        temperature: float = 1.0,
    ) -> list[Ranked]:
        """Return the results of `score` with the `top` likeliest tokens at each position.
        ValueError names a sequence that does not fit, or `top`."""
        ...

    def update_weights(self, update: WeightUpdate, in_flight: InFlight = "keep") -> BehaviorTag:
        """Take new weights between two steps; what is in flight goes on under them, or is replayed.
        Returns the new `behavior`. ValueError, before anything is written, names what does not
        fit."""
        ...

    def linear_weights(self) -> Mapping[str, QTensor]:
        """The linear weights that it multiplies with, by name, to be read: their storages are
        refilled by every update. Empty when they lie in another process."""
        ...

    def reset_prefix_cache(self) -> None:
        """Forget the pages of shared prompts: what comes next has the bits of a fresh engine."""
        ...

    def release(self, in_flight: InFlight = "keep") -> None:
        """Give the memory of the KV cache away until the next step. Requests in flight are replayed
        from there on, or, as they cannot be kept, a RuntimeError."""
        ...

    def close(self) -> None:
        """Give back what it holds outside of this object: processes, connections, files. Nothing
        else may be called then. Idempotent."""
        ...


def replayed(before: EngineStats, after: EngineStats) -> dict[str, float]:
    """The metrics of the replays between two looks at one engine; {} when there were none."""
    samples = after.replays - before.replays
    if samples <= 0:  # fewer than before: an engine that was started again counts anew
        return {}
    tokens = after.replayed_tokens - before.replayed_tokens
    kept = after.kept_tokens - before.kept_tokens
    return {
        "rollout/replay_samples": float(samples),
        "rollout/replay_kept_mean": kept / samples,
        "rollout/replay_kept_fraction": kept / tokens,
        "rollout/replay_redrawn_tokens": float(tokens - kept),
    }
