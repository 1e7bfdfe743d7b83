"""The state of the server, its limits, and the middleware before each route (docs/server.md).

401  no token, or a wrong one
403  a host name or browser page that is not of this machine (DNS rebinding)
404  no such route; only with a valid token
500  the log has the reason, under the X-Request-Id of the response
503  too many open requests, or the engine does not answer
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import math
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NoReturn, ParamSpec, TypeVar
from urllib.parse import urlsplit

from aiohttp import HttpVersion10, HttpVersion11, web
from aiohttp.typedefs import Middleware

from lowroll.engine.base import Capabilities
from lowroll.server.engine_loop import EngineStalled, ServerBusy
from lowroll.server.engine_thread import EngineThread
from lowroll.server.protocol import Refused, RequestBody, error_body, parse_request, wrong_field
from lowroll.types import printable

if TYPE_CHECKING:
    from lowroll.model.tokenizer import ChatTokenizer
    from lowroll.server.text import Vocabulary

log = logging.getLogger(__name__)

B = TypeVar("B", bound=RequestBody)
P = ParamSpec("P")
R = TypeVar("R")
Access = Literal["open", "token", "admin"]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Routes = Mapping[tuple[str, str], tuple[Access, Handler]]

WORKERS = 2  # threads that encode texts and write long answers
LOCAL_HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})
LARGE_BODY = 1 << 16  # bytes from which a body is parsed in a worker, and counted
_MAX_SHOWN_PATH = 100  # characters of a path that an error repeats
_REQUEST_ID_PATTERN = re.compile(r"[A-Za-z0-9._-]{1,64}")
_JSON_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_BRACES_TO_BRACKETS = bytes.maketrans(b"{}", b"[]")
_OTHER_BYTES = bytes(set(range(256)) - set(b"[]{}"))


@dataclass(frozen=True)
class ServerLimits:
    """The limits of the server, in bytes and seconds (docs/server.md)."""

    body: int = 8 << 20
    bodies: int = 512 << 20  # of all open requests
    text: int = 1 << 20  # characters to encode
    told: int = 1 << 18  # prompt log-probs in one answer
    told_streamed: int = 1 << 13  # in a stream
    headers: int = 16 << 10
    depth: int = 32  # of nested lists and objects
    n: int = 64  # samples of one prompt
    prompts: int = 256  # of one request
    requests: int = 1024  # open together
    connections: int = 4096
    head_s: float = 10.0  # until a connection has sent a request
    body_s: float = 30.0  # until its body has come
    health_s: float = 10.0  # until the engine's thread has answered
    write_s: float = 60.0  # until a client has read a part of its answers
    update_s: float = 300.0  # until the engine has taken new weights


@dataclass
class ServerState:
    """The engine's thread and the model, for all handlers (`request.app[STATE]`). chat: the
    tokenizer with its chat template. vocabulary: None lets only token ids in and out."""

    engine: EngineThread
    chat: ChatTokenizer | None
    name: str  # of the model, as it is served
    capabilities: Capabilities
    vocabulary: Vocabulary | None = None
    limits: ServerLimits = field(default_factory=ServerLimits)
    version: str = ""
    created: int = field(default_factory=lambda: time.time_ns() // 10**9)  # seconds since 1970
    workers: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(WORKERS, thread_name_prefix="clients")
    )

    async def run_in_worker(self, fn: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run fn in one of a few threads, which bounds the memory of concurrent requests."""
        job = partial(fn, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self.workers, job)

    def check_model(self, model: str | None) -> None:
        if model is not None and model != self.name:
            reason = f"{model!r} is not served here, {self.name!r} is"
            raise wrong_field("model", reason, 404, "model_not_found")

    def check_n(self, n: int) -> None:
        if n > self.limits.n:
            raise wrong_field("n", f"{n} answers; {self.limits.n} at most")

    def require_vocabulary(self, field: str) -> Vocabulary:
        """Return the model's vocabulary. Refuse the field without one."""
        if self.vocabulary is None:
            raise wrong_field(field, "the model has no tokenizer; use token ids")
        return self.vocabulary

    def tokens_left(self, prompt_ids: list[int]) -> int:
        """Return the tokens that the context leaves; at least 1, for the engine to refuse."""
        return max(1, self.capabilities.context_length - len(prompt_ids))


STATE: web.AppKey[ServerState] = web.AppKey("state", ServerState)
# connections without a request, with their timers
SILENT: web.AppKey[dict[web.RequestHandler, asyncio.TimerHandle]] = web.AppKey("silent", dict)
REQUEST_ID: web.RequestKey[str] = web.RequestKey("request_id", str)
_BEGUN: web.RequestKey[bool] = web.RequestKey("begun", bool)


@dataclass(frozen=True)
class Credentials:
    """The bearer tokens: `token` for every route (None: needs none), `admin` for control."""

    token: str | None = field(default=None, repr=False)
    admin: str | None = field(default=None, repr=False)


def guard(routes: Routes, credentials: Credentials, hosts: frozenset[str] | None) -> Middleware:
    """Return the middleware that admits requests and answers errors. hosts: allowed names of the
    server; None for any."""
    open_requests = held_bytes = 0

    @web.middleware
    async def admit(request: web.Request, handler: Handler) -> web.StreamResponse:
        nonlocal open_requests, held_bytes
        state = request.app[STATE]
        request[REQUEST_ID] = _request_id(request)
        if (timer := request.app[SILENT].pop(request.protocol, None)) is not None:
            timer.cancel()
        resource = request.match_info.route.resource
        path = "" if resource is None else resource.canonical
        # hide unknown paths behind the token too
        access = routes[request.method, path][0] if (request.method, path) in routes else "token"
        is_counted = access == "token" and request.method == "POST"  # it may draw tokens
        open_requests += is_counted
        size = 0  # for `finally`
        try:
            _check_version(request)
            _check_headers(request, state.limits)
            _check_host(request, hosts)
            _check_token(request, access, credentials)
            if is_counted and open_requests > state.limits.requests:
                raise ServerBusy(f"{open_requests - 1} requests are open, as many as may be")
            size = _held_bytes(request, state.limits)
            held_bytes += size
            if size and held_bytes > state.limits.bodies:
                raise ServerBusy(
                    f"{held_bytes - size:,} bytes of bodies are held, as many as may be"
                )
            response = await handler(request)
        except Exception as error:  # the log gets the error
            response = _error_response(request, error)
        finally:
            open_requests -= is_counted
            held_bytes -= size
        state.engine.metrics.answered(path or "none", response.status)
        return response

    return admit


def _held_bytes(request: web.Request, limits: ServerLimits) -> int:
    if not request.body_exists:
        return 0
    size = limits.body if request.content_length is None else request.content_length
    return min(size, limits.body) if size > LARGE_BODY else 0


async def mark(request: web.BaseRequest, response: web.StreamResponse) -> None:
    """Add the headers of every response (an application signal)."""
    response.headers["Server"] = "lowroll"
    response.headers["X-Request-Id"] = request.get(REQUEST_ID, "")
    response.headers["X-Content-Type-Options"] = "nosniff"
    request[_BEGUN] = True


async def read_body(request: web.Request, kind: type[B]) -> B:
    """Return the validated body of a request. Raises Refused."""

    def parse(data: bytes) -> B:
        return parse_request(parse_json(data, state.limits.depth), kind, state.check_model)

    state = request.app[STATE]
    data = await _read_bytes(request)
    return await state.run_in_worker(parse, data) if len(data) > LARGE_BODY else parse(data)


async def _read_bytes(request: web.Request) -> bytes:
    limits = request.app[STATE].limits
    if request.content_type != "application/json":
        raise wrong_field("Content-Type", "expected application/json", 415)
    if request.headers.get("Content-Encoding", "identity") != "identity":
        raise wrong_field("Content-Encoding", "a body comes as it is", 415)
    too_large = Refused(f"body: more than {limits.body:,} bytes", None, 413)
    if (request.content_length or 0) > limits.body:
        raise too_large
    try:
        async with asyncio.timeout(limits.body_s):
            return await request.read()
    except TimeoutError:
        raise Refused(f"body: it has not come in {limits.body_s:g} s", None, 408) from None
    except web.HTTPRequestEntityTooLarge:
        raise too_large from None


def parse_json(body: bytes, depth: int) -> dict[str, Any]:
    """Parse a JSON object. Refuse deep nesting, invalid numbers, and lone surrogates."""
    try:
        text = body.decode()
        if _too_deep(body, depth):
            raise Refused(f"body: more than {depth} lists and objects inside each other")
        value = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite_float)
        if "\\u" in text:  # only an escape can make a lone surrogate
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
    if body.count(b"[") + body.count(b"{") <= depth:
        return False
    brackets = _JSON_STRING.sub(b"", body).translate(_BRACES_TO_BRACKETS, _OTHER_BYTES)
    for _ in range(depth):  # removes the innermost ones
        brackets = brackets.replace(b"[]", b"")
    return b"[]" in brackets or len(brackets) > depth


def _refuse_constant(name: str) -> NoReturn:
    raise Refused(f"body: {name} is no number in JSON")


def _finite_float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise Refused(f"body: {text[:40]} is too large for a number")
    return number


def _request_id(request: web.Request) -> str:
    sent_id = request.headers.get("X-Request-Id", "")
    return sent_id if _REQUEST_ID_PATTERN.fullmatch(sent_id) else secrets.token_hex(12)


def _check_version(request: web.Request) -> None:
    """Refuse HTTP 0.9 and 2.0, which aiohttp accepts and repeats in its answer."""
    if request.version not in (HttpVersion10, HttpVersion11):
        major, minor = request.version
        request._cache["version"] = HttpVersion11
        raise Refused(f"HTTP: version {major}.{minor}; this server speaks 1.0 and 1.1")


def _check_headers(request: web.Request, limits: ServerLimits) -> None:
    size = sum(len(name) + len(value) + 4 for name, value in request.raw_headers)
    if size > limits.headers:
        raise Refused(f"headers: {size:,} bytes, {limits.headers:,} at most", None, 431)


def _check_host(request: web.Request, hosts: frozenset[str] | None) -> None:
    """Refuse a web page whose own name points at this machine (DNS rebinding); a browser sends both
    names."""
    if hosts is None:
        return
    host_headers = request.headers.getall("Host", [])
    if len(host_headers) != 1 or _host_name(host_headers[0]) not in hosts:
        raise wrong_field("Host", "it is none of this server's names", 403)
    for origin in request.headers.getall("Origin", []):
        if _origin_host(origin) not in hosts:
            raise wrong_field("Origin", "pages of other machines may not ask", 403)


def _host_name(host: str) -> str:
    return (host[1:].partition("]")[0] if host[:1] == "[" else host.partition(":")[0]).lower()


def _origin_host(origin: str) -> str | None:
    try:
        return urlsplit(origin).hostname
    except ValueError:
        return None


def _check_token(request: web.Request, access: Access, credentials: Credentials) -> None:
    if access == "open":
        return
    headers = request.headers.getall("Authorization", [])
    header = headers[0] if len(headers) == 1 else ""
    token = header.removeprefix("Bearer ") if header.startswith("Bearer ") else ""
    if same_token(token, credentials.admin):
        return
    is_client = credentials.token is None or same_token(token, credentials.token)
    if access != "token" or not is_client:
        raise wrong_field("Authorization", "expected this server's token", 401)


def same_token(given: str, token: str | None) -> bool:
    """Compare in constant time."""
    expected = (token or "").encode()
    same = hmac.compare_digest(given.encode("utf-8", "surrogateescape"), expected)
    return same and token is not None


def _error_response(request: web.Request, error: Exception) -> web.StreamResponse:
    """Return the answer to an error. ConnectionResetError when a response has begun, which would
    look complete."""
    if isinstance(error, ConnectionResetError):
        raise error
    if request.get(_BEGUN):
        log.error("request %s: failed in its response", request[REQUEST_ID], exc_info=error)
        raise ConnectionResetError("the response cannot be finished") from error
    request_id, headers = request[REQUEST_ID], {}
    if isinstance(error, Refused):
        status, body = error.status, error.body()
        headers = {"WWW-Authenticate": "Bearer"} if status == 401 else {}
    elif isinstance(error, web.HTTPNotFound):
        status, body = 404, error_body(_unknown_path_text(request), 404)
    elif isinstance(error, web.HTTPException):
        status, body = error.status, error_body(error.reason, error.status)
        headers = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
    elif isinstance(error, ServerBusy):
        status, body = 503, error_body(str(error), 503, code="busy")
        headers = {"Retry-After": "1"}
    elif isinstance(error, EngineStalled):
        log.error("request %s: %s", request_id, error)
        status, body = 503, error_body(str(error), 503, code="stalled")
        headers = {"Retry-After": "10"}
    else:
        log.error("request %s: failed", request_id, exc_info=error)
        message = f"the server failed; its log says why, at request {request_id}"
        status, body = 500, error_body(message, 500)
    return web.json_response(body, status=status, headers=headers)


def _unknown_path_text(request: web.Request) -> str:
    """Suggest the nearest route: most clients omit /v1, or repeat it."""
    path = request.path[:_MAX_SHOWN_PATH]
    known = [route.resource.canonical for route in request.app.router.routes() if route.resource]
    similar = get_close_matches(path, known, n=1)
    hint = f"; did you mean {similar[0]}?" if similar else ""
    return f"there is no {printable(path)} here{hint}"
