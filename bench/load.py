"""Clients of a completions server, as a worker of `bench.peer`, so that they take no time from it.

Each order

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
import base64
import json
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from bench.worker import channel, orders

CALL_S = 300.0
JSON = {"Content-Type": "application/json"}
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
        """Take a read of server-sent events."""
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
        """Return the number of tokens by the server's own count. ValueError when it gave none."""
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


@dataclass(frozen=True)
class Whole:
    """An answer as it was read."""

    sent: float
    now: float
    data: bytes


def told_by(answer: Whole, n: int) -> Told:
    """Return what was read, after all have been. ValueError unless each choice has its ids and
    log-probs."""
    choices = json.loads(answer.data)["choices"]
    if len(choices) != n:
        raise ValueError(f"{len(choices)} choices instead of {n}")
    tokens = 0
    for choice in choices:
        packed = {name: base64.b64decode(text) for name, text in choice["packed"].items()}
        count = len(packed["token_ids"]) // 4
        if len(packed["logprobs"]) != 8 * count:
            raise ValueError(f"{count} token ids and other than {count} log-probs")
        tokens += count
    return answer.sent, answer.now, answer.now, tokens, 0.0, 0.0


async def call(session: aiohttp.ClientSession, url: str, body: bytes, stream: bool) -> Told | Whole:
    """Make one call. ValueError for an answer that is none."""
    sent = time.perf_counter()
    async with session.post(f"{url}/v1/completions", data=body, headers=JSON) as response:
        if response.status != 200:
            raise ValueError(f"{response.status}: {(await response.text())[:300]}")
        if stream:
            return await streamed(response, sent)
        data = await response.read()
        return Whole(sent, time.perf_counter(), data)


async def run(session: aiohttp.ClientSession, order: dict[str, Any]) -> dict[str, Any]:
    """Make the calls of an order; what is said of them. Bodies are written before, and whole
    answers read after the time that is taken."""
    asked, answers, errors = order["body"], list[Told | Whole](), list[str]()
    waiting = iter([json.dumps(asked | {"prompt": prompt}).encode() for prompt in order["prompts"]])

    async def one() -> None:
        for body in waiting:
            try:
                answers.append(await call(session, order["url"], body, bool(asked.get("stream"))))
            except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                errors.append(f"{type(error).__name__}: {error}")

    began = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(order["concurrency"])))
    seconds = time.perf_counter() - began
    told = []
    for answer in answers:
        try:
            n = asked.get("n", 1)
            told.append(told_by(answer, n) if isinstance(answer, Whole) else answer)
        except (ValueError, KeyError) as error:
            errors.append(f"{type(error).__name__}: {error}")
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


async def main() -> None:
    """Answer all orders over connections that stay open from one order to the next."""
    _, say = channel()
    say({"ready": True})
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=CALL_S)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        for order in orders():  # nothing else is to be done while it waits for one
            say(await run(session, order))


if __name__ == "__main__":
    asyncio.run(main())
