"""What the server says of itself: health, metrics and version."""

from __future__ import annotations

from aiohttp import web

from lowroll.server.loop import Health, Stalled
from lowroll.server.serving import SERVING


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
    return web.json_response({"version": request.app[SERVING].version, "server": "lowroll"})
