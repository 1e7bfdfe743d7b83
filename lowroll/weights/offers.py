"""The trainer's end of a direct way (`weights.device_link`): engines ask for a version, and its
buckets go over by NCCL, gloo or CUDA IPC.

produces       the buckets of the newest versions, for whoever asks
waits for      engines that ask, in a thread of its own; once one has, for the others that have asked
               before, at most GATHER_S; for a group, at most JOIN_S; for a broadcast, at most
               `timeout_s`; for no single connection: what has arrived of a line is kept until the
               rest comes
unblocked by   a new version, an engine's word, `close`

A group stays as long as the engines that ask are those of the last time. A peer that dies in the
midst of a broadcast ends the group, and the next one who asks begins another.

Who asks says a token; without one only this machine is listened to. A connection that has not said it
within HELLO_S or MOST_HELLO bytes is closed, and the oldest of them once there are too many. Who
meets at the group's store or reads what goes over is not asked for it: between machines use a
private network.
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowroll.machine import raise_file_limit
from lowroll.parallel.store import tcp_store
from lowroll.transport.base import TransportError
from lowroll.weights.device_link import (
    MOST_LINE,
    Group,
    Lines,
    LinkFailed,
    device_uuid,
    handles,
)

log = logging.getLogger(__name__)

GATHER_S = 1.0
TURN_S = 0.05
ANSWER_S = 5.0  # until a line is sent to somebody who is there
HELLO_S = 10.0  # until somebody who has connected has said the token
MOST_HELLO = 1 << 12  # bytes of the line with the token
MOST_STRANGERS = 256  # connections that have not said it; fewer where few files may be open


@dataclass(frozen=True)
class Offer:
    """A version that can be fetched. write: put it into the folder as files, for who cannot."""

    version: int
    digest: str
    buckets: list[Tensor]
    write: Callable[[], None]


@dataclass
class Round:
    """One time that a version goes over. failed: why it did not; "" while nothing is wrong."""

    number: int
    group: Group | None
    sending: bool = False  # every member has been told
    failed: str = ""


class Offers:
    """way: nccl (gloo on a CPU) or cuda_ipc. host, port: where engines ask; 0 for a free port. Only
    that interface is listened at. keep: how many of the newest versions stay, a copy of the model each:
    engines of a strict run take older ones. token: that engines say (`device_link.secret`). ValueError for an
    address that engines cannot ask at, and for one that others reach without a token."""

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
        if way not in ("nccl", "cuda_ipc"):
            raise ValueError(f"way: {way!r} is none of nccl, cuda_ipc")
        if way == "cuda_ipc" and device.type != "cuda":
            raise ValueError("way: cuda_ipc shares memory of a GPU, and the learner is on a CPU")
        _check_address(host, token)
        self.way = way
        self.device = device
        self.host = host
        self.timeout_s = timeout_s
        self.token = token
        self.keep = keep
        self.broken = False  # somebody asked for files: the next versions come as files
        self._listening = socket.create_server((host, port), backlog=128)
        self.port: int = self._listening.getsockname()[1]
        meeting = socket.create_server((host, 0), backlog=128)
        self._store_port = meeting.getsockname()[1]
        self._store = tcp_store(host, self._store_port, meeting, timeout_s)
        self._offered: list[Offer] = []  # the newest last
        self._most_strangers = max(1, min(MOST_STRANGERS, raise_file_limit() // 4))
        self._strangers: dict[Lines, float] = {}  # with when they are given up; the oldest first
        self._peers: dict[Lines, list[Any] | None] = {}  # that know the token, with what they want
        self._listening.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listening, selectors.EVENT_READ, None)
        self._asked = 0.0  # when the first of them did
        self._group: tuple[list[Lines], Group] | None = None
        self._groups = 0
        self._closing = threading.Event()
        self._failed: Exception | None = None  # the thread has ended with it
        self._thread = threading.Thread(target=self._run, name="weights", daemon=True)
        self._thread.start()

    def offer(self, offer: Offer) -> None:
        """Offer this version, beside the older ones: engines may still be asked to take those.
        TransportError as `check`."""
        self.check()
        older = [one for one in self._offered if one.version < offer.version]
        self._offered = [*older, offer]

    def forget_older(self) -> None:
        """Drop all offered versions but the newest `keep`: engines can be asked to take the last by
        now."""
        self._offered = self._offered[-self.keep :]

    def check(self) -> None:
        """Raise TransportError when no engine can be answered any more, with the reason."""
        if self._failed is not None:
            raise TransportError(
                f"weights are not offered by {self.way} any more: {self._failed!r}"
            ) from self._failed

    def close(self) -> None:
        """Stop offering anything. Idempotent."""
        self._closing.set()
        self._thread.join(5.0)
        self._listening.close()

    def _run(self) -> None:
        try:
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)
            while not self._closing.is_set():
                self._turn()
        except Exception as error:  # the trainer's next look raises it
            log.error("weights are not offered by %s any more: %r", self.way, error)
            self._failed = error
            self._listening.close()
        for peer in [*self._strangers, *self._peers]:
            self._drop(peer)
        self._selector.close()
        self._end_group()

    def _turn(self) -> None:
        self._listen()
        wanting = [peer for peer, want in self._peers.items() if want is not None]
        late = time.monotonic() - self._asked > GATHER_S
        if wanting and (late or len(wanting) == len(self._peers)):
            self._serve(wanting)

    def _listen(self) -> None:
        """Accept new peers, and read what peers send."""
        for peer in [peer for peer in self._peers if peer.has_line]:
            self._hear(peer)
        for key, _ in self._selector.select(TURN_S):
            if key.data is None:
                self._accept()
            else:
                self._hear(key.data)
        now = time.monotonic()
        for peer in [peer for peer, until in self._strangers.items() if until <= now]:
            self._drop(peer)

    def _accept(self) -> None:
        """Accept a connection. The oldest peer that has not sent the token makes room."""
        if len(self._strangers) >= self._most_strangers:
            self._drop(next(iter(self._strangers)))
        try:
            peer = Lines(self._listening.accept()[0])
        except OSError:  # who has gone again, or no file is free
            if self._strangers:
                self._drop(next(iter(self._strangers)))
            return
        self._strangers[peer] = time.monotonic() + HELLO_S
        self._selector.register(peer.socket, selectors.EVENT_READ, peer)

    def _hear(self, peer: Lines) -> None:
        """Read what has arrived from a peer, and handle its line when it is whole. Drop a peer that
        fails."""
        is_stranger = peer in self._strangers
        try:
            if not peer.has_line:
                peer.take_in(MOST_HELLO if is_stranger else MOST_LINE)
            if peer.has_line:
                self._heed(peer, peer.receive(ANSWER_S))
        except LinkFailed:
            self._drop(peer)

    def _heed(self, peer: Lines, message: dict[str, Any]) -> None:
        if not self._knows(message.get("token")):
            return self._refuse(peer)
        if self._strangers.pop(peer, None) is not None:
            self._peers[peer] = None
        if "write" in message:
            self._write(peer, message["write"])
        elif "want" in message:
            if all(want is None for want in self._peers.values()):
                self._asked = time.monotonic()
            self._peers[peer] = message["want"]

    def _knows(self, token: Any) -> bool:
        said = token if isinstance(token, str) else ""
        told = said.encode(errors="surrogatepass")  # JSON has characters that UTF-8 has not
        return hmac.compare_digest(told, self.token.encode())

    def _refuse(self, peer: Lines) -> None:
        log.warning("%s asks for weights with another token; refused", peer.name)
        peer.send({"error": "it takes another token: give both roles the same ones"}, ANSWER_S)
        self._drop(peer)

    def _write(self, peer: Lines, wanted: Any) -> None:
        offer = self._find(wanted)
        if offer is None:
            return peer.send({"error": self._gone(wanted)}, ANSWER_S)
        if not self.broken:
            log.warning("%s: %s came to nothing; weights come as files", peer.name, self.way)
            self.broken = True
        try:
            offer.write()
        except (OSError, ValueError) as error:
            return peer.send({"error": str(error)}, ANSWER_S)
        peer.send({"written": offer.version}, ANSWER_S)

    def _serve(self, wanting: list[Lines]) -> None:
        rounds: dict[int, tuple[Offer, list[Lines]]] = {}
        for peer in wanting:
            want, self._peers[peer] = self._peers[peer], None
            if (offer := self._find(want)) is not None:
                rounds.setdefault(offer.version, (offer, []))[1].append(peer)
            else:
                with suppress(LinkFailed):
                    peer.send({"error": self._gone(want)}, ANSWER_S)
        for offer, members in rounds.values():
            self._end_round(offer, members, self._begun(offer, members))

    def _find(self, wanted: Any) -> Offer | None:
        return next((one for one in self._offered if wanted == [one.version, one.digest]), None)

    def _gone(self, wanted: Any) -> str:
        there = ", ".join(str(one.version) for one in self._offered)
        return f"{wanted!r} is wanted, and {f'version {there}' if there else 'nothing'} is offered"

    def _begun(self, offer: Offer, members: list[Lines]) -> Round:
        """Run a round and return it, over or given up: its calls may hang in a dead peer."""
        if self._group is not None and self._group[0] != members:
            self._end_group()
        if self._group is None:
            self._groups += 1
        group = None if self._group is None else self._group[1]
        begun = Round(self._groups, group)
        worker = threading.Thread(target=self._go, args=(offer, members, begun), daemon=True)
        worker.start()
        end = time.monotonic() + self.timeout_s
        while worker.is_alive() and time.monotonic() < end:
            worker.join(TURN_S)
            if begun.sending and any(peer.is_gone for peer in members):
                begun.failed = begun.failed or "a peer has gone"
                break
        if worker.is_alive():
            begun.failed = begun.failed or f"not over in {self.timeout_s:g} s"
        return begun

    def _end_round(self, offer: Offer, members: list[Lines], ended: Round) -> None:
        self._group = None if ended.group is None else (members, ended.group)
        try:
            if ended.failed:
                raise LinkFailed(ended.failed)
            self._hear_all(offer, members)
        except LinkFailed as error:
            log.warning("version %d by %s: %s", offer.version, self.way, error)
            self._end_group()
            for peer in members:
                self._drop(peer)

    def _hear_all(self, offer: Offer, members: list[Lines]) -> None:
        """Wait until every engine confirms the version, within one deadline. LinkFailed names those
        that do not."""
        end = time.monotonic() + self.timeout_s
        missing = []
        for peer in members:
            try:
                said = peer.receive(max(1e-3, end - time.monotonic()))
                if said.get("have") != offer.version:
                    missing.append(f"{peer.name}: it does not have the version")
            except LinkFailed as error:
                missing.append(str(error))
        if missing:
            raise LinkFailed(
                f"{len(missing)} of {len(members)} engines do not have it after at most "
                f"{self.timeout_s:g} s: {'; '.join(missing)}"
            )

    def _go(self, offer: Offer, members: list[Lines], mine: Round) -> None:
        try:
            if self.way == "nccl":
                self._broadcast(offer, members, mine)
            else:
                self._share(offer, members)
        except (LinkFailed, RuntimeError) as error:
            mine.failed = str(error)

    def _broadcast(self, offer: Offer, members: list[Lines], mine: Round) -> None:
        for rank, peer in enumerate(members, 1):
            told = {"group": mine.number, "rank": rank, "size": len(members) + 1}
            peer.send(told | {"store": self._store_port}, ANSWER_S)
        mine.sending = True
        if mine.group is None:
            mine.group = Group(
                self._store, mine.number, 0, len(members) + 1, self.device, self.host,
                self.timeout_s,
            )  # fmt: skip
        for bucket in offer.buckets:
            mine.group.broadcast(bucket)

    def _share(self, offer: Offer, members: list[Lines]) -> None:
        uuid = device_uuid(self.device.index)
        for peer in members:  # each handle is for one process
            peer.send({"device": uuid, "handles": handles(offer.buckets)}, ANSWER_S)

    def _end_group(self) -> None:
        if self._group is not None:
            self._group[1].end()
            self._group = None

    def _drop(self, peer: Lines) -> None:
        known = peer in self._strangers or peer in self._peers
        self._strangers.pop(peer, None)
        self._peers.pop(peer, None)
        if known:
            self._selector.unregister(peer.socket)
        peer.close()
        if self._group is not None and peer in self._group[0]:
            self._end_group()


def _check_address(host: str, token: str) -> None:
    """Raise ValueError for an address that engines cannot ask at, and for one that others reach
    when they could ask without a token."""
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
