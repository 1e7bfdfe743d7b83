"""From requests to answers: whole ones, and streams of server-sent events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, TypeVar

from aiohttp import web

from lowroll.server.asks import Prompt, refuse
from lowroll.server.body import Answered
from lowroll.server.errors import Refused, error_body
from lowroll.server.loop import Stalled
from lowroll.server.parts import drawn, origin
from lowroll.server.serving import REQUEST_ID, SERVING, Serving
from lowroll.server.ticket import Delta, EngineFailed, Ticket
from lowroll.types import Group, Request

T = TypeVar("T")
Tree = dict[str, Any]
_AT_ONCE = 1 << 15  # bytes that a connection takes without a wait: half of what asyncio buffers
FEW = 1024  # tokens of an answer that the event loop writes itself
_compact = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode


async def together(jobs: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """What all of them return, in order. What the first that fails raises, and the others end."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(job) for job in jobs]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [await task for task in tasks]


async def groups(
    serving: Serving, requests: Sequence[Request], names: Mapping[str, str]
) -> list[Group]:
    """The groups of all requests. When one fails, or the client goes, all end. names: the client's
    names of a Request's fields. Refused names what the engine refuses."""
    async with _open(serving, requests, names, stream=False) as tickets:
        owned = _owned(names, len(requests))
        return await together(_group(one, own) for one, own in zip(tickets, owned, strict=True))


async def stream(
    request: web.Request,
    requests: Sequence[Request],
    names: Mapping[str, str],
    chunk: Callable[[int, Delta], Tree | None],
    *,
    first: Sequence[Tree] = (),
    last: Callable[[list[Group]], Sequence[Tree]] = lambda _: (),
) -> web.StreamResponse:
    """Server-sent events: `first`, `chunk(i, delta)` of what request i draws, and `last`.

    The engine does not wait for the client: what it draws meanwhile comes in one chunk. Refused, as
    long as nothing was sent; later an event says what went wrong."""
    serving, owned = request.app[SERVING], _owned(names, len(requests))
    async with _open(serving, requests, names, stream=True) as tickets:
        events = _Events(request, serving.limits.write_s)
        await events.begin()

        async def tell(i: int, ticket: Ticket) -> Group:
            async for delta in _deltas(ticket, owned[i]):
                tree = chunk(i, delta)
                if tree is not None:
                    await events.send(tree)
            return await _group(ticket, owned[i])

        try:
            for tree in first:
                await events.send(tree)
            ended = await together(tell(i, ticket) for i, ticket in enumerate(tickets))
            for tree in last(ended):
                await events.send(tree)
        except Refused as error:
            await events.send(error.body())
        except (EngineFailed, Stalled):
            told = f"the engine could not finish request {request[REQUEST_ID]}"
            await events.send(error_body(told, 500))
        except ConnectionResetError:
            return events.response  # nobody is there: leaving the block ends what is left
        await events.end()
        return events.response


def wants_usage(body: Answered) -> bool:
    """Whether the stream ends with the number of tokens."""
    return body.stream_options is not None and body.stream_options.include_usage


def ends(
    head: Tree, body: Answered, ended: list[Group], used: dict[str, int], packed: bool = False
) -> list[Tree]:
    """The events after the last token: where the samples come from, and the number of tokens."""
    events = []
    if body.return_token_ids:
        rollouts = [rollout for group in ended for rollout in group.rollouts]
        sources = [
            {"index": i} | origin(rollout, packed=packed) for i, rollout in enumerate(rollouts)
        ]
        events.append(head | {"choices": [], "lowroll": sources})
    if wants_usage(body):
        events.append(head | {"choices": [], "usage": used})
    return events


def to_json(tree: Tree) -> web.Response:
    """A whole answer. Floats are written so that they read back as they are."""
    return web.Response(text=_compact(tree), content_type="application/json")


async def to_json_beside(serving: Serving, make: Callable[[], Tree], tokens: int) -> web.Response:
    """As `to_json` of what `make` returns; of many tokens it is made and written in a thread."""
    if tokens <= FEW:
        return to_json(make())
    text = await serving.work(lambda: _compact(make()).encode())
    return web.Response(body=text, content_type="application/json", charset="utf-8")


def size(prompts: Sequence[Prompt], ended: Sequence[Group]) -> int:
    """Tokens of prompts and answers."""
    return sum(len(prompt.token_ids) for prompt in prompts) + drawn(ended)


@asynccontextmanager
async def _open(
    serving: Serving, requests: Sequence[Request], names: Mapping[str, str], *, stream: bool
) -> AsyncIterator[list[Ticket]]:
    """Tickets of all requests; whatever of them is left at the end is aborted."""
    owned = _owned(names, len(requests))
    async with AsyncExitStack() as stack:

        async def submit(i: int, request: Request) -> Ticket:
            try:
                ticket = await serving.loop.submit(request, stream=stream)
            except ValueError as error:
                refuse(error, owned[i])
            return await stack.enter_async_context(ticket)

        yield await together(submit(i, request) for i, request in enumerate(requests))


def _owned(names: Mapping[str, str], count: int) -> list[Mapping[str, str]]:
    """The client's names, for each of so many requests: of several prompts each has its place."""
    if count == 1:
        return [names]
    return [{**names, "prompt_ids": f"{names['prompt_ids']}[{i}]"} for i in range(count)]


async def _deltas(ticket: Ticket, names: Mapping[str, str]) -> AsyncIterator[Delta]:
    try:
        async for delta in ticket:
            yield delta
    except ValueError as error:  # as below
        refuse(error, names)


async def _group(ticket: Ticket, names: Mapping[str, str]) -> Group:
    try:
        return await ticket.group()
    except ValueError as error:  # of a request that was held back while the engine was paused
        refuse(error, names)


class _Events:
    """A response of server-sent events. A client that takes nothing for `patience_s` is dropped."""

    def __init__(self, request: web.Request, patience_s: float) -> None:
        self.request = request
        self.patience_s = patience_s
        self.response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        )
        self.turn = asyncio.Lock()

    async def begin(self) -> None:
        await self.response.prepare(self.request)

    async def send(self, tree: Tree) -> None:
        await self._write(_compact(tree))

    async def end(self) -> None:
        await self._write("[DONE]")
        await self.response.write_eof()

    async def _write(self, data: str) -> None:
        event = f"data: {data}\n\n".encode()
        transport = self.request.transport
        if (
            transport is not None
            and not self.turn.locked()
            and transport.get_write_buffer_size() + len(event) < _AT_ONCE
        ):
            await self.response.write(event)  # without a wait: there is room for it
            return
        async with self.turn:
            try:
                async with asyncio.timeout(self.patience_s):
                    await self.response.write(event)
            except TimeoutError:
                if self.request.transport is not None:
                    self.request.transport.abort()
                raise ConnectionResetError("the client takes nothing of its stream") from None
