"""Clients of a completions server in a process of their own, so that they take no time from it:
JSON lines in, JSON lines out (`bench.peer.Peer`).

It needs aiohttp alone. The first line in is {}, the first line out {"ready": true}. Then each

    {"url": "http://127.0.0.1:8000", "concurrency": 64, "prompts": [[5, 17, ...], ...],
     "body": {"model": ..., "stream": true, ...}}

is a call of /v1/completions for every prompt, `concurrency` at a time, answered by

    {"began": ..., "seconds": ..., "tokens": ..., "errors": 0, "error": "",
     "requests": [[sent, first, last, tokens, gap, gap_at], ...]}

in seconds: of the machine's clock (`time.perf_counter`) when the first was sent, and since then
when each was sent, when its first and its last token came, how many it got, and the longest gap
between two reads with the time of its end. Without streaming, first and last are the answer's.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

CALL_S = 300.0
Told = tuple[float, float, float, int, float, float]


@dataclass
class Stream:
    """What one call has got."""

    sent: float
    first: float | None = None
    last: float = 0.0
    gap: float = 0.0  # longest, between two reads
    gap_at: float = 0.0  # when it ended
    tail: bytes = b""
    said: list[bytes] = field(default_factory=list)  # events without a token: usage

    def take(self, data: bytes, now: float) -> None:
        """A read of server-sent events."""
        *events, self.tail = (self.tail + data).split(b"\n\n")
        drawn = False
        for event in events:
            if b'"choices":[{' in event or b'"choices": [{' in event:
                drawn = True
            elif event.startswith(b"data: {"):
                self.said.append(event)
        if not drawn:
            return
        if self.first is None:
            self.first = now
        elif now - self.last > self.gap:
            self.gap, self.gap_at = now - self.last, now
        self.last = now

    def tokens(self) -> int:
        """By the server's own count. ValueError when it gave none."""
        for event in self.said:
            usage = json.loads(event.removeprefix(b"data: ")).get("usage")
            if usage:
                return int(usage["completion_tokens"])
        raise ValueError(f"the stream ended without usage: {self.tail[:200]!r} {self.said[-1:]}")


async def streamed(response: aiohttp.ClientResponse, sent: float) -> Told:
    """Read a stream to its end."""
    stream = Stream(sent)
    async for data in response.content.iter_any():
        stream.take(data, time.perf_counter())
    tokens = stream.tokens()
    first = stream.last if stream.first is None else stream.first
    return sent, first, stream.last, tokens, stream.gap, stream.gap_at


async def whole(response: aiohttp.ClientResponse, sent: float, body: dict[str, Any]) -> Told:
    """Read an answer, and see that each choice has its ids and log-probs."""
    choices = json.loads(await response.read())["choices"]
    now = time.perf_counter()
    if len(choices) != body.get("n", 1):
        raise ValueError(f"{len(choices)} choices instead of {body.get('n', 1)}")
    tokens = 0
    for choice in choices:
        count = len(choice["token_ids"])
        if "logprobs" in body and len(choice["logprobs"]["token_logprobs"]) != count:
            raise ValueError(f"{count} token ids and other than {count} log-probs")
        tokens += count
    return sent, now, now, tokens, 0.0, 0.0


async def call(session: aiohttp.ClientSession, order: dict[str, Any], prompt: Any) -> Told:
    """One call. ValueError for an answer that is none."""
    body = {**order["body"], "prompt": prompt}
    sent = time.perf_counter()
    async with session.post(f"{order['url']}/v1/completions", json=body) as response:
        if response.status != 200:
            raise ValueError(f"{response.status}: {(await response.text())[:300]}")
        if body.get("stream"):
            return await streamed(response, sent)
        return await whole(response, sent, body)


async def run(order: dict[str, Any]) -> dict[str, Any]:
    """Make the calls of an order; what is said of them."""
    waiting, told, errors = iter(order["prompts"]), list[Told](), list[str]()
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=CALL_S)

    async def one(session: aiohttp.ClientSession) -> None:
        for prompt in waiting:
            try:
                told.append(await call(session, order, prompt))
            except (aiohttp.ClientError, TimeoutError, ValueError, KeyError) as error:
                errors.append(f"{type(error).__name__}: {error}")

    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        began = time.perf_counter()
        await asyncio.gather(*(one(session) for _ in range(order["concurrency"])))
        seconds = time.perf_counter() - began
    return {
        "began": began,
        "seconds": seconds,
        "tokens": sum(one[3] for one in told),
        "errors": len(errors),
        "error": errors[0] if errors else "",
        "requests": [_since(began, one) for one in told],
    }


def _since(began: float, told: Told) -> Told:
    sent, first, last, tokens, gap, gap_at = told
    return sent - began, first - began, last - began, tokens, gap, gap_at - began


def serve(lines: Iterable[str]) -> None:
    """Answer every line until they end."""
    orders = iter(lines)
    next(orders)
    print(json.dumps({"ready": True}), flush=True)
    for line in orders:
        print(json.dumps(asyncio.run(run(json.loads(line)))), flush=True)


if __name__ == "__main__":
    serve(sys.stdin)
