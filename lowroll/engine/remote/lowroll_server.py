"""A client of lowroll's own server. The server supports what the engine behind it supports, draws
the same noise for the same id and seed, and says of each sample which policy it was drawn from."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Sequence, Set
from dataclasses import dataclass, fields
from typing import Any

from lowroll.engine.base import Capabilities, EngineStats, InFlight
from lowroll.engine.remote.http_client import HttpCall, HttpClient, ServerError
from lowroll.engine.remote.protocol import ArrivingSample, body_of, tagged
from lowroll.engine.remote.server_base import (
    CONTROL_S,
    Dialect,
    HeldPolicy,
    Published,
    ServedName,
    ServerProgress,
)
from lowroll.kv.policy.base import CachePolicy
from lowroll.kv.policy.dense import DENSE
from lowroll.kv.policy.table import make
from lowroll.types import BehaviorTag, Evictions, PolicySpan, Request, printable

ANY_ID = 2**31  # where a server does not tell: it refuses what lies outside
WHAT = "the list of models"
_GAUGE = re.compile(r"^lowroll_(\w+?)(?:_total)? (\S+)$", re.MULTILINE)


@dataclass
class LowrollDialect:
    """The capabilities and the policy that a lowroll server states."""

    capabilities: Capabilities
    behavior: BehaviorTag
    model: str
    vocab_size: int = ANY_ID
    weight_bits: float = 0.0  # of a linear weight
    cache_tokens: int = 0  # that the KV cache holds
    packs: bool = False  # it can send tokens and log-probs packed

    def check(self, request: Request) -> None:
        """The server checks."""

    def stop_ids(self, request: Request) -> None:
        """Not known here: the server adds the model's."""

    def body(self, request: Request) -> dict[str, Any]:
        """The request, field by field."""
        body = body_of(request, self.model, seed=request.seed, stop_ids=list(request.stop_ids))
        body |= {
            "ignore_eos": request.ignore_eos,
            "stop": list(request.stop_strings),
            "request_id": request.id,
        }
        if request.grammar is not None:
            body["structured_outputs"] = {"grammar": request.grammar}
        if self.packs and not request.top_logprobs:
            body |= {"packed": True, "logprobs": None}
        return body

    def scoring(self, ids: Sequence[int], top: int, temperature: float) -> dict[str, Any]:
        """Return the request body for the log-probs of a prompt."""
        return {
            "model": self.model,
            "prompt": list(ids),
            "max_tokens": 0,
            "prompt_logprobs": top,
            "score_temperature": temperature,
        }

    def tag(
        self, request: Request, behavior: BehaviorTag, index: int, one: ArrivingSample
    ) -> BehaviorTag:
        """The server's own; of a request that was given up before it came, what the server said of
        itself at the start."""
        if one.stated is None and one.given_up:
            return tagged(behavior, request, index)
        try:
            tag = _tag(one.stated["behavior"])
        except (KeyError, TypeError, AttributeError, ValueError):
            shown = printable(repr(one.stated), 200)
            raise ServerError(f"request {request.id}: no behavior of a sample: {shown}") from None
        if (tag.sample, tag.seed, tag.request_id) != (index, request.seed, request.id):
            raise ServerError(f"request {request.id}: sample {index} has the tag of another")
        return tag

    def evictions(self, one: ArrivingSample) -> Evictions | None:
        """Return the keys that a bounded cache dropped, where the server's engine records them."""
        stated = one.stated.get("evictions") if isinstance(one.stated, dict) else None
        if stated is None:
            return None
        try:
            return Evictions(
                int(stated["layers"]),
                int(stated["heads"]),
                tuple(int(i) for i in stated["after"]),
                base64.b64decode(stated["numbers"], validate=True),
            )
        except (KeyError, TypeError, ValueError, binascii.Error):
            raise ServerError(f"evictions: {printable(repr(stated), 200)}") from None

    def stats(self, metrics: str) -> EngineStats:
        """Parse a page of its /metrics."""
        found = _metrics(metrics)
        return EngineStats(
            weights=self.behavior.weights,
            weight_bits=self.weight_bits,
            cache_tokens=int(found.get("cache_tokens", 0)),
            cache_bytes=0,
            policy_bytes=0,
            virtual_memory_bytes=0,
            pages_peak=0,
            prefix_hits=int(found.get("prefix_hit_pages", 0)),
            running=int(found.get("samples_running", 0)),
            waiting=int(found.get("samples_waiting", 0)),
            tokens=int(found.get("drawn_tokens", 0)),
            replays=int(found.get("replayed_samples", 0)),
            replayed_tokens=int(found.get("replayed_tokens", 0)),
            kept_tokens=int(found.get("replay_kept_tokens", 0)),
        )


def read(answer: Any, url: str, model: str | None) -> LowrollDialect:
    """Read the dialect of a server from its list of models. ServerError when it is none of ours;
    ValueError for a model that it does not serve."""
    try:
        served = {one["id"]: one["lowroll"] for one in answer["data"]}
        name = next(iter(served)) if model is None else model
        found = None
        if name in served:
            stated = served[name]
            able, behavior = _capabilities(stated["capabilities"]), _tag(stated["behavior"])
            holds = stated.get("engine", {})
            found = LowrollDialect(
                able,
                behavior,
                name,
                able.vocab_size or ANY_ID,
                float(holds.get("weight_bits", 0.0)),
                int(holds.get("cache_tokens", 0)),
                bool(stated.get("packs", False)),
            )
    except (KeyError, TypeError, AttributeError, ValueError, StopIteration):
        shown = printable(repr(answer), 200)
        raise ServerError(f"{WHAT}: {url} is no server of lowroll's: {shown}") from None
    if found is None:
        raise ValueError(f"model: {url} serves {', '.join(served)}, and not {name}")
    return found


def _capabilities(stated: dict[str, Any]) -> Capabilities:
    """Updates travel by the server's own version ids, not from here."""
    kv = stated["kv"]
    policy: CachePolicy = DENSE
    if kv["policy"] != DENSE.name:
        policy = make(kv["policy"], **kv["options"])
    return Capabilities(
        context_length=int(stated["context_length"]),
        updates=frozenset(),
        updates_in_flight=bool(stated["updates_in_flight"]),
        noise=bool(stated["noise"]),
        scores=bool(stated["scores"]),
        exact_logprobs=bool(stated["exact_logprobs"]),
        sampler=frozenset(map(str, stated["sampler"])),
        kv=policy,
        kv_dtype=stated["kv_dtype"],
        records_evictions=bool(stated["records_evictions"]),
        replays=bool(stated["replays"]),
        vocab_size=_size(stated.get("vocab_size")),
        lora_rank=_size(stated.get("lora_rank")),
    )


def _size(stated: Any) -> int | None:
    """Return a number; None from older servers, which do not state it."""
    return None if stated is None else int(stated)


def _tag(stated: dict[str, Any]) -> BehaviorTag:
    """A tag as JSON. KeyError, TypeError, AttributeError or ValueError for anything else."""
    known = {field.name for field in fields(BehaviorTag)}
    if set(stated) - known:
        raise TypeError(f"unknown fields: {set(stated) - known}")
    spans = tuple(
        PolicySpan(int(one["version"]), str(one["digest"]), int(one["start"]))
        for one in stated["policy"]
    )
    if not spans or type(stated["weights"]) is not str:
        raise TypeError("no policy")
    sampler = {str(name): float(value) for name, value in stated["sampler"].items()}
    return BehaviorTag(**(stated | {"policy": spans, "sampler": sampler}))


class LowrollServer:
    """A server of lowroll's. admin: its admin's token; without one it takes no weights and is never
    paused. what: becomes of requests in flight at an update."""

    in_flight = True

    def __init__(
        self, http: HttpClient, dialect: LowrollDialect, admin: str | None, what: InFlight = "keep"
    ) -> None:
        self.what = what
        self.http = http
        self.dialect: Dialect = dialect
        self.served = ServedName(dialect.model, dialect.model)
        self.admin = admin
        self.scores = dialect.capabilities.scores and dialect.capabilities.vocab_size is not None

    @property
    def held(self) -> HeldPolicy:
        return HeldPolicy.of(self.dialect.behavior)

    async def health(self, deadline_s: float) -> str:
        call = HttpCall("GET", "/health", "its health", deadline_s=deadline_s)
        answer = await self.http.answer(call)
        return str(answer.get("status")) if isinstance(answer, dict) else ""

    async def progress(self, deadline_s: float) -> ServerProgress:
        found = _metrics(await self.metrics(deadline_s))
        return ServerProgress(int(found.get("requests_open", 0)), int(found.get("drawn_tokens", 0)))

    async def metrics(self, deadline_s: float) -> str:
        call = HttpCall("GET", "/metrics", "its metrics", deadline_s=deadline_s, text=True)
        return str(await self.http.answer(call))

    async def take(self, broadcast: Published, deadline_s: float, in_use: Set[str]) -> HeldPolicy:
        name = broadcast.path.name
        what = f"taking {name}"
        body = {"version": name} | ({"in_flight": self.what} if self.what != "keep" else {})
        answer = await self.http.answer(self._order("/weights", what, body, deadline_s))
        held = acknowledged(answer, what)
        read = answer.get("manifest_digest")
        if read != broadcast.digest and read != broadcast.lies():
            shown = printable(repr(read), 80)
            raise ServerError(f"{what}: it read {shown}, and {broadcast.digest} was published")
        return held

    async def resume(self) -> None:
        await self.http.answer(self._order("/resume", "the end of its pause"))

    def _order(
        self, path: str, what: str, body: Any = None, deadline_s: float = CONTROL_S
    ) -> HttpCall:
        return HttpCall("POST", path, what, body, deadline_s, token=self.admin)


def acknowledged(answer: Any, what: str) -> HeldPolicy:
    """Parse the answer of POST /weights. ServerError when it acknowledges no policy."""
    try:
        spans = [(int(span["version"]), str(span["digest"])) for span in answer["policy"]]
        newest = max(version for version, _ in spans)
    except (KeyError, TypeError, ValueError):
        shown = printable(repr(answer), 200)
        raise ServerError(f"{what}: no policy is acknowledged: {shown}") from None
    return HeldPolicy(newest, frozenset(digest for version, digest in spans if version == newest))


def _metrics(text: str) -> dict[str, float]:
    """Return the values of lowroll's own series in a page of metrics, by name."""
    return {name: float(value) for name, value in _GAUGE.findall(text)}
