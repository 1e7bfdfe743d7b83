"""The durable queue: what is sent survives its sender, what is committed goes, nobody waits for
ever."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from lowroll.checkpoint.line_checksum import seal, unseal
from lowroll.runs.roles.channels import TrainerChannel
from lowroll.transport.base import (
    ChannelClosed,
    Cursor,
    DamagedFrame,
    DeadlineExceeded,
    Fenced,
    FrameGone,
    OtherFormat,
    TransportError,
)
from lowroll.transport.filesystem import Receiver, Sender
from lowroll.transport.frame import pack_batch
from lowroll.transport.spool import CURSOR, Spool
from tests.fixtures.batches import batch_of, exactly


def test_the_spool_keeps_frames_as_they_are(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool")
    assert spool.steps() == [] and spool.newest() is None
    for step in (3, 4, 5):
        spool.put(batch_of(step, orchestrator={"next": step}))
    frame = spool.get(4)
    spool.put(batch_of(4, orchestrator={"next": 4}))  # the same again
    assert spool.get(4) == frame and spool.steps() == [3, 4, 5]
    with pytest.raises(TransportError, match=r"step_000004\.frame: another batch"):
        spool.put(batch_of(4, temperature=0.5))
    with pytest.raises(TransportError, match="step 7 does not follow step 5"):
        spool.put(batch_of(7))
    assert exactly(spool.newest()) == exactly(batch_of(5, orchestrator={"next": 5}))
    spool.drop_through(3)
    assert spool.steps() == [4, 5]
    with pytest.raises(FrameGone, match="step 3"):
        spool.get(3)
    spool.drop_through(9)
    assert spool.steps() == [5]  # its state is needed
    spool.put(batch_of(6))
    assert spool.drop_after(4) == [5, 6] and spool.steps() == []


def test_foreign_names_are_no_frames(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    spool.put(batch_of(3))
    for name in ("step_0000004.frame", "step_x.frame", ".tmp-step_000009.frame", "step_9.frame"):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "step_000008.frame").mkdir()
    assert spool.steps() == [3]
    spool.put(batch_of(4))


@pytest.mark.parametrize("n", [1, 8])
@pytest.mark.parametrize("hwm", [1, 3])
def test_batches_arrive_once_in_order_and_as_they_were_sent(
    tmp_path: Path, n: int, hwm: int
) -> None:
    sender, receiver = Sender(tmp_path, hwm, 30), Receiver(tmp_path, 1)
    thread = threading.Thread(
        target=lambda: [sender.send(batch_of(step)) for step in range(1, n + 1)]
    )
    thread.start()
    received = [receiver.receive(30) for _ in range(n)]
    thread.join()
    assert [exactly(batch) for batch in received] == [
        exactly(batch_of(step)) for step in range(1, n + 1)
    ]
    assert sender.cursor() == Cursor(n, 0, 1)


def test_a_full_channel_blocks_and_names_whom_it_waits_for(tmp_path: Path) -> None:
    sender = Sender(tmp_path, hwm=2, deadline_s=0.02)
    assert sender.cursor() is None
    sender.send(batch_of(1))
    sender.send(batch_of(2))
    with pytest.raises(DeadlineExceeded, match="0.02 s for the trainer to receive a batch: step 3"):
        sender.send(batch_of(3))
    assert sender.spool.steps() == [1, 2]  # the refused batch did not enter
    receiver = Receiver(tmp_path, 1)
    receiver.receive(0)
    sender.send(batch_of(3))
    with pytest.raises(DeadlineExceeded, match="step 4"):
        sender.send(batch_of(4))
    sender.close()
    with pytest.raises(ChannelClosed, match="step 4"):
        sender.send(batch_of(4))


def test_both_sides_go_on_where_they_were(tmp_path: Path) -> None:
    """Nothing is lost, and nothing is sent twice, whoever starts again."""
    sender, receiver = Sender(tmp_path, hwm=3), Receiver(tmp_path, 1)
    for step in (1, 2, 3):
        sender.send(batch_of(step))
        assert receiver.receive(0).step == step
    receiver.commit(2)
    sender.send(batch_of(4))
    assert sender.spool.steps() == [3, 4]
    receiver = Receiver(tmp_path, 2, committed=2)  # from the checkpoint of step 2
    assert receiver.receive(0).step == 3
    sender = Sender(tmp_path, hwm=3)
    assert sender.cursor() == Cursor(3, 2, 2)
    newest = sender.spool.newest()
    assert newest is not None and newest.step == 4
    sender.send(batch_of(4))  # it did not know that it had sent it
    sender.send(batch_of(5))
    assert [receiver.receive(0).step for _ in range(2)] == [4, 5]
    receiver.commit(5)
    sender.drain(0)


def test_what_cannot_be_committed_is_refused(tmp_path: Path) -> None:
    sender, receiver = Sender(tmp_path), Receiver(tmp_path, 1)
    sender.send(batch_of(1))
    receiver.receive(0)
    with pytest.raises(ValueError, match="step 2 is not between"):
        receiver.commit(2)
    receiver.commit(1)
    with pytest.raises(ValueError, match="step 0 is not between"):
        receiver.commit(0)
    with pytest.raises(DeadlineExceeded, match="the trainer to commit step 2"):
        sender.send(batch_of(2))
        sender.drain(0)


def test_an_earlier_attempt_is_fenced(tmp_path: Path) -> None:
    """A trainer that was stopped and comes back finds out, and is not listened to."""
    sender, old = Sender(tmp_path), Receiver(tmp_path, 1)
    sender.send(batch_of(1))
    words = (tmp_path / CURSOR).read_bytes()
    new = Receiver(tmp_path, 2)
    assert sender.cursor() == Cursor(0, 0, 2)
    with pytest.raises(Fenced, match="attempt 2 of the trainer has taken over from attempt 1"):
        old.receive(0)
    assert sender.cursor() == Cursor(0, 0, 2)
    (tmp_path / CURSOR).write_bytes(words)  # between its look and its word
    assert sender.cursor() == Cursor(0, 0, 2)
    assert new.receive(0).step == 1
    assert sender.cursor() == Cursor(1, 0, 2)


def test_batches_of_another_place_are_refused(tmp_path: Path) -> None:
    """Of another step under this one's name, and one that was cut."""
    sender = Sender(tmp_path, 9)
    for step in (1, 2):
        sender.send(batch_of(step))
    path = sender.spool.path(1)
    whole, pauses = path.read_bytes(), []
    receiver = Receiver(tmp_path, 1, pause=pauses.append)
    for data, message in [
        (sender.spool.get(2), "of step 2, not of step 1"),
        (whole[:-1], "bytes, .* were sent"),
        (whole.replace(b"two", b"six"), "SHA-256"),
        (b"", "no header"),
    ]:
        path.write_bytes(data)
        pauses.clear()
        with pytest.raises(DamagedFrame, match=f"step_000001.frame: .*{message}.*read 3 times"):
            receiver.receive(0)
        assert len(pauses) == 2
    path.write_bytes(whole)
    assert exactly(receiver.receive(0)) == exactly(batch_of(1))


def test_a_damaged_frame_is_made_again_by_the_next_orchestrator(tmp_path: Path) -> None:
    sender = Sender(tmp_path, hwm=9)
    for step in range(1, 5):
        sender.send(batch_of(step))
    sender.spool.path(3).write_bytes(b"zero")
    again = Sender(tmp_path, hwm=9)
    assert again.spool.steps() == [1, 2]
    assert sorted(path.name for path in tmp_path.glob("*.damaged")) == [
        "step_000003.frame.damaged",
        "step_000004.frame.damaged",
    ]
    again.send(batch_of(3, temperature=0.5))
    assert Receiver(tmp_path, 1, committed=2).receive(0).temperature == 0.5


def test_a_step_that_is_not_there_any_more_is_named_on_both_sides(tmp_path: Path) -> None:
    sender = Sender(tmp_path, hwm=9)
    for step in (1, 2, 3):
        sender.send(batch_of(step))
    sender.spool.drop_through(2)
    receiver = Receiver(tmp_path, 1, committed=1)
    with pytest.raises(FrameGone, match="needs the batch of step 2; the oldest .* is of step 3"):
        receiver.receive(0)
    with pytest.raises(FrameGone, match="needs the batch of step 2; the oldest is of step 3"):
        sender.send(batch_of(4))


def test_a_trainer_that_fell_back_waits_until_its_batch_is_made_again(tmp_path: Path) -> None:
    sender = Sender(tmp_path, hwm=9)
    for step in (1, 2, 3):
        sender.send(batch_of(step))
    sender.spool.drop_through(2)
    looked: list[int] = []

    def look() -> None:
        looked.append(1)
        if len(looked) == 2:
            cursor = sender.cursor()
            assert cursor == Cursor(0, 0, 2)
            sender.go_back(cursor)
            sender.send(batch_of(1, temperature=0.5))

    channel = TrainerChannel(look)
    channel.open(Receiver(tmp_path, 2))
    with pytest.raises(FrameGone, match="needs the batch of step 1"):
        sender.check()
    assert not sender.spool.reaches(0) and sender.spool.reaches(2)
    assert channel.receive(30).temperature == 0.5
    sender.check()
    with pytest.raises(FrameGone):
        sender.spool.drop_through(9)
        sender.send(batch_of(2))
        sender.spool.drop_through(1)
        channel.open(Receiver(tmp_path, 3))
        channel.receive(0.3)


@pytest.mark.parametrize("is_told_by", ["waiting", "committing"])
def test_a_trainer_whose_batches_are_lost_is_sent_back_to_its_checkpoint(
    tmp_path: Path, is_told_by: str
) -> None:
    sender, receiver = Sender(tmp_path), Receiver(tmp_path, 4)
    sender.send(batch_of(1))
    receiver.receive(0)
    sender.spool.path(1).write_bytes(b"zero")
    again = Sender(tmp_path)
    assert not again.spool.reaches(1), "it has the batch, and nobody else has"
    cursor = again.cursor()
    assert cursor == Cursor(1, 0, 4)
    again.go_back(cursor)
    assert again.cursor() is None and Sender(tmp_path).cursor() is None
    with pytest.raises(Fenced, match=r"attempt 4 .* goes on from the checkpoint .*--resume"):
        receiver.receive(0) if is_told_by == "waiting" else receiver.commit(1)
    following = Receiver(tmp_path, 5)
    assert again.cursor() == Cursor(0, 0, 5)
    again.spool.progress.report(Cursor(1, 0, 5))
    with pytest.raises(FrameGone, match="step 1 that the trainer has received is not here"):
        again.send(batch_of(1, temperature=0.5))
    again.go_back(Cursor(1, 0, 5))
    following = Receiver(tmp_path, 6)
    again.send(batch_of(1, temperature=0.5))
    assert following.receive(0).temperature == 0.5


def test_the_end_holds_until_a_batch_follows_or_the_trainer_takes_it_back(tmp_path: Path) -> None:
    sender, receiver = Sender(tmp_path), Receiver(tmp_path, 1)
    sender.send(batch_of(1))
    receiver.receive(0)
    sender.end("all is learned")
    assert Sender(tmp_path).spool.ended() == "all is learned", "who starts again says the same"
    sender.spool.reopen()
    with pytest.raises(DeadlineExceeded, match="to commit step 1"):
        sender.drain(0)
    with pytest.raises(ChannelClosed, match="all is learned"):
        receiver.receive(0)


def test_the_end_is_told_behind_the_last_batch(tmp_path: Path) -> None:
    sender, receiver = Sender(tmp_path), Receiver(tmp_path, 1)
    sender.send(batch_of(1))
    sender.end("nothing to learn any more")
    assert receiver.receive(0).step == 1
    with pytest.raises(ChannelClosed, match="before step 2: nothing to learn any more"):
        receiver.receive(0)
    (tmp_path / "end.json").write_bytes((tmp_path / "end.json").read_bytes()[:-1])
    with pytest.raises(DamagedFrame, match="end.json: torn"):
        receiver.receive(0)
    again = Sender(tmp_path)
    with pytest.raises(DeadlineExceeded, match="the batch of step 2 from the orchestrator, in"):
        receiver.receive(0)
    again.send(batch_of(2))
    assert receiver.receive(0).step == 2


def test_a_waiting_trainer_looks_fifty_times_a_second_at_most(tmp_path: Path) -> None:
    """Polls are counted: a timing decides nothing."""
    pauses: list[float] = []
    sender = Sender(tmp_path)

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if sum(pauses) > 60 and not sender.spool.steps():
            sender.send(batch_of(1))

    receiver = Receiver(tmp_path, 1, pause=pause)
    assert receiver.receive(1000).step == 1
    assert len(pauses) < 50 * 60 + 10 and max(pauses) <= 0.02


def test_a_dead_orchestrator_ends_the_wait(tmp_path: Path) -> None:
    def dead() -> None:
        raise TransportError("the orchestrator, pid 7 on host a, has done nothing for 30 s")

    with pytest.raises(TransportError, match="pid 7 on host a"):
        Receiver(tmp_path, 1, alive=dead).receive(1000)
    sender = Sender(tmp_path, 1, 1000, alive=dead)
    sender.send(batch_of(1))
    with pytest.raises(TransportError, match="pid 7 on host a"):
        sender.send(batch_of(2))


def test_frames_are_small_files_of_plain_lines(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    spool.put(batch_of(12))
    header, rest = spool.get(12).split(b"\n", 1)
    assert header.startswith(b'{"run":"","step":12,"size":') and b'"kind":"frame"' in header
    assert rest == pack_batch(batch_of(12))
    assert json.loads(rest.split(b"\n")[0])["num_samples"] == 2


def test_a_spool_of_another_format_is_named_and_left_as_it_is(tmp_path: Path) -> None:
    assert issubclass(OtherFormat, ValueError)  # a role ends with it at once, and is not restarted
    spool = Spool(tmp_path)
    spool.put(batch_of(1))
    header, rest = spool.get(1).split(b"\n", 1)
    older = unseal(header)[0].replace(b'"format":3', b'"format":2')
    data = seal(older) + b"\n" + rest
    spool.path(1).write_bytes(data)
    for opened in (lambda: Sender(tmp_path), lambda: Receiver(tmp_path, 1).receive(0)):
        with pytest.raises(OtherFormat, match="step_000001.frame: a frame of format 2, .* 3"):
            opened()
    assert spool.path(1).read_bytes() == data
