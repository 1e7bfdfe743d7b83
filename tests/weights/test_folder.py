"""Broadcasts: whole or absent at every kill point, never a mix of two attempts, kept while they are
read, and the bits of the learner."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from lowroll.checkpoint.atomic_folders import MANIFEST, verify_folder
from lowroll.checkpoint.fault_injection import observers
from lowroll.model import hf, lora
from lowroll.model.transformer import Transformer
from lowroll.transport.base import DeadlineExceeded, wait_until
from lowroll.weights.exploration_noise import NoiseSchedule
from lowroll.weights.sync.base import STABLE, Broadcasts, Replaced, read_broadcast, reading
from tests.fixtures.broadcasts import adapted, broadcaster, moved, moved_to

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def learner(folder: Path) -> Transformer:
    return adapted(folder)


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def whole(folder: Path) -> list[int]:
    """The versions in a folder, every byte of theirs read."""
    found = Broadcasts(folder).versions()
    for one in found:
        with reading(one):
            assert verify_folder(one.path)["version"] == one.version
    return [one.version for one in found]


# -- one after the other -----------------------------------------------------------------------------


def test_a_version_is_there_with_its_marker(tmp_path: Path, learner: Transformer) -> None:
    schedule = NoiseSchedule(num_stages=2, total_steps=10, seed=3)
    at = broadcaster(tmp_path, learner, attempt=4, noise=schedule)
    metrics = at.publish(7)
    found = Broadcasts(tmp_path).newest()
    assert found is not None and found == Broadcasts(tmp_path).at(7)
    assert (found.version, found.kind, found.attempt, found.way) == (7, "adapter", 4, "filesystem")
    assert found.path == tmp_path / "step_000007" and found.since is None
    drawn = schedule.at(7)
    assert drawn.sigma > 0 and found.noise == {"seed": drawn.seed, "sigma": drawn.sigma}
    marker = json.loads((found.path / STABLE).read_bytes())
    assert marker["manifest_digest"] == found.digest and marker["noise"] == found.noise
    assert metrics["perf/broadcast_bytes"] > 1000
    alpha, tensors = lora.stored(found.path)
    assert alpha == 8 and all(
        torch.equal(tensors[name], value) for name, value in lora.state(learner).items()
    )


def test_a_whole_model_keeps_the_dtype_of_its_master(tmp_path: Path, folder: Path) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        learner = hf.load(folder, dtype=dtype).requires_grad_(True)
        broadcaster(tmp_path / str(dtype), moved(learner)).publish(1)
        _, _, tensors = hf.stored(tmp_path / str(dtype) / "step_000001")
        assert {tensor.dtype for tensor in tensors.values()} == {dtype}
        assert all(torch.equal(tensors[name], value) for name, value in hf.state(learner).items())


def test_what_is_frozen_whole_is_refused(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(ValueError, match="int8, and nothing of it learns"):
        broadcaster(tmp_path, hf.load(folder, weights="int8"))


def test_the_newest_stay_and_no_other(tmp_path: Path, learner: Transformer) -> None:
    at = broadcaster(tmp_path, learner, keep=3)
    for version in range(1, 8):
        at.publish(version)
        assert whole(tmp_path) == list(range(max(1, version - 2), version + 1))
    assert len(names(tmp_path)) == 3


def test_what_is_read_stays(tmp_path: Path, learner: Transformer) -> None:
    at = broadcaster(tmp_path, learner, keep=1)
    at.publish(1)
    first = Broadcasts(tmp_path).at(1)
    assert first is not None
    with reading(first):
        for version in (2, 3):
            at.publish(moved_to(learner, version))
        assert whole(tmp_path) == [1, 3]
        verify_folder(first.path)
    at.publish(4)
    assert names(tmp_path) == ["step_000004"]


def test_the_same_bytes_again_are_kept(tmp_path: Path, learner: Transformer) -> None:
    broadcaster(tmp_path, learner, attempt=1).publish(3)
    before = Broadcasts(tmp_path).at(3)
    inode = (tmp_path / "step_000003").stat().st_ino
    broadcaster(tmp_path, learner, attempt=2).publish(3)
    assert Broadcasts(tmp_path).at(3) == before and before is not None and before.attempt == 1
    assert (tmp_path / "step_000003").stat().st_ino == inode
    assert names(tmp_path) == ["step_000003"]


def test_other_bytes_replace_it_and_its_reader_is_told(
    tmp_path: Path, learner: Transformer
) -> None:
    broadcaster(tmp_path, learner, attempt=1).publish(3)
    before = Broadcasts(tmp_path).at(3)
    assert before is not None
    with pytest.raises(Replaced, match="version 3"), reading(before):
        broadcaster(tmp_path, moved(learner), attempt=2).publish(3)
    after = Broadcasts(tmp_path).at(3)
    assert after is not None and after.attempt == 2 and after.digest != before.digest
    with pytest.raises(Replaced), reading(before):
        pytest.fail("it is another's")
    broadcaster(tmp_path, learner, attempt=3)
    assert names(tmp_path) == ["step_000003"]


def test_a_future_that_is_undone_is_nobodys(
    tmp_path: Path, learner: Transformer, caplog: pytest.LogCaptureFixture
) -> None:
    at = broadcaster(tmp_path, learner, keep=9)
    for version in (1, 2, 3, 4):
        at.publish(version)
    again = broadcaster(tmp_path, learner, keep=9, attempt=2)
    again.forget_after(3)
    assert whole(tmp_path) == [1, 2, 3] and "step_000004: of a future" in caplog.text
    again.publish(2)  # the same bytes
    assert whole(tmp_path) == [1, 2, 3]
    moved(learner, 2)
    again.publish(2)
    assert whole(tmp_path) == [1, 2], "what was learned after the other 2 does not stand"


def test_other_noise_is_another_broadcast(tmp_path: Path, learner: Transformer) -> None:
    at = broadcaster(tmp_path, learner)
    at.publish(5)
    quiet = Broadcasts(tmp_path).at(5)
    broadcaster(tmp_path, learner, noise=NoiseSchedule(seed=1)).publish(5)
    loud = Broadcasts(tmp_path).at(5)
    assert quiet is not None and loud is not None and quiet.digest != loud.digest
    assert quiet.noise is None and loud.noise is not None


@pytest.mark.parametrize("damage", ["flipped", "lost"])
def test_a_damaged_one_is_written_again(tmp_path: Path, learner: Transformer, damage: str) -> None:
    at = broadcaster(tmp_path, learner)
    at.publish(3)
    weights = tmp_path / "step_000003/adapter_model.safetensors"
    if damage == "lost":
        weights.unlink()
    else:
        content = bytearray(weights.read_bytes())
        content[-1] ^= 1
        weights.write_bytes(content)
    at.publish(3)
    assert whole(tmp_path) == [3]


# -- kills -------------------------------------------------------------------------------------------

KILLER = """
import json, os, sys
import torch
torch.set_num_threads(1)
from pathlib import Path
from tests.fixtures.broadcasts import adapted, broadcaster, moved, moved_to
learner = moved(adapted(Path(sys.argv[1])), 2)
for folder, fault in json.load(sys.stdin):
    pid = os.fork()
    if pid == 0:
        os.environ["LOWROLL_FAULT"] = fault
        broadcaster(Path(folder), learner, attempt=2).publish(2)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("again", [False, True])
def test_a_kill_at_every_point_leaves_whole_versions(
    tmp_path: Path, folder: Path, again: bool
) -> None:
    start = tmp_path / "start"
    first = broadcaster(start, adapted(folder), attempt=1)
    first.publish(1)
    if again:  # version 2 was there, with other bytes
        first.publish(2)
    old = {one.version: one.digest for one in Broadcasts(start).versions()}
    learner = moved(adapted(folder), 2)
    rehearsal = tmp_path / "rehearsal"
    shutil.copytree(start, rehearsal)
    points: list[str] = []
    observers.append(points.append)
    try:
        broadcaster(rehearsal, learner, attempt=2).publish(2)
    finally:
        observers.remove(points.append)
    new = read_broadcast(rehearsal / "step_000002").digest
    assert len(points) == len(set(points)) >= (17 if again else 13)
    assert ("broadcast.replaced" in points) == again

    jobs = []
    for index, point in enumerate(points):
        shutil.copytree(start, tmp_path / f"kill_{index}")
        jobs.append((str(tmp_path / f"kill_{index}"), f"{point}:kill"))
    done = subprocess.run(
        [sys.executable, "-c", KILLER, str(folder)],
        cwd=ROOT,
        input=json.dumps(jobs),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.stdout.split() == [str(-signal.SIGKILL)] * len(points), done.stderr
    for at, _ in jobs:
        left = whole(Path(at))
        assert set(left) <= {1, 2}
        for one in Broadcasts(at).versions():
            assert one.digest in ({new, old.get(2)} if one.version == 2 else {old[1]})
        broadcaster(Path(at), learner, attempt=3).publish(2)  # the run goes on
        assert 2 in whole(Path(at)) and read_broadcast(Path(at) / "step_000002").digest == new
        assert not any(name.startswith(".") for name in names(Path(at)))


@pytest.mark.slow
def test_a_poller_never_sees_half_a_version(tmp_path: Path, folder: Path) -> None:
    """64 publications, every fourth of them a version again with other bytes. However slow the
    poller is, it sees every eighth."""
    learner = adapted(folder)
    at, broadcasts = broadcaster(tmp_path, learner, keep=2), Broadcasts(tmp_path)
    stop, seen = threading.Event(), set[str]()
    torn: list[object] = []
    contents: dict[str, bytes] = {}

    def poll() -> None:
        while not stop.is_set():
            for one in broadcasts.versions():
                try:
                    with reading(one):
                        verify_folder(one.path)
                        content = (one.path / "adapter_model.safetensors").read_bytes()
                    if contents.setdefault(one.digest, content) != content:  # they are its own
                        torn.append(one)
                    seen.add(one.digest)
                except Replaced:
                    pass
                except (ValueError, OSError) as error:
                    torn.append(error)

    poller = threading.Thread(target=poll)
    poller.start()
    try:
        for turn in range(64):
            at.publish(1 + turn - (turn % 4 == 3))
            moved(learner, turn)
            if turn % 8 == 7:
                newest = broadcasts.newest()
                assert newest is not None
                digest = newest.digest
                wait_until(lambda: bool(torn) or digest in seen, "the poller", 120)  # noqa: B023
    finally:
        stop.set()
        poller.join(120)
    assert not torn and not poller.is_alive()


# -- the reader --------------------------------------------------------------------------------------


@pytest.fixture
def shelf(tmp_path: Path, learner: Transformer) -> Path:
    at = broadcaster(tmp_path / "shelf", learner, keep=9)
    at.publish(1)
    at.publish(2)
    return tmp_path / "shelf"


def test_what_is_no_broadcast_is_not_there(shelf: Path) -> None:
    (shelf / "step_000003").mkdir()
    shutil.copytree(shelf / "step_000002", shelf / "step_000004")  # says that it is version 2
    shutil.copytree(shelf / "step_000002", shelf / "step_0000002")
    (shelf / "step_000005").symlink_to(shelf / "step_000002")
    (shelf / "step_000006").write_text("no folder")
    (shelf / "notes").mkdir()
    assert [one.version for one in Broadcasts(shelf).versions()] == [1, 2]
    newest = Broadcasts(shelf).newest()
    assert newest is not None and newest.version == 2
    assert Broadcasts(shelf / "nowhere").versions() == []
    assert Broadcasts(shelf / "nowhere").newest() is None


def test_the_documents_own_name_is_read(shelf: Path) -> None:
    (shelf / "step_000002").rename(shelf / "step_2")
    found = Broadcasts(shelf).at(2)
    assert found is not None and found.path == shelf / "step_2"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 3}, "version"),
        ({"attempt": -1}, "attempt"),
        ({"attempt": True}, "attempt"),
        ({"format": 2}, "another lowroll"),
        ({"kind": "whole"}, "kind"),
        ({"kind": "full"}, "say different things"),
        ({"manifest_digest": "0" * 64}, "not the one"),
        ({"manifest_digest": 3}, "manifest_digest"),
        ({"noise": {"seed": 1, "sigma": 0.1}}, "say different things"),
        ({"noise": {"seed": 1}}, "sigma"),
        ({"noise": {"seed": -1, "sigma": 0.1}}, "seed"),
        ({"noise": {"seed": 1, "sigma": "x"}}, "sigma"),
        ({"more": 1}, "more"),
    ],
)
def test_a_marker_that_does_not_fit(shelf: Path, change: dict, words: str) -> None:
    path = shelf / "step_000002"
    marker = json.loads((path / STABLE).read_bytes())
    (path / STABLE).write_text(json.dumps(marker | change))
    with pytest.raises(ValueError, match=words):
        read_broadcast(path)
    assert Broadcasts(shelf).at(2) is None


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"[" * 10000, b"x" * (1 << 17)])
def test_a_marker_that_is_none(shelf: Path, content: bytes) -> None:
    (shelf / "step_000002" / STABLE).write_bytes(content)
    assert [one.version for one in Broadcasts(shelf).versions()] == [1]


def test_a_manifest_of_another_attempt(shelf: Path) -> None:
    shutil.copyfile(shelf / "step_000001" / MANIFEST, shelf / "step_000002" / MANIFEST)
    assert Broadcasts(shelf).at(2) is None


def test_waiting_ends_with_the_version_a_death_or_the_deadline(
    tmp_path: Path, learner: Transformer
) -> None:
    broadcasts, at = Broadcasts(tmp_path), broadcaster(tmp_path, learner)
    with pytest.raises(DeadlineExceeded, match=r"version 1 in .*none is there"):
        broadcasts.wait(1, 0.05)
    looks: list[int] = []

    def alive() -> None:
        looks.append(1)
        if len(looks) == 2:
            at.publish(1)
        if len(looks) > 9:
            raise RuntimeError("the trainer has ended")

    assert broadcasts.wait(1, 60, alive).version == 1 and len(looks) == 2
    with pytest.raises(RuntimeError, match="has ended"):
        broadcasts.wait(2, 60, alive)
    with pytest.raises(DeadlineExceeded, match="the newest is version 1"):
        broadcasts.wait(2, 0)
    (tmp_path / "step_000002").mkdir()
    with pytest.raises(DeadlineExceeded, match="STABLE"):
        broadcasts.wait(2, 0)


def test_a_long_wait_says_what_it_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(time, "sleep", lambda _: clock.__setitem__(0, clock[0] + 100.0))
    with pytest.raises(DeadlineExceeded):
        Broadcasts(tmp_path).wait(7, 1000.0)
    told = [line for line in caplog.messages if "waiting for the weights of version 7" in line]
    assert len(told) == 3 and "300 s so far and 700 s more at most" in told[0]
    caplog.clear()
    with pytest.raises(DeadlineExceeded):
        wait_until(lambda: False, "a sign of life", 1000.0, pause=time.sleep)
    told = [line for line in caplog.messages if "waiting for a sign of life" in line]
    assert len(told) == 3


def test_a_folder_that_is_being_removed_is_not_read(shelf: Path) -> None:
    found = Broadcasts(shelf).at(2)
    assert found is not None
    descriptor = os.open(found.path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(Replaced), reading(found):
        pytest.fail("its remover holds it")
    os.close(descriptor)
