"""The control routes, for the admin."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from aiohttp import web

from lowroll.checkpoint.fault_injection import faultpoint
from lowroll.engine.base import Engine, InFlight
from lowroll.server.engine_loop import EngineStalled
from lowroll.server.limits import STATE, read_body
from lowroll.server.protocol import PauseQuery, Refused, WeightsRequest, parse_request, wrong_field
from lowroll.server.weight_store import WeightStore, WeightVersion
from lowroll.types import BehaviorTag
from lowroll.weights.sync.base import Gap

WEIGHTS: web.AppKey[WeightStore] = web.AppKey("weights", WeightStore)
UPDATING: web.AppKey[asyncio.Lock] = web.AppKey("updating", asyncio.Lock)


async def pause(request: web.Request) -> web.Response:
    """`POST /pause?mode=keep`: stop drawing (`EngineThread.pause`). 409 while another pause waits,
    or when a resume or another pause comes first."""
    mode = parse_request(dict(request.query), PauseQuery).mode
    try:
        await request.app[STATE].engine.pause(mode)
    except ValueError as error:
        raise Refused(str(error), "mode", 409) from None
    return web.json_response({"status": "paused", "mode": mode})


async def resume(request: web.Request) -> web.Response:
    await request.app[STATE].engine.resume()
    return web.json_response({"status": "resumed"})


async def is_paused(request: web.Request) -> web.Response:
    return web.json_response({"is_paused": request.app[STATE].engine.paused})


async def abort(request: web.Request) -> web.Response:
    """`POST /abort`: end every request; each is answered with what it has drawn."""
    return web.json_response({"aborted": await request.app[STATE].engine.abort_all()})


async def reset_prefix_cache(request: web.Request) -> web.Response:
    thread = request.app[STATE].engine
    await thread.call(lambda engine: engine.reset_prefix_cache(), "reset_prefix_cache")
    return web.json_response({"success": True})


async def weights(request: web.Request) -> web.Response:
    """`GET /weights`: return the current weights, and the available versions."""
    state, store = request.app[STATE], request.app[WEIGHTS]
    found = await state.engine.health()
    available = await asyncio.to_thread(store.versions)
    held = _held(store.current) | _policy(found.behavior)
    return web.json_response({**held, "available": available})


async def update_weights(request: web.Request) -> web.Response:
    """`POST /weights {"version": "step_7"}`: draw from these weights from the next step on.
    Requests in flight go on under them, and their spans say so; with `"in_flight": "replay"` they
    are replayed (`engine.base.InFlight`). A broadcast that the engine holds is answered at once.

    Refused before anything has changed: with 404 an unknown version; with 409 one that does not fit
    or while another one is taken, a replay by an engine without it, and a replay while a request in
    flight is a stream, whose tokens cannot be taken back."""
    body = await read_body(request, WeightsRequest)
    version, in_flight = body.version, body.in_flight
    if in_flight == "replay" and not request.app[STATE].capabilities.replays:
        raise wrong_field("in_flight", "this engine cannot replay", 409)
    if request.app[UPDATING].locked():
        raise wrong_field("version", "another update is being taken", 409)
    async with request.app[UPDATING]:
        return web.json_response(await _update(request.app, version, in_flight))


async def _update(app: web.Application, version: str, in_flight: InFlight) -> dict[str, Any]:
    began = time.monotonic()
    try:
        try:
            found, behavior = await _take(app, version, in_flight)
        except Gap:  # it missed what the version changes
            found, behavior = await _take(app, version, in_flight, gap=True)
    except Refused:
        raise
    except ValueError as error:
        raise wrong_field("version", str(error), 409) from error
    return {**_held(found), **_policy(behavior), "seconds": time.monotonic() - began}


async def _take(
    app: web.Application, version: str, in_flight: InFlight, gap: bool = False
) -> tuple[WeightVersion, BehaviorTag]:
    """Read a version and have the engine take it. ValueError as of `Engine.update_weights`."""
    state, store = app[STATE], app[WEIGHTS]
    behavior = (await state.engine.health()).behavior
    limit = state.limits.update_s
    try:
        async with asyncio.timeout(limit):
            found, updates = await asyncio.to_thread(
                store.load,
                version,
                behavior.policy[-1].version,
                state.capabilities,
                behavior.weights,
                gap,
            )
    except TimeoutError:
        raise EngineStalled(f"weights: {version} was not read in {limit:g} s") from None

    faultpoint(f"serve.read/{version}")

    def take(engine: Engine) -> BehaviorTag:
        if in_flight == "replay" and (streams := state.engine.loop.num_streams()):
            reason = f"{streams} requests in flight are streams, whose tokens cannot be taken back"
            raise wrong_field("in_flight", reason, 409)
        for one, update in updates:
            engine.update_weights(update, in_flight=in_flight)
            store.current = one  # also when the client has gone
            faultpoint(f"serve.took/{one.name}")
        return engine.behavior

    if updates:
        behavior = await state.engine.call(take, f"weights {version}", limit)
    return found, behavior


def _held(version: WeightVersion | None) -> dict[str, Any]:
    """Return the engine's last version, and its manifest's digest, which differs from those of what
    the engine then holds."""
    if version is None:
        return {"version": None, "manifest_digest": None}
    broadcast = version.broadcast
    return {
        "version": version.name,
        "manifest_digest": None if broadcast is None else broadcast.digest,
    }


def _policy(behavior: BehaviorTag) -> dict[str, Any]:
    spans = [{"version": span.version, "digest": span.digest} for span in behavior.policy]
    return {"weights": behavior.weights, "policy": spans}
