"""A client of lowroll's own server, which states the policy of each sample."""

from __future__ import annotations

import re
from collections.abc import Sequence, Set
from dataclasses import fields
from typing import Any

import msgspec

from lowroll.engine.base import Capabilities, EngineStats, InFlight
from lowroll.engine.remote.http_client import HttpCall, HttpClient, ServerError, excerpt
from lowroll.engine.remote.protocol import ArrivingSample, body_of
from lowroll.engine.remote.server_base import CONTROL_S, EngineServer, HeldPolicy, ServerProgress
from lowroll.kv.policy.base import CachePolicy
from lowroll.kv.policy.dense import DENSE
from lowroll.kv.policy.table import make
from lowroll.types import BehaviorTag, Evictions, PolicySpan, Request
from lowroll.weights.sync.base import Broadcast

ANY_ID = 2**31  # for an unknown vocabulary: the server checks ids
WHAT = "the list of models"
_METRIC_LINE = re.compile(r"^lowroll_(\w+?)(?:_total)? (\S+)$", re.MULTILINE)


class LowrollServer(EngineServer):
    """A server of lowroll's. answer: its list of models. model: default its first. Without
    `admin_token` it takes no weights. update_mode: of requests in flight. ServerError for another
    kind of server, ValueError for a model that it does not serve."""

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
            facts_by_model = {card["id"]: card["lowroll"] for card in answer["data"]}
            self.model = self.root = next(iter(facts_by_model)) if model is None else model
            if self.model in facts_by_model:
                self._read(facts_by_model[self.model])
        except (KeyError, TypeError, AttributeError, ValueError, StopIteration):
            raise ServerError(
                f"{WHAT}: {http.url} is no server of lowroll's: {excerpt(answer)}"
            ) from None
        if self.model not in facts_by_model:
            served_names = ", ".join(facts_by_model)
            raise ValueError(f"model: {http.url} serves {served_names}, and not {self.model}")

    def _read(self, stated: dict[str, Any]) -> None:
        self.capabilities = _parse_capabilities(stated["capabilities"])
        self.behavior = _parse_tag(stated["behavior"])
        self.held = HeldPolicy.newest_of(self.behavior.policy)
        vocab_size = self.capabilities.vocab_size
        self.vocab_size = vocab_size or ANY_ID
        self.scores = self.capabilities.scores and vocab_size is not None
        engine = stated.get("engine", {})
        self.weight_bits = float(engine.get("weight_bits", 0.0))
        self.cache_tokens = int(engine.get("cache_tokens", 0))
        self.packs = bool(stated.get("packs", False))

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
        """Return the stated tag of a sample; `behavior` if it was aborted before."""
        if one.stated is None and one.given_up:
            return super().tag(request, behavior, index, one)
        try:
            tag = _parse_tag(one.stated["behavior"])
        except (KeyError, TypeError, AttributeError, ValueError):
            raise ServerError(
                f"request {request.id}: no behavior of a sample: {excerpt(one.stated)}"
            ) from None
        if (tag.sample, tag.seed, tag.request_id) != (index, request.seed, request.id):
            raise ServerError(f"request {request.id}: sample {index} has the tag of another")
        return tag

    def evictions(self, one: ArrivingSample) -> Evictions | None:
        eviction_fields = one.stated.get("evictions") if isinstance(one.stated, dict) else None
        if eviction_fields is None:
            return None
        try:
            if missing := {field.name for field in fields(Evictions)} - {*eviction_fields}:
                raise ValueError(f"no {', '.join(sorted(missing))}")
            return msgspec.convert(eviction_fields, Evictions)
        except (TypeError, ValueError):
            raise ServerError(f"evictions: {excerpt(eviction_fields)}") from None

    def stats(self, metrics: str) -> EngineStats:
        values = _parse_metrics(metrics)
        return EngineStats(
            weights=self.behavior.weights,
            weight_bits=self.weight_bits,
            cache_tokens=int(values.get("cache_tokens", 0)),
            prefix_hits=int(values.get("prefix_hit_pages", 0)),
            running=int(values.get("samples_running", 0)),
            waiting=int(values.get("samples_waiting", 0)),
            tokens=int(values.get("drawn_tokens", 0)),
            replays=int(values.get("replayed_samples", 0)),
            replayed_tokens=int(values.get("replayed_tokens", 0)),
            kept_tokens=int(values.get("replay_kept_tokens", 0)),
        )

    async def health(self, deadline_s: float) -> str:
        call = HttpCall("GET", "/health", "its health", deadline_s=deadline_s)
        answer = await self.http.answer(call)
        return str(answer.get("status")) if isinstance(answer, dict) else ""

    async def progress(self, deadline_s: float) -> ServerProgress:
        values = _parse_metrics(await self.metrics(deadline_s))
        return ServerProgress(
            int(values.get("requests_open", 0)), int(values.get("drawn_tokens", 0))
        )

    async def take(self, broadcast: Broadcast, deadline_s: float, in_use: Set[str]) -> HeldPolicy:
        name = broadcast.path.name
        label = f"taking {name}"
        body = {"version": name}
        if self.update_mode != "keep":
            body["in_flight"] = self.update_mode
        answer = await self.http.answer(self._order("/weights", label, body, deadline_s))
        try:
            spans = msgspec.convert(answer["policy"], list[PolicySpan])
            held_policy = HeldPolicy.newest_of(spans)
        except (KeyError, TypeError, ValueError):
            raise ServerError(f"{label}: no policy is acknowledged: {excerpt(answer)}") from None
        manifest_digest = answer.get("manifest_digest")
        if manifest_digest != broadcast.digest and manifest_digest != broadcast.lies():
            raise ServerError(
                f"{label}: it read {excerpt(manifest_digest, 80)}, and {broadcast.digest} was published"
            )
        return held_policy

    async def resume(self) -> None:
        await self.http.answer(self._order("/resume", "the end of its pause"))

    def _order(
        self, path: str, what: str, body: Any = None, deadline_s: float = CONTROL_S
    ) -> HttpCall:
        return HttpCall("POST", path, what, body, deadline_s, token=self.admin_token)


def _parse_capabilities(stated: dict[str, Any]) -> Capabilities:
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
        vocab_size=_int_or_none(stated.get("vocab_size")),
        lora_rank=_int_or_none(stated.get("lora_rank")),
    )


def _int_or_none(stated: Any) -> int | None:
    return None if stated is None else int(stated)


def _parse_tag(stated: dict[str, Any]) -> BehaviorTag:
    field_names = {field.name for field in fields(BehaviorTag)}
    if set(stated) - field_names:
        raise TypeError(f"unknown fields: {set(stated) - field_names}")
    tag = msgspec.convert(stated, BehaviorTag)
    # defaults are for tags made here: a server states each of these
    if "sampler" not in stated or any("start" not in span for span in stated["policy"]):
        raise ValueError("no sampler, or a span without its start")
    if not tag.policy:
        raise ValueError("no policy")
    return tag


def _parse_metrics(text: str) -> dict[str, float]:
    return {name: float(value) for name, value in _METRIC_LINE.findall(text)}
