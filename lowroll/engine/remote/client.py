"""`wire` for plain threads: a thread with the loop that the requests of hundreds of rollouts run on
together.

    with Client("http://127.0.0.1:8000") as client:
        client.get("/v1/models", what="the list of models")
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

from lowroll.engine.remote.wire import Call, Wire

MARGIN = 5.0  # seconds that a waiting thread grants the loop beyond a request's own deadline


class Client:
    """A wire, and the thread that talks over it. token, concurrency, lost: as `Wire`'s."""

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        concurrency: int = 256,
        lost: Callable[[], str | None] | None = None,
    ) -> None:
        self.wire = Wire(url, token=token, concurrency=concurrency, lost=lost)
        self.url = self.wire.url
        self.answer = self.wire.answer
        self.body = self.wire.body
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="remote-engine", daemon=True)
        self._thread.start()
        if not self._ready.wait(timeout=MARGIN):
            raise RuntimeError("the thread of the HTTP client did not start")

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End what is in flight, and the thread. Idempotent."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._ended.set)
            self._thread.join(timeout=MARGIN)

    def get(self, path: str, what: str, **cost: Any) -> Any:
        """The JSON of a GET. ServerError says what was waited for."""
        return self.ask(Call("GET", path, what, again=True, **cost))

    def post(self, path: str, body: Any, what: str, **cost: Any) -> Any:
        """The JSON of a POST (its text, where it is none), sent once unless `again` says else."""
        return self.ask(Call("POST", path, what, body, **cost))

    def ask(self, call: Call) -> Any:
        """The answer, waited for here."""
        future = self.begin(self.answer(call))
        try:
            return future.result(call.deadline_s + MARGIN)
        except FutureTimeout:
            future.cancel()
            raise self.wire.late(call) from None

    def begin(self, work: Awaitable[Any]) -> Future[Any]:
        """Start a coroutine on the client's thread. Cancelling the future closes its connection."""

        async def run() -> Any:
            return await work

        return asyncio.run_coroutine_threadsafe(run(), self._loop)

    # -- on the client's thread --------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        """Keep the connections open until the end is asked for."""
        self._ended = asyncio.Event()
        await self.wire.open()
        self._ready.set()
        await self._ended.wait()
        mine = asyncio.current_task()
        others = [task for task in asyncio.all_tasks() if task is not mine]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self.wire.close()
