"""HTTP to one server, with a deadline for every wait. An address is `http://`, `https://`, or
`unix:/path/of/a/socket`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from lowroll.types import RunFailed, printable

MOST_JSON = 16 << 20  # bytes of an answer without another limit
AGAIN = (429, 502, 503)  # the server has not begun: busy, or not there yet
TRIES = 3
PAUSE = 0.2  # seconds before the second try, doubled for the third
DYING = 30  # tenths of a second in which a failed server may exit


class ServerError(RunFailed):
    """A bad answer of a server, or none within the deadline."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class EngineLost(ServerError):
    """An engine that has ended or is unreachable."""


class DeadlineExceeded(ServerError):
    """No answer within the deadline."""


@dataclass(frozen=True)
class HttpCall:
    """One request and its limits. again: it may be sent twice."""

    method: str
    path: str
    what: str  # for errors: "what: no answer within 30 s"
    body: Any = None
    deadline_s: float = 30.0
    most_bytes: int = MOST_JSON
    again: bool = False
    text: bool = False  # not JSON
    token: str | None = field(default=None, repr=False)  # in place of the client's


class HttpClient:
    """An address and its token, for one event loop.

    concurrency: requests open at once; deadlines begin when one may open. lost: returns why the
    server has ended, if known.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        concurrency: int = 256,
        lost: Callable[[], str | None] | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self._socket, self._base = _split_url(self.url)
        self.token = token
        self._concurrency = concurrency
        self._lost = lost
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        self._turns = asyncio.Semaphore(self._concurrency)
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if self.token is not None:
            headers["Authorization"] = f"Bearer {self.token}"
        limit = self._concurrency + 1
        connector = (
            aiohttp.TCPConnector(limit=limit)
            if self._socket is None
            else aiohttp.UnixConnector(self._socket, limit=limit)
        )
        self._session = aiohttp.ClientSession(
            connector=connector, headers=headers, timeout=aiohttp.ClientTimeout(total=None)
        )

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def get(self, path: str, what: str) -> Any:
        """Return the JSON of a GET, which may be retried. ServerError names the call."""
        return await self.answer(HttpCall("GET", path, what, again=True))

    async def answer(self, call: HttpCall) -> Any:
        """Return the JSON of an answer, or its text if the call expects none. ServerError names the
        call."""
        return _parse_answer(call, await self.body(call))

    async def answers(self, calls: Sequence[HttpCall]) -> list[Any]:
        """Return the answers to several calls. The first error ends the others."""
        tasks = [asyncio.ensure_future(self.answer(call)) for call in calls]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def body(self, call: HttpCall, on_line: Callable[[bytes], None] | None = None) -> bytes:
        """Return the bytes of an answer; with `on_line`, pass it each line instead, and
        return b""."""
        async with self._turns:
            try:
                async with asyncio.timeout(call.deadline_s):
                    return await self._tries(call, on_line)
            except TimeoutError:
                raise self._late(call) from None

    async def _tries(self, call: HttpCall, on_line: Callable[[bytes], None] | None) -> bytes:
        pause = PAUSE
        tries_left = TRIES if call.again else 1
        while True:
            tries_left -= 1
            try:
                return await self._once(call, on_line)
            except ServerError as error:
                if error.status not in AGAIN or not tries_left:
                    raise await self._explained(error) from None
            except (aiohttp.ClientError, OSError) as error:
                if not tries_left:
                    reason = printable(str(error) or type(error).__name__)
                    message = f"{call.what}: the connection to {self.url} failed: {reason}"
                    raise await self._explained(EngineLost(message)) from None
            await asyncio.sleep(pause)
            pause *= 2

    async def _once(self, call: HttpCall, on_line: Callable[[bytes], None] | None) -> bytes:
        data = None if call.body is None else json.dumps(call.body, allow_nan=False).encode()
        headers = None if call.token is None else {"Authorization": f"Bearer {call.token}"}
        assert self._session is not None
        async with self._session.request(
            call.method, self._base + call.path, data=data, headers=headers, allow_redirects=False
        ) as response:
            if response.status >= 300:
                text = await _read_start(response, 1 << 16)
                raise ServerError(
                    f"{call.what}: {self.url} answered {response.status}: {_error_text(text)}",
                    response.status,
                )
            return await _read_body(response, call, on_line)

    async def _explained(self, error: ServerError) -> ServerError:
        if self._lost is None or (error.status is not None and error.status < 500):
            return error
        for _ in range(DYING):
            if (reason := self._lost()) is not None:
                return EngineLost(f"{error}; {reason}", error.status)
            await asyncio.sleep(0.1)
        return error

    def _late(self, call: HttpCall) -> ServerError:
        reason = None if self._lost is None else self._lost()
        message = f"{call.what}: no answer from {self.url} within {call.deadline_s:g} s"
        return DeadlineExceeded(message) if reason is None else EngineLost(f"{message}; {reason}")


def _split_url(url: str) -> tuple[str | None, str]:
    parts = urlsplit(url)
    if parts.scheme == "unix" and parts.path and not parts.netloc:
        return parts.path, "http://localhost"
    if parts.scheme in ("http", "https") and parts.hostname and not (parts.query or parts.fragment):
        if parts.username is not None or parts.password is not None:
            raise ValueError("url: a token belongs into its environment variable, not the address")
        return None, url.removesuffix("/v1")  # OpenAI's clients write it
    raise ValueError(
        f"url: expected http://host:port, https://host:port or unix:/path, got {excerpt(url)}"
    )


async def _read_start(response: aiohttp.ClientResponse, most: int) -> bytes:
    buffer = bytearray()
    async for chunk in response.content.iter_any():
        buffer += chunk
        if len(buffer) > most:
            break
    return bytes(buffer[:most])


async def _read_body(
    response: aiohttp.ClientResponse, call: HttpCall, on_line: Callable[[bytes], None] | None
) -> bytes:
    buffer = bytearray()
    num_bytes = 0
    async for chunk in response.content.iter_any():
        buffer += chunk
        num_bytes += len(chunk)
        if num_bytes > call.most_bytes:
            raise ServerError(f"{call.what}: the answer is longer than {call.most_bytes:,} bytes")
        if on_line is not None and b"\n" in chunk:
            *lines, rest = bytes(buffer).split(b"\n")
            buffer = bytearray(rest)
            for line in lines:
                on_line(line)
    if on_line is not None:
        on_line(bytes(buffer))
        on_line(b"")
    return bytes(buffer)


def parse_json(text: bytes, what: str) -> Any:
    """Parse a server's JSON. ServerError when it is invalid or too deep."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        excerpt = printable(text[:200].decode(errors="replace"))
        raise ServerError(f"{what}: the answer is no JSON: {excerpt}") from None


def _parse_answer(call: HttpCall, text: bytes) -> Any:
    if call.text or (call.method == "POST" and text[:1] not in (b"{", b"[")):
        return text.decode(errors="replace")
    return parse_json(text, call.what)


def _error_text(text: bytes) -> str:
    try:
        parsed = json.loads(text)
        error = parsed.get("error", parsed) if isinstance(parsed, dict) else parsed
        message = error.get("message", error) if isinstance(error, dict) else error
    except (ValueError, RecursionError, AttributeError):
        message = text.decode(errors="replace")
    return printable(" ".join(str(message).split()), 500)


def excerpt(value: object, most: int = 200) -> str:
    """Return a value, shortened for an error."""
    return printable(repr(value), most)


async def happens_within(event: asyncio.Event, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True
