"""Not here yet."""

from __future__ import annotations

from aiohttp import web


async def tokenize(request: web.Request) -> web.StreamResponse:
    """Not here yet."""
    raise web.HTTPNotImplemented


async def detokenize(request: web.Request) -> web.StreamResponse:
    """Not here yet."""
    raise web.HTTPNotImplemented
