"""Answers to generation requests: JSON, or server-sent events."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import (
    AsyncIterator,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict
from typing import Any, TypeVar

from aiohttp import web

from lowroll.server.engine_loop import Delta, EngineFailed, EngineStalled, InFlightRequest
from lowroll.server.limits import REQUEST_ID, STATE, ServerState
from lowroll.server.protocol import GenerationFields, Refused, error_body, refuse_engine_error
from lowroll.server.text import TokenNames, finite_logprob
from lowroll.types import Group, Request, Rollout

T = TypeVar("T")
Tree = dict[str, Any]
SENT_AT_ONCE = 1 << 15  # bytes that a connection takes without a wait: half of asyncio's buffer
SHORT_ANSWER = 1024  # tokens of an answer that the event loop writes itself
compact_json = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode


class Answer:
    """The answer to a generation request, whole or event by event.

    prompts: token ids, with `n` samples of each. head: first fields of each event.
    """

    packed = False  # ids and log-probs in one string

    def __init__(self, body: GenerationFields, prompts: Sequence[list[int]], head: Tree) -> None:
        self.body = body
        self.prompts = prompts
        self.head = head

    def whole_choice(self, prompt: int, delta: Delta, rollout: Rollout) -> Tree:
        raise NotImplementedError

    def chunk(self, prompt: int, delta: Delta) -> Tree | None:
        """Return the event of a sample's new tokens; None for an empty one."""
        raise NotImplementedError

    def first(self) -> list[Tree]:
        return []

    def whole(self, groups: Sequence[Group]) -> Tree:
        choices = [
            self.whole_choice(i, Delta.since(sample, rollout), rollout)
            for i, group in enumerate(groups)
            for sample, rollout in enumerate(group.rollouts)
        ]
        return self.head | {"choices": choices, "usage": self.usage(groups)}

    def last(self, groups: Sequence[Group]) -> list[Tree]:
        events = []
        if self.body.return_token_ids:
            origins = [origin(rollout, self.packed) for one in groups for rollout in one.rollouts]
            indexed = [{"index": i} | fields for i, fields in enumerate(origins)]
            events.append(self.head | {"choices": [], "lowroll": indexed})
        if self.body.wants_usage:
            events.append(self.head | {"choices": [], "usage": self.usage(groups)})
        return events

    def event(self, choice: Tree) -> Tree:
        usage = {"usage": None} if self.body.wants_usage else {}
        return self.head | {"choices": [choice]} | usage

    def usage(self, groups: Sequence[Group]) -> dict[str, int]:
        """Count the tokens. A prompt with several samples counts once."""
        read, drawn = sum(map(len, self.prompts)), num_drawn(groups)
        return {
            "prompt_tokens": read,
            "completion_tokens": drawn,
            "total_tokens": read + drawn,
        }


async def respond(
    request: web.Request, answer: Answer, requests: Sequence[Request], names: Mapping[str, str]
) -> web.StreamResponse:
    """Answer a generation request with the groups of `requests`, one for each prompt. An error or a
    disconnected client aborts all. names: the client's names of the engine's fields."""
    if answer.body.stream:
        return await _stream_answer(request, answer, requests, names)
    state, client_names = request.app[STATE], _names_by_prompt(names, len(requests))

    async def finished(engine_request: Request, own_names: Mapping[str, str]) -> Group:
        with _engine_errors(own_names):
            async with await state.engine.submit(engine_request) as in_flight:
                return await in_flight.group()

    groups = await _gather(finished(*one) for one in zip(requests, client_names, strict=True))
    tokens = sum(map(len, answer.prompts)) + num_drawn(groups)
    return await json_response_in_worker(state, lambda: answer.whole(groups), tokens)


async def _stream_answer(
    request: web.Request, answer: Answer, requests: Sequence[Request], names: Mapping[str, str]
) -> web.StreamResponse:
    state, client_names = request.app[STATE], _names_by_prompt(names, len(requests))
    async with _submitted_streams(state, requests, client_names) as in_flight:
        events = _EventStream(request, state.limits.write_s)
        await events.response.prepare(request)

        async def send(i: int, one: InFlightRequest) -> Group:
            async for delta in _checked_deltas(one, client_names[i]):
                if (tree := answer.chunk(i, delta)) is not None:
                    await events.send(tree)
            return await one.group()

        try:
            for tree in answer.first():
                await events.send(tree)
            groups = await _gather(send(i, one) for i, one in enumerate(in_flight))
            for tree in answer.last(groups):
                await events.send(tree)
        except Refused as error:
            await events.send(error.body())
        except (EngineFailed, EngineStalled):
            message = f"the engine could not finish request {request[REQUEST_ID]}"
            await events.send(error_body(message, 500))
        except ConnectionResetError:
            return events.response  # the client has gone; leaving the block aborts the rest
        await events.end()
        return events.response


@asynccontextmanager
async def _submitted_streams(
    state: ServerState, requests: Sequence[Request], names: Sequence[Mapping[str, str]]
) -> AsyncIterator[list[InFlightRequest]]:
    async with AsyncExitStack() as stack:

        async def submit(request: Request, own: Mapping[str, str]) -> InFlightRequest:
            with _engine_errors(own):
                in_flight = await state.engine.submit(request, stream=True)
            return await stack.enter_async_context(in_flight)

        yield await _gather(submit(*one) for one in zip(requests, names, strict=True))


def _names_by_prompt(names: Mapping[str, str], count: int) -> list[Mapping[str, str]]:
    return [{**names, "prompt_ids": field} for field in prompt_fields(names["prompt_ids"], count)]


def prompt_fields(field: str, count: int) -> list[str]:
    """Return the client's name of each prompt: each of several has its index."""
    return [field] if count == 1 else [f"{field}[{i}]" for i in range(count)]


async def _checked_deltas(
    in_flight: InFlightRequest, names: Mapping[str, str]
) -> AsyncIterator[Delta]:
    with _engine_errors(names):
        async for delta in in_flight:
            yield delta


@contextmanager
def _engine_errors(names: Mapping[str, str]) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        refuse_engine_error(error, names)


async def _gather(jobs: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return all results in order. The first error cancels the other jobs."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(job) for job in jobs]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [await task for task in tasks]


class _EventStream:
    def __init__(self, request: web.Request, patience_s: float) -> None:
        self.request = request
        self.patience_s = patience_s
        self.response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        )
        self.turn = asyncio.Lock()

    async def send(self, tree: Tree) -> None:
        await self._write(compact_json(tree))

    async def end(self) -> None:
        await self._write("[DONE]")
        await self.response.write_eof()

    async def _write(self, data: str) -> None:
        event = f"data: {data}\n\n".encode()
        transport = self.request.transport
        if (
            transport is not None
            and not self.turn.locked()
            and transport.get_write_buffer_size() + len(event) < SENT_AT_ONCE
        ):
            await self.response.write(event)
            return
        async with self.turn:
            try:
                async with asyncio.timeout(self.patience_s):
                    await self.response.write(event)
            except TimeoutError:
                if self.request.transport is not None:
                    self.request.transport.abort()
                raise ConnectionResetError("the client takes nothing of its stream") from None


# -- JSON --------------------------------------------------------------------------------------------


def json_response(tree: Tree) -> web.Response:
    """Return a complete answer, whose floats round-trip."""
    return web.Response(text=compact_json(tree), content_type="application/json")


async def json_response_in_worker(
    state: ServerState, make: Callable[[], Tree], tokens: int
) -> web.Response:
    if tokens <= SHORT_ANSWER:
        return json_response(make())
    body = await state.run_in_worker(lambda: compact_json(make()).encode())
    return web.Response(body=body, content_type="application/json", charset="utf-8")


def openai_head(request: web.Request, prefix: str, object: str) -> Tree:
    return {
        "id": f"{prefix}-{request[REQUEST_ID]}",
        "object": object,
        "created": time.time_ns() // 10**9,
        "model": request.app[STATE].name,
    }


def origin(rollout: Rollout, packed: bool = False) -> Tree:
    """Return what a learner needs of a rollout besides its tokens: log-probs (unless packed), the
    policy that drew it, how it ended, and the keys that its cache dropped."""
    behavior, evictions = rollout.behavior, None
    if rollout.evictions is not None:
        numbers = base64.b64encode(rollout.evictions.numbers).decode()
        evictions = asdict(rollout.evictions) | {"numbers": numbers}
    logprobs: Tree = {} if packed else {"logprobs": list(map(finite_logprob, rollout.logprobs))}
    return logprobs | {
        "behavior": vars(behavior) | {"policy": [vars(span) for span in behavior.policy]},
        "finish_reason": rollout.finish_reason,
        "stop_reason": rollout.stop_reason,
        "evictions": evictions,
    }


def logprob_objects(names: TokenNames, delta: Delta, top: int) -> list[Tree]:
    """Return log-probs for /v1/chat/completions: one object for each token."""

    def one(token_id: int, logprob: float) -> Tree:
        return {
            "token": names.name(token_id),
            "logprob": finite_logprob(logprob),
            "bytes": names.bytes(token_id),
        }

    tops = delta.top_logprobs or [[]] * len(delta.token_ids)
    return [
        one(token, logprob) | {"top_logprobs": [one(*pair) for pair in likeliest[:top]]}
        for token, logprob, likeliest in zip(delta.token_ids, delta.logprobs, tops, strict=True)
    ]


def num_drawn(groups: Sequence[Group]) -> int:
    return sum(len(rollout.token_ids) for group in groups for rollout in group.rollouts)
