"""The trainer's end of the direct route: engines request a version, and its buckets travel by NCCL,
gloo or CUDA IPC. Both ends exchange lines of JSON on a socket:

    engine -> trainer  {"token": token, "want": [version, manifest digest]}
    trainer -> engine  {"group": number, "rank", "size", "store": port}  and the buckets follow, or
                       {"device": uuid, "handles": [...]}                of the buckets' memory, or
                       {"error": reason}
    engine -> trainer  {"have": version}  and the trainer may forget it
    engine -> trainer  {"token": token, "write": [version, manifest digest]}  write files instead
    trainer -> engine  {"written": version}

After the first request it waits at most GATHER_S for the other connected engines, then at most
JOIN_S for their group and `timeout_s` for the round. A group lasts while the requesting engines
stay the same and none dies in a broadcast.

A connection without the token within HELLO_S or MOST_LINE bytes is closed, and so is the oldest of
too many. The token does not protect the group's store and the buckets: between machines use a
private network.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import logging
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from lowroll.machine import raise_file_limit
from lowroll.parallel.store import tcp_store
from lowroll.transport.base import TransportError
from lowroll.weights.sync.base import LinkFailed
from lowroll.weights.sync.buckets import BucketGroup, device_uuid, ipc_handles

log = logging.getLogger(__name__)
T = TypeVar("T")

GATHER_S = 1.0
LOOK_S = 0.05  # between checks for lost engines
ANSWER_S = 5.0  # to send a line
HELLO_S = 10.0  # to send the token
MOST_LINE = 1 << 12  # bytes of an engine's line
MOST_UNKNOWN = 256  # unauthenticated connections; fewer where few files may be open


@dataclass(frozen=True)
class ServedVersion:
    """A version that can be fetched. write: writes it as files."""

    version: int
    digest: str
    buckets: list[Tensor]
    write: Callable[[], None]


class _WantedVersion(NamedTuple):
    """An engine's request. stated: unchecked. answered: set at the end of its round."""

    stated: Any
    answered: asyncio.Event


class WeightServer:
    """A server of the newest versions to engines.

    way: nccl (gloo on a CPU) or cuda_ipc. host, port: the only interface; port 0 for a free one.
    token: `base.transfer_token`. keep: how many versions stay, each a copy of the model. ValueError
    for an address that engines cannot reach, or others without a token.
    """

    def __init__(
        self,
        way: str,
        device: torch.device,
        host: str = "127.0.0.1",
        port: int = 0,
        timeout_s: float = 1200.0,
        token: str = "",
        keep: int = 1,
    ) -> None:
        if way == "cuda_ipc" and device.type != "cuda":
            raise ValueError("way: cuda_ipc shares memory of a GPU, and the learner is on a CPU")
        _check_address(host, token)
        self.way = way
        self.device = device
        self.host = host
        self.timeout_s = timeout_s
        self.token = token
        self.keep = keep
        self.broken = False  # an engine requested files: the next versions are files too
        self.versions: list[ServedVersion] = []  # newest last
        self._listening = socket.create_server((host, port), backlog=128)
        self.port: int = self._listening.getsockname()[1]
        meeting = socket.create_server((host, 0), backlog=128)
        self._store_port = meeting.getsockname()[1]
        self._store = tcp_store(host, self._store_port, meeting, timeout_s)
        self._unknown: dict[Connection, None] = {}  # unauthenticated, oldest first
        self._most_unknown = max(1, min(MOST_UNKNOWN, raise_file_limit() // 4))
        self._engines: dict[Connection, None] = {}
        self._asking: dict[Connection, _WantedVersion] = {}  # not answered yet
        self._group: tuple[list[Connection], BucketGroup] | None = None
        self._groups = 0
        self._changed = asyncio.Event()  # an engine sent a request or left
        self._closing = asyncio.Event()
        self._failed: Exception | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="weights", daemon=True)
        self._thread.start()

    def serve(self, version: ServedVersion) -> None:
        """Serve a version beside the older ones. Raises as `check`."""
        self.check()
        older = [one for one in self.versions if one.version < version.version]
        self.versions = [*older, version]

    def forget_older(self) -> None:
        """Drop all but the newest `keep` versions."""
        self.versions = self.versions[-self.keep :]

    def check(self) -> None:
        """Raise TransportError with the reason when the server has failed."""
        if self._failed is not None:
            raise TransportError(
                f"weights are not offered by {self.way} any more: {self._failed!r}"
            ) from self._failed

    def close(self) -> None:
        """Stop serving. Idempotent."""
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join(5.0)

    # -- the server's own thread --------------------------------------------------------------------

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            try:
                if self.device.type == "cuda":
                    torch.cuda.set_device(self.device)
                runner.run(self._work())
            except Exception as error:  # raised by the trainer's next `check`
                grouped = isinstance(error, ExceptionGroup)
                self._failed = error.exceptions[0] if grouped else error  # type: ignore[attr-defined]
                log.error("weights are not offered by %s any more: %r", self.way, self._failed)
        self._listening.close()
        self._end_group()

    async def _work(self) -> None:
        async with asyncio.TaskGroup() as tasks:

            def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                if self._closing.is_set():
                    writer.close()
                else:
                    tasks.create_task(self._talk(Connection(reader, writer)))

            await asyncio.start_server(accept, sock=self._listening, limit=MOST_LINE, backlog=128)
            tasks.create_task(self._run_rounds())
            await self._closing.wait()
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()

    async def _talk(self, peer: Connection) -> None:
        """Answer a connection until it ends. The token makes it an engine."""
        self._unknown[peer] = None
        if len(self._unknown) > self._most_unknown:
            oldest = next(iter(self._unknown))
            del self._unknown[oldest]
            oldest.close()
        deadline_s: float | None = HELLO_S
        try:
            while True:
                message = await peer.receive(deadline_s)
                if not self._has_token(message):
                    log.warning("%s asks for weights with another token; refused", peer.name)
                    reason = "it takes another token: give both roles the same ones"
                    return await peer.send({"error": reason})
                self._unknown.pop(peer, None)
                self._engines[peer] = None
                deadline_s = None
                await self._reply(peer, message)
        except LinkFailed:
            pass
        finally:
            self._drop(peer)

    def _has_token(self, message: dict[str, Any]) -> bool:
        stated = str(message.get("token") or "")
        found = stated.encode(errors="surrogatepass")  # JSON allows characters that UTF-8 lacks
        return hmac.compare_digest(found, self.token.encode())

    async def _reply(self, peer: Connection, message: dict[str, Any]) -> None:
        if "write" in message:
            await peer.send(self._write(peer, message["write"]))
        elif "want" in message:
            wanted = _WantedVersion(message["want"], asyncio.Event())
            self._asking[peer] = wanted
            self._changed.set()
            await wanted.answered.wait()

    def _drop(self, peer: Connection) -> None:
        self._unknown.pop(peer, None)
        self._engines.pop(peer, None)
        self._changed.set()
        peer.close()
        if self._group is not None and peer in self._group[0]:
            self._end_group()

    def _write(self, peer: Connection, wanted: Any) -> dict[str, Any]:
        try:
            found = self._find(wanted)
            if not self.broken:
                log.warning("%s: %s came to nothing; weights come as files", peer.name, self.way)
                self.broken = True
            found.write()
        except (LinkFailed, OSError, ValueError) as error:
            return {"error": str(error)}
        return {"written": found.version}

    def _find(self, wanted: Any) -> ServedVersion:
        versions = self.versions
        for one in versions:
            if wanted == [one.version, one.digest]:
                return one
        there = ", ".join(str(one.version) for one in versions)
        offered = f"version {there}" if there else "nothing"
        raise LinkFailed(f"{wanted!r} is wanted, and {offered} is offered")

    # -- rounds: a version goes to all that want it -------------------------------------------------

    async def _run_rounds(self) -> None:
        """Answer requests in rounds, each of all engines that ask within GATHER_S of the first."""
        while True:
            await self._until(lambda: bool(self._asking))
            with suppress(TimeoutError):
                async with asyncio.timeout(GATHER_S):
                    await self._until(lambda: len(self._asking) >= len(self._engines))
            asking, self._asking = self._asking, {}
            versions: dict[int, ServedVersion] = {}
            members: dict[int, list[Connection]] = {}
            # in the order of connection, so that a lasting group keeps its ranks
            present = [peer for peer in self._engines if peer in asking and not peer.is_gone]
            for peer in present:
                try:
                    found = self._find(asking[peer].stated)
                except LinkFailed as error:
                    with suppress(LinkFailed):
                        await peer.send({"error": str(error)})
                else:
                    versions.setdefault(found.version, found)
                    members.setdefault(found.version, []).append(peer)
            for number, version in versions.items():
                await self._transfer(version, members[number])
            for wanted in asking.values():
                wanted.answered.set()

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            self._changed.clear()
            await self._changed.wait()

    async def _transfer(self, version: ServedVersion, members: list[Connection]) -> None:
        try:
            if self.way == "nccl":
                await self._broadcast(version, members)
            else:
                await self._send_handles(version, members)
            await confirm(version.version, members, self.timeout_s)
        except (LinkFailed, RuntimeError) as error:
            log.warning("version %d by %s: %s", version.version, self.way, error)
            self._end_group()
            for peer in members:
                peer.close()

    async def _broadcast(self, version: ServedVersion, members: list[Connection]) -> None:
        if self._group is not None and self._group[0] != members:
            self._end_group()
        if self._group is None:
            self._groups += 1
        number, size = self._groups, len(members) + 1
        for rank, peer in enumerate(members, 1):
            place = {"group": number, "rank": rank, "size": size, "store": self._store_port}
            await peer.send(place)

        def join() -> BucketGroup:
            return BucketGroup(self._store, number, 0, size, self.device, self.host, self.timeout_s)

        def send(group: BucketGroup) -> None:
            for bucket in version.buckets:
                group.broadcast(bucket)

        try:
            async with asyncio.timeout(self.timeout_s):
                if self._group is None:
                    self._group = members, await beside(join, members)
                _, group = self._group
                await beside(lambda: send(group), members)
        except TimeoutError:
            raise LinkFailed(f"not over in {self.timeout_s:g} s") from None

    async def _send_handles(self, version: ServedVersion, members: list[Connection]) -> None:
        uuid = device_uuid(self.device.index)
        for peer in members:  # each handle is for one process
            await peer.send({"device": uuid, "handles": ipc_handles(version.buckets)})

    def _end_group(self) -> None:
        if self._group is not None:
            self._group[1].abort()
            self._group = None


class Connection:
    """A connection to an engine: lines of JSON both ways."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        host, port, *_ = writer.get_extra_info("peername") or ("a peer that has gone", 0)
        self.name = f"{host}:{port}"

    async def send(self, message: dict[str, Any]) -> None:
        """Send a message. Raises LinkFailed."""
        try:
            async with asyncio.timeout(ANSWER_S):
                self._writer.write(json.dumps(message).encode() + b"\n")
                await self._writer.drain()
        except OSError as error:
            raise LinkFailed(f"the other side of {self.name}: {error}") from None

    async def receive(self, deadline_s: float | None) -> dict[str, Any]:
        """Return the next message. Raises LinkFailed."""
        try:
            async with asyncio.timeout(deadline_s):
                line = await self._reader.readline()
        except TimeoutError:
            raise LinkFailed(f"{self.name}: silent for {deadline_s:g} s") from None
        except (OSError, ValueError) as error:
            raise LinkFailed(f"{self.name}: {error}") from None
        if not line.endswith(b"\n"):
            raise LinkFailed(f"{self.name} has closed the connection")
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            raise LinkFailed(f"{self.name}: not a message of an engine's")
        return message

    @property
    def is_gone(self) -> bool:
        return self._reader.at_eof() or self._reader.exception() is not None

    def close(self) -> None:
        self._writer.close()


async def beside(work: Callable[[], T], members: list[Connection]) -> T:
    """Run `work` in a thread, and return its result. LinkFailed when a member leaves meanwhile: the
    thread, which may hang on it, is abandoned."""
    outcome: Future[T] = Future()
    # prevents `waiting.cancel` from cancelling it, so that the thread can always set it
    outcome.set_running_or_notify_cancel()

    def run() -> None:
        try:
            outcome.set_result(work())
        except (LinkFailed, RuntimeError) as error:
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    waiting = asyncio.wrap_future(outcome)
    try:
        while not waiting.done():
            await asyncio.wait([waiting], timeout=LOOK_S)
            if not waiting.done() and any(peer.is_gone for peer in members):
                raise LinkFailed("a peer has gone")
        return await waiting
    finally:
        waiting.cancel()


async def confirm(version: int, members: list[Connection], timeout_s: float) -> None:
    """Wait until every engine confirms the version. LinkFailed names the others."""

    async def find_problem(peer: Connection) -> str | None:
        try:
            message = await peer.receive(timeout_s)
        except LinkFailed as error:
            return str(error)
        if message.get("have") == version:
            return None
        return f"{peer.name}: it does not have the version"

    answers = await asyncio.gather(*map(find_problem, members))
    problems = [problem for problem in answers if problem is not None]
    if problems:
        raise LinkFailed(
            f"{len(problems)} of {len(members)} engines do not have it after at most "
            f"{timeout_s:g} s: {'; '.join(problems)}"
        )


def _check_address(host: str, token: str) -> None:
    try:
        found = ipaddress.ip_address(socket.getaddrinfo(host, None)[0][4][0])
    except OSError as error:
        raise ValueError(f"host: {host!r}: {error}") from None
    if found.is_unspecified:
        raise ValueError(
            f"host: engines cannot ask at {host}: name the address of this machine in the network "
            "that it shares with them (127.0.0.1 where all are on it)"
        )
    if not found.is_loopback and not token:
        raise ValueError(
            f"host: others reach {host}, and weights are offered there only by a token"
        )
