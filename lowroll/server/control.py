"""Control routes, for whoever has the admin's token: pausing, aborting, weights by version id."""

from __future__ import annotations

import asyncio
import time
from typing import Any, get_args

from aiohttp import web

from lowroll.checkpoint.faults import faultpoint
from lowroll.engine.base import Engine, InFlight
from lowroll.server.errors import Refused
from lowroll.server.guard import read_json
from lowroll.server.loop import PauseMode, Stalled
from lowroll.server.serving import SERVING
from lowroll.server.shelf import Version, WeightShelf, read_again
from lowroll.transport.broadcasts import Gap
from lowroll.types import BehaviorTag

SHELF: web.AppKey[WeightShelf] = web.AppKey("shelf", WeightShelf)
UPDATING: web.AppKey[asyncio.Lock] = web.AppKey("updating", asyncio.Lock)


async def pause(request: web.Request) -> web.Response:
    """`POST /pause?mode=keep`: stop drawing (`EngineLoop.pause`). 409 beside another pause
    that waits, or when a resume or another pause comes first."""
    mode = _mode(request)
    try:
        await request.app[SERVING].loop.pause(mode)
    except ValueError as error:
        raise Refused(str(error), "mode", 409) from None
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
    serving, shelf = request.app[SERVING], request.app[SHELF]
    found = await serving.loop.health()
    available = await asyncio.to_thread(shelf.versions)
    held = _held(shelf.current) | _policy(found.behavior)
    return web.json_response({**held, "available": available})


async def update_weights(request: web.Request) -> web.Response:
    """`POST /weights {"version": "step_7"}`: draw from these weights from the next step on. Requests
    in flight go on under them, and their spans say so; with `"in_flight": "replay"` they are
    replayed (`engine.base.InFlight`). A broadcast that the engine holds is answered at once.

    Refused before anything has changed: 404 for a version that is not there, 409 for one that does
    not fit or while another one is taken, for a replay by an engine that has none, and while a
    request in flight is a stream: what it was told cannot be taken back."""
    body = await read_json(request)
    version, in_flight = _version(body), _in_flight(body)
    if in_flight == "replay" and not request.app[SERVING].capabilities.replays:
        raise Refused("in_flight: this engine cannot replay", "in_flight", 409)
    if request.app[UPDATING].locked():
        raise Refused("version: another update is being taken", "version", 409)
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
        raise Refused(f"version: {error}", "version", 409) from error
    return {**_held(found), **_policy(behavior), "seconds": time.monotonic() - began}


async def _take(
    app: web.Application, version: str, in_flight: InFlight, gap: bool = False
) -> tuple[Version, BehaviorTag]:
    """Read a version and have the engine take it. ValueError as `Engine.update_weights` says."""
    serving, shelf = app[SERVING], app[SHELF]
    behavior = (await serving.loop.health()).behavior
    limit = serving.limits.update_s
    try:
        async with asyncio.timeout(limit):
            found, updates = await asyncio.to_thread(
                read_again,
                shelf,
                version,
                behavior.policy[-1].version,
                serving.capabilities,
                behavior.weights,
                gap,
            )
    except TimeoutError:
        raise Stalled(f"weights: {version} was not read in {limit:g} s") from None

    faultpoint(f"serve.read/{version}")

    def take(engine: Engine) -> BehaviorTag:
        if in_flight == "replay" and serving.loop.streams:
            told = f"in_flight: {serving.loop.streams} requests in flight are streams"
            raise Refused(f"{told}, whose tokens cannot be taken back", "in_flight", 409)
        for one, update in updates:
            engine.update_weights(update, in_flight=in_flight)
            shelf.current = one  # also when nobody waits for the answer any more
            faultpoint(f"serve.took/{one.name}")
        return engine.behavior

    if updates:
        behavior = await serving.loop.call(take, f"weights {version}", limit)
    return found, behavior


def _held(version: Version | None) -> dict[str, Any]:
    """Which version an engine was given last, and the digest of its manifest: what the engine then
    holds has digests of its own."""
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


def _version(body: dict[str, Any]) -> str:
    for name in body:
        if name not in ("version", "in_flight"):
            raise Refused(f"{name}: /weights has no such field; it has version, in_flight", name)
    version = body.get("version")
    if not isinstance(version, str):
        raise Refused("version: expected the id of a version, a string", "version")
    return version


def _in_flight(body: dict[str, Any]) -> InFlight:
    stated = body.get("in_flight", "keep")
    for known in get_args(InFlight):
        if stated == known:
            return known
    raise Refused("in_flight: expected keep or replay", "in_flight")


def _mode(request: web.Request) -> PauseMode:
    for name in request.query:
        if name != "mode":
            raise Refused(f"{name}: /pause has no such parameter; it has mode", name)
    mode = request.query.get("mode", "keep")
    for known in get_args(PauseMode):
        if mode == known:
            return known
    raise Refused(f"mode: expected keep, wait or abort, got {mode[:40]!r}", "mode")
