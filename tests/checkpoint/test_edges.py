"""Checkpoints at their edges: which steps stay, whose error is told, what is swept, what the files
hold."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest
import torch

from lowroll.checkpoint.atomic_files import is_disk_full
from lowroll.checkpoint.atomic_folders import TEMPORARY, publish_folder, verify_folder
from lowroll.checkpoint.fault_injection import VARIABLE, faultpoint
from lowroll.checkpoint.folder_swap import replace_folder
from lowroll.checkpoint.lock import RunLock
from lowroll.checkpoint.store import Store


@pytest.mark.parametrize(
    ("keep_last", "keep_interval", "left"),
    [
        (None, None, [0, 1, 2, 3, 4, 5, 6]),
        (None, 3, [0, 1, 2, 3, 4, 5, 6]),
        (1, None, [6]),
        (2, None, [5, 6]),
        (1, 3, [0, 3, 6]),
        (2, 4, [0, 4, 5, 6]),
        (9, None, [0, 1, 2, 3, 4, 5, 6]),
    ],
)
def test_which_steps_stay(
    tmp_path: Path, keep_last: int | None, keep_interval: int | None, left: list[int]
) -> None:
    store = Store(tmp_path, keep_last, keep_interval)
    for step in range(7):
        store.save(step, {}, {"step": step})
    assert store.steps() == left and store.load().state == {"step": 6}


def test_the_first_save_removes_nothing_and_late_steps_do_not_count_as_older(
    tmp_path: Path,
) -> None:
    Store(tmp_path).save(5, {}, {})
    Store(tmp_path, keep_last=1).save(2, {}, {})
    assert Store(tmp_path).steps() == [2, 5]


def test_shared_memory_comes_back_as_it_was_and_a_view_leaves_its_buffer_behind(
    tmp_path: Path,
) -> None:
    big, one = torch.arange(100_000.0), torch.randn(3, 4)
    group = {
        "view": big[7:9],
        "one": one,
        "again": one,
        "turned": one.t(),
        "empty": torch.empty(0),
        "none": torch.empty(0),
    }
    path = Store(tmp_path).save(1, {"policy": group}, {})
    back = Store(tmp_path).load().tensors["policy"]
    assert set(back) == set(group) and all(
        torch.equal(back[name], tensor) for name, tensor in group.items()
    )
    assert (path / "policy.safetensors").stat().st_size < 2000


def test_a_folder_can_be_read_by_others_and_its_parents_are_made(tmp_path: Path) -> None:
    old = os.umask(0o022)
    try:
        path = Store(tmp_path / "deep" / "run").save(1, {"policy": {"w": torch.ones(3)}}, {})
        os.umask(0o077)
        private = Store(tmp_path / "private").save(1, {"policy": {"w": torch.ones(3)}}, {})
    finally:
        os.umask(old)
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in (path, *path.iterdir())}
    assert modes.pop(path.name) == 0o755
    assert set(modes.values()) == {0o644} and "policy.safetensors" in modes
    assert {stat.S_IMODE(file.stat().st_mode) for file in private.iterdir()} == {0o600}
    with RunLock(tmp_path / "deeper" / "still" / "run") as lock:
        assert lock.attempt == 1 and (tmp_path / "deeper" / "still" / "run" / ".lock").is_file()


def test_the_writers_own_error_is_told_even_when_its_folder_is_gone(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        folder.rmdir()
        raise KeyError("the first error")

    with pytest.raises(KeyError, match="the first error"):
        publish_folder(tmp_path / "out", fail, {})


def test_the_sweep_never_follows_a_link(tmp_path: Path) -> None:
    kept = tmp_path / "elsewhere"
    kept.mkdir()
    (kept / "data").write_text("a person's")
    run = tmp_path / "run"
    run.mkdir()
    (run / f"{TEMPORARY}link").symlink_to(kept)
    (run / f"{TEMPORARY}file").write_text("no folder of ours")
    publish_folder(run / "out", lambda folder: (folder / "x").write_text("x") and None, {})
    assert (kept / "data").read_text() == "a person's"
    assert sorted(os.listdir(run)) == [f"{TEMPORARY}file", f"{TEMPORARY}link", "out"]


def test_a_manifest_does_not_depend_on_the_order_of_its_keys(tmp_path: Path) -> None:
    for name, meta in (("a", {"x": 1, "y": 2}), ("b", {"y": 2, "x": 1})):
        publish_folder(
            tmp_path / name, lambda folder: (folder / "f").write_text("f") and None, meta
        )
    assert (tmp_path / "a" / "MANIFEST.json").read_bytes() == (
        tmp_path / "b" / "MANIFEST.json"
    ).read_bytes()
    assert verify_folder(tmp_path / "a") == verify_folder(tmp_path / "b")


@pytest.mark.parametrize(
    ("error", "full"),
    [
        (OSError(errno.ENOSPC, "in words of its own"), True),
        (OSError(errno.EDQUOT, "quota"), True),
        (RuntimeError(f"wrapped: {os.strerror(errno.ENOSPC)} (os error 28)"), True),
        (ValueError("no"), False),
        (RuntimeError(f"wrapped: {os.strerror(errno.EDQUOT)}"), True),
        (OSError(errno.EACCES, "denied"), False),
    ],
)
def test_a_full_disk_is_told_from_other_errors(error: BaseException, full: bool) -> None:
    assert is_disk_full(error) == full


def test_a_lock_given_back_twice_closes_nothing_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, closed, close = RunLock(tmp_path), [], os.close
    monkeypatch.setattr(
        os, "close", lambda descriptor: (closed.append(descriptor), close(descriptor))
    )
    lock.release()
    lock.release()
    assert len(closed) == 1


def test_a_fault_strikes_at_its_own_point_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "here:enospc")
    faultpoint("there")
    with pytest.raises(OSError) as caught:
        faultpoint("here")
    assert caught.value.errno == errno.ENOSPC
    monkeypatch.setenv(VARIABLE, "here:explode")
    with pytest.raises(ValueError, match="expected NAME:kill, NAME:enospc, NAME:eio"):
        faultpoint("there")


def test_retention_removes_what_was_published_and_nothing_else(tmp_path: Path) -> None:
    store = Store(tmp_path, keep_last=1)
    for name in ("step_000000/model.safetensors", ".trash-step_000001/half", ".trash-mine/x"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("x")
    store.save(1, {}, {})
    (tmp_path / "step_000001" / "notes.txt").write_text("a person's")
    store.save(2, {}, {})
    store.save(3, {}, {})
    assert sorted(os.listdir(tmp_path)) == [
        ".trash-mine",
        "step_000000",
        "step_000001",
        "step_000003",
    ]
    assert (tmp_path / "step_000001" / "notes.txt").read_text() == "a person's"


@pytest.mark.parametrize("mine", [False, True])
def test_a_folder_that_is_replaced_is_kept_when_somebody_changed_it(
    tmp_path: Path, mine: bool
) -> None:
    def publish(path: Path) -> Path:
        return publish_folder(path, lambda folder: (folder / "x").write_text("x") and None, {})

    final = replace_folder(tmp_path / "final", publish)
    if mine:
        (final / "x").write_text("a person's")
    replace_folder(final, publish)
    assert (final / "x").read_text() == "x"
    assert sorted(os.listdir(tmp_path)) == (["final", "final-1"] if mine else ["final"])
    assert not mine or (tmp_path / "final-1" / "x").read_text() == "a person's"
