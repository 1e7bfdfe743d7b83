"""Checkpoints: whole or absent at every kill point, bitwise round trips, damage always noticed,
retention, lock."""

from __future__ import annotations

import errno
import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowroll.checkpoint.atomic_folders import (
    TEMPORARY,
    DamagedError,
    DiskFullError,
    NotSyncedError,
    publish_folder,
    verify_folder,
)
from lowroll.checkpoint.fault_injection import VARIABLE, observers
from lowroll.checkpoint.lock import RunLock, RunLockedError
from lowroll.checkpoint.store import Store
from tests.fixtures.states import state_of, tensors_of

ROOT = Path(__file__).resolve().parents[2]


def assert_is_step(store: Store, step: int) -> None:
    loaded = store.load()
    assert loaded.step == step
    assert loaded.state == state_of(step)
    for name, group in tensors_of(step).items():
        assert {k: (v.dtype, v.tolist()) for k, v in loaded.tensors[name].items()} == {
            k: (v.dtype, v.tolist()) for k, v in group.items()
        }


def bits(tensor: torch.Tensor) -> bytes:
    return (
        tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    )


def passed_points(operation) -> list[str]:
    points: list[str] = []
    observers.append(points.append)
    try:
        operation()
    finally:
        observers.remove(points.append)
    return points


# One interpreter imports torch once and forks a child for every fault, which is killed inside the
# save.
KILLER = """
import json, os, sys, warnings
import torch
torch.set_num_threads(1)
from pathlib import Path
from lowroll.checkpoint.store import Store
import lowroll.checkpoint.store, safetensors.torch
from tests.fixtures.states import tensors_of, state_of
for folder, fault in json.load(sys.stdin):
    pid = os.fork()
    if pid == 0:
        os.environ["LOWROLL_FAULT"] = fault
        Store(Path(folder), keep_last=1).save(2, tensors_of(2), state_of(2))
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


@pytest.mark.slow
def test_a_kill_at_every_point_of_a_save_leaves_a_loadable_checkpoint(tmp_path: Path) -> None:
    start = tmp_path / "start"
    Store(start).save(1, tensors_of(1), state_of(1))
    rehearsal = tmp_path / "rehearsal"
    shutil.copytree(start, rehearsal)
    points = passed_points(
        lambda: Store(rehearsal, keep_last=1).save(2, tensors_of(2), state_of(2))
    )
    assert len(points) == len(set(points)) >= 12
    assert points[-1] == "store.removed/step_000001"

    jobs = []
    for index, point in enumerate(points):
        folder = tmp_path / f"kill_{index}"
        shutil.copytree(start, folder)
        jobs.append((str(folder), f"{point}:kill"))
    done = subprocess.run(
        [sys.executable, "-c", KILLER],
        cwd=ROOT,
        input=json.dumps(jobs),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.split() == [str(-signal.SIGKILL)] * len(points), done.stderr

    committed = points.index("publish.renamed")
    for index, (folder, fault) in enumerate(jobs):
        store = Store(Path(folder), keep_last=1)
        assert_is_step(store, 2 if index >= committed else 1)
        store.save(
            3, tensors_of(3), state_of(3)
        )  # the run goes on, and removes what the dead one left
        assert_is_step(store, 3)
        assert sorted(os.listdir(folder)) == ["step_000003"], fault


@pytest.mark.parametrize("index", range(0, 6))
def test_a_full_disk_leaves_no_trace_and_a_later_save_works(
    tmp_path: Path, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path / "run")
    store.save(1, tensors_of(1), state_of(1))
    before = [
        "publish.begin",
        "store.tensors_written/policy",
        "publish.written",
        "publish.synced/state.json",
        "publish.manifest_written",
        "publish.manifest_synced",
    ]
    monkeypatch.setenv(VARIABLE, f"{before[index]}:enospc")
    with pytest.raises(DiskFullError, match="step_000002") as caught:
        store.save(2, tensors_of(2), state_of(2))
    assert caught.value.errno == errno.ENOSPC
    assert os.listdir(store.folder) == ["step_000001"]
    monkeypatch.delenv(VARIABLE)
    store.save(2, tensors_of(2), state_of(2))
    assert_is_step(store, 2)


@pytest.mark.parametrize("action", ["enospc", "eio"])
@pytest.mark.parametrize("point", ["publish.renamed", "publish.parent_synced"])
def test_after_the_rename_nobody_says_that_nothing_was_published(
    tmp_path: Path,
    point: str,
    action: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = Store(tmp_path / "run", keep_last=1)
    store.save(1, tensors_of(1), state_of(1))
    monkeypatch.setenv(VARIABLE, f"{point}:{action}")
    store.save(
        2, tensors_of(2), state_of(2)
    )  # kept beside the one before, which a power loss spares
    assert "is published, but a power loss could still take it away" in caplog.text
    assert store.steps() == [1, 2] and not any(
        name.startswith(".") for name in os.listdir(store.folder)
    )
    with pytest.raises(NotSyncedError, match="out is published, but"):
        publish_folder(tmp_path / "out", lambda folder: (folder / "x").write_text("x") and None, {})
    assert verify_folder(tmp_path / "out") == {}
    monkeypatch.delenv(VARIABLE)
    store.save(3, tensors_of(3), state_of(3))
    assert store.steps() == [3]


def test_an_input_or_output_error_names_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors import SafetensorError

    store = Store(tmp_path / "run")
    monkeypatch.setenv(VARIABLE, "publish.synced/state.json:eio")
    with pytest.raises(OSError, match="nothing was published.*step_000001") as caught:
        store.save(1, tensors_of(1), state_of(1))
    assert caught.value.errno == errno.EIO and os.listdir(store.folder) == []
    monkeypatch.delenv(VARIABLE)

    def broken(*_: object) -> None:  # as safetensors words what the system tells it
        raise SafetensorError("Error while serializing: I/O error: Input/output error (os error 5)")

    monkeypatch.setattr("safetensors.torch.save_file", broken)
    with pytest.raises(OSError, match="Input/output error while publishing.*step_000001"):
        store.save(1, tensors_of(1), state_of(1))


def test_a_really_full_disk_is_reported_as_such(tmp_path: Path) -> None:
    """safetensors wraps ENOSPC in an error of its own: checked against a 1 MiB file system when we
    may mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True
    )
    if mounted.returncode != 0:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        store = Store(disk)
        store.save(1, tensors_of(1), state_of(1))
        with pytest.raises(DiskFullError):
            store.save(2, {"policy": {"w": torch.zeros(1 << 20)}}, {})
        assert os.listdir(disk) == ["step_000001"]
        assert_is_step(store, 1)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_every_dtype_and_shape_comes_back_bit_for_bit(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    raw = torch.randint(0, 256, (8, 16), dtype=torch.uint8, generator=generator)
    shared = torch.randn(6, generator=generator)
    group = {
        "bf16": raw.view(torch.bfloat16),
        "f32_with_nans": raw.view(torch.float32),
        "f64": raw.view(torch.float64),
        "f16": raw.view(torch.float16),
        "i8": raw.view(torch.int8),
        "u8": raw,
        "i64": raw.view(torch.int64),
        "bool": raw > 99,
        "empty": torch.empty(0, 7),
        "scalar": torch.tensor(3.5),
        "scalar_int": torch.tensor(2**40),
        "transposed": raw.t(),
        "tied": shared,
        "tied_too": shared,
        "slice": shared[2:5],
    }
    store = Store(tmp_path)
    store.save(0, {"policy": group, "nothing": {}}, {})
    assert store.load(only=("nothing",)).tensors == {"nothing": {}}
    loaded = store.load().tensors
    assert loaded["nothing"] == {}
    assert set(loaded["policy"]) == set(group)
    for name, tensor in group.items():
        back = loaded["policy"][name]
        assert (back.dtype, back.shape, bits(back)) == (tensor.dtype, tensor.shape, bits(tensor)), (
            name
        )
    assert (
        tmp_path / "step_000000" / "policy.safetensors"
    ).stat().st_size < 6000  # the slice left its buffer


def test_the_newest_verified_is_loaded_and_damage_is_loud(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(tmp_path)
    for step in (1, 2, 3):
        store.save(step, tensors_of(step), state_of(step))
    flip(tmp_path / "step_000003" / "policy.safetensors", -1, 0x10)
    os.remove(tmp_path / "step_000002" / "MANIFEST.json")
    with pytest.raises(DamagedError, match="policy.safetensors: SHA-256"):
        store.load(step=3)  # asked for by number: no silent replacement
    assert store.steps() == [1, 2, 3]
    with caplog.at_level(logging.WARNING):
        assert_is_step(store, 1)
    assert "policy.safetensors" in caplog.text and "MANIFEST.json: missing" in caplog.text
    assert sorted(os.listdir(tmp_path / "damaged")) == ["step_000002-1", "step_000003-1"]
    store.save(3, tensors_of(3), state_of(3))  # the run redoes the lost steps
    assert_is_step(store, 3)
    for step in (1, 3):
        flip(tmp_path / f"step_{step:06d}" / "state.json", 0, 0x01)
    for _ in range(2):  # the second time nothing but damaged/ is left
        with pytest.raises(DamagedError, match="no undamaged checkpoint is left"):
            store.load()


def test_no_checkpoint_is_an_error_that_says_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        Store(tmp_path / "absent").load()
    store = Store(tmp_path)
    store.save(4, tensors_of(4), state_of(4))
    with pytest.raises(FileNotFoundError, match=r"step 5.*\[4\]"):
        store.load(step=5)


def flip(path: Path, offset: int, mask: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= mask
    path.write_bytes(data)


def test_no_random_flip_cut_or_zeroed_tail_is_ever_accepted(tmp_path: Path) -> None:
    folder = Store(tmp_path).save(7, tensors_of(7), state_of(7))
    originals = {path: path.read_bytes() for path in sorted(folder.iterdir())}
    assert len(originals) == 4
    rng = random.Random(0)
    for trial in range(400):
        path, data = rng.choice(list(originals.items()))
        damaged = bytearray(data)
        kind = trial % 4
        if kind == 0:
            damaged[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        elif kind == 1:
            damaged = damaged[: rng.randrange(len(data))]
        elif kind == 2:
            cut = rng.randrange(len(data))
            damaged[cut:] = bytes(len(data) - cut)
        else:
            damaged += b"\0" * rng.randrange(1, 9)
        if bytes(damaged) == data:  # a tail that was zero already
            continue
        path.write_bytes(damaged)
        with pytest.raises(DamagedError, match=path.name):
            verify_folder(folder)
        path.write_bytes(data)
    assert verify_folder(folder)["step"] == 7


def test_files_of_another_step_are_noticed(tmp_path: Path) -> None:
    store = Store(tmp_path)
    one, two = (store.save(step, tensors_of(step), state_of(step)) for step in (1, 2))
    shutil.copy(one / "policy.safetensors", two / "policy.safetensors")
    with pytest.raises(DamagedError, match="policy.safetensors"):
        store.load(step=2)
    shutil.rmtree(two)
    shutil.copytree(one, two)  # a whole folder under another number
    with pytest.raises(DamagedError, match="checkpoint 2"):
        store.load(step=2)


@pytest.mark.parametrize(
    ("state", "place"),
    [
        ({"a": {"b": (1, 2)}}, r"state\.a\.b: a tuple"),
        ({"a": [1.0, float("nan")]}, r"state\.a\[1\]: nan"),
        ({"a": {3: 1}}, r"state\.a: key 3"),
        ({"a": {1, 2}}, "a set"),
        ({"a": torch.tensor(1)}, "a Tensor"),
        ({"a": float("-inf")}, "-inf"),
    ],
)
def test_state_that_json_would_change_is_refused_before_writing(
    tmp_path: Path, state, place: str
) -> None:
    with pytest.raises(ValueError, match=place):
        Store(tmp_path / "run").save(1, {}, state)
    assert not (tmp_path / "run").exists()


def test_bad_arguments_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="meta"):
        Store(tmp_path).save(1, {}, {}, meta={"x": float("nan")})
    Store(tmp_path).save(1, {}, {})
    with pytest.raises(FileExistsError, match="step_000001"):
        Store(tmp_path).save(1, {}, {})


def test_foreign_names_are_ignored_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(tmp_path)
    store.save(12, {}, {})
    for name in (
        "step_tmp",
        "step_12",
        "step_0000012",
        "step_-00001",
        "step_00000１",
        "step_000013.bak",
        "latest",
    ):
        (tmp_path / name).mkdir()
    (tmp_path / "step_000099").write_text("a file")
    (tmp_path / "step_000098").symlink_to(tmp_path / "step_000012")
    os.mkfifo(tmp_path / "step_000097")
    assert store.steps() == [12]
    assert store.load().step == 12
    assert all(
        name in caplog.text for name in ("step_tmp", "step_0000012", "step_000099", "step_000098")
    )


@pytest.mark.slow
@settings(max_examples=40)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=12, unique=True),
    st.none() | st.integers(1, 4),
    st.none() | st.integers(1, 7),
)
def test_retention_keeps_the_newest_and_the_pinned(
    steps: list[int], keep_last: int | None, keep_interval: int | None
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder), keep_last, keep_interval)
        expected: list[int] = []
        for step in sorted(steps):
            store.save(step, {}, {"step": step})
            expected.append(step)
            if keep_last is not None:
                newest = expected[-keep_last:]
                expected = [
                    s for s in expected if s in newest or (keep_interval and s % keep_interval == 0)
                ]
            assert store.steps() == expected
            assert store.load().state == {"step": step}


def test_a_checkpoint_that_does_not_verify_removes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path, keep_last=1)
    store.save(1, tensors_of(1), state_of(1))

    def tear(point: str) -> None:
        if point == "publish.parent_synced":
            flip(tmp_path / "step_000002" / "state.json", 5, 0xFF)

    monkeypatch.setattr("lowroll.checkpoint.fault_injection.observers", [tear])
    with pytest.raises(DamagedError, match="state.json"):
        store.save(2, tensors_of(2), state_of(2))
    assert_is_step(store, 1)


def test_an_old_checkpoint_that_cannot_be_removed_costs_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is half gone and out of sight, and the next save removes the rest."""
    store = Store(tmp_path, keep_last=1)
    store.save(1, tensors_of(1), state_of(1))

    def die_half_way(path: Path) -> None:
        os.remove(path / "state.json")
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", die_half_way)
        store.save(2, tensors_of(2), state_of(2))
    assert (
        "could not be removed, the next save tries again" in caplog.text
        and "step_000001" in caplog.text
    )
    assert store.steps() == [2]
    store.save(3, tensors_of(3), state_of(3))
    assert os.listdir(tmp_path) == ["step_000003"]


def test_truncate_forgets_later_steps(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for step in (1, 2, 3):
        store.save(step, tensors_of(step), state_of(step))
    store.truncate(1)
    assert store.steps() == [1]
    assert os.listdir(tmp_path) == ["step_000001"]


def test_publish_is_refused_or_undone_as_a_whole(tmp_path: Path) -> None:
    dest = tmp_path / "out"
    meta = {"kind": "export", "numbers": [1, 2.5, None]}

    def write(folder: Path) -> None:
        (folder / "sub").mkdir()
        (folder / "sub" / "a.txt").write_text("alpha")
        assert not dest.exists()

    assert publish_folder(dest, write, meta) == dest
    assert verify_folder(dest) == meta
    (dest / "note.txt").write_text("a person's note is not damage")
    assert verify_folder(dest) == meta
    with pytest.raises(FileExistsError, match="out"):
        publish_folder(dest, write, meta)

    def fail(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise KeyError("boom")

    def escape(folder: Path) -> None:
        (folder / "link").symlink_to("/etc/hostname")

    def reserved(folder: Path) -> None:
        (folder / "MANIFEST.json").write_text("{}")

    for writer, error in ((fail, KeyError), (escape, ValueError), (reserved, ValueError)):
        with pytest.raises(error):
            publish_folder(tmp_path / "other", writer, {})
    assert os.listdir(tmp_path) == ["out"]


def test_data_reaches_the_disk_before_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    fsync, rename = os.fsync, os.rename

    def traced_fsync(descriptor: int) -> None:
        events.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def traced_rename(source: Path, target: Path) -> None:
        events.append("rename")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", traced_fsync)
    monkeypatch.setattr(os, "rename", traced_rename)
    Store(tmp_path / "run").save(1, tensors_of(1), state_of(1))
    assert events.index("MANIFEST.json") > max(
        events.index(name) for name in ("policy.safetensors", "optimizer.safetensors", "state.json")
    )
    assert events[4].startswith(f"{TEMPORARY}step_000001") and events[5:] == ["rename", "run"]


def test_only_leftovers_of_dead_writers_are_swept(tmp_path: Path) -> None:
    for name in (f"{TEMPORARY}out-dead", ".tmp-of-somebody"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "half").write_text("half")

    def outer(folder: Path) -> None:
        publish_folder(tmp_path / "inner", lambda inner: (inner / "x").write_text("x") and None, {})
        (folder / "y").write_text("y")  # our own folder is locked: the inner run left it alone

    publish_folder(tmp_path / "outer", outer, {})
    assert sorted(os.listdir(tmp_path)) == [".tmp-of-somebody", "inner", "outer"]
    assert verify_folder(tmp_path / "outer") == {}


def test_one_owner_per_run_folder(tmp_path: Path) -> None:
    with RunLock(tmp_path) as lock:
        assert lock.attempt == 1
        content = (tmp_path / ".lock").read_bytes()
        code = (
            "import sys; from lowroll.checkpoint.lock import RunLock, RunLockedError\n"
            "try: RunLock(sys.argv[1])\nexcept RunLockedError as error: print(error); sys.exit(3)"
        )
        other = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert other.returncode == 3 and f"pid {os.getpid()} on " in other.stdout, other
        with pytest.raises(RunLockedError, match="attempt 1"):
            RunLock(tmp_path)  # a second trainer in the same process, too
        assert (tmp_path / ".lock").read_bytes() == content
    with (tmp_path / ".lock").open("ab") as file:
        file.write(b'{"attempt": 2, "pi')  # a launch that died while writing its line
    with RunLock(tmp_path) as lock:
        assert lock.attempt == 3
    with RunLock(tmp_path) as lock:
        assert lock.attempt == 4


def test_the_lock_of_a_killed_owner_is_free(tmp_path: Path) -> None:
    code = "import os, sys; from lowroll.checkpoint.lock import RunLock; RunLock(sys.argv[1]); os.kill(os.getpid(), 9)"
    assert (
        subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, timeout=60).returncode
        == -9
    )
    with RunLock(tmp_path) as lock:
        assert lock.attempt == 2


@pytest.mark.slow
def test_others_run_while_a_file_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A heart beats in a thread. safetensors before 0.8 holds Python's lock until the whole file is
    on the disk, and a role with a large checkpoint was taken for one that hangs."""
    turns, over, began = [0], threading.Event(), []
    write = safetensors.torch.serialize_file

    def beat() -> None:
        while not over.wait(0.001):
            turns[0] += 1

    def watched(*arguments: Any, **more: Any) -> None:
        began.append(turns[0])
        write(*arguments, **more)
        began[-1] -= turns[0]

    monkeypatch.setattr(safetensors.torch, "serialize_file", watched)
    heart, before = threading.Thread(target=beat), sys.getswitchinterval()
    heart.start()
    sys.setswitchinterval(1000.0)  # nobody is made to give the lock back
    try:
        for step in range(1, 50):  # a machine may be too busy to run the thread just then
            Store(tmp_path, keep_last=1).save(step, {"model": {"w": torch.ones(1 << 22)}}, {})
            if min(began) < 0:
                break
    finally:
        sys.setswitchinterval(before)
        over.set()
        heart.join()
    assert min(began) < 0, began
