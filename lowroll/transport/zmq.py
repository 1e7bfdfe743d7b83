"""Rollouts over TCP: the trainer requests, the orchestrator answers from its spool.

    trainer (DEALER)        PieceRequest   frame 12 from byte 0 on; received 11, committed 10
    orchestrator (ROUTER)   wait           not there yet; sent at once, which shows that it lives
                            piece          bytes 0 .. 4 MiB of 9 MiB, once the frame is in the spool
    trainer                 PieceRequest   frame 12 from byte 4 MiB on

A request is repeated until it is answered, and the next one acknowledges. Pieces bound the size of
a message and let a transfer resume after a restart of either side. A message is a sealed line
(`transport.messages`) and a piece.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import zmq

from lowroll.checkpoint.atomic_files import read_file, write_file
from lowroll.checkpoint.fault_injection import faultpoint
from lowroll.transport.base import (
    ChannelClosed,
    Cursor,
    DamagedFrame,
    DeadlineExceeded,
    Fenced,
    FrameGone,
    PeerSilent,
    TransportError,
    check_deadline,
)
from lowroll.transport.codec import MAX_BYTES
from lowroll.transport.encryption import set_client_keys, set_server_keys, start_authenticator
from lowroll.transport.filesystem import Sender as FolderSender
from lowroll.transport.frame import decode_frame
from lowroll.transport.messages import (
    MAX_LINE_BYTES,
    Line,
    PieceReply,
    PieceRequest,
    ReplyKind,
    SenderAddress,
    decode_line,
    encode_line,
)
from lowroll.transport.spool import Spool, dismissal, takeover
from lowroll.types import Batch, printable

log = logging.getLogger(__name__)

PIECE = 4 << 20  # bytes of a frame in one message
MAX_FRAME_BYTES = MAX_BYTES + MAX_LINE_BYTES
TRIES = 3  # for a damaged frame
RETRY_S = 1.0
SILENCE_S = 30.0
_LINGER_MS = 1000
_POLL_S = 0.1  # between checks for a peer
_CLOSE_S = 2.0
_MAX_WAITING = 16


def pack(message: PieceRequest | PieceReply, piece: bytes) -> list[bytes]:
    return [encode_line(message), piece]


def unpack(kind: type[Line], parts: Sequence[bytes]) -> tuple[Line, bytes]:
    """Decode `pack`. ValueError for anything else."""
    line, piece = parts  # ValueError for another number
    if len(piece) > PIECE:
        raise ValueError(f"a piece of {len(piece)} bytes is too long")
    return decode_line(kind, line), piece


def _open_socket(
    context: zmq.Context[zmq.Socket[bytes]], kind: int, most: int
) -> zmq.Socket[bytes]:
    opened = context.socket(kind)
    for option, value in (
        (zmq.LINGER, _LINGER_MS),
        (zmq.MAXMSGSIZE, most),
        (zmq.SNDHWM, 16),
        (zmq.RCVHWM, 16),
        (zmq.HEARTBEAT_IVL, 5_000),
        (zmq.HEARTBEAT_TIMEOUT, 15_000),
        (zmq.RECONNECT_IVL, 100),
        (zmq.RECONNECT_IVL_MAX, 1_000),
    ):
        opened.setsockopt(option, value)
    return opened


class Sender(FolderSender):
    """The orchestrator's end. Listens on `host` and `port` (0: a free one), and writes the address
    to the file `publish`.

    attempt: grows with every start. token: the shared secret. ValueError without one,
    TransportError for an address in use.
    """

    def __init__(
        self,
        folder: Path,
        host: str = "127.0.0.1",
        port: int = 0,
        hwm: int = 2,
        deadline_s: float = 3600.0,
        *,
        attempt: int = 0,
        token: str,
        publish: Path | None = None,
        alive: Callable[[], None] | None = None,
    ) -> None:
        if not token:
            raise ValueError("rollouts are served only to those who know a token: none is given")
        interface = _resolve_interface(host)
        super().__init__(folder, hwm, deadline_s, alive=alive)
        self.service = SpoolServer(self.spool, attempt, token)
        self.address = self.service.bind(interface, port)
        if publish is not None:
            publish.parent.mkdir(parents=True, exist_ok=True)
            write_file(publish, encode_line(SenderAddress(attempt=attempt, address=self.address)))
        self.service.start()

    def cursor(self) -> Cursor | None:
        self.service.check()
        return self.service.cursor

    def go_back(self, cursor: Cursor) -> None:
        super().go_back(cursor)
        self.service.forget()

    def notify(self) -> None:
        self.service.wake()

    def close(self) -> None:
        super().close()
        self.service.close()


class SpoolServer:
    """The thread that answers requests, which alone uses the socket."""

    def __init__(self, spool: Spool, attempt: int, token: str) -> None:
        self.spool = spool
        self.attempt = attempt
        self.cursor = spool.progress.cursor()
        self.dismissed = spool.progress.dismissed()  # of the trainer
        self.iterations = 0  # for tests
        self._waiting: dict[bytes, PieceRequest] = {}
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.authenticator = start_authenticator(self._context, token)
        self._socket = _open_socket(self._context, zmq.ROUTER, 2 * MAX_LINE_BYTES)
        set_server_keys(self._socket, token)
        self._wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self._wake_reader, False)
        os.set_blocking(self._wake_writer, False)
        self._closing = threading.Event()
        self._failed: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="rollouts", daemon=True)
        self._refused = 0

    def bind(self, interface: str, port: int) -> str:
        try:
            self._socket.bind(f"tcp://{interface}:{port or '*'}")
        except zmq.ZMQError as error:
            self._release()
            raise TransportError(
                f"rollouts cannot be served on {interface}:{port}: {error}"
            ) from error
        endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        all_interfaces = ipaddress.ip_address(interface).is_unspecified
        return endpoint.replace(interface, socket.gethostname()) if all_interfaces else endpoint

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        with suppress(BlockingIOError):  # already woken
            os.write(self._wake_writer, b"!")

    def forget(self) -> None:
        """Reread the trainer's progress after a dismissal."""
        self.dismissed = self.spool.progress.dismissed()
        self.cursor = self.spool.progress.cursor()
        self.wake()

    def check(self) -> None:
        """Raise TransportError when the thread has failed."""
        if self._failed is not None:
            raise TransportError(
                f"rollouts are not served any more: {self._failed}"
            ) from self._failed

    def close(self) -> None:
        """Stop the thread. Queued answers are still sent."""
        if self._closing.is_set():
            return
        self._closing.set()
        self.wake()
        self._thread.join(_CLOSE_S + _LINGER_MS / 1000)
        if not self._thread.is_alive():
            self._release()

    def _release(self) -> None:
        self._closing.set()
        self._socket.close()
        self.authenticator.stop()
        self._context.term()
        os.close(self._wake_reader)
        os.close(self._wake_writer)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake_reader, zmq.POLLIN)
        try:
            while not self._closing.is_set():
                self.iterations += 1
                self._handle(dict(poller.poll(1000)))
        except BaseException as error:
            self._failed = error
            log.error("rollouts are not served any more: %r", error)
            raise

    def _handle(self, ready: dict[object, int]) -> None:
        if self._wake_reader in ready:
            os.read(self._wake_reader, 4096)
            for peer, request in list(self._waiting.items()):
                self._answer(peer, request, again=True)
        for peer, request in self._read_requests().items():
            self._answer(peer, request, again=False)

    def _read_requests(self) -> dict[bytes, PieceRequest]:
        requests: dict[bytes, PieceRequest] = {}
        while True:
            try:
                peer, *parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return requests
            try:
                requests[peer], _ = unpack(PieceRequest, parts)
            except ValueError as error:
                self._refused += 1
                if self._refused == 1:
                    log.warning("a message that no trainer sends is refused: %s", printable(error))

    def _answer(self, peer: bytes, request: PieceRequest, again: bool) -> None:
        """Answer a request, or let it wait. again: it has waited."""
        self._waiting.pop(peer, None)
        if self.cursor is not None and request.attempt < self.cursor.attempt:
            text = takeover(self.cursor.attempt, request.attempt)
            self._send(peer, request, "fenced", text=text)
            return
        if request.attempt <= self.dismissed:
            self._send(peer, request, "fenced", text=dismissal(request.attempt))
            return
        self._note(request.cursor)
        if request.want is None:
            self._send(peer, request, "heard")
        else:
            self._serve(peer, request, request.want, again)

    def _note(self, cursor: Cursor) -> None:
        if cursor == self.cursor or not cursor.follows(self.cursor):
            return
        faultpoint(f"serve.heard/{cursor.received}")
        try:
            self.spool.progress.report(cursor)
        except (OSError, Fenced) as error:  # stored with the trainer's next step
            log.warning("what the trainer has said could not be kept: %s", error)
        self.cursor = cursor

    def _serve(self, peer: bytes, request: PieceRequest, step: int, again: bool) -> None:
        steps = self.spool.steps()
        if step in steps:
            self._send_piece(peer, request, step, newest=steps[-1])
            return
        if steps and step < steps[-1]:
            self._send(peer, request, "gone", step=steps[0])
            return
        if (reason := self.spool.ended()) is not None:
            self._send(peer, request, "ended", text=reason)
            return
        self._waiting[peer] = request
        if len(self._waiting) > _MAX_WAITING:  # peers that are gone do not say so
            del self._waiting[next(iter(self._waiting))]
        if not again:
            self._send(peer, request, "wait")

    def _send_piece(self, peer: bytes, request: PieceRequest, step: int, newest: int) -> None:
        try:
            piece, size = self.spool.piece(step, request.offset, PIECE)
        except FrameGone:  # dropped since
            self._send(peer, request, "gone", step=newest)
        except OSError as error:
            self._send(peer, request, "refused", text=printable(error, 200))
        else:
            self._send(peer, request, "piece", piece, step=step, offset=request.offset, size=size)
            faultpoint(f"serve.sent/{step}")

    def _send(
        self, peer: bytes, request: PieceRequest, kind: ReplyKind, piece: bytes = b"", **rest: Any
    ) -> None:
        committed = 0 if self.cursor is None else self.cursor.committed
        reply = PieceReply(
            kind=kind, attempt=self.attempt, to=request.attempt, committed=committed, **rest
        )
        with suppress(zmq.Again):  # the peer will repeat its request
            self._socket.send_multipart([peer, *pack(reply, piece)], zmq.NOBLOCK)


def _resolve_interface(host: str) -> str:
    try:
        return socket.gethostbyname(host)
    except OSError as error:
        raise ValueError(f"rollout_transport.host: {host!r}: {error}") from error


class Receiver:
    """The trainer's end. address: tcp://HOST:PORT, or the file of the orchestrator's address, which
    may change. attempt, committed: as of `filesystem.Receiver`. token: the orchestrator's."""

    def __init__(
        self,
        address: str | Path,
        attempt: int,
        committed: int = 0,
        *,
        token: str,
        alive: Callable[[], None] | None = None,
        silence_s: float = SILENCE_S,
    ) -> None:
        self.line = Connection(address, token)
        self.alive = alive
        self.silence_s = silence_s
        self._cursor = Cursor(committed, committed, attempt)
        self._orchestrator = -1
        self._acknowledged = committed
        self._warned = False  # that no orchestrator has ever answered

    def receive(self, deadline_s: float) -> Batch:
        """Return the next batch. PeerSilent when an orchestrator that was there is silent for
        `silence_s` seconds, DamagedFrame after TRIES damaged transfers. Raises FrameGone, Fenced,
        ChannelClosed."""
        step = self._cursor.received + 1
        deadline = time.monotonic() + check_deadline(deadline_s)
        assembler = FrameAssembler(step)
        silent_s = 0.0  # time spent listening, not wall clock: this process may have been suspended
        while assembler.batch is None:
            is_connected = self.line.tell(self._request(step, assembler.offset))
            remaining_s = max(0.0, deadline - time.monotonic())
            listen_s = min(RETRY_S if is_connected else _POLL_S, remaining_s)
            silent_s = 0.0 if self._listen(assembler, listen_s) else silent_s + listen_s
            if self.alive is not None:
                self.alive()
            if silent_s >= self.silence_s:
                self._complain()
            if assembler.batch is None and time.monotonic() >= deadline:
                raise DeadlineExceeded(self._waited_for(step), deadline_s)
        faultpoint(f"receive.read/{step}")
        self._cursor = self._cursor.receive()
        self.line.tell(self._request())  # the next request repeats a lost report
        faultpoint(f"receive.said/{step}")
        return assembler.batch

    def _waited_for(self, step: int) -> str:
        note = ", which has never answered" if self._orchestrator < 0 else ""
        return f"the batch of step {step} from the orchestrator at {self.line.where}{note}"

    def commit(self, step: int) -> None:
        self._cursor = self._cursor.commit(step)
        self.line.tell(self._request())

    def close(self) -> None:
        """Report the last commit until it is acknowledged, for _CLOSE_S at most."""
        deadline = time.monotonic() + _CLOSE_S
        while self._acknowledged < self._cursor.committed and time.monotonic() < deadline:
            self.line.tell(self._request())
            with suppress(ValueError):
                if (reply := self.line.listen(_POLL_S)) is not None:
                    self._accept(reply[0])
        self.line.close()

    def _complain(self) -> None:
        """Raise PeerSilent for an orchestrator that was there; else warn once."""
        if self._orchestrator >= 0:
            raise PeerSilent(f"the orchestrator at {self.line.where} to answer", self.silence_s)
        if self.line.is_placed and not self._warned:
            self._warned = True
            log.warning(
                "nobody at %s has answered for %g s: if the orchestrator is there, it has another "
                "token (LOWROLL_TOKEN, or roles/tokens.json of the run)",
                self.line.where,
                self.silence_s,
            )

    def _request(self, want: int | None = None, offset: int = 0) -> PieceRequest:
        return PieceRequest(**vars(self._cursor), want=want, offset=offset)

    def _listen(self, assembler: FrameAssembler, seconds: float) -> bool:
        """Take answers for `seconds`, or until a piece was taken or refused. Return whether the
        orchestrator answered."""
        deadline = time.monotonic() + seconds
        answered = False
        while (remaining_s := deadline - time.monotonic()) > 0:
            try:
                reply = self.line.listen(remaining_s)
            except ValueError as error:
                assembler.refuse(f"{self.line.where}: {printable(error)}")
                return True
            if reply is None:
                break
            answer, piece = reply
            if not self._accept(answer):
                continue
            answered = True
            self._raise(answer, assembler.step)
            if answer.kind == "piece" and assembler.take(answer, piece, self.line.where):
                break
        return answered

    def _accept(self, answer: PieceReply) -> bool:
        """Note what an answer acknowledges. Return False for one to another attempt, or of an
        earlier orchestrator."""
        if answer.to != self._cursor.attempt or answer.attempt < self._orchestrator:
            return False
        self._orchestrator = answer.attempt
        self._acknowledged = answer.committed
        return True

    def _raise(self, answer: PieceReply, step: int) -> None:
        where, text = self.line.where, printable(answer.text)
        if answer.kind == "refused":
            raise TransportError(f"{where}: refused: {text}")
        if answer.kind == "fenced":
            raise Fenced(text)
        if answer.kind == "gone":
            raise FrameGone(
                f"{where}: the trainer needs the batch of step {step}; the oldest that the "
                f"orchestrator keeps is of step {answer.step}"
            )
        if answer.kind == "ended":
            raise ChannelClosed(f"the orchestrator has ended before step {step}: {text}")


class FrameAssembler:
    """A frame that arrives in pieces; `batch` once it is whole."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.batch: Batch | None = None
        self._data = bytearray()
        self._size = 0  # 0 before the first piece
        self._tries = 0

    @property
    def offset(self) -> int:
        return len(self._data)

    def take(self, answer: PieceReply, piece: bytes, where: str) -> bool:
        """Append a piece, and decode the whole frame. Return False for another step or offset.
        A damaged piece or frame is asked for again; raises DamagedFrame after `TRIES` times."""
        if answer.step != self.step or answer.offset != self.offset:
            return False
        if problem := self._problem(answer, piece):
            self.refuse(f"{where}: step {self.step}: {problem}")
            return True
        self._size = answer.size
        self._data += piece
        if len(self._data) == self._size:
            try:
                self.batch = decode_frame(
                    bytes(self._data), self.step, f"{where}: step {self.step}"
                )
            except DamagedFrame as error:
                self.refuse(str(error))
        return True

    def _problem(self, answer: PieceReply, piece: bytes) -> str:
        if answer.size > MAX_FRAME_BYTES:
            return f"a frame of {answer.size} bytes is over the limit of {MAX_FRAME_BYTES}"
        if self._size and answer.size != self._size:
            return f"a frame of {answer.size} bytes, {self._size} were announced"
        if not piece or self.offset + len(piece) > answer.size:
            return f"{len(piece)} bytes at {self.offset} of {answer.size}"
        return ""

    def refuse(self, problem: str) -> None:
        """Begin the frame again. Raises DamagedFrame when `TRIES` frames were damaged."""
        self._data.clear()
        self._size = 0
        self._tries += 1
        if self._tries == TRIES:
            raise DamagedFrame(f"{problem}; asked for {TRIES} times")
        log.warning("%s; it is asked for again", problem)


class Connection:
    """The trainer's socket, which follows the orchestrator's address."""

    def __init__(self, address: str | Path, token: str) -> None:
        self.place = address if isinstance(address, Path) else None
        self.where = str(address)
        self.token = token
        self.polls = 0  # for tests
        self._attempt = -1  # of the orchestrator whose address was read
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        if self.place is None:
            self._connect(str(address))

    @property
    def is_placed(self) -> bool:
        return self._socket is not None

    def tell(self, word: PieceRequest) -> bool:
        """Send a request; return False when no peer is connected."""
        self._look()
        if self._socket is None:
            return False
        with suppress(zmq.Again):
            self._socket.send_multipart(pack(word, b""), zmq.NOBLOCK)
            return True
        return False

    def listen(self, seconds: float) -> tuple[PieceReply, bytes] | None:
        """Return the next answer, if one comes. ValueError for an invalid message."""
        self.polls += 1
        if self._socket is None:
            time.sleep(seconds)
            return None
        if not self._socket.poll(max(1, int(1000 * seconds))):
            return None
        return unpack(PieceReply, self._socket.recv_multipart(zmq.NOBLOCK))

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._context.term()

    def _look(self) -> None:
        if self.place is None:
            return
        try:
            published = decode_line(SenderAddress, read_file(self.place))
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            log.warning("%s is ignored: %s", self.place, printable(error))
            return
        if published.attempt >= self._attempt and published.address != self.where:
            self._attempt = published.attempt
            self._connect(published.address)

    def _connect(self, address: str) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket = _open_socket(self._context, zmq.DEALER, PIECE + 2 * MAX_LINE_BYTES)
        set_client_keys(self._socket, self.token)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)  # do not queue requests for an absent peer
        try:
            self._socket.connect(address)
        except zmq.ZMQError as error:
            raise TransportError(
                f"{printable(address)}: no address of rollouts: {error}"
            ) from error
        self.where = address
