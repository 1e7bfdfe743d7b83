"""A pool of two real servers, each an exact `lowroll serve` of one tiny model in fp32."""

from __future__ import annotations

import os
import re
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lowroll.engine.remote import connect
from lowroll.engine.remote.pool import EnginePool
from lowroll.engine.remote.replica import PoolOptions
from lowroll.types import Group, Request
from tests.fixtures import forks
from tests.fixtures.processes import eventually
from tests.fixtures.tiny import hf_folder

ADMIN = "the-admin-of-these-engines"


class Server:
    """A child that serves `model`; `url` once it answers."""

    def __init__(self, model: Path, port: int = 0) -> None:
        words = ["serve", str(model), "--weights", "fp32", "--max-batch", "64"]
        words += ["--device", "cpu", "--cache-tokens", "4096", "--port", str(port)]
        words += ["--admin-token-env", "POOL_ADMIN", "--exact"]
        self.model, self.port = model, port
        self.log = tempfile.NamedTemporaryFile()
        env = {**os.environ, "POOL_ADMIN": ADMIN, "OMP_NUM_THREADS": "1"}
        self.process = forks.start(words, self.log.fileno(), env)

    @property
    def url(self) -> str:
        if not self.port:
            assert eventually(lambda: self._port() or self.process.poll() is not None)
            self.port = self._port()
            assert self.port, self._said()
        return f"http://127.0.0.1:{self.port}"

    def _port(self) -> int:
        (found,) = re.findall(r"^serving .*:(\d+)/v1$", self._said(), re.MULTILINE) or [0]
        return int(found)

    def _said(self) -> str:
        return Path(self.log.name).read_text()

    def send(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def close(self) -> None:
        self.process.kill()
        self.process.wait(20)
        self.log.close()


def restarted(model: Path, port: int) -> Server:
    """Return a server on a port, which another process of this machine may have for a moment."""
    said = ""
    for _ in range(20):
        server = Server(model, port)
        assert eventually(lambda: server._port() or server.process.poll() is not None)  # noqa: B023
        if server._port():
            return server
        said = server._said()
        server.close()
        time.sleep(1)
    raise AssertionError(said)


@contextmanager
def serving(model: Path, count: int) -> Iterator[list[Server]]:
    servers = [Server(model) for _ in range(count)]
    try:
        for server in servers:
            assert server.url
        yield servers
    finally:
        for server in servers:
            server.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_folder(tmp_path_factory.mktemp("pool") / "model")


def asked(n: int, count: int = 10, tokens: int = 48) -> list[Request]:
    return [
        Request([2 + i % 40, 5, 7 + i], n=n, max_tokens=tokens, seed=3, id=f"r{i}", ignore_eos=True)
        for i in range(count)
    ]


def finish(pool: EnginePool, handles: list[int]) -> list[Group]:
    found: dict[int, Group] = {}
    end = time.monotonic() + 120
    while len(found) < len(handles):
        assert time.monotonic() < end, pool.report()
        for handle, group in pool.step():
            assert handle not in found
            found[handle] = group
    return [found[handle] for handle in handles]


def tokens(groups: list[Group]) -> list[list[list[int]]]:
    return [[one.token_ids for one in group.rollouts] for group in groups]


def drawn(groups: list[Group]) -> list[list[tuple[list[int], list[float]]]]:
    return [[(one.token_ids, one.logprobs) for one in group.rollouts] for group in groups]


@pytest.mark.slow
def test_a_pool_of_two_draws_what_one_engine_draws(model: Path) -> None:
    """Bit for bit, also where an engine is stopped meanwhile and the other draws what it had."""
    with serving(model, 2) as (a, b):
        urls = [a.url, b.url]
        with EnginePool(urls, PoolOptions(admin_token=ADMIN, start_s=60.0, silent_s=6.0)) as pool:
            assert pool.capabilities.vocab_size == 67
            for n, victim in ((1, a), (8, b)):
                requests = asked(n, tokens=100)
                with connect(a.url, token=ADMIN) as alone:
                    one = alone.generate(requests)
                two = pool.generate(requests)
                assert drawn(two) == drawn(one)
                assert pool.generate(requests) == two
                stopped: list[int] = []

                def stop(done: int, of: int) -> None:
                    if not stopped:  # noqa: B023
                        stopped.append(done)  # noqa: B023
                        victim.send(signal.SIGSTOP)  # noqa: B023

                assert pool.generate(requests, stop) == two
                victim.send(signal.SIGCONT)
                assert eventually(lambda: healthy(pool) == 2, 120.0), pool.report()
            assert pool.report().metrics()["perf/engine_handed_over"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("times", [4, pytest.param(20, marks=pytest.mark.long)])
def test_a_server_is_killed_or_stopped_time_and_again_and_no_request_is_lost(
    model: Path, times: int
) -> None:
    with serving(model, 2) as servers:
        with EnginePool(
            [s.url for s in servers], PoolOptions(admin_token=ADMIN, silent_s=6.0)
        ) as pool:
            expected = {n: tokens(pool.generate(asked(n))) for n in (1, 8)}
            before = pool.report().metrics()["perf/engine_requests"]
            for round in range(times):
                n = (1, 8)[round % 2]
                victim = servers[round // 2 % 2]
                fault = signal.SIGKILL if round % 4 == 3 else signal.SIGSTOP
                handles = [pool.add(request) for request in asked(n)]
                assert eventually(lambda: busy(pool, victim.url))  # noqa: B023
                victim.send(fault)
                groups = tokens(finish(pool, handles))
                assert groups == expected[n]
                if fault == signal.SIGSTOP:
                    victim.send(signal.SIGCONT)
                else:
                    port = victim.port
                    victim.close()
                    servers[servers.index(victim)] = restarted(model, port)
                assert eventually(lambda: healthy(pool) == 2, 120.0), pool.report()
            found = pool.report().metrics()
            assert found["perf/engine_requests"] - before == 10 * times, "each was answered once"
            assert found["perf/engine_fenced"] >= times / 2


def busy(pool: EnginePool, url: str) -> bool:
    return any(one.url == url and one.outstanding for one in pool.report().engines)


def healthy(pool: EnginePool) -> float:
    return pool.report().metrics()["perf/engines_healthy"]
