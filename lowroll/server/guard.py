"""The one door in front of every handler: who may ask, how much, and what goes out when it fails.

401  no token, or a wrong one; compared in constant time
403  a name of the server, or a page in a browser, that is not of this machine (DNS rebinding)
404  no such route; said only to those who may ask
408  the body came too slowly
413, 415, 431  too large, no plain JSON, too many headers
500  the reason is in the log, under the X-Request-Id of the response
503  as many requests are open as may be, or the engine does not answer: try again later
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import math
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Literal, NoReturn, TypeVar
from urllib.parse import urlsplit

from aiohttp import HttpVersion10, HttpVersion11, web
from aiohttp.typedefs import Middleware

from lowroll.server.body import Body, check
from lowroll.server.errors import Refused, error_body
from lowroll.server.loop import Busy, Stalled
from lowroll.server.serving import REQUEST_ID, SERVING, Limits
from lowroll.types import printable

log = logging.getLogger(__name__)

B = TypeVar("B", bound=Body)
Access = Literal["open", "token", "admin"]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Routes = Mapping[tuple[str, str], tuple[Access, Handler]]  # by method and path

# connections that have not asked for anything yet, and when they are dropped
SILENT: web.AppKey[dict[web.RequestHandler, asyncio.TimerHandle]] = web.AppKey("silent", dict)
_BEGUN: web.RequestKey[bool] = web.RequestKey("begun", bool)  # its response has
LOCAL = frozenset({"localhost", "127.0.0.1", "::1"})
LARGE = 1 << 16  # bytes of a body from which on it is read in a thread of its own
_MOST_PATH = 100  # characters of one that is told back
_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_ALIKE = bytes.maketrans(b"{}", b"[]")
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


@dataclass(frozen=True)
class Tokens:
    """What clients must say: `token` for everything (None: nothing), `admin` for control."""

    token: str | None = field(default=None, repr=False)
    admin: str | None = field(default=None, repr=False)


def guard(routes: Routes, tokens: Tokens, hosts: frozenset[str] | None) -> Middleware:
    """The middleware. hosts: names by which clients may call the server; None is any."""
    open_requests = held = 0  # held: bytes of large bodies

    @web.middleware
    async def door(request: web.Request, handler: Handler) -> web.StreamResponse:
        nonlocal open_requests, held
        serving = request.app[SERVING]
        request[REQUEST_ID] = _request_id(request)
        _heard(request)
        resource = request.match_info.route.resource
        path = "" if resource is None else resource.canonical
        # what has no route is hidden behind the token too
        access = routes[request.method, path][0] if (request.method, path) in routes else "token"
        counted = access == "token" and request.method == "POST"
        open_requests += counted
        size = 0
        try:
            _check_version(request)
            _check_headers(request, serving.limits)
            _check_host(request, hosts)
            _check_token(request, access, tokens)
            if counted and open_requests > serving.limits.requests:
                raise Busy(f"{open_requests - 1} requests are open, as many as may be")
            size = _held(request, serving.limits)
            held += size
            if size and held > serving.limits.bodies:
                raise Busy(f"{held - size:,} bytes of bodies are held, as many as may be")
            response = await handler(request)
        except Exception as error:  # whatever it is, the client gets an answer and the log the rest
            response = _answer(request, error)
        finally:
            open_requests -= counted
            held -= size
        serving.loop.metrics.answered(path or "none", response.status)
        return response

    return door


def _held(request: web.Request, limits: Limits) -> int:
    """Bytes that a body takes for as long as its request is open; 0 of a small one."""
    if not request.body_exists:
        return 0
    size = limits.body if request.content_length is None else request.content_length
    return min(size, limits.body) if size > LARGE else 0


async def mark(request: web.BaseRequest, response: web.StreamResponse) -> None:
    """Before a response begins: what every one carries. A signal of the application."""
    response.headers["Server"] = "lowroll"
    response.headers["X-Request-Id"] = request.get(REQUEST_ID, "")
    response.headers["X-Content-Type-Options"] = "nosniff"
    request[_BEGUN] = True


async def read_body(request: web.Request, kind: type[B]) -> B:
    """The body, of this kind. Refused as `_read` and `body.check` say."""

    def made(data: bytes) -> B:
        return check(parse(data, depth), kind)

    serving = request.app[SERVING]
    depth, data = serving.limits.depth, await _read(request)
    if len(data) > LARGE:
        return await serving.work(made, data)
    return made(data)


async def read_json(request: web.Request) -> dict[str, Any]:
    """The body, a JSON object. Refused as `_read` and `parse` say."""
    return parse(await _read(request), request.app[SERVING].limits.depth)


async def _read(request: web.Request) -> bytes:
    """The body. Refused when it is no plain JSON, too large or too slow. Busy when those of
    all open requests are too large together."""
    limits = request.app[SERVING].limits
    if request.content_type != "application/json":
        raise Refused("Content-Type: expected application/json", "Content-Type", 415)
    if request.headers.get("Content-Encoding", "identity") != "identity":
        raise Refused("Content-Encoding: a body comes as it is", "Content-Encoding", 415)
    too_large = Refused(f"body: more than {limits.body:,} bytes", None, 413)
    if (request.content_length or 0) > limits.body:
        raise too_large
    try:
        async with asyncio.timeout(limits.body_s):
            body = await request.read()
    except TimeoutError:
        raise Refused(f"body: it has not come in {limits.body_s:g} s", None, 408) from None
    except web.HTTPRequestEntityTooLarge:
        raise too_large from None
    return body


def parse(body: bytes, depth: int) -> dict[str, Any]:
    """The object that a body holds. Refused when it is none, or too deep; or has a number that is
    none, or half of a surrogate pair."""
    try:
        text = body.decode()
        if _too_deep(body, depth):
            raise Refused(f"body: more than {depth} lists and objects inside each other")
        value = json.loads(text, parse_constant=_no_number, parse_float=_finite)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise Refused("body: a string has half of a surrogate pair") from None
    except UnicodeDecodeError as error:
        raise Refused(f"body: not UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise Refused(f"body: no JSON at character {error.pos}: {error.msg}") from None
    except Refused:
        raise
    except ValueError:  # an integer of thousands of digits
        raise Refused("body: a number is too long") from None
    if not isinstance(value, dict):
        raise Refused("body: expected a JSON object")
    return value


def _too_deep(body: bytes, depth: int) -> bool:
    """Whether lists and objects lie in each other deeper than that. What is no JSON may be either:
    the parser then has few of them to go into."""
    if body.count(b"[") + body.count(b"{") <= depth:
        return False
    left = _STRING.sub(b"", body).translate(_ALIKE, _NO_BRACKETS)
    for _ in range(depth):  # each round takes the innermost ones
        left = left.replace(b"[]", b"")
    return b"[]" in left or len(left) > depth


def _no_number(name: str) -> NoReturn:
    raise Refused(f"body: {name} is no number in JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise Refused(f"body: {text[:40]} is too large for a number")
    return number


def _heard(request: web.Request) -> None:
    """Its connection is not silent any more."""
    timer = request.app[SILENT].pop(request.protocol, None)
    if timer is not None:
        timer.cancel()


def _request_id(request: web.Request) -> str:
    """The client's own, if it is short and plain, else a new one."""
    given = request.headers.get("X-Request-Id", "")
    return given if _ID.fullmatch(given) else secrets.token_hex(12)


def _check_version(request: web.Request) -> None:
    """aiohttp takes 0.9 and 2.0 too, and would say in its answer that it speaks them."""
    if request.version not in (HttpVersion10, HttpVersion11):
        major, minor = request.version
        request._cache["version"] = HttpVersion11
        raise Refused(f"HTTP: version {major}.{minor}; this server speaks 1.0 and 1.1")


def _check_headers(request: web.Request, limits: Limits) -> None:
    size = sum(len(name) + len(value) + 4 for name, value in request.raw_headers)
    if size > limits.headers:
        raise Refused(f"headers: {size:,} bytes, {limits.headers:,} at most", None, 431)


def _check_host(request: web.Request, hosts: frozenset[str] | None) -> None:
    """A page on the web may have its own name point at this machine; a browser says both."""
    if hosts is None:
        return
    named = request.headers.getall("Host", [])
    if len(named) != 1 or _name(named[0]) not in hosts:
        raise Refused("Host: it is none of this server's names", "Host", 403)
    for origin in request.headers.getall("Origin", []):
        if _origin(origin) not in hosts:
            raise Refused("Origin: pages of other machines may not ask", "Origin", 403)


def _name(host: str) -> str:
    """Of a Host header, without its port."""
    return (host[1:].partition("]")[0] if host[:1] == "[" else host.partition(":")[0]).lower()


def _origin(origin: str) -> str | None:
    try:
        return urlsplit(origin).hostname
    except ValueError:
        return None


def _check_token(request: web.Request, access: Access, tokens: Tokens) -> None:
    if access == "open":
        return
    sent = request.headers.getall("Authorization", [])
    said = sent[0] if len(sent) == 1 else ""
    given = said.removeprefix("Bearer ") if said.startswith("Bearer ") else ""
    is_admin = _same(given, tokens.admin)
    is_client = _same(given, tokens.token)
    if not is_admin and (access == "admin" or (tokens.token is not None and not is_client)):
        raise Refused("Authorization: expected this server's token", "Authorization", 401)


def _same(given: str, token: str | None) -> bool:
    """In a time that says nothing about the token."""
    expected = (token or "").encode()
    same = hmac.compare_digest(given.encode("utf-8", "surrogateescape"), expected)
    return same and token is not None


def _answer(request: web.Request, error: Exception) -> web.StreamResponse:
    """What a client gets for an error. ConnectionResetError when a response has begun already: its
    end would look like a whole one."""
    if isinstance(error, ConnectionResetError):
        raise error
    if request.get(_BEGUN):
        log.error("request %s: failed in its response", request[REQUEST_ID], exc_info=error)
        raise ConnectionResetError("the response cannot be finished") from error
    if isinstance(error, Refused):
        headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else {}
        return _response(error.body(), error.status, headers)
    if isinstance(error, web.HTTPNotFound):
        return _response(error_body(_nowhere(request), 404), 404, {})
    if isinstance(error, web.HTTPException):
        allow = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
        return _response(error_body(error.reason, error.status), error.status, allow)
    if isinstance(error, Busy):
        return _response(error_body(str(error), 503, code="busy"), 503, {"Retry-After": "1"})
    if isinstance(error, Stalled):
        log.error("request %s: %s", request[REQUEST_ID], error)
        body = error_body(str(error), 503, code="stalled")
        return _response(body, 503, {"Retry-After": "10"})
    log.error("request %s: failed", request[REQUEST_ID], exc_info=error)
    told = f"the server failed; its log says why, at request {request[REQUEST_ID]}"
    return _response(error_body(told, 500), 500, {})


def _nowhere(request: web.Request) -> str:
    """What a path that leads nowhere may have meant: most clients leave /v1 out, or say it twice."""
    path = request.path[:_MOST_PATH]
    known = [route.resource.canonical for route in request.app.router.routes() if route.resource]
    near = get_close_matches(path, known, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"there is no {printable(path)} here{hint}"


def _response(body: dict[str, Any], status: int, headers: dict[str, str]) -> web.Response:
    return web.json_response(body, status=status, headers=headers)
