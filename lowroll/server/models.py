"""GET /v1/models and /v1/models/NAME: the model that is served, and what its engine can do."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from aiohttp import web

from lowroll.engine.base import Capabilities
from lowroll.server.answer import to_json
from lowroll.server.asks import check_model
from lowroll.server.serving import SERVING, Serving


async def handle(request: web.Request) -> web.StreamResponse:
    """A list of one."""
    return to_json({"object": "list", "data": [await _model(request.app[SERVING])]})


async def one(request: web.Request) -> web.StreamResponse:
    """The model that the path names. Refused, 404, for another name."""
    serving = request.app[SERVING]
    check_model(serving, request.match_info["name"])
    return to_json(await _model(serving))


async def _model(serving: Serving) -> dict[str, Any]:
    """`lowroll` has the engine's capabilities, the policy that it draws from, and what it holds."""
    health = await serving.loop.health(serving.limits.health_s)
    return {
        "id": serving.name,
        "object": "model",
        "created": serving.created,
        "owned_by": "lowroll",
        "root": serving.name,
        "parent": None,
        "permission": [],
        "max_model_len": serving.capabilities.context_length,
        "lowroll": {
            "capabilities": capabilities(serving.capabilities),
            "behavior": asdict(health.behavior),
            "engine": {
                "weight_bits": health.stats.weight_bits,
                "cache_tokens": health.stats.cache_tokens,
            },
            "packs": True,
        },
    }


def capabilities(can: Capabilities) -> dict[str, Any]:
    """What an engine can do, as JSON."""
    return {
        "context_length": can.context_length,
        "updates": sorted(can.updates),
        "updates_in_flight": can.updates_in_flight,
        "noise": can.noise,
        "scores": can.scores,
        "exact_logprobs": can.exact_logprobs,
        "sampler": sorted(can.sampler),
        "kv": {"policy": can.kv.name, "options": vars(can.kv)},
        "kv_dtype": can.kv_dtype,
        "records_evictions": can.records_evictions,
        "replays": can.replays,
        "vocab_size": can.vocab_size,
        "lora_rank": can.lora_rank,
    }
