"""Clients of a completions server, as a worker of `bench.peer`, so that they take no time from it.

Each order

    {"url": "http://127.0.0.1:8000", "concurrency": 64, "prompts": [[5, 17, ...], ...],
     "body": {"model": ..., "stream": true, ...}}

is a call of /v1/completions for every prompt, `concurrency` at a time, answered by

    {"seconds": ..., "tokens": ..., "errors": 0, "error": "",
     "gaps": [[seconds, end], ...]}

gaps: of each stream the longest between two reads, with the time of its end by the machine's clock
(`time.perf_counter`).
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


@dataclass
class Stream:
    """What one call has got. gap: the longest between two reads, in seconds; gap_at: when it ended."""

    last: float | None = None
    gap: float = 0.0
    gap_at: float = 0.0
    tail: bytes = b""
    said: list[bytes] = field(default_factory=list)  # events without a token: usage

    def take(self, data: bytes, now: float) -> None:
        *events, self.tail = (self.tail + data).split(b"\n\n")
        drawn = False
        for event in events:
            if b'"choices":[{' in event or b'"choices": [{' in event:
                drawn = True
            elif event.startswith(b"data: {"):
                self.said.append(event)
        if not drawn:
            return
        if self.last is not None and now - self.last > self.gap:
            self.gap, self.gap_at = now - self.last, now
        self.last = now

    def tokens(self) -> int:
        """Return the number of tokens by the server's own count. ValueError when it gave none."""
        for event in self.said:
            usage = json.loads(event.removeprefix(b"data: ")).get("usage")
            if usage:
                return int(usage["completion_tokens"])
        raise ValueError(f"the stream ended without usage: {self.tail[:200]!r} {self.said[-1:]}")


def tokens_of(answer: bytes, n: int) -> int:
    """Return the tokens of an answer. ValueError unless each choice has its ids and log-probs."""
    choices = json.loads(answer)["choices"]
    if len(choices) != n:
        raise ValueError(f"{len(choices)} choices instead of {n}")
    tokens = 0
    for choice in choices:
        packed = {name: base64.b64decode(text) for name, text in choice["packed"].items()}
        count = len(packed["token_ids"]) // 4
        if len(packed["logprobs"]) != 8 * count:
            raise ValueError(f"{count} token ids and other than {count} log-probs")
        tokens += count
    return tokens


async def call(
    session: aiohttp.ClientSession, url: str, body: bytes, stream: bool
) -> Stream | bytes:
    """Make one call; return its stream, or its whole answer. ValueError for an answer that is none."""
    async with session.post(f"{url}/v1/completions", data=body, headers=JSON) as response:
        if response.status != 200:
            raise ValueError(f"{response.status}: {(await response.text())[:300]}")
        if not stream:
            return await response.read()
        found = Stream()
        async for data in response.content.iter_any():
            found.take(data, time.perf_counter())
        return found


async def run(session: aiohttp.ClientSession, order: dict[str, Any]) -> dict[str, Any]:
    """Make the calls of an order. Bodies are written before, and answers read after the time that is
    taken."""
    asked, answers, errors = order["body"], list[Stream | bytes](), list[str]()
    waiting = iter([json.dumps(asked | {"prompt": prompt}).encode() for prompt in order["prompts"]])

    async def one() -> None:
        for body in waiting:
            try:
                answers.append(await call(session, order["url"], body, bool(asked.get("stream"))))
            except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                errors.append(f"{type(error).__name__}: {error}")

    began = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(order["concurrency"])))
    seconds, tokens = time.perf_counter() - began, 0
    for answer in answers:
        try:
            if isinstance(answer, Stream):
                tokens += answer.tokens()
            else:
                tokens += tokens_of(answer, asked.get("n", 1))
        except (ValueError, KeyError) as error:
            errors.append(f"{type(error).__name__}: {error}")
    return {
        "seconds": seconds,
        "tokens": tokens,
        "errors": len(errors),
        "error": errors[0] if errors else "",
        "gaps": [[one.gap, one.gap_at] for one in answers if isinstance(one, Stream)],
    }


async def main() -> None:
    _, say = channel()
    say({"ready": True})
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=CALL_S)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        for order in orders():  # nothing else is to be done while it waits for one
            say(await run(session, order))


if __name__ == "__main__":
    asyncio.run(main())
