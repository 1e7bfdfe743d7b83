"""The client of one engine's server, which `lowroll_server` and `vllm.server` implement."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from lowroll.engine.base import Capabilities, EngineStats
from lowroll.engine.remote.http_client import HttpCall, HttpClient
from lowroll.engine.remote.protocol import ArrivingSample, tagged
from lowroll.engine.request import validate
from lowroll.types import BehaviorTag, Evictions, PolicySpan, Request
from lowroll.weights.sync.base import Broadcast

CONTROL_S = 10.0  # of a short control route


@dataclass(frozen=True)
class HeldPolicy:
    """The policy that an engine states. Weights for few and many rows may have two digests."""

    version: int
    digests: frozenset[str]

    @classmethod
    def newest_of(cls, spans: Sequence[PolicySpan]) -> HeldPolicy:
        newest = max(span.version for span in spans)
        return cls(newest, frozenset(span.digest for span in spans if span.version == newest))


@dataclass(frozen=True)
class ServerProgress:
    open: int  # taken and not answered
    tokens: int  # drawn since its start


class EngineServer(ABC):
    """The client of one engine's server. Its methods raise ServerError for a bad answer."""

    capabilities: Capabilities
    behavior: BehaviorTag  # of the next request
    model: str  # name for the next request
    root: str  # stated folder or hub id of the model, else its name
    vocab_size: int
    weight_bits: float
    cache_tokens: int = 0  # of the KV cache, if known
    in_flight: bool = True
    scores: bool = True
    held: HeldPolicy | None = None  # stated at the start, if any

    def __init__(self, http: HttpClient) -> None:
        self.http = http

    # -- requests and answers ----------------------------------------------------------------------

    def check(self, request: Request, where: str = "") -> None:
        """Raise ValueError that names an unsupported field, after `where`."""
        length = self.capabilities.context_length
        try:
            validate(
                request,
                vocab_size=self.vocab_size,
                context_length=length,
                cache_tokens=length,
                has_tokenizer="stop_strings" in self.capabilities.sampler,
            )
            self.check_fields(request)
        except ValueError as error:
            raise ValueError(f"{where}{error}") from None

    @abstractmethod
    def check_fields(self, request: Request) -> None:
        """Raise ValueError that names a field that this kind of server does not support."""

    def stop_ids(self, request: Request) -> list[int] | None:
        """Return the tokens that end a response, the model's own included; None if unknown."""
        return None

    @abstractmethod
    def body(self, request: Request) -> dict[str, Any]: ...

    @abstractmethod
    def scoring(self, ids: Sequence[int], top: int, temperature: float) -> dict[str, Any]:
        """Return the request body for a prompt's log-probs. ValueError if it cannot score them."""

    def tag(
        self, request: Request, behavior: BehaviorTag, index: int, one: ArrivingSample
    ) -> BehaviorTag:
        """Return the policy that drew a sample: by default the one at the time of the request."""
        return tagged(behavior, request, index)

    def evictions(self, one: ArrivingSample) -> Evictions | None:
        return None

    @abstractmethod
    def stats(self, metrics: str) -> EngineStats:
        """Parse a page of its /metrics."""

    # -- the server --------------------------------------------------------------------------------

    @abstractmethod
    async def health(self, deadline_s: float) -> str:
        """Return the state of its loop: "running", "paused", "draining"."""

    @abstractmethod
    async def progress(self, deadline_s: float) -> ServerProgress: ...

    async def metrics(self, deadline_s: float) -> str:
        call = HttpCall("GET", "/metrics", "its metrics", deadline_s=deadline_s, text=True)
        return str(await self.http.answer(call))

    @abstractmethod
    async def take(self, broadcast: Broadcast, deadline_s: float, in_use: Set[str]) -> HeldPolicy:
        """Have the engine draw from a broadcast; return the policy that it acknowledges. in_use:
        models of requests in flight."""

    @abstractmethod
    async def resume(self) -> None: ...

    def facts(self) -> Mapping[str, Any]:
        """Return what all engines of a pool must agree on."""
        capabilities, behavior = self.capabilities, self.behavior
        return {
            "kind of server": type(self).__name__.removesuffix("Server").lower(),
            "vocabulary": capabilities.vocab_size or self.vocab_size,
            "context length": capabilities.context_length,
            "weights": behavior.weights,
            "KV policy": capabilities.kv,
            "KV dtype": capabilities.kv_dtype,
            "sampler": sorted(capabilities.sampler),
            "exact log-probs": capabilities.exact_logprobs,
            "recorded evictions": capabilities.records_evictions,
        }
