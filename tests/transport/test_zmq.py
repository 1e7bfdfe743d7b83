"""The same queue over TCP: pieces, answers, fences, and peers that send anything."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from lowroll.checkpoint.line_checksum import seal, unseal
from lowroll.transport import zmq
from lowroll.transport.base import (
    ChannelClosed,
    Cursor,
    DamagedFrame,
    DeadlineExceeded,
    Fenced,
    FrameGone,
    PeerSilent,
    TransportError,
    wait_until,
)
from lowroll.transport.messages import (
    PieceReply,
    PieceRequest,
    SenderAddress,
    decode_line,
    encode_cursor,
    encode_line,
)
from lowroll.transport.spool import Spool
from lowroll.transport.zmq import Receiver, Sender, pack
from tests.fixtures.batches import batch_of, exactly
from tests.fixtures.frames import sends

TOKEN = "what both ends know"


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq, "RETRY_S", 0.02)


def sender_of(stack: ExitStack, folder: Path, **options: object) -> Sender:
    sender = Sender(folder, **{"token": TOKEN} | options)
    stack.callback(sender.close)
    return sender


def receiver_of(stack: ExitStack, address: object, *words: int, **options: object) -> Receiver:
    receiver = Receiver(address, *words, **{"token": TOKEN} | options)
    stack.callback(receiver.close)
    return receiver


@pytest.mark.parametrize("n", [1, 8])
@pytest.mark.parametrize("piece", [1 << 22, 100])
def test_batches_arrive_once_in_order_and_as_they_were_sent(
    tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch, n: int, piece: int
) -> None:
    monkeypatch.setattr(zmq, "PIECE", piece)
    sender = sender_of(stack, tmp_path, hwm=2)
    receiver = receiver_of(stack, sender.address, 1)
    thread = threading.Thread(
        target=lambda: [sender.send(batch_of(step)) for step in range(1, n + 1)]
    )
    thread.start()
    received = [receiver.receive(30) for _ in range(n)]
    thread.join()
    assert [exactly(batch) for batch in received] == [
        exactly(batch_of(step)) for step in range(1, n + 1)
    ]
    receiver.commit(n)
    sender.drain(30)
    assert sender.cursor() == Cursor(n, n, 1)
    assert Spool(tmp_path).progress.cursor() == Cursor(
        n, n, 1
    )  # an orchestrator that starts knows it


def test_it_listens_where_it_says_on_this_machine_alone(tmp_path: Path, stack: ExitStack) -> None:
    place = tmp_path / "roles" / "rollouts.json"
    sender = sender_of(stack, tmp_path / "spool", attempt=3, publish=place)
    assert sender.address.startswith("tcp://127.0.0.1:")
    published = SenderAddress(attempt=3, address=sender.address)
    assert decode_line(SenderAddress, place.read_bytes()) == published
    with pytest.raises(ValueError, match="only to those who know a token: none is given"):
        Sender(tmp_path / "b", token="")
    every = sender_of(stack, tmp_path / "c", host="0.0.0.0")
    assert every.address.startswith(f"tcp://{socket.gethostname()}:")
    port = int(sender.address.rpartition(":")[2])
    with pytest.raises(TransportError, match=f"127.0.0.1:{port}: Address already in use"):
        Sender(tmp_path / "d", port=port, token=TOKEN)
    with pytest.raises(TransportError, match="nonsense: no address"):
        Receiver("nonsense", 1, token=TOKEN)


def test_a_full_channel_blocks_and_a_waiting_trainer_names_whom(
    tmp_path: Path, stack: ExitStack, quick: None
) -> None:
    sender = sender_of(stack, tmp_path, hwm=1, deadline_s=0.05)
    sender.send(batch_of(1))
    with pytest.raises(DeadlineExceeded, match="the trainer to receive a batch: step 2"):
        sender.send(batch_of(2))
    receiver = receiver_of(stack, sender.address, 1)
    assert receiver.receive(30).step == 1
    with pytest.raises(DeadlineExceeded, match=f"step 2 from the orchestrator at {sender.address}"):
        receiver.receive(0.05)
    sender.deadline_s = 30
    sender.send(batch_of(2))
    assert receiver.receive(30).step == 2
    nobody = receiver_of(stack, "tcp://127.0.0.1:1", 1)
    with pytest.raises(DeadlineExceeded, match="which has never answered"):
        nobody.receive(0.05)


def test_both_sides_start_again_and_find_each_other(
    tmp_path: Path, stack: ExitStack, quick: None
) -> None:
    """The orchestrator on another port, the trainer from its checkpoint."""
    place, spool = tmp_path / "place.json", tmp_path / "spool"
    sender = Sender(spool, hwm=9, attempt=1, publish=place, token=TOKEN)
    receiver = Receiver(place, 1, token=TOKEN)
    for step in (1, 2, 3):
        sender.send(batch_of(step))
        assert receiver.receive(30).step == step
    receiver.commit(2)
    receiver.close()
    assert sender.cursor() == Cursor(3, 2, 1)
    sender.close()
    sender = sender_of(stack, spool, hwm=9, attempt=2, publish=place)
    assert sender.cursor() == Cursor(3, 2, 1)
    receiver = receiver_of(stack, place, 2, 2)
    sender.send(batch_of(4))
    assert [receiver.receive(30).step for _ in range(2)] == [3, 4]
    sender.close()
    sender = sender_of(stack, spool, hwm=9, attempt=3, publish=place)
    sender.send(batch_of(5))
    assert receiver.receive(30).step == 5  # the same trainer follows it


def test_a_trainer_that_waits_asks_once_a_second(tmp_path: Path, stack: ExitStack) -> None:
    """Waits are counted, on both sides: a timing decides nothing."""
    sender = sender_of(stack, tmp_path)
    receiver = receiver_of(stack, sender.address, 1)
    with pytest.raises(DeadlineExceeded):
        receiver.receive(3.0)
    assert 1 <= receiver.line.polls <= 10  # an answer and a silence for each ask
    assert sender.service.iterations <= 12


def test_an_orchestrator_that_was_there_and_is_silent_is_named(
    tmp_path: Path, stack: ExitStack, quick: None
) -> None:
    sender = sender_of(stack, tmp_path)
    sender.send(batch_of(1))
    receiver = receiver_of(stack, sender.address, 1)
    assert receiver.receive(30).step == 1
    receiver.silence_s = 0.1
    where = sender.address
    sender.close()
    with pytest.raises(PeerSilent, match=f"0.1 s for the orchestrator at {where} to answer"):
        receiver.receive(1000)

    def dead() -> None:
        raise TransportError("the orchestrator, pid 7, has done nothing for 30 s")

    with pytest.raises(TransportError, match="pid 7"):
        receiver_of(stack, where, 1, alive=dead).receive(1000)


def test_an_earlier_attempt_is_fenced(tmp_path: Path, stack: ExitStack) -> None:
    sender = sender_of(stack, tmp_path)
    sender.send(batch_of(1))
    old = receiver_of(stack, sender.address, 1)
    new = receiver_of(stack, sender.address, 2)
    assert new.receive(30).step == 1
    with pytest.raises(Fenced, match="attempt 2 of the trainer has taken over from attempt 1"):
        old.receive(30)
    wait_until(lambda: sender.cursor() == Cursor(1, 0, 2), "the trainer's word", 30)


def test_a_trainer_whose_batches_are_lost_is_sent_back_to_its_checkpoint(
    tmp_path: Path, stack: ExitStack
) -> None:
    sender = sender_of(stack, tmp_path)
    sender.send(batch_of(1))
    receiver = receiver_of(stack, sender.address, 4)
    assert receiver.receive(30).step == 1
    cursor = Cursor(1, 0, 4)
    wait_until(lambda: sender.cursor() == cursor, "the trainer's word", 30)
    threading.Timer(0.05, sender.go_back, (cursor,)).start()
    with pytest.raises(Fenced, match=r"attempt 4 .* goes on from the checkpoint .*--resume"):
        receiver.receive(30)
    assert sender.cursor() is None and sender.spool.steps() == []
    following = receiver_of(stack, sender.address, 5)
    sender.send(batch_of(1, temperature=0.5))
    assert following.receive(30).temperature == 0.5
    wait_until(lambda: sender.cursor() == Cursor(1, 0, 5), "the trainer's word", 30)


def test_without_the_token_nothing_is_said(tmp_path: Path, stack: ExitStack, quick: None) -> None:
    sender = sender_of(stack, tmp_path, token="secret")
    sender.send(batch_of(1))
    for token in ("", "secre", "Secret"):
        with pytest.raises(DeadlineExceeded, match="never answered"):
            receiver_of(stack, sender.address, 5, token=token).receive(0.1)
    assert sender.cursor() is None
    assert receiver_of(stack, sender.address, 1, token="secret").receive(30).step == 1


def test_gone_and_ended_are_told(tmp_path: Path, stack: ExitStack) -> None:
    sender = sender_of(stack, tmp_path, hwm=9)
    for step in (1, 2, 3):
        sender.send(batch_of(step))
    sender.spool.drop_through(2)
    receiver = receiver_of(stack, sender.address, 1, 1)
    with pytest.raises(FrameGone, match="needs the batch of step 2; .* is of step 3"):
        receiver.receive(30)
    receiver = receiver_of(stack, sender.address, 2, 2)
    assert receiver.receive(30).step == 3
    threading.Timer(0.05, sender.end, ("nothing to learn any more",)).start()
    with pytest.raises(ChannelClosed, match="before step 4: nothing to learn any more"):
        receiver.receive(30)


def answer_of(ask: PieceRequest, kind: str = "piece", **rest: object) -> PieceReply:
    return PieceReply(kind=kind, attempt=1, to=ask.attempt, **{"step": ask.want or 0, **rest})


def frame(tmp_path: Path, step: int = 1) -> bytes:
    spool = Spool(tmp_path / "frames")
    spool.put(batch_of(step))
    return spool.get(step)


WRONG = {
    "noise": lambda ask, data: [b"noise"],
    "parts": lambda ask, data: [b"a", b"b", b"c"],
    "another word": lambda ask, data: [encode_cursor(Cursor(0, 0, 1)), b""],
    "empty": lambda ask, data: pack(answer_of(ask, size=9), b""),
    "too long": lambda ask, data: pack(answer_of(ask, size=3), b"1234"),
    "huge": lambda ask, data: pack(answer_of(ask, size=1 << 40), b"1234"),
    "no frame": lambda ask, data: pack(answer_of(ask, size=4), b"1234"),
    "flipped": lambda ask, data: pack(answer_of(ask, size=len(data)), data.replace(b"two", b"six")),
    "cut": lambda ask, data: pack(answer_of(ask, size=len(data) - 1), data[:-1]),
}


@pytest.mark.parametrize("wrong", sorted(WRONG))
@pytest.mark.parametrize("times", [1, 2, 3])
def test_what_is_no_frame_is_asked_for_again_twice(
    tmp_path: Path, stack: ExitStack, wrong: str, times: int
) -> None:
    data, asks = frame(tmp_path), []

    def answer(ask: PieceRequest) -> list[list[bytes]]:
        asks.append(ask)
        if ask.want is None:
            return []
        if len(asks) <= times:
            return [WRONG[wrong](ask, data)]
        return [pack(answer_of(ask, size=len(data)), data)]

    receiver = receiver_of(stack, sends(stack, TOKEN, answer), 1)
    if times == zmq.TRIES:
        with pytest.raises(DamagedFrame, match=r"tcp://.*; asked for 3 times"):
            receiver.receive(30)
        assert len(asks) == 3
    else:
        assert exactly(receiver.receive(30)) == exactly(batch_of(1))


def test_stale_words_are_passed_over(tmp_path: Path, stack: ExitStack) -> None:
    """For another attempt or another step, pieces twice, and an orchestrator that was
    replaced: none of it is an error, none of it counts."""
    data = frame(tmp_path)
    half = len(data) // 2

    def answer(ask: PieceRequest) -> list[list[bytes]]:
        piece = data[ask.offset : ask.offset + half]
        good = answer_of(ask, offset=ask.offset, size=len(data))
        return [
            pack(replace(answer_of(ask, "fenced"), to=7), b""),
            pack(replace(good, step=2), piece),
            pack(good, piece),
            pack(good, piece),
            pack(replace(answer_of(ask, "fenced"), attempt=0), b""),
        ]

    receiver = receiver_of(stack, sends(stack, TOKEN, answer), 1)
    assert exactly(receiver.receive(30)) == exactly(batch_of(1))


def test_words_are_read_strictly() -> None:
    ask = PieceRequest(attempt=1, received=3, committed=2, want=4)
    line = encode_line(ask)
    assert decode_line(PieceRequest, line) == ask and len(line) < 200
    rng = random.Random(0)
    for _ in range(1000):
        damaged = bytearray(line)
        way = rng.randrange(3)
        if way == 0:
            damaged[rng.randrange(len(line))] ^= 1 << rng.randrange(8)
        elif way == 1:
            del damaged[rng.randrange(len(line)) :]
        else:
            damaged[rng.randrange(len(line)) :] = rng.randbytes(rng.randrange(1, 99))
        with pytest.raises(ValueError):
            decode_line(PieceRequest, bytes(damaged))
    content, _ = unseal(line.removesuffix(b"\n"))
    for field, value in (
        ("received", 1),
        ("attempt", -1),
        ("format", 2),
        ("more", 3),
        ("run", "b"),
    ):
        wrong = msgspec.json.encode(msgspec.json.decode(content) | {field: value})
        with pytest.raises(ValueError, match=f"committed|{field}"):
            decode_line(PieceRequest, seal(wrong) + b"\n")
    with pytest.raises(ValueError, match="no checksum"):
        decode_line(PieceRequest, msgspec.json.encode(ask) + b"\n")
    with pytest.raises(ValueError, match="at most"):
        decode_line(PieceReply, encode_line(replace(answer_of(ask), text="r" * 5000)))


def test_a_batch_that_is_dropped_while_it_is_asked_for_ends_nothing(
    stack: ExitStack, tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = sender_of(stack, tmp_path)
    monkeypatch.setattr(sender.service.spool, "steps", lambda: [1, 2])  # as it was a moment before
    with pytest.raises(FrameGone, match="needs the batch of step 1"):
        receiver_of(stack, sender.address, 1).receive(5)
    sender.service.check()
