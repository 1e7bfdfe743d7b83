"""The door: who may ask, for how much, and what a client learns when something is wrong."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientPayloadError, web
from aiohttp.test_utils import TestClient

from lowroll.server import app as server_app
from lowroll.server import limits as server_limits
from lowroll.server.app import CONTROL, PUBLIC, WEIGHTS, make_app
from lowroll.server.engine_thread import EngineThread
from lowroll.server.limits import STATE, Credentials, ServerLimits, ServerState
from lowroll.server.protocol import Refused
from lowroll.server.weight_store import WeightStore
from tests.fixtures import serving as fixtures
from tests.fixtures.serving import (
    ADMIN,
    CLIENT,
    TOKENS,
    Moody,
    hung,
    impatient,
    looped,
    served,
    tiny,
)

METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE")
GOOD = {"prompt": [3, 4, 5], "max_tokens": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("guard") / "model"
    tiny(path)
    return path


@pytest.fixture
def engine(folder: Path) -> Moody:
    return Moody(tiny(folder))


def error_of(body: bytes) -> dict[str, Any]:
    """What every refusal looks like."""
    error = json.loads(body)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


async def status(client: TestClient, method: str, path: str, **options: Any) -> int:
    async with client.request(method, path, **options) as response:
        body = await response.read()
        assert response.headers["X-Request-Id"] and response.headers["Server"] == "lowroll"
        if response.status >= 400 and path != "/health" and method != "HEAD":
            error_of(body)
        return response.status


# -- who may ask -------------------------------------------------------------------------------------


async def test_every_route_of_the_application_is_in_the_table(
    engine: Moody, tmp_path: Path
) -> None:
    async with looped(engine) as loop:
        serving = ServerState(loop, None, "tiny", engine.capabilities)
        shelf = WeightStore(tmp_path, tmp_path)
        for tokens, held, wanted in (
            (Credentials(), None, PUBLIC.keys()),
            (TOKENS, None, PUBLIC.keys() | CONTROL.keys()),
            (TOKENS, shelf, PUBLIC.keys() | CONTROL.keys() | WEIGHTS.keys()),
            (Credentials(token="a-client-of-this-server"), shelf, PUBLIC.keys()),
        ):
            app = make_app(serving, tokens, held)
            routes = {(r.method, r.resource.canonical) for r in app.router.routes()}
            assert routes == wanted
        tables = {**PUBLIC, **CONTROL, **WEIGHTS}
        assert [key for key, row in tables.items() if row[0] == "open"] == [("GET", "/health")]
        assert {row[0] for row in [*CONTROL.values(), *WEIGHTS.values()]} == {"admin"}


@pytest.mark.slow
async def test_no_method_of_any_route_answers_a_stranger(engine: Moody, tmp_path: Path) -> None:
    paths = sorted({path for _, path in {**PUBLIC, **CONTROL, **WEIGHTS}})
    wrong: list[dict[str, str]] = [
        {},
        {"Authorization": ""},
        {"Authorization": "Bearer "},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Basic a-client-of-this-server"},
        {"Authorization": "a-client-of-this-server"},
        {"Authorization": "bearer\ta-client-of-this-server"},
        {"Authorization": "Bearer a-client-of-this-serve"},
        {"Authorization": "Bearer a-client-of-this-server2"},
        {"Authorization": "Bearer \udcff\udcfe"},
        {"X-Api-Key": "a-client-of-this-server"},
    ]

    async with served(engine, TOKENS, WeightStore(tmp_path, tmp_path)) as client:
        for path in [*paths, "/", "/nothing", "/v1", "/v1//pause", "/pause/", "/%70ause/x"]:
            for method in METHODS:
                if (method, path) == ("GET", "/health"):
                    continue
                for headers in wrong:
                    assert await status(client, method, path, headers=headers) == 401
        assert await status(client, "GET", "/health") == 200
        loop = client.server.app[STATE].engine
        registry, outcome = loop.metrics.registry, {"outcome": "stop"}
        assert registry.get_sample_value("lowroll_requests_total", outcome) is None
        assert not loop.paused


async def test_a_client_is_no_admin_and_an_admin_is_a_client(engine: Moody, tmp_path: Path) -> None:
    async with served(engine, TOKENS, WeightStore(tmp_path, tmp_path)) as client:
        for method, path in [*CONTROL, *WEIGHTS]:
            assert await status(client, method, path, headers=CLIENT) == 401
        for headers in (CLIENT, ADMIN):
            assert await status(client, "GET", "/v1/models", headers=headers) == 200
            assert await status(client, "GET", "/nothing", headers=headers) == 404
            assert await status(client, "DELETE", "/v1/models", headers=headers) == 405
        assert await status(client, "POST", "/pause", headers=ADMIN) == 200
        assert await status(client, "GET", "/is_paused", headers=ADMIN) == 200
        assert await status(client, "POST", "/resume", headers=ADMIN) == 200
        double = [("Authorization", CLIENT["Authorization"])] * 2
        assert await status(client, "GET", "/v1/models", headers=double) == 401


async def test_a_path_that_leads_nowhere_is_named_with_the_nearest(engine: Moody) -> None:
    async with served(engine) as client:
        for path, told in (
            ("/chat/completions", "/chat/completions here; did you mean /v1/chat/completions?"),
            ("/v1/v1/models", "/v1/v1/models here; did you mean /v1/models?"),
            ("/%0A" + "x" * 500, "/\\n" + "x" * 98 + " here"),
        ):
            answer = await client.post(path, json={})
            assert (await answer.json())["error"]["message"] == f"there is no {told}"


async def test_without_tokens_control_is_not_there(engine: Moody) -> None:
    async with served(engine) as client:
        assert await status(client, "GET", "/v1/models") == 200
        for method, path in [*CONTROL, *WEIGHTS]:
            assert await status(client, method, path, headers=ADMIN) == 404


async def test_an_admin_alone_leaves_the_public_routes_open(engine: Moody) -> None:
    async with served(engine, Credentials(admin=TOKENS.admin)) as client:
        assert await status(client, "GET", "/v1/models") == 200
        for headers in ({}, {"Authorization": "Bearer "}, CLIENT):
            assert await status(client, "POST", "/pause", headers=headers) == 401
        assert await status(client, "POST", "/pause", headers=ADMIN) == 200


def test_tokens_are_compared_in_constant_time_and_never_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared = []
    monkeypatch.setattr(
        server_limits.hmac, "compare_digest", lambda a, b: compared.append((a, b)) or a == b
    )
    assert server_limits.same_token("x", "token") is False
    assert server_limits.same_token("token", "token") is True
    assert server_limits.same_token("", None) is False
    assert compared == [(b"x", b"token"), (b"token", b"token"), (b"", b"")]
    assert "client" not in repr(TOKENS) and "admin-of" not in repr(TOKENS)


@pytest.mark.parametrize(
    ("headers", "wanted"),
    [
        ({}, 200),
        ({"Host": "localhost:1"}, 200),
        ({"Host": "LOCALHOST"}, 200),
        ({"Host": "[::1]:80"}, 200),
        ({"Host": "evil.example"}, 403),
        ({"Host": "127.0.0.1.evil.example"}, 403),
        ({"Host": "localhost.evil.example:8000"}, 403),
        ({"Host": "evil.example#@localhost"}, 403),
        ({"Host": ""}, 403),
        ({"Origin": "http://localhost:3000"}, 200),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://[oops"}, 403),
    ],
)
async def test_other_names_of_this_machine_are_refused(
    engine: Moody, headers: dict[str, str], wanted: int
) -> None:
    async with served(engine) as client:
        for path in ("/health", "/v1/models", "/version"):
            assert await status(client, "GET", path, headers=headers) == wanted


async def test_an_address_of_others_needs_a_token_and_takes_any_name(engine: Moody) -> None:
    async with looped(engine) as loop:
        serving = ServerState(loop, None, "tiny", engine.capabilities)
        with pytest.raises(ValueError, match="needs one"):
            make_app(serving, Credentials(admin=TOKENS.admin), loopback=False)
        app = make_app(serving, TOKENS, loopback=False)
        async with TestClient(fixtures.TestServer(app)) as client:
            named = CLIENT | {"Host": "gpu-7.example"}
            assert await status(client, "GET", "/v1/models", headers=named) == 200
            assert await status(client, "GET", "/v1/models", headers={"Host": "gpu-7"}) == 401


# -- how much ----------------------------------------------------------------------------------------

JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize(
    ("data", "headers", "wanted", "says"),
    [
        (b"", JSON, 400, "no JSON at character 0"),
        (b"[]", JSON, 400, "expected a JSON object"),
        (b'{"prompt": [3], "max_tokens": NaN}', JSON, 400, "NaN"),
        (b'{"prompt": [3], "temperature": -Infinity}', JSON, 400, "-Infinity"),
        (b'{"prompt": [3], "temperature": 1e999}', JSON, 400, "1e999 is too large"),
        (b'{"prompt": [' + b"9" * 5000 + b"]}", JSON, 400, "a number is too long"),
        (b'{"prompt": "\\ud800"}', JSON, 400, "half of a surrogate pair"),
        (b'{"prompt": "\xff"}', JSON, 400, "not UTF-8 at byte 12"),
        ('{"prompt": [3]}'.encode("utf-16"), JSON, 400, "not UTF-8 at byte 0"),
        (b'{"a":' + b"[" * 40 + b"]" * 40 + b"}", JSON, 400, "more than 32 lists"),
        (b'{"a":' * 40 + b"1" + b"}" * 40, JSON, 400, "more than 32 lists"),
        (b"[" * 200_000, JSON, 400, "more than 32 lists"),
        (b'{"prompt": "' + b"x" * 300_000 + b'"}', JSON, 413, "more than 262,144 bytes"),
        (b'{"prompt": [3]}', {"Content-Type": "text/plain"}, 415, "application/json"),
        (b'{"prompt": [3]}', {}, 415, "application/json"),
        (b"\x1f\x8b", JSON | {"Content-Encoding": "gzip"}, 415, "as it is"),
        (b'{"prompt": [3]}', JSON | {"X-Much": "a" * 5000}, 431, "4,096 at most"),
    ],
)
async def test_a_body_that_is_wrong_is_named(
    engine: Moody, data: bytes, headers: dict[str, str], wanted: int, says: str
) -> None:
    limits = ServerLimits(body=1 << 18, headers=4096)
    async with served(engine, limits=limits) as client:
        for path in ("/v1/completions", "/v1/chat/completions", "/inference/v1/generate"):
            async with client.post(path, data=data, headers=headers) as response:
                assert response.status == wanted
                assert says in error_of(await response.read())["message"]
        assert await status(client, "POST", "/v1/completions", json=GOOD) == 200


def test_brackets_in_texts_are_no_nesting() -> None:
    text = '{"a": "' + "[{" * 500 + '", "b": "\\"[[\\\\", "c": [[[1]]]}'
    assert server_limits.parse_json(text.encode(), 4)["c"] == [[[1]]]
    with pytest.raises(Refused, match="more than 3 lists"):
        server_limits.parse_json(text.encode(), 3)
    for inside in (b"[" * 4, b'{"a":' * 4 + b"1" + b"}" * 4, b"[[[[]]]]", b"[{}, [[{}]], 1"):
        with pytest.raises(Refused):
            server_limits.parse_json(b'{"a": ' + inside + b"}", 4)
    for inside in (b"[[[]]]", b'{"a": [{}, {}, [], []]}', b"[[], [[]], [[], []]]"):
        server_limits.parse_json(b'{"a": ' + inside + b"}", 4)
    flat = b'{"a": [' + b",".join([b"[1]"] * 50_000) + b"]}"
    assert len(server_limits.parse_json(flat, 3)["a"]) == 50_000


@pytest.mark.parametrize(
    "bomb",
    [
        b'{"a": "' + b"\\" * (8 << 20),
        b'{"a": "' + b'\\"' * (4 << 20),
        b'{"a": ' + b"[" * 40 + b'"' * (8 << 20),
        b'{"a": ' + b"[]," * (2 << 20),
        b'{"a": ' + b'{"a":' * (1 << 20),
    ],
)
@pytest.mark.slow
def test_a_large_bomb_is_read_in_a_moment(bomb: bytes) -> None:
    began = time.process_time()
    with pytest.raises(Refused):
        server_limits.parse_json(bomb, 32)
    assert time.process_time() - began < 5


async def test_more_open_requests_than_may_be_are_told_to_come_again(engine: Moody) -> None:
    async with served(engine, limits=ServerLimits(requests=2)) as client:
        loop = client.server.app[STATE].engine
        await hung(engine, loop)
        begun, submit = [], loop.submit

        def seen(*request: Any, **options: Any) -> Any:
            begun.append(request)
            return submit(*request, **options)

        loop.submit = seen  # type: ignore[method-assign]
        waiting = [
            asyncio.ensure_future(client.post("/v1/completions", json=GOOD)) for _ in range(2)
        ]
        await fixtures.until(lambda: len(begun) == 2, "two open requests")
        async with client.post("/v1/completions", json=GOOD) as response:
            assert response.status == 503 and response.headers["Retry-After"] == "1"
            assert error_of(await response.read())["code"] == "busy"
        engine.hang.clear()
        assert [(await one).status for one in waiting] == [200, 200]
        assert await status(client, "POST", "/v1/completions", json=GOOD) == 200


# -- connections that give nothing, and take nothing ----------------------------------------------------


@asynccontextmanager
async def listening(
    engine: Any, limits: ServerLimits
) -> AsyncIterator[tuple[str, int, EngineThread]]:
    """The real listener, as `lowroll serve` has it."""
    async with looped(engine) as loop:
        app = make_app(
            ServerState(loop, None, "tiny", engine.capabilities, limits=limits), Credentials()
        )
        runner = server_app.make_runner(app)
        await runner.setup()
        sock = server_app.bind("127.0.0.1", 0)
        server = await server_app.listen(app, runner, sock)
        try:
            yield *sock.getsockname()[:2], loop
        finally:
            server.close()
            await runner.cleanup()


async def raw(host: str, port: int, data: bytes, wait_s: float = 30.0) -> bytes:
    """What comes back for these bytes until the server closes; b"" when it only closes."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(data)
        await writer.drain()
        async with asyncio.timeout(wait_s):
            return await reader.read()
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


def post(data: bytes, length: int | None = None) -> bytes:
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    size = len(data) if length is None else length
    return f"{head}Connection: close\r\nContent-Length: {size}\r\n\r\n".encode() + data


async def test_slow_connections_are_dropped_beside_a_good_request(engine: Moody) -> None:
    limits = ServerLimits(head_s=1.0, body_s=1.0)
    async with listening(engine, limits) as (host, port, _):
        slow = [
            asyncio.ensure_future(raw(host, port, data))
            for data in [b""] * 20 + [b"POST /v1/comp"] * 15 + [post(b'{"prompt"', 500)] * 15
        ]
        await asyncio.sleep(0.1)
        answer = await raw(host, port, post(json.dumps(GOOD).encode()))
        assert answer.startswith(b"HTTP/1.1 200")
        assert not all(end.done() for end in slow), "it waited for them"
        ends = await asyncio.gather(*slow)
        assert ends[:35] == [b""] * 35
        assert all(b" 408 " in end and b"has not come in 1 s" in end for end in ends[35:])
        answer = await raw(host, port, post(json.dumps(GOOD).encode()))
        assert answer.startswith(b"HTTP/1.1 200")


@pytest.mark.slow
async def test_who_reads_no_answers_is_dropped(engine: Moody) -> None:
    """Answers that nobody takes would hold their connection for ever."""

    async with listening(engine, ServerLimits(connections=1, write_s=0.3)) as (host, port, _):
        sock = socket.socket()
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        events = asyncio.get_running_loop()
        await events.sock_connect(sock, (host, port))
        asked = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n" * 4000
        with contextlib.suppress(ConnectionError):  # it is dropped
            await events.sock_sendall(sock, asked)
        with contextlib.suppress(BlockingIOError, ConnectionError):
            sock.recv(1)  # what it still has of an answer, or that it was dropped
        answer = b""
        while not answer:  # as long as `run` lets it
            answer = await raw(host, port, post(json.dumps(GOOD).encode()))
        assert answer.startswith(b"HTTP/1.1 200")
        sock.close()


@pytest.mark.parametrize(
    "data", [b"\x16\x03\x01\x02\x00\r\n\r\n", b"GET / HTTP/9\r\n\r\n", b"a\r\n\r\n"]
)
async def test_what_is_no_http_is_answered_like_other_errors(engine: Moody, data: bytes) -> None:
    async with listening(engine, ServerLimits()) as (host, port, _):
        head, _, rest = (await raw(host, port, data)).partition(b"\r\n\r\n")
        assert b" 400 " in head and b"Server: lowroll" in head and b"ython" not in head
        assert error_of(rest)["message"].startswith("HTTP: ")


@pytest.mark.parametrize("version", ["0.9", "2.0"])
@pytest.mark.parametrize("more", ["", "Expect: 100-continue\r\n"])
async def test_a_version_of_http_that_the_server_does_not_speak_is_refused_in_one_that_it_does(
    engine: Moody, version: str, more: str
) -> None:
    async with listening(engine, ServerLimits()) as (host, port, _):
        data = f"GET /health HTTP/{version}\r\nHost: localhost\r\n{more}\r\n".encode()
        head, _, rest = (await raw(host, port, data)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 ") and b"Server: lowroll" in head
        assert error_of(rest)["message"].startswith(f"HTTP: version {version}; ")


async def test_of_a_connection_that_is_gone_nothing_is_kept(
    engine: Moody, monkeypatch: pytest.MonkeyPatch
) -> None:
    apps: list[web.Application] = []
    listen = server_app.listen

    def seen(app: web.Application, *rest: Any) -> Any:
        apps.append(app)
        return listen(app, *rest)

    monkeypatch.setattr(server_app, "listen", seen)

    async with listening(engine, ServerLimits(head_s=60)) as (host, port, _):
        silent = apps[0][server_limits.SILENT]
        held = [await asyncio.open_connection(host, port) for _ in range(5)]
        await fixtures.until(lambda: len(silent) == 5, "five connections")
        for _, writer in held:
            writer.close()
        await fixtures.until(lambda: not silent, "the end of what is kept of them")


async def test_connections_are_counted(engine: Moody) -> None:
    async with listening(engine, ServerLimits(connections=3, head_s=30)) as (host, port, _):
        held = [await asyncio.open_connection(host, port) for _ in range(3)]
        assert await raw(host, port, post(b"{}")) == b""
        assert not any(reader.at_eof() for reader, _ in held)
        for _, writer in held:
            writer.close()
    async with listening(engine, ServerLimits(connections=3, head_s=0.2)) as (host, port, _):
        held = [await asyncio.open_connection(host, port) for _ in range(3)]
        assert [await reader.read() for reader, _ in held] == [b""] * 3  # they say nothing
        answer = await raw(host, port, post(json.dumps(GOOD).encode()))
        assert answer.startswith(b"HTTP/1.1 200")
        for _, writer in held:
            writer.close()


async def test_connections_are_fewer_than_files(
    engine: Moody, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Half of the files that the process may open are left to the rest of it, and what cannot be
    accepted is one line of the log, and no traceback each time."""
    monkeypatch.setattr("lowroll.server.app.raise_file_limit", lambda: 6)

    async with listening(engine, ServerLimits(head_s=30)) as (host, port, _):
        held = [await asyncio.open_connection(host, port) for _ in range(3)]
        assert await raw(host, port, post(b"{}")) == b""
        assert not any(reader.at_eof() for reader, _ in held)
        for _, writer in held:
            writer.close()
        for _ in range(9):
            full = OSError(errno.EMFILE, "Too many open files")
            asyncio.get_running_loop().call_exception_handler({"exception": full})
        asyncio.get_running_loop().call_exception_handler({"message": "another fault"})
    told = [record for record in caplog.records if "files may be open" in record.message]
    assert len(told) == 1 and told[0].exc_info is None
    assert "another fault" in caplog.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("phase", ["queued", "decode", "paused"])
async def test_a_dropped_connection_ends_its_request(
    folder: Path, stream: bool, phase: str
) -> None:
    engine = Moody(tiny(folder, max_batch=2, page_size=4))
    long = GOOD | {"max_tokens": 200, "ignore_eos": True, "stream": stream, "n": 2}

    async with listening(engine, ServerLimits()) as (host, port, loop):
        engine.slow_s = 0.01
        first = await asyncio.open_connection(host, port)
        first[1].write(post(json.dumps(long | {"prompt": [5, 6]}).encode()))
        if phase == "queued":
            other = await asyncio.open_connection(host, port)
            other[1].write(post(json.dumps(long).encode()))
            await fixtures.until(lambda: len(loop.open) == 2, "two requests")
        await fixtures.until(lambda: engine.stats().tokens > 4, "tokens")
        if phase == "queued":
            other[1].close()
            await fixtures.until(lambda: len(loop.open) == 1, "the queued one to go")
        if phase == "paused":
            await loop.pause("keep")
        first[1].close()
        await fixtures.until(
            lambda: fixtures.idle(engine) and not loop.open, "what is left to end", 3.0
        )
        assert engine.stats().tokens < 100
        outcome = {"outcome": "abort"}
        aborted = loop.metrics.registry.get_sample_value("lowroll_requests_total", outcome)
        assert aborted == (2 if phase == "queued" else 1)


# -- what a failure looks like ---------------------------------------------------------------------------


async def test_a_failure_is_a_plain_500_and_the_log_has_the_reason(
    engine: Moody, caplog: pytest.LogCaptureFixture
) -> None:
    async with served(engine) as client:
        engine.fail = 1
        named = {"X-Request-Id": "mine-7"}
        async with client.post("/v1/completions", json=GOOD, headers=named) as response:
            assert response.status == 500 and response.headers["X-Request-Id"] == "mine-7"
            text = await response.text()
            assert "mine-7" in text and "secret" not in text and "cuda" not in text
        assert "secret" in caplog.text and "mine-7" in caplog.text
        assert await status(client, "POST", "/v1/completions", json=GOOD) == 200
        odd = {"X-Request-Id": "a b\tc"}
        async with client.get("/version", headers=odd) as response:
            assert len(response.headers["X-Request-Id"]) == 24


async def test_health_is_the_engines_own(engine: Moody) -> None:
    async with served(engine) as client:
        async with client.get("/health") as response:
            assert (response.status, await response.json()) == (200, {"status": "running"})
        serving = client.server.app[STATE]
        loop, probes = serving.engine, 0
        ask_health = loop.ask_health

        def counted() -> Any:
            nonlocal probes
            probes += 1
            return ask_health()

        loop.ask_health = counted  # type: ignore[method-assign]
        await hung(engine, loop)
        serving.limits = ServerLimits(health_s=0.2)
        answers = await asyncio.gather(*(client.get("/health") for _ in range(20)))
        assert probes == 1, "nobody waits for another's"
        assert {answer.status for answer in answers} == {503}
        assert "busy with a step" in (await answers[0].json())["waits_for"]
        async with client.get("/metrics") as response:
            assert "lowroll_engine_up 0.0" in await response.text()
        with impatient(loop):
            async with client.post("/v1/completions", json=GOOD) as response:
                assert response.status == 503
                assert error_of(await response.read())["code"] == "stalled"
        engine.hang.clear()
        serving.limits = ServerLimits()
        await fixtures.until(lambda: not loop.open, "the hung request to end")
        assert await status(client, "GET", "/health") == 200
        for _ in range(3):
            engine.fail = 1
            assert await status(client, "POST", "/v1/completions", json=GOOD) == 500
        async with client.get("/health") as response:
            assert response.status == 503
            assert (await response.json())["status"] == "failing"


async def test_metrics_count(engine: Moody) -> None:
    async with served(engine) as client:
        asked = GOOD | {"n": 2, "max_tokens": 6, "ignore_eos": True, "seed": 1}
        for stream in (False, True):
            async with client.post("/v1/completions", json=asked | {"stream": stream}) as r:
                assert r.status == 200 and await r.read()
        await status(client, "GET", "/nothing")
        async with client.get("/metrics") as response:
            assert response.headers["Content-Type"].startswith("text/plain")
            lines = dict(
                line.rsplit(" ", 1)
                for line in (await response.text()).splitlines()
                if not line.startswith("#")
            )
        assert lines['lowroll_requests_total{outcome="length"}'] == "2.0"
        assert lines["lowroll_prompt_tokens_total"] == "6.0"
        assert lines["lowroll_response_tokens_total"] == "24.0"
        assert lines["lowroll_first_token_seconds_count"] == "2.0"
        assert float(lines["lowroll_inter_token_seconds_count"]) >= 4
        assert lines["lowroll_cache_used_tokens"] == "0.0"
        assert lines["lowroll_cache_tokens"] == "2048.0"
        assert lines["lowroll_engine_up"] == "1.0" and lines["lowroll_paused"] == "0.0"
        answered = 'lowroll_http_responses_total{route="%s",status="%d"}'
        assert lines[answered % ("/v1/completions", 200)] == "2.0"
        assert lines[answered % ("none", 404)] == "1.0"
        info = next(line for line in lines if line.startswith("lowroll_weights_info"))
        assert 'version="0"' in info and 'format="fp32"' in info


async def test_a_response_that_fails_half_way_does_not_end_like_a_whole_one(
    engine: Moody, caplog: pytest.LogCaptureFixture
) -> None:
    async def half(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"half")
        raise ValueError("the other half")

    async with looped(engine) as loop:
        app = make_app(ServerState(loop, None, "tiny", engine.capabilities), Credentials())
        app.router.add_route("GET", "/half", half)
        async with TestClient(fixtures.TestServer(app)) as client:
            async with client.get("/half") as response:
                with pytest.raises(ClientPayloadError):
                    await response.read()
            assert "the other half" in caplog.text
