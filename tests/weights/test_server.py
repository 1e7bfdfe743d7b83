"""Weights from device to device: the same bits as by files, whoever dies, and files in the end."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from lowroll import Engine
from lowroll.model import hf
from lowroll.model.transformer import Transformer
from lowroll.server.protocol import Refused
from lowroll.server.weight_store import WeightStore
from lowroll.transport.base import TransportError
from lowroll.weights.publish import digest, rollout_copy
from lowroll.weights.sync import client as client_module
from lowroll.weights.sync import server as server_module
from lowroll.weights.sync.base import Broadcast, LinkFailed, read_broadcast, transfer_token
from lowroll.weights.sync.buckets import BucketLayout, pack, unpack
from lowroll.weights.sync.client import WeightClient
from lowroll.weights.sync.server import Connection, ServedVersion, WeightServer, confirm
from tests.fixtures.broadcasts import broadcaster, moved, moved_to
from tests.fixtures.engines import engine_of

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[2]
TOKEN = transfer_token("of-the-admin")


@pytest.fixture
def learner(folder: Path) -> Transformer:
    return hf.load(folder).requires_grad_(True)


@pytest.fixture
def server() -> Iterator[WeightServer]:
    made = WeightServer("nccl", CPU, timeout_s=20.0, token=TOKEN)
    yield made
    made.close()


@dataclass
class Route:
    """A learner, the server of its versions, and engines that fetch them."""

    folder: Path  # of broadcasts
    model: Path
    learner: Transformer
    server: WeightServer

    def __post_init__(self) -> None:
        self.publisher = broadcaster(self.folder, self.learner, server=self.server)

    def publish(self, version: int) -> None:
        """Publish a version after a step of the learner."""
        self.publisher.publish(moved_to(self.learner, version))

    def store(self, token: str = TOKEN, server: WeightServer | None = None) -> WeightStore:
        to = server or self.server
        client = WeightClient(to.host, to.port, CPU, 60.0, token=token)
        return WeightStore(self.folder, self.model, client)

    def engine(self) -> Engine:
        return engine_of(self.model, weights="int8")

    def fetched(self, version: int = 1, token: str = TOKEN) -> str:
        """The digest of an engine that has fetched a version."""
        return take(self.store(token), self.engine(), version)

    def wanted(self) -> str:
        return digest(rollout_copy(self.learner, "int8", torch.float32))

    def broadcast(self, version: int = 1) -> Broadcast:
        return read_broadcast(self.folder / f"step_{version:06d}")


@pytest.fixture
def route(tmp_path: Path, folder: Path, learner: Transformer, server: WeightServer) -> Route:
    """A route whose version 1 is published."""
    made = Route(tmp_path, folder, learner, server)
    made.publish(1)
    return made


def take(store: WeightStore, engine: Engine, version: int) -> str:
    weights = engine.behavior.weights
    _, updates = store.load(f"step_{version}", 0, engine.capabilities, weights)
    for one, update in updates:
        engine.update_weights(update)
        store.current = one
    return str(engine.behavior.policy[0].digest)


def test_versions_arrive_at_several_engines(route: Route) -> None:
    engines = [(route.store(), route.engine()) for _ in range(3)]
    for version in (1, 2, 3):
        if version > 1:
            route.publish(version)
        found = route.broadcast(version)
        assert found.way == "nccl" and not (found.path / "model.safetensors").exists()
        with ThreadPoolExecutor() as pool:
            taken = [pool.submit(take, store, engine, version) for store, engine in engines]
            assert {one.result(60) for one in taken} == {route.wanted()}
    assert not route.server.broken


def test_a_late_engine_gets_the_version_too(route: Route) -> None:
    assert [route.fetched() for _ in range(2)] == [route.wanted()] * 2


def test_what_is_sent_is_what_was_published(route: Route) -> None:
    before = route.wanted()
    moved(route.learner, 2)  # the learner goes on
    assert route.fetched() == before != route.wanted()


def test_bytes_that_changed_on_the_way_are_refused(route: Route) -> None:
    route.server.versions[-1].buckets[0][5] ^= 1
    engine = route.engine()
    before = engine.behavior
    with pytest.raises(ValueError, match="was stated, and what has arrived"):
        take(route.store(), engine, 1)
    assert engine.behavior == before


DIES = """
import os, signal, sys
import torch
from lowroll.weights.sync import buckets
from lowroll.weights.sync.client import WeightClient
from lowroll.transport.base import TransportError
from lowroll.weights.sync.base import read_broadcast
from lowroll.weights.sync.folder import read_layout
from pathlib import Path
path = Path(sys.argv[1])
client = WeightClient("127.0.0.1", int(sys.argv[2]), torch.device("cpu"), 20.0)
when = sys.argv[3]
if when == "told":
    client._receive = lambda *given: os.kill(os.getpid(), signal.SIGKILL)
elif when == "joined":
    buckets.BucketGroup.broadcast = lambda *given: os.kill(os.getpid(), signal.SIGKILL)
else:
    send = client._send
    client._send = lambda message: (
        os.kill(os.getpid(), signal.SIGKILL) if "have" in message else send(message))
print("ready", flush=True)
client.fetch(read_broadcast(path), read_layout(path))
"""


@pytest.mark.slow
@pytest.mark.parametrize("when", ["told", "joined", "arrived"])
def test_a_peer_that_dies_takes_nobody_with_it(
    tmp_path: Path, folder: Path, learner: Transformer, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "GATHER_S", 60.0)  # until both ask
    monkeypatch.setattr("lowroll.weights.sync.buckets.JOIN_S", 3.0)
    with closing(WeightServer("nccl", CPU, timeout_s=6.0)) as server:
        route = Route(tmp_path, folder, learner, server)
        route.publish(1)
        store = route.store("")
        take(store, route.engine(), 1)  # from now on the trainer waits for it
        store = WeightStore(tmp_path, folder, store.client)
        path = route.broadcast().path
        arguments = [sys.executable, "-c", DIES, str(path), str(server.port), when]
        child = subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        end = time.monotonic() + 30
        while not server._asking and time.monotonic() < end:
            time.sleep(0.01)
        assert server._asking and len(server._engines) == 2
        assert take(store, route.engine(), 1) == route.wanted()
        assert child.wait(30) == -signal.SIGKILL
        child.stdout.close()


def test_after_two_failures_it_comes_as_files(
    route: Route, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, engine, tries = route.store(), route.engine(), []

    def fails(*given: Any) -> Any:
        tries.append(1)
        raise RuntimeError("nccl: a link is down")

    monkeypatch.setattr(store.client, "_receive", fails)
    monkeypatch.setattr("lowroll.weights.sync.buckets.JOIN_S", 1.0)
    before = route.broadcast()
    assert take(store, engine, 1) == route.wanted()
    after = route.broadcast()
    assert len(tries) == 2 and route.server.broken
    assert (before.way, after.way) == ("nccl", "filesystem") and before.digest != after.digest
    route.publish(2)
    assert route.broadcast(2).way == "filesystem"
    assert take(store, engine, 2) == route.wanted() and len(tries) == 2


def test_a_trainer_that_begins_again_serves_what_it_has(route: Route) -> None:
    before = route.broadcast()
    with closing(WeightServer("nccl", CPU, timeout_s=20.0, token=TOKEN)) as again:
        broadcaster(route.folder, route.learner, server=again, attempt=2).publish(1)
        assert route.broadcast() == before
        assert take(route.store(server=again), route.engine(), 1) == route.wanted()


def test_who_cannot_fetch_says_why(route: Route) -> None:
    with pytest.raises(Refused, match="--weights-from"):
        take(WeightStore(route.folder, route.model), route.engine(), 1)
    route.server.serve(ServedVersion(9, "0" * 64, [], lambda: None))
    route.server.forget_older()
    with pytest.raises(Refused, match="version 9 is offered"):
        route.fetched()
    route.server.close()
    with pytest.raises(Refused, match=r"the trainer at 127.0.0.1:\d+"):
        route.fetched()
    with pytest.raises(ValueError, match="cuda_ipc shares memory of a GPU"):
        WeightServer("cuda_ipc", CPU)


def test_older_versions_are_kept_for_a_strict_run(route: Route) -> None:
    """Engines of one want the version before, while the newest is there; also as files."""
    route.server.keep, route.publisher.keep = 2, 4
    digests = {}
    for version in (2, 3):
        route.publish(version)
        digests[version] = route.wanted()
    engine, store = route.engine(), route.store()
    for version in (2, 3):
        assert take(store, engine, version) == digests[version]
    with pytest.raises(Refused, match="is wanted, and version 2, 3 is offered"):
        take(store, engine, 1)
    route.server.versions[0].write()
    assert route.broadcast(2).way == "filesystem" and route.broadcast(3).path.is_dir()


def test_without_the_token_nothing_is_given(route: Route) -> None:
    for token in ("", TOKEN[:-1], transfer_token("of-another")):
        with pytest.raises(Refused, match="another token: give both roles the same"):
            route.fetched(token=token)
    assert not route.server.broken, "who has no token has no files written either"
    assert route.fetched() == route.wanted()


def test_a_store_that_says_nothing_is_waited_for_no_longer_than_a_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A trainer that stopped between its answer and the meeting of its group."""
    monkeypatch.setattr(client_module, "JOIN_S", 0.3)
    monkeypatch.setattr(client_module, "TRIES", 1)
    with socket.create_server(("127.0.0.1", 0)) as store, socket.create_server(("", 0)) as trainer:
        answer = {"group": 1, "rank": 1, "size": 2, "store": store.getsockname()[1]}

        def answers() -> None:
            with suppress(OSError):
                while True:
                    with trainer.accept()[0] as connection, connection.makefile("rb") as lines:
                        if "want" in json.loads(lines.readline()):
                            connection.sendall(json.dumps(answer).encode() + b"\n")

        threading.Thread(target=answers, daemon=True).start()
        client = WeightClient("127.0.0.1", trainer.getsockname()[1], CPU, 5.0)
        began = time.monotonic()
        with pytest.raises(LinkFailed):
            client.fetch(Broadcast(1, Path(), "full", "d", 1), BucketLayout((), (), "d"))
        assert time.monotonic() - began < 5
    until = time.monotonic() + 20  # torch's thread ends when the store is closed
    while any(thread.name == "weight-store" for thread in threading.enumerate()):
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ("0.0.0.0", "host: engines cannot ask at 0.0.0.0: name the address of this"),  # noqa: S104
        ("::", "host: engines cannot ask at ::"),
        ("198.51.100.7", "host: others reach 198.51.100.7, .* only by a token"),
        ("no.such.host.invalid", "host: 'no.such.host.invalid'"),
    ],
)
def test_where_engines_cannot_ask_nothing_is_served(host: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        WeightServer("nccl", CPU, host)


def test_what_ends_the_server_reaches_the_trainer(route: Route) -> None:
    route.publisher.check()

    class Fails(list[ServedVersion]):
        def __iter__(self) -> Any:
            raise MemoryError("no room for a group")

    route.server.versions = Fails(route.server.versions)
    with pytest.raises(Refused):  # at once, not after its 60 s
        route.fetched()
    with pytest.raises(TransportError, match="not offered by nccl any more.*no room for a group"):
        route.publisher.check()
    with pytest.raises(TransportError, match="no room for a group"):
        route.publish(2)


def test_one_deadline_holds_for_all_engines_and_names_who_is_missing() -> None:
    async def body() -> None:
        pairs = [socket.socketpair() for _ in range(3)]
        members = [Connection(*await asyncio.open_connection(sock=left)) for left, _ in pairs]
        pairs[1][1].sendall(b'{"have": 7}\n')
        pairs[2][1].sendall(b'{"have": 6}\n')
        began = time.monotonic()
        with pytest.raises(LinkFailed, match=r"2 of 3 engines .* 0.4 s: .*silent.*does not have"):
            await confirm(7, members, 0.4)
        assert time.monotonic() - began < 5
        for peer, (_, right) in zip(members, pairs, strict=True):
            peer.close()
            right.close()

    asyncio.run(body())


def test_strangers_are_dropped(route: Route) -> None:
    for said in (b"GET / HTTP/1.1\r\n\r\n", b"[1]\n", b"[" * 9999 + b"\n", b'{"want": {}}\n', b""):
        with connected(route.server) as stranger:
            stranger.sendall(said)
    assert route.fetched() == route.wanted()
    route.server.check()


def connected(server: WeightServer) -> socket.socket:
    return socket.create_connection((server.host, server.port), 5)


def answers(server: WeightServer, said: bytes) -> bytes:
    """What who says a line without a token is told; nothing where the connection is closed."""
    with (
        suppress(ConnectionError),  # closed before all of it was read
        connected(server) as stranger,
    ):
        stranger.sendall(said)
        return stranger.recv(1 << 12)
    return b""


def test_no_line_ends_the_server(route: Route) -> None:
    for line in (b'{"token": "\\ud800", "want": [1, ""]}\n', b'{"token": 1e999}\n'):
        assert b"another token" in answers(route.server, line)
    assert route.fetched() == route.wanted()


def test_half_a_line_holds_nobody_up(route: Route, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the rest of it may take."""
    for limit in ("ANSWER_S", "HELLO_S", "GATHER_S"):
        monkeypatch.setattr(server_module, limit, 1e6)
    strangers = [connected(route.server) for _ in range(6)]
    try:
        for stranger in strangers:
            stranger.sendall(b"{")
        assert route.fetched() == route.wanted()
        strangers[0].sendall(b"}\n")
        assert b"another token" in strangers[0].recv(1 << 12), "its line is heard when it is whole"
    finally:
        [stranger.close() for stranger in strangers]


def test_who_does_not_say_the_token_is_closed(
    server: WeightServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert answers(server, b"x" * (server_module.MOST_LINE + 1)) == b"", "a line without an end"
    monkeypatch.setattr(server_module, "HELLO_S", 0.0)
    assert answers(server, b"{") == b"", "a line that does not go on"


CROWDED = """
import resource, sys
import torch
from lowroll.weights.sync.server import WeightServer
resource.setrlimit(resource.RLIMIT_NOFILE, (160, 160))
server = WeightServer("nccl", torch.device("cpu"))
print(server.port, flush=True)
sys.stdin.readline()
server.check()
print("serves", flush=True)
"""


def test_idle_connections_leave_room_for_engines() -> None:
    """More of them than the process may have open files."""
    arguments = [sys.executable, "-c", CROWDED]
    child = subprocess.Popen(
        arguments, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdin is not None and child.stdout is not None
    idle: list[socket.socket] = []
    try:
        place = "127.0.0.1", int(child.stdout.readline())
        idle += [socket.create_connection(place, 30) for _ in range(200)]
        with socket.create_connection(place, 30) as engine:
            engine.sendall(b'{"token": "", "want": [1, ""]}\n')
            assert b"nothing is offered" in engine.recv(1 << 12)
        idle[0].settimeout(30)
        assert idle[0].recv(1) == b"", "the oldest has made room"
        child.stdin.write("\n")
        child.stdin.flush()
        assert child.stdout.readline() == "serves\n"
    finally:
        [one.close() for one in idle]
        child.kill()
        child.wait(30)
        child.stdin.close()
        child.stdout.close()


def test_what_can_be_told_is_served_at_every_moment(
    tmp_path: Path,
    folder: Path,
    learner: Transformer,
    server: WeightServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before the marker of a version is there the version before it, and from then on the new one."""
    route, taken = Route(tmp_path, folder, learner, server), []

    def ask(point: str) -> None:
        newest = route.publisher.broadcasts.newest()
        if point in ("file.begin/STABLE", "file.renamed/STABLE") and newest is not None:
            route.fetched(newest.version)
            taken.append(newest.version)

    monkeypatch.setattr("lowroll.checkpoint.fault_injection.observers", [ask])
    route.publish(1)
    route.publish(2)
    assert taken == [1, 1, 2]


# -- buckets -----------------------------------------------------------------------------------------


def test_buckets_hold_their_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowroll.weights.sync.buckets.BUCKET_BYTES", 100)
    tensors = {
        "a": torch.arange(7, dtype=torch.float32),
        "b": torch.arange(6, dtype=torch.bfloat16).view(2, 3),
        "c": torch.arange(40, dtype=torch.float32),  # larger than a bucket
        "d": torch.arange(3, dtype=torch.float16),
    }
    layout, buckets = pack(tensors, "x", CPU)
    assert len(buckets) > 1
    found = unpack(BucketLayout.from_json(json.loads(json.dumps(layout.to_json()))), buckets)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    for change in (
        {"sizes": [1]},
        {"places": [["a", "int8", [1], 0, 0]]},
        {"places": [["a", "float32", [-1], 0, 0]]},
        {"places": [["a", "float32", [99], 0, 0]]},
        {"places": [["a", "float32", [1], 7, 0]]},
        {"places": [["a", "float32", [1], 0, 1]]},
        {"places": 3},
    ):
        with pytest.raises(ValueError, match="layout"):
            BucketLayout.from_json(layout.to_json() | change)


def test_lines_end_in_time() -> None:
    async def body() -> None:
        left, right = socket.socketpair()
        peer = Connection(*await asyncio.open_connection(sock=left))
        with pytest.raises(LinkFailed, match="silent"):
            await peer.receive(0.05)
        right.sendall(b'{"a": 1}\n{"b": 2}\n[3]\n')
        assert await peer.receive(5) == {"a": 1} and await peer.receive(5) == {"b": 2}
        with pytest.raises(LinkFailed, match="not a message"):
            await peer.receive(5)
        assert not peer.is_gone
        right.close()
        with pytest.raises(LinkFailed, match="closed"):
            await peer.receive(5)
        assert peer.is_gone
        peer.close()

    asyncio.run(body())
