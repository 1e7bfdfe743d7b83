"""Not here yet."""

from __future__ import annotations

from aiohttp import web


async def handle(request: web.Request) -> web.StreamResponse:
    """Not here yet."""
    raise web.HTTPNotImplemented
