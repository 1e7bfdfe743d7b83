"""The application: routes, access, sockets, signals and shutdown.

A route is `open`, or needs the token if there is one (`token`), or the admin's (`admin`). After a
signal the server accepts nothing, and requests in flight have `grace_s`; a second signal aborts
them.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

from aiohttp import web

from lowroll.machine import raise_file_limit
from lowroll.server import admin, generate, openai, prompts
from lowroll.server.engine_loop import EngineStalled
from lowroll.server.limits import (
    LOCAL_HOSTS,
    SILENT,
    STATE,
    Credentials,
    Routes,
    ServerState,
    guard,
    mark,
)
from lowroll.server.metrics import EngineHealth
from lowroll.server.protocol import error_body
from lowroll.server.weight_store import WeightStore

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ECHO_S = 1.0  # a second signal within it is ignored: terminals and wrappers often send two
LAST_S = 5.0  # for the answers of aborted requests
BACKLOG = 512
THREADS = 4  # threads that encode texts and read weights


async def health(request: web.Request) -> web.Response:
    """`GET /health`: 200 if the engine's thread answers and does not fail, else 503 and why."""
    state = request.app[STATE]
    try:
        engine_health = await state.engine.health(state.limits.health_s)
    except EngineStalled as error:
        return web.json_response({"status": "stalled", "waits_for": str(error)}, status=503)
    if not engine_health.healthy:
        reason = f"{engine_health.failures} steps of the engine have failed, one after the other"
        return web.json_response({"status": "failing", "waits_for": reason}, status=503)
    return web.json_response({"status": engine_health.state})


async def metrics(request: web.Request) -> web.Response:
    state = request.app[STATE]
    engine_health: EngineHealth | None = None
    with suppress(EngineStalled):  # lowroll_engine_up reports it
        engine_health = await state.engine.health(state.limits.health_s)
    body = state.engine.metrics.render(engine_health)
    return web.Response(body=body, headers={"Content-Type": "text/plain; version=0.0.4"})


async def version(request: web.Request) -> web.Response:
    return web.json_response({"version": request.app[STATE].version, "server": "lowroll"})


PUBLIC: Routes = {
    ("GET", "/health"): ("open", health),
    ("GET", "/v1/models"): ("token", openai.list_models),
    ("GET", "/v1/models/{name}"): ("token", openai.one_model),
    ("GET", "/metrics"): ("token", metrics),
    ("GET", "/version"): ("token", version),
    ("POST", "/v1/completions"): ("token", openai.completions),
    ("POST", "/v1/chat/completions"): ("token", openai.chat_completions),
    ("POST", "/inference/v1/generate"): ("token", generate.generate),
    ("POST", "/tokenize"): ("token", prompts.tokenize),
    ("POST", "/detokenize"): ("token", prompts.detokenize),
}
CONTROL: Routes = {
    ("POST", "/pause"): ("admin", admin.pause),
    ("POST", "/resume"): ("admin", admin.resume),
    ("GET", "/is_paused"): ("admin", admin.is_paused),
    ("POST", "/abort"): ("admin", admin.abort),
    ("POST", "/reset_prefix_cache"): ("admin", admin.reset_prefix_cache),
}
WEIGHTS: Routes = {
    ("GET", "/weights"): ("admin", admin.weights),
    ("POST", "/weights"): ("admin", admin.update_weights),
}


def make_app(
    state: ServerState,
    credentials: Credentials,
    weights: WeightStore | None = None,
    *,
    loopback: bool = True,
) -> web.Application:
    """Return the application. It has control routes if the admin has a token, and `/weights` if
    there is also a weight store.

    loopback: clients must call the server by a name of this machine. ValueError without it and a
    token.
    """
    if not loopback and not credentials.token:
        raise ValueError("token: an address that others can reach needs one")
    routes = dict(PUBLIC)
    if credentials.admin:
        routes |= CONTROL
        routes |= WEIGHTS if weights is not None else {}
    middleware = guard(routes, credentials, LOCAL_HOSTS if loopback else None)
    app = web.Application(middlewares=[middleware], client_max_size=state.limits.body)
    app[STATE], app[SILENT] = state, {}
    if weights is not None:
        app[admin.WEIGHTS], app[admin.UPDATING] = weights, asyncio.Lock()
    for (method, path), (_, handler) in routes.items():
        # a hub id has a slash
        app.router.add_route(method, path.replace("{name}", "{name:.+}"), handler)
    app.on_response_prepare.append(mark)
    app.on_cleanup.append(_end_workers)
    return app


async def _end_workers(app: web.Application) -> None:
    app[STATE].workers.shutdown(wait=False, cancel_futures=True)


def bind(host: str, port: int) -> socket.socket:
    """Return a socket bound to an address, or raise ValueError. It does not listen yet: clients are
    refused until the model is loaded."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, proto)
    except OSError as error:
        raise ValueError(f"--host: {host}: {error.strerror}") from None
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
    except (OSError, OverflowError) as error:
        listening.close()
        raise _address_error((host, port), error) from None
    listening.setblocking(False)
    return listening


def _address_error(address: tuple[Any, ...], error: Exception) -> ValueError:
    in_use = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
    hint = "; --port 0 takes one that is free" if in_use else ""
    return ValueError(f"--port: {address[0]}:{address[1]}: {error}{hint}")


async def run(
    app: web.Application,
    listening: socket.socket,
    ready: Callable[[], None],
    grace_s: float = 20.0,
) -> int:
    """Serve until a signal comes, and return its number. ready: called once requests
    are accepted."""
    engine = app[STATE].engine
    # each thread keeps the memory of the largest text that it has encoded
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(THREADS, "texts"))
    runner = make_runner(app)
    await runner.setup()
    engine.start()
    with catch_signals() as (first_signal, second_signal):
        try:
            connections = await listen(app, runner, listening)
            ready()
            signal_number = await first_signal
            connections.close()
            log.warning("%s: ending", signal.Signals(signal_number).name)
            settle_task = asyncio.ensure_future(engine.settle(grace_s))
            await asyncio.wait({settle_task, second_signal}, return_when=asyncio.FIRST_COMPLETED)
            settle_task.cancel()
        finally:
            await asyncio.to_thread(engine.stop)
            await runner.cleanup()
    return signal_number


def make_runner(app: web.Application) -> web.AppRunner:
    """Return aiohttp's server with settings for untrusted clients."""
    quiet_log = logging.getLogger(f"{__name__}.http")
    # clients that send no HTTP would fill the log
    quiet_log.setLevel(logging.CRITICAL)
    return web.AppRunner(
        app,
        access_log=None,
        logger=quiet_log,
        handler_cancellation=True,  # a dropped connection ends its request
        auto_decompress=False,  # no decompression bombs
        keepalive_timeout=75.0,
        lingering_time=1.0,  # for the rest of an unread body
        shutdown_timeout=LAST_S,
    )


async def listen(
    app: web.Application, runner: web.AppRunner, listening: socket.socket
) -> asyncio.Server:
    """Accept connections up to the limit, and to half of the process's file limit. Drop one that
    sends no request in `head_s`."""
    limits, silence_timers, server = app[STATE].limits, app[SILENT], runner.server
    assert server is not None
    event_loop = asyncio.get_running_loop()
    max_files = raise_file_limit()
    max_connections = max(1, min(limits.connections, max_files // 2))
    # accepted before the first is counted
    backlog = max(1, min(BACKLOG, max_files // 8))
    event_loop.set_exception_handler(_FileShortageHandler())

    def connection() -> asyncio.Protocol:
        if len(server.connections) >= max_connections:
            return _RefusedConnection()
        protocol = _Connection(server, event_loop, limits.write_s, silence_timers)
        silence_timers[protocol] = event_loop.call_later(limits.head_s, protocol.drop)
        return protocol

    try:
        return await event_loop.create_server(connection, sock=listening, backlog=backlog)
    except OSError as error:  # a socket that does not listen blocks no client
        raise _address_error(listening.getsockname(), error) from None


class _Connection(web.RequestHandler):
    """A connection that is dropped when its client reads nothing for `patience_s`."""

    __slots__ = ("patience_s", "silent", "unread")

    def __init__(
        self,
        server: web.Server,
        events: asyncio.AbstractEventLoop,
        patience_s: float,
        silent: dict[web.RequestHandler, asyncio.TimerHandle],
    ) -> None:
        # aiohttp's arguments, without tracebacks in debug mode
        super().__init__(server, loop=events, **server._kwargs | {"debug": False})
        self.patience_s = patience_s
        self.silent = silent
        self.unread: asyncio.TimerHandle | None = None

    def pause_writing(self) -> None:
        super().pause_writing()
        loop = asyncio.get_running_loop()
        self.unread = loop.call_later(self.patience_s, self.drop)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._forget()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._forget()
        if (timer := self.silent.pop(self, None)) is not None:
            timer.cancel()
        super().connection_lost(exc)

    def _forget(self) -> None:
        if self.unread is not None:
            self.unread.cancel()
            self.unread = None

    def drop(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        super().handle_error(request, status, exc, message)  # its answer names aiohttp and Python
        reason = (message or "").partition("\n")[0] if status < 500 else "the server failed"
        headers = {"Server": "lowroll", "X-Content-Type-Options": "nosniff"}
        body = error_body(f"HTTP: {reason.rstrip(':')}", status)
        response = web.json_response(body, status=status, headers=headers)
        response.force_close()
        return response


class _RefusedConnection(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.abort()


class _FileShortageHandler:
    def __init__(self) -> None:
        self.told = False

    def __call__(self, events: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in (errno.EMFILE, errno.ENFILE):
            events.default_exception_handler(context)
        elif not self.told:
            self.told = True
            log.warning("no more files may be open, so connections wait: %s", error)


@contextmanager
def catch_signals() -> Iterator[tuple[asyncio.Future[int], asyncio.Future[int]]]:
    """Yield futures of the first and the second signal. An ignored signal (nohup) stays ignored."""
    loop = asyncio.get_running_loop()
    first, second = loop.create_future(), loop.create_future()
    first_at = 0.0

    def take(number: int) -> None:
        nonlocal first_at
        if not first.done():
            first_at = time.monotonic()
            first.set_result(number)
        elif time.monotonic() - first_at > ECHO_S and not second.done():
            second.set_result(number)

    caught = [one for one in SIGNALS if signal.getsignal(one) not in (signal.SIG_IGN, None)]
    for number in caught:
        loop.add_signal_handler(number, take, number)
    try:
        yield first, second
    finally:
        for number in caught:
            loop.remove_signal_handler(number)
