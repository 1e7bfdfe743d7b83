"""A server from its first connection to its last: sockets, signals, and an end that is in order.

first signal     no new connections and no new requests; those in flight have `grace_s`, then they
                 end with what they have drawn
second signal    they end now (one that comes within a second is taken for the first one: terminals
                 and wrappers often send two)
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
from contextlib import contextmanager
from typing import Any

from aiohttp import web

from lowroll.machine import raise_file_limit
from lowroll.server.errors import error_body
from lowroll.server.guard import SILENT
from lowroll.server.serving import SERVING

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ECHO_S = 1.0
LAST_S = 5.0  # for the answers of what was aborted
BACKLOG = 512  # connections that wait to be accepted
THREADS = 4  # that encode texts and read weights


def bind(host: str, port: int) -> socket.socket:
    """A socket of an address, which does not listen yet: whoever connects before the model is there
    is refused, and does not wait. ValueError says why it cannot be had."""
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
        raise _taken((host, port), error) from None
    listening.setblocking(False)
    return listening


def _taken(address: tuple[Any, ...], error: Exception) -> ValueError:
    """Why an address cannot be had."""
    host, port = address[:2]
    in_use = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
    hint = "; --port 0 takes one that is free" if in_use else ""
    return ValueError(f"--port: {host}:{port}: {error}{hint}")


async def run(
    app: web.Application,
    listening: socket.socket,
    ready: Callable[[], None],
    grace_s: float = 20.0,
) -> int:
    """Serve until a signal comes; its number. ready: called when requests are taken."""
    loop = app[SERVING].loop
    # every thread keeps memory of the largest text that it has encoded
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(THREADS, "texts"))
    runner = runner_of(app)
    await runner.setup()
    loop.start()
    with _signals() as (first, second):
        try:
            connections = await listen(app, runner, listening)
            ready()
            number = await first
            connections.close()
            log.warning("%s: ending", signal.Signals(number).name)
            settled = asyncio.ensure_future(loop.settle(grace_s))
            await asyncio.wait({settled, second}, return_when=asyncio.FIRST_COMPLETED)
            settled.cancel()
        finally:
            await asyncio.to_thread(loop.stop)
            await runner.cleanup()
    return number


def runner_of(app: web.Application) -> web.AppRunner:
    """aiohttp's server of the application, as strangers need it."""
    quiet = logging.getLogger(f"{__name__}.http")
    quiet.setLevel(logging.CRITICAL)  # else whoever sends no HTTP fills the log with tracebacks
    return web.AppRunner(
        app,
        access_log=None,
        logger=quiet,
        handler_cancellation=True,  # a dropped connection ends its request
        auto_decompress=False,  # nothing grows when it is unpacked
        keepalive_timeout=75.0,
        lingering_time=1.0,  # for the rest of a body that nobody reads
        shutdown_timeout=LAST_S,
    )


async def listen(
    app: web.Application, runner: web.AppRunner, listening: socket.socket
) -> asyncio.Server:
    """Take connections, as many as may be and at most half as many as the process may open files;
    one that asks for nothing is dropped after `head_s`."""
    limits, silent, server = app[SERVING].limits, app[SILENT], runner.server
    assert server is not None
    events = asyncio.get_running_loop()
    files = raise_file_limit()
    most = max(1, min(limits.connections, files // 2))
    # so many are accepted at once, before the first of them is counted
    backlog = max(1, min(BACKLOG, files // 8))
    events.set_exception_handler(_OneLineOfFiles())

    def connection() -> asyncio.Protocol:
        if len(server.connections) >= most:
            return _Full()
        protocol = _Connection(server, events, limits.write_s, silent)
        silent[protocol] = events.call_later(limits.head_s, drop, protocol)
        return protocol

    def drop(protocol: web.RequestHandler) -> None:
        del silent[protocol]
        if protocol.transport is not None:
            protocol.transport.abort()

    try:
        return await events.create_server(connection, sock=listening, backlog=backlog)
    except OSError as error:  # a socket that does not listen yet keeps nobody away
        raise _taken(listening.getsockname(), error) from None


class _Connection(web.RequestHandler):
    """A connection that is dropped when its client takes nothing of its answers for `patience_s`,
    and that answers what is no HTTP as it answers other errors."""

    __slots__ = ("patience_s", "silent", "unread")

    def __init__(
        self,
        server: web.Server,
        events: asyncio.AbstractEventLoop,
        patience_s: float,
        silent: dict[web.RequestHandler, asyncio.TimerHandle],
    ) -> None:
        # aiohttp makes its own kind of connection, with these options and tracebacks in debug mode
        super().__init__(server, loop=events, **server._kwargs | {"debug": False})
        self.patience_s = patience_s
        self.silent = silent
        self.unread: asyncio.TimerHandle | None = None

    def pause_writing(self) -> None:
        super().pause_writing()
        events = asyncio.get_running_loop()
        self.unread = events.call_later(self.patience_s, self._drop)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._forget()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._forget()
        timer = self.silent.pop(self, None)
        if timer is not None:
            timer.cancel()
        super().connection_lost(exc)

    def _forget(self) -> None:
        if self.unread is not None:
            self.unread.cancel()
            self.unread = None

    def _drop(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        super().handle_error(request, status, exc, message)  # its own names aiohttp and Python
        reason = (message or "").partition("\n")[0] if status < 500 else "the server failed"
        headers = {"Server": "lowroll", "X-Content-Type-Options": "nosniff"}
        body = error_body(f"HTTP: {reason.rstrip(':')}", status)
        response = web.json_response(body, status=status, headers=headers)
        response.force_close()
        return response


class _Full(asyncio.Protocol):
    """One connection too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.abort()


class _OneLineOfFiles:
    """The event loop's handler of exceptions, which says once that files are short: asyncio hands it
    a traceback for every connection that it cannot accept."""

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
def _signals() -> Iterator[tuple[asyncio.Future[int], asyncio.Future[int]]]:
    """The numbers of the first and the second signal, as they come. One that is ignored (nohup)
    stays so."""
    events = asyncio.get_running_loop()
    first, second = events.create_future(), events.create_future()
    asked_at = 0.0

    def ask(number: int) -> None:
        nonlocal asked_at
        if not first.done():
            asked_at = time.monotonic()
            first.set_result(number)
        elif time.monotonic() - asked_at > ECHO_S and not second.done():
            second.set_result(number)

    caught = [n for n in SIGNALS if signal.getsignal(n) not in (signal.SIG_IGN, None)]
    for number in caught:
        events.add_signal_handler(number, ask, number)
    try:
        yield first, second
    finally:
        for number in caught:
            events.remove_signal_handler(number)
