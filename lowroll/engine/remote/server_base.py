"""The interface of a server for a pool, beside rollouts: its health, its progress, the policy that
it draws from, and taking another. `lowroll_server` and `vllm_server` implement it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from lowroll.engine.base import Capabilities, EngineStats
from lowroll.engine.remote.protocol import ArrivingSample
from lowroll.engine.request import validate
from lowroll.types import BehaviorTag, Evictions, Request

CONTROL_S = 10.0  # until a control route that does little has answered


class Dialect(Protocol):
    """The request and answer formats of one kind of server."""

    capabilities: Capabilities
    behavior: BehaviorTag  # of the next request
    model: str  # the name that the next request asks for
    vocab_size: int

    def check(self, request: Request) -> None:
        """Check a request. ValueError names a field that this server does not support."""
        ...

    def stop_ids(self, request: Request) -> list[int] | None:
        """Tokens that end a response of the request, the model's own among them; None where the
        server alone knows."""
        ...

    def body(self, request: Request) -> dict[str, Any]: ...

    def scoring(self, ids: Sequence[int], top: int, temperature: float) -> dict[str, Any]:
        """Return the request body for a prompt's log-probs. ValueError for what the server cannot
        score."""
        ...

    def tag(
        self, request: Request, behavior: BehaviorTag, index: int, one: ArrivingSample
    ) -> BehaviorTag:
        """Return the policy that a sample was drawn from. ServerError when the server does not say."""
        ...

    def evictions(self, one: ArrivingSample) -> Evictions | None:
        """Return the keys that the cache behind a sample dropped, where that is recorded."""
        ...

    def stats(self, metrics: str) -> EngineStats:
        """Parse a page of its /metrics."""
        ...


class Published(Protocol):
    """A published policy (`weights.sync.base.Broadcast`)."""

    @property
    def version(self) -> int: ...
    @property
    def path(self) -> Path: ...
    @property
    def kind(self) -> str: ...
    @property
    def digest(self) -> str: ...
    def lies(self) -> str: ...


@dataclass(frozen=True)
class HeldPolicy:
    """The policy that an engine says it draws from. digests: of its weights, in its format; those
    for few and for many rows may differ."""

    version: int
    digests: frozenset[str]

    @classmethod
    def of(cls, behavior: BehaviorTag) -> HeldPolicy:
        newest = behavior.policy[-1].version
        return cls(newest, frozenset(s.digest for s in behavior.policy if s.version == newest))


@dataclass(frozen=True)
class ServerProgress:
    """Counters of an engine."""

    open: int  # requests that it has taken and not answered
    tokens: int  # drawn since it began


@dataclass(frozen=True)
class ServedName:
    """The model behind an address: its name there, and the folder or hub id that it is told to
    be."""

    name: str
    root: str


class EngineServer(Protocol):
    """The client of one engine's server. Its methods raise ServerError for a bad answer."""

    dialect: Dialect
    served: ServedName
    in_flight: bool  # requests go on while it takes weights
    scores: bool  # it says log-probs of a prompt

    @property
    def held(self) -> HeldPolicy | None:
        """Return the policy that it stated when it was met; None when it states none."""
        ...

    async def health(self, deadline_s: float) -> str:
        """Return the state of its loop: "running", "paused", "draining"."""
        ...

    async def progress(self, deadline_s: float) -> ServerProgress: ...

    async def metrics(self, deadline_s: float) -> str:
        """Return a page of its /metrics, for `Dialect.stats`."""
        ...

    async def take(self, broadcast: Published, deadline_s: float, in_use: Set[str]) -> HeldPolicy:
        """Have it draw from a broadcast; returns what it acknowledges. in_use: names of models that
        requests in flight were sent to."""
        ...

    async def resume(self) -> None:
        """End a pause."""
        ...


def check_request(request: Request, dialect: Dialect, where: str = "") -> None:
    """Raise ValueError that names a field, after `where`, that a server does not support."""
    length = dialect.capabilities.context_length
    try:
        validate(
            request,
            vocab_size=dialect.vocab_size,
            context_length=length,
            cache_tokens=length,
            has_tokenizer="stop_strings" in dialect.capabilities.sampler,
        )
        dialect.check(request)
    except ValueError as error:
        raise ValueError(f"{where}{error}") from None


def facts(server: EngineServer) -> Mapping[str, Any]:
    """Return the facts on which all engines of a pool must agree, by the name that an error
    uses."""
    able, behavior = server.dialect.capabilities, server.dialect.behavior
    return {
        "kind of server": type(server).__name__.removesuffix("Server").lower(),
        "vocabulary": able.vocab_size or server.dialect.vocab_size,
        "context length": able.context_length,
        "weights": behavior.weights,
        "KV policy": able.kv,
        "KV dtype": able.kv_dtype,
        "sampler": sorted(able.sampler),
        "exact log-probs": able.exact_logprobs,
        "recorded evictions": able.records_evictions,
    }
