"""What a pool asks of an engine at an address beside rollouts: is it well, does it get on, which
policy does it draw from, and would it take another.

`OwnPeer` is a server of lowroll's; `vllm_peer` has a vLLM.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from lowroll.engine.base import InFlight
from lowroll.engine.remote import own
from lowroll.engine.remote.engine import Dialect
from lowroll.engine.remote.wire import Call, ServerError, Wire
from lowroll.types import BehaviorTag, printable

CONTROL_S = 10.0  # until a control route that does little has answered
_GAUGE = re.compile(r"^lowroll_(requests_open|drawn_tokens)(?:_total)? (\S+)$", re.MULTILINE)

_REPLAYED = re.compile(
    r"^lowroll_(replayed_samples|replayed_tokens|replay_kept_tokens)(?:_total)? (\S+)$",
    re.MULTILINE,
)


class Published(Protocol):
    """A published policy (`transport.broadcasts.Broadcast`)."""

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
class Held:
    """The policy that an engine says it draws from. digests: of its weights, in its format; those
    for few and for many rows may differ."""

    version: int
    digests: frozenset[str]

    @classmethod
    def of(cls, behavior: BehaviorTag) -> Held:
        newest = behavior.policy[-1].version
        return cls(newest, frozenset(s.digest for s in behavior.policy if s.version == newest))


@dataclass(frozen=True)
class Progress:
    """Counters of an engine."""

    open: int  # requests that it has taken and not answered
    tokens: int  # drawn since it began


class Peer(Protocol):
    """An engine that has been met. ServerError for an answer that is none."""

    dialect: Dialect
    in_flight: bool  # requests go on while it takes weights
    scores: bool  # it says log-probs of a prompt

    @property
    def held(self) -> Held | None:
        """What it said when it was met; None when it does not say."""
        ...

    async def health(self, deadline_s: float) -> str:
        """What its own loop says: "running", "paused", "draining"."""
        ...

    async def progress(self, deadline_s: float) -> Progress: ...

    async def take(self, broadcast: Published, deadline_s: float, in_use: Set[str]) -> Held:
        """Have it draw from a broadcast; returns what it acknowledges. in_use: names of models that
        requests in flight were sent to."""
        ...

    async def resume(self) -> None:
        """It draws again, when somebody has paused it."""
        ...


class OwnPeer:
    """A server of lowroll's. admin: its admin's token; without one it takes no weights and is never
    paused. what: becomes of requests in flight at an update."""

    in_flight = True

    def __init__(
        self, wire: Wire, dialect: own.OwnDialect, admin: str | None, what: InFlight = "keep"
    ) -> None:
        self.what = what
        self.wire = wire
        self.dialect: Dialect = dialect
        self.admin = admin
        self.scores = dialect.capabilities.scores and dialect.capabilities.vocab_size is not None

    @property
    def held(self) -> Held:
        return Held.of(self.dialect.behavior)

    async def health(self, deadline_s: float) -> str:
        call = Call("GET", "/health", "its health", deadline_s=deadline_s)
        answer = await self.wire.answer(call)
        return str(answer.get("status")) if isinstance(answer, dict) else ""

    async def progress(self, deadline_s: float) -> Progress:
        call = Call("GET", "/metrics", "its metrics", deadline_s=deadline_s, text=True)
        found = {n: float(v) for n, v in _GAUGE.findall(await self.wire.answer(call))}
        return Progress(int(found.get("requests_open", 0)), int(found.get("drawn_tokens", 0)))

    async def replays(self, deadline_s: float) -> tuple[int, int, int]:
        """(samples, tokens that they had drawn, those of them that stood), since it began."""
        call = Call("GET", "/metrics", "its metrics", deadline_s=deadline_s, text=True)
        found = {n: float(v) for n, v in _REPLAYED.findall(await self.wire.answer(call))}
        return (
            int(found.get("replayed_samples", 0)),
            int(found.get("replayed_tokens", 0)),
            int(found.get("replay_kept_tokens", 0)),
        )

    async def take(self, broadcast: Published, deadline_s: float, in_use: Set[str]) -> Held:
        name = broadcast.path.name
        what = f"taking {name}"
        body = {"version": name} | ({"in_flight": self.what} if self.what != "keep" else {})
        answer = await self.wire.answer(self._order("/weights", what, body, deadline_s))
        held = acknowledged(answer, what)
        read = answer.get("manifest_digest")
        if read != broadcast.digest and read != broadcast.lies():
            shown = printable(repr(read), 80)
            raise ServerError(f"{what}: it read {shown}, and {broadcast.digest} was published")
        return held

    async def resume(self) -> None:
        await self.wire.answer(self._order("/resume", "the end of its pause"))

    def _order(self, path: str, what: str, body: Any = None, deadline_s: float = CONTROL_S) -> Call:
        return Call("POST", path, what, body, deadline_s, token=self.admin)


def acknowledged(answer: Any, what: str) -> Held:
    """What an answer of POST /weights says. ServerError."""
    try:
        spans = [(int(span["version"]), str(span["digest"])) for span in answer["policy"]]
        newest = max(version for version, _ in spans)
    except (KeyError, TypeError, ValueError):
        shown = printable(repr(answer), 200)
        raise ServerError(f"{what}: no policy is acknowledged: {shown}") from None
    return Held(newest, frozenset(digest for version, digest in spans if version == newest))


async def meet(
    wire: Wire,
    *,
    admin: str | None,
    model: str | None,
    check_model: bool,
    deadline_s: float,
    folder: Path | None = None,
    in_flight: InFlight = "keep",
) -> Peer:
    """Who answers there. model: that it must serve, unless `check_model` is off: then whatever it
    serves is taken. folder: of a vLLM's model, where its own name of it does not lead there.
    ServerError; ValueError names what does not fit."""
    call = Call("GET", "/v1/models", own.WHAT, deadline_s=deadline_s)
    answer = await wire.answer(call)
    wanted = model if check_model else None
    if _is_vllm(answer):
        from lowroll.engine.remote.vllm_peer import VllmPeer

        return await VllmPeer.meet(wire, wanted, folder, deadline_s)
    return OwnPeer(wire, own.read(answer, wire.url, wanted), admin, in_flight)


def facts(peer: Peer) -> Mapping[str, Any]:
    """In what all engines of a pool must agree, by what people call it."""
    able, behavior = peer.dialect.capabilities, peer.dialect.behavior
    return {
        "kind of server": type(peer).__name__.removesuffix("Peer").lower(),
        "vocabulary": able.vocab_size or peer.dialect.vocab_size,
        "context length": able.context_length,
        "weights": behavior.weights,
        "KV policy": able.kv,
        "KV dtype": able.kv_dtype,
        "sampler": sorted(able.sampler),
        "exact log-probs": able.exact_logprobs,
        "recorded evictions": able.records_evictions,
    }


def _is_vllm(answer: Any) -> bool:
    try:
        return bool(answer["data"][0]["owned_by"] == "vllm")
    except (KeyError, IndexError, TypeError):
        return False
