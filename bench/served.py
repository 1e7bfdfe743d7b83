"""Our server in this process, as `lowroll serve` has it: the engine on its thread, HTTP on another.

The thread that made it waits for whoever measures, and takes no turn of Python's lock.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from aiohttp import web

from lowroll import Engine
from lowroll.server.app import listen, make_app
from lowroll.server.engine_thread import EngineThread
from lowroll.server.limits import Credentials, ServerState
from lowroll.server.text import Vocabulary

T = TypeVar("T")
START_S = 30.0
CALL_S = 180.0


class Served:
    """A server over an engine that has a tokenizer, from entering to leaving."""

    def __init__(self, engine: Engine, name: str) -> None:
        self.engine = engine
        self.name = name
        self.url = ""
        self.loop = EngineThread(engine)
        serving = ServerState(
            self.loop, None, name, engine.capabilities, vocabulary=Vocabulary(engine.tokenizer)
        )
        self._app = make_app(serving, Credentials())
        self._events = asyncio.new_event_loop()
        self._end = asyncio.Event()
        self._ready: Future[str] = Future()
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)

    def __enter__(self) -> Served:
        self._thread.start()
        self.url = self._ready.result(START_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._events.call_soon_threadsafe(self._end.set)
        self._thread.join(START_S)

    def call(self, fn: Callable[[Any], T], what: str) -> T:
        """Call fn(engine) on the engine's thread, between two steps."""
        return self.wait(self.loop.call(fn, what, CALL_S))

    def wait(self, waiting: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(waiting, self._events).result(CALL_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self._events)
        self._events.run_until_complete(self._serve())

    async def _serve(self) -> None:
        runner = web.AppRunner(self._app, access_log=None, handler_cancellation=True)
        await runner.setup()
        self.loop.start()
        try:
            listening = socket.create_server(("127.0.0.1", 0), backlog=512)
            await listen(self._app, runner, listening)
            self._ready.set_result(f"http://127.0.0.1:{listening.getsockname()[1]}")
            await self._end.wait()
        finally:
            await asyncio.to_thread(self.loop.stop)
            await runner.cleanup()
