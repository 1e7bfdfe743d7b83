"""What the server says of itself: health, metrics, version, and what its model can be asked for."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from aiohttp import web

from lowroll import __version__
from lowroll.engine.base import Capabilities
from lowroll.server.loop import Health, Stalled
from lowroll.server.serving import SERVING, Serving


async def health(request: web.Request) -> web.Response:
    """`GET /health`: 200 when the engine's own thread has answered in time and its last steps did
    not fail, else 503 and what it waits for."""
    serving = request.app[SERVING]
    try:
        found = await serving.loop.health(serving.limits.health_s)
    except Stalled as error:
        return web.json_response({"status": "stalled", "waits_for": str(error)}, status=503)
    if not found.well:
        why = f"{found.failures} steps of the engine have failed, one after the other"
        return web.json_response({"status": "failing", "waits_for": why}, status=503)
    return web.json_response({"status": found.state})


async def metrics(request: web.Request) -> web.Response:
    """`GET /metrics`, in Prometheus' format."""
    serving = request.app[SERVING]
    found: Health | None = None
    try:
        found = await serving.loop.health(serving.limits.health_s)
    except Stalled:
        pass  # lowroll_engine_up says it
    body = serving.loop.metrics.text(found)
    return web.Response(body=body, headers={"Content-Type": "text/plain; version=0.0.4"})


async def version(request: web.Request) -> web.Response:
    """`GET /version`."""
    return web.json_response({"version": __version__, "server": "lowroll"})


async def models(request: web.Request) -> web.Response:
    """`GET /v1/models`: the one model; under "lowroll" what it can be asked for, what it holds, and
    which weights it draws from."""
    serving = request.app[SERVING]
    found = await serving.loop.health()
    card = {
        "id": serving.name,
        "object": "model",
        "created": serving.created,
        "owned_by": "lowroll",
        "root": serving.name,
        "parent": None,
        "max_model_len": serving.capabilities.context_length,
        "lowroll": about(serving, found),
    }
    return web.json_response({"object": "list", "data": [card]})


def about(serving: Serving, found: Health) -> dict[str, Any]:
    """What a program asks of an engine at the other end of a wire."""
    return {
        "version": __version__,
        "capabilities": capabilities(serving.capabilities),
        "behavior": asdict(found.behavior),
        "stats": asdict(found.stats),
        "limits": {"n": serving.limits.n, "prompts": serving.limits.prompts},
        "chat": serving.chat is not None,
    }


def capabilities(able: Capabilities) -> dict[str, Any]:
    """As JSON; the cache policy by its name and budget."""
    return {
        "context_length": able.context_length,
        "updates": sorted(able.updates),
        "updates_in_flight": able.updates_in_flight,
        "noise": able.noise,
        "scores": able.scores,
        "exact_logprobs": able.exact_logprobs,
        "sampler": sorted(able.sampler),
        "kv": {"policy": able.kv_policy, "budget": able.kv.budget, "dtype": able.kv_dtype},
        "records_evictions": able.records_evictions,
    }
