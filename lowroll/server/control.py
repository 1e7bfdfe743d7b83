"""Control routes, for whoever has the admin's token: pausing, aborting, weights by version id."""

from __future__ import annotations

from typing import get_args

from aiohttp import web

from lowroll.server.errors import Refused
from lowroll.server.guard import read_json
from lowroll.server.loop import PauseMode
from lowroll.server.serving import SERVING


async def pause(request: web.Request) -> web.Response:
    """`POST /pause?mode=keep`: stop drawing (`EngineLoop.pause`)."""
    mode = _mode(request)
    await request.app[SERVING].loop.pause(mode)
    return web.json_response({"status": "paused", "mode": mode})


async def resume(request: web.Request) -> web.Response:
    """`POST /resume`: go on."""
    await request.app[SERVING].loop.resume()
    return web.json_response({"status": "resumed"})


async def is_paused(request: web.Request) -> web.Response:
    """`GET /is_paused`."""
    return web.json_response({"is_paused": request.app[SERVING].loop.paused})


async def abort(request: web.Request) -> web.Response:
    """`POST /abort`: end every request; each is answered with what it has drawn."""
    return web.json_response({"aborted": await request.app[SERVING].loop.abort_all()})


async def reset_prefix_cache(request: web.Request) -> web.Response:
    """`POST /reset_prefix_cache`: forget the pages of prompts."""
    loop = request.app[SERVING].loop
    await loop.call(lambda engine: engine.reset_prefix_cache(), "reset_prefix_cache")
    return web.json_response({"success": True})


async def weights(request: web.Request) -> web.Response:
    """`GET /weights`: which weights are drawn from, and which may be asked for."""
    raise web.HTTPNotImplemented


async def update_weights(request: web.Request) -> web.Response:
    """`POST /weights {"version": "step_7"}`: draw from these weights from the next step on."""
    await read_json(request)
    raise web.HTTPNotImplemented


def _mode(request: web.Request) -> PauseMode:
    for name in request.query:
        if name != "mode":
            raise Refused(f"{name}: /pause has no such parameter; it has mode", name)
    mode = request.query.get("mode", "keep")
    for known in get_args(PauseMode):
        if mode == known:
            return known
    raise Refused(f"mode: expected keep, wait or abort, got {mode[:40]!r}", "mode")
