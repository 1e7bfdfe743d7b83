"""How lowroll's own server is asked. It heeds what the engine behind it heeds, draws the same noise
for the same id and seed, and says of each sample which policy it was drawn from."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from lowroll.engine.base import Capabilities, EngineStats
from lowroll.engine.remote.client import Client
from lowroll.engine.remote.completions import Sample, body_of, tagged
from lowroll.engine.remote.wire import ServerError
from lowroll.kv.policy.base import CachePolicy
from lowroll.kv.policy.dense import DENSE
from lowroll.kv.policy.table import make
from lowroll.types import BehaviorTag, Evictions, PolicySpan, Request, printable

ANY_ID = 2**31  # where a server does not tell: it refuses what lies outside
WHAT = "the list of models"
_GAUGE = re.compile(r"^lowroll_(\w+?)(?:_total)? (\S+)$", re.MULTILINE)


@dataclass
class OwnDialect:
    """What a server of ours has said of itself."""

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
        """The body that asks for the log-probs of a prompt."""
        return {
            "model": self.model,
            "prompt": list(ids),
            "max_tokens": 0,
            "prompt_logprobs": top,
            "score_temperature": temperature,
        }

    def tag(self, request: Request, behavior: BehaviorTag, index: int, one: Sample) -> BehaviorTag:
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

    def evictions(self, one: Sample) -> Evictions | None:
        """What a bounded cache dropped of a sample, where the server's engine records it."""
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
        """What its /metrics say."""
        found = {name: float(value) for name, value in _GAUGE.findall(metrics)}
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


def ask(client: Client, model: str | None) -> OwnDialect:
    """The dialect of the server at an address. ServerError when it is none of ours; ValueError for a
    model that it does not serve."""
    return read(client.get("/v1/models", WHAT), client.url, model)


def read(answer: Any, url: str, model: str | None) -> OwnDialect:
    """The same from a list of models that has come."""
    try:
        served = {one["id"]: one["lowroll"] for one in answer["data"]}
        name = next(iter(served)) if model is None else model
        found = None
        if name in served:
            stated = served[name]
            able, behavior = _capabilities(stated["capabilities"]), _tag(stated["behavior"])
            holds = stated.get("engine", {})
            found = OwnDialect(
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
    """A number; servers before it was told say nothing."""
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
