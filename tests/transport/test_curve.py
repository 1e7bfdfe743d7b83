"""Who may speak to the socket of rollouts: nobody without the token, before anything of theirs is
kept."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import zmq as wire
from zmq.utils import z85

from lowroll.transport import zmq
from lowroll.transport.base import DeadlineExceeded
from lowroll.transport.encryption import keypair, set_client_keys
from lowroll.transport.messages import PieceRequest
from lowroll.transport.zmq import Receiver, Sender, pack
from tests.fixtures.batches import batch_of, exactly

TOKEN = "what both ends know"
PART = b"\x01" + bytes([255]) + bytes(255)  # a part of a message of which more parts follow


@pytest.fixture
def sender(tmp_path: Path) -> Iterator[Sender]:
    with closing(Sender(tmp_path / "spool", token=TOKEN)) as sender:
        sender.send(batch_of(1))
        yield sender


def connect(sender: Sender) -> socket.socket:
    host, _, port = sender.address.removeprefix("tcp://").rpartition(":")
    return socket.create_connection((host, int(port)), timeout=30)


def greeting(mechanism: bytes) -> bytes:
    """The first 64 bytes of a ZMTP 3.0 peer (RFC 23)."""
    signature = b"\xff" + bytes(8) + b"\x7f"
    return signature + b"\x03\x00" + mechanism.ljust(20, b"\0") + bytes(32)


def receives(sender: Sender) -> bool:
    with closing(Receiver(sender.address, 1, token=TOKEN)) as receiver:
        return exactly(receiver.receive(30)) == exactly(batch_of(1))


READY = b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
STRANGERS = {  # what they send one after the other, reading between
    "no mechanism": [greeting(b"NULL"), READY],
    "plain": [greeting(b"PLAIN"), b"\x04\x08\x05HELLO\x01a\x00"],
    "a false hello": [greeting(b"CURVE"), b"\x04\xc8\x05HELLO\x01\x00" + bytes(192)],
    "a hello without end": [greeting(b"CURVE"), b"\x06" + b"\x7f" + b"\xff" * 7],
    "messages at once": [greeting(b"CURVE"), PART],
    "another protocol": [b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"],
}


@pytest.mark.parametrize("stranger", sorted(STRANGERS))
def test_a_stranger_who_sends_endless_parts_is_cut_off(sender: Sender, stranger: str) -> None:
    most, sent = 32 << 20, 0  # bytes; sockets on the way take a few MB
    with connect(sender) as peer, pytest.raises(ConnectionError):
        for said in STRANGERS[stranger]:
            peer.sendall(said)
            peer.recv(1000)
        while sent < most:
            peer.sendall(PART * 1000)
            sent += 1000 * len(PART)
    assert receives(sender)


def test_the_trainers_key_is_asked_for_too(sender: Sender) -> None:
    """Of a peer that has learned the orchestrator's public key, and of one with its secret key."""
    context: wire.Context[wire.Socket[bytes]] = wire.Context()
    server, _ = keypair(TOKEN, "orchestrator")
    for public, secret in (wire.curve_keypair(), keypair(TOKEN, "orchestrator")):
        peer = context.socket(wire.DEALER)
        peer.setsockopt(wire.LINGER, 0)
        peer.curve_publickey, peer.curve_secretkey, peer.curve_serverkey = public, secret, server
        peer.connect(sender.address)
        peer.send_multipart(pack(PieceRequest(attempt=9, received=1, committed=1, want=1), b""))
        assert not peer.poll(500)
        peer.close()
    peer = context.socket(wire.DEALER)
    set_client_keys(peer, TOKEN)
    peer.connect(sender.address)
    peer.send_multipart(pack(PieceRequest(attempt=1, received=0, committed=0, want=1), b""))
    assert peer.poll(30_000)
    peer.close()
    context.term()


def test_while_nobody_looks_at_keys_nobody_enters(sender: Sender) -> None:
    sender.service.authenticator.stop()
    with closing(Receiver(sender.address, 1, token=TOKEN)) as receiver:
        with pytest.raises(DeadlineExceeded):
            receiver.receive(0.5)
    sender.service.authenticator.start()
    assert receives(sender)


def test_connections_that_say_nothing_keep_no_trainer_out(sender: Sender) -> None:
    with ExitStack() as stack:
        for _ in range(400):
            stack.enter_context(connect(sender))
        assert receives(sender)
        sender.send(batch_of(2))


def test_who_listens_on_the_way_reads_nothing(sender: Sender) -> None:
    """A relay between the two sees neither the frame nor the words."""
    seen = bytearray()
    front = socket.create_server(("127.0.0.1", 0))

    def relay(source: socket.socket, sink: socket.socket) -> None:
        while data := source.recv(65536):
            seen.extend(data)
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)

    def accept() -> None:
        near, _ = front.accept()
        with near, connect(sender) as far:
            ways = [
                threading.Thread(target=relay, args=ends) for ends in ((near, far), (far, near))
            ]
            for way in ways:
                way.start()
            for way in ways:
                way.join()

    thread = threading.Thread(target=accept)
    thread.start()
    address = f"tcp://127.0.0.1:{front.getsockname()[1]}"
    with closing(Receiver(address, 1, token=TOKEN)) as receiver:
        assert receiver.receive(30).step == 1
    thread.join(30)
    front.close()
    frame = sender.spool.get(1)
    assert len(seen) > len(frame) and b"CURVE" in seen
    for readable in (frame[:40], frame[-40:], b"attempt", b"piece"):
        assert (
            readable in frame
            or readable in pack(PieceRequest(attempt=1, received=0, committed=0), b"")[0] + b"piece"
        )
        assert readable not in seen


def test_a_trainer_with_another_token_is_told_why_nobody_answers(
    sender: Sender, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zmq, "RETRY_S", 0.02)
    with closing(Receiver(sender.address, 1, token=TOKEN + "!", silence_s=0.1)) as receiver:
        with (
            caplog.at_level(logging.WARNING),
            pytest.raises(DeadlineExceeded, match="never answer"),
        ):
            receiver.receive(1.0)
    (record,) = caplog.records
    assert "it has another token (LOWROLL_TOKEN" in record.getMessage()


def test_keys_follow_from_the_token_alone_and_are_two() -> None:
    keys = {
        (token, owner): keypair(token, owner)
        for token in (TOKEN, TOKEN + " ")
        for owner in ("orchestrator", "trainer")
    }
    assert len({*keys.values()}) == 4
    for (token, owner), (public, secret) in keys.items():
        assert keypair(token, owner) == (public, secret)
        assert wire.curve_public(secret) == public and len(z85.decode(secret)) == 32
