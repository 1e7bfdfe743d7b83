"""A client of lowroll's own server, which draws the same noise for the same id and seed, and states
for each sample which policy drew it."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Sequence, Set
from dataclasses import fields
from typing import Any

from lowroll.engine.base import Capabilities, EngineStats, InFlight
from lowroll.engine.remote.http_client import HttpCall, HttpClient, ServerError
from lowroll.engine.remote.protocol import ArrivingSample, body_of
from lowroll.engine.remote.server_base import (
    CONTROL_S,
    EngineServer,
    HeldPolicy,
    Published,
    ServerProgress,
)
from lowroll.kv.policy.base import CachePolicy
from lowroll.kv.policy.dense import DENSE
from lowroll.kv.policy.table import make
from lowroll.types import BehaviorTag, Evictions, PolicySpan, Request, printable

ANY_ID = 2**31  # where a server does not state it: it refuses what lies outside
WHAT = "the list of models"
_GAUGE = re.compile(r"^lowroll_(\w+?)(?:_total)? (\S+)$", re.MULTILINE)


class LowrollServer(EngineServer):
    """A server of lowroll's. answer: its list of models. model: the one to use, None for the first.
    admin_token: without one it takes no weights and is never paused. update_mode: the fate of
    requests in flight at an update. ServerError when it is no lowroll server; ValueError for a
    model that it does not serve."""

    def __init__(
        self,
        http: HttpClient,
        answer: Any,
        model: str | None,
        admin_token: str | None,
        update_mode: InFlight = "keep",
    ) -> None:
        super().__init__(http)
        self.admin_token = admin_token
        self.update_mode = update_mode
        try:
            served = {one["id"]: one["lowroll"] for one in answer["data"]}
            self.model = self.root = next(iter(served)) if model is None else model
            if self.model in served:
                self._read(served[self.model])
        except (KeyError, TypeError, AttributeError, ValueError, StopIteration):
            shown = printable(repr(answer), 200)
            raise ServerError(f"{WHAT}: {http.url} is no server of lowroll's: {shown}") from None
        if self.model not in served:
            raise ValueError(f"model: {http.url} serves {', '.join(served)}, and not {self.model}")

    def _read(self, stated: dict[str, Any]) -> None:
        self.capabilities = _capabilities(stated["capabilities"])
        self.behavior = _tag(stated["behavior"])
        self.held = HeldPolicy.of(self.behavior)
        vocab_size = self.capabilities.vocab_size
        self.vocab_size = vocab_size or ANY_ID
        self.scores = self.capabilities.scores and vocab_size is not None
        engine = stated.get("engine", {})
        self.weight_bits = float(engine.get("weight_bits", 0.0))
        self.cache_tokens = int(engine.get("cache_tokens", 0))
        self.packs = bool(stated.get("packs", False))  # it can send tokens and log-probs packed

    def check_fields(self, request: Request) -> None:
        """Do nothing: the server itself checks."""

    def body(self, request: Request) -> dict[str, Any]:
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
        """Return the tag that the server states; for a request that was aborted before it came, the
        server's tag from the start."""
        if one.stated is None and one.given_up:
            return super().tag(request, behavior, index, one)
        try:
            tag = _tag(one.stated["behavior"])
        except (KeyError, TypeError, AttributeError, ValueError):
            shown = printable(repr(one.stated), 200)
            raise ServerError(f"request {request.id}: no behavior of a sample: {shown}") from None
        if (tag.sample, tag.seed, tag.request_id) != (index, request.seed, request.id):
            raise ServerError(f"request {request.id}: sample {index} has the tag of another")
        return tag

    def evictions(self, one: ArrivingSample) -> Evictions | None:
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
        found = _metrics(metrics)
        return EngineStats(
            weights=self.behavior.weights,
            weight_bits=self.weight_bits,
            cache_tokens=int(found.get("cache_tokens", 0)),
            prefix_hits=int(found.get("prefix_hit_pages", 0)),
            running=int(found.get("samples_running", 0)),
            waiting=int(found.get("samples_waiting", 0)),
            tokens=int(found.get("drawn_tokens", 0)),
            replays=int(found.get("replayed_samples", 0)),
            replayed_tokens=int(found.get("replayed_tokens", 0)),
            kept_tokens=int(found.get("replay_kept_tokens", 0)),
        )

    async def health(self, deadline_s: float) -> str:
        call = HttpCall("GET", "/health", "its health", deadline_s=deadline_s)
        answer = await self.http.answer(call)
        return str(answer.get("status")) if isinstance(answer, dict) else ""

    async def progress(self, deadline_s: float) -> ServerProgress:
        found = _metrics(await self.metrics(deadline_s))
        return ServerProgress(int(found.get("requests_open", 0)), int(found.get("drawn_tokens", 0)))

    async def take(self, broadcast: Published, deadline_s: float, in_use: Set[str]) -> HeldPolicy:
        name = broadcast.path.name
        what = f"taking {name}"
        body = {"version": name} | (
            {"in_flight": self.update_mode} if self.update_mode != "keep" else {}
        )
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
        return HttpCall("POST", path, what, body, deadline_s, token=self.admin_token)


def _capabilities(stated: dict[str, Any]) -> Capabilities:
    """Updates go by the server's own version ids, not from here."""
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
    """Return None for older servers, which do not state a number."""
    return None if stated is None else int(stated)


def _tag(stated: dict[str, Any]) -> BehaviorTag:
    """Parse a tag. KeyError, TypeError, AttributeError or ValueError for anything else."""
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
    return {name: float(value) for name, value in _GAUGE.findall(text)}
