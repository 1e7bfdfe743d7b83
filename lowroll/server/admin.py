"""The admin's control routes."""

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
from lowroll.server.weight_store import VersionUpdates, WeightStore, WeightVersion
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
    """`POST /abort`: end every request, with the tokens drawn so far."""
    return web.json_response({"aborted": await request.app[STATE].engine.abort_all()})


async def reset_prefix_cache(request: web.Request) -> web.Response:
    thread = request.app[STATE].engine
    await thread.call(lambda engine: engine.reset_prefix_cache(), "reset_prefix_cache")
    return web.json_response({"success": True})


async def weights(request: web.Request) -> web.Response:
    """`GET /weights`: return the current and the available versions."""
    store = request.app[WEIGHTS]
    health = await request.app[STATE].engine.health()
    available = await asyncio.to_thread(store.versions)
    current = _version_fields(store.current) | _policy_fields(health.behavior)
    return web.json_response({**current, "available": available})


async def update_weights(request: web.Request) -> web.Response:
    """`POST /weights {"version": "step_7"}`: draw from these weights from the next step on. Refused
    before any change (docs/server.md), as is a replay of a stream, whose tokens cannot be taken
    back."""
    body = await read_body(request, WeightsRequest)
    version, in_flight = body.version, body.in_flight
    if in_flight == "replay" and not request.app[STATE].capabilities.replays:
        raise wrong_field("in_flight", "this engine cannot replay", 409)
    if request.app[UPDATING].locked():
        raise wrong_field("version", "another update is being taken", 409)
    async with request.app[UPDATING]:
        return web.json_response(await _update(request.app, version, in_flight))


async def _update(app: web.Application, version: str, in_flight: InFlight) -> dict[str, Any]:
    began_at = time.monotonic()
    try:
        try:
            weight_version, behavior = await _take_version(app, version, in_flight)
        except Gap:  # the engine missed a version
            weight_version, behavior = await _take_version(app, version, in_flight, gap=True)
    except Refused:
        raise
    except ValueError as error:
        raise wrong_field("version", str(error), 409) from error
    return {
        **_version_fields(weight_version),
        **_policy_fields(behavior),
        "seconds": time.monotonic() - began_at,
    }


async def _take_version(
    app: web.Application, version: str, in_flight: InFlight, gap: bool = False
) -> tuple[WeightVersion, BehaviorTag]:
    """Have the engine take a version. Return it and the next tag. gap: read from a complete version
    on."""
    state, store = app[STATE], app[WEIGHTS]
    behavior = (await state.engine.health()).behavior
    weight_version, updates = await _read_version(app, version, behavior, gap)
    faultpoint(f"serve.read/{version}")

    def take(engine: Engine) -> BehaviorTag:
        if in_flight == "replay" and (streams := state.engine.loop.num_streams()):
            reason = f"{streams} requests in flight are streams, whose tokens cannot be taken back"
            raise wrong_field("in_flight", reason, 409)
        for step_version, update in updates:
            engine.update_weights(update, in_flight=in_flight)
            store.current = step_version  # also when the client has gone
            faultpoint(f"serve.took/{step_version.name}")
        return engine.behavior

    if updates:
        behavior = await state.engine.call(take, f"weights {version}", state.limits.update_s)
    return weight_version, behavior


async def _read_version(
    app: web.Application, version: str, behavior: BehaviorTag, gap: bool
) -> tuple[WeightVersion, VersionUpdates]:
    state, newest = app[STATE], behavior.policy[-1].version
    limit_s = state.limits.update_s
    try:
        async with asyncio.timeout(limit_s):
            return await asyncio.to_thread(
                app[WEIGHTS].load, version, newest, state.capabilities, behavior.weights, gap
            )
    except TimeoutError:
        raise EngineStalled(f"weights: {version} was not read in {limit_s:g} s") from None


def _version_fields(version: WeightVersion | None) -> dict[str, Any]:
    broadcast = None if version is None else version.broadcast
    return {
        "version": None if version is None else version.name,
        "manifest_digest": None if broadcast is None else broadcast.digest,
    }


def _policy_fields(behavior: BehaviorTag) -> dict[str, Any]:
    spans = [{"version": span.version, "digest": span.digest} for span in behavior.policy]
    return {"weights": behavior.weights, "policy": spans}
