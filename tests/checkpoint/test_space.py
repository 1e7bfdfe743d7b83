"""A full or broken disk: a run waits, goes on, or ends with one line; nothing that was committed is
lost."""

from __future__ import annotations

import errno
import logging
import os
from dataclasses import replace
from pathlib import Path

import pytest

import lowroll
from lowroll.checkpoint.atomic_files import append_line, write_file
from lowroll.checkpoint.disk_space import Space
from lowroll.checkpoint.fault_injection import VARIABLE, observers
from lowroll.config import from_mapping
from lowroll.metrics.record import Recorder, read
from lowroll.runs import demo
from lowroll.runs.policy_gap import excerpt, newest_batch
from lowroll.runs.session import log_file
from lowroll.transport.rollout_log import write_rollouts
from lowroll.types import Batch, BehaviorTag, PolicySpan, Prompt, Rollout, RunFailed, Sample, Score
from tests.fixtures.batches import batch_of
from tests.fixtures.runs import TINY, fingerprint, settings


def refusing(times: int, code: int = errno.ENOSPC):
    """An action that fails so often, and then returns 7."""
    left = [times]

    def action() -> int:
        left[0] -= 1
        if left[0] >= 0:
            raise OSError(code, os.strerror(code))
        return 7

    return action


def test_a_write_waits_for_room_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert Space(60).write(tmp_path / "metrics.jsonl", refusing(2)) == 7
    first, last = caplog.messages
    assert (
        "waiting for room to write" in first
        and "metrics.jsonl" in first
        and "ckpt.wait_for_space" in first
    )
    assert "there is room again" in last
    assert Space(0).write(tmp_path / "x", refusing(0)) == 7 and len(caplog.messages) == 2


def test_the_wait_has_an_end_and_another_error_has_none(tmp_path: Path) -> None:
    with pytest.raises(
        RunFailed, match=r"no room to write .*x within 0\.5 s .*MiB free.* intact.*--resume"
    ):
        Space(0.5).write(tmp_path / "x", refusing(99))
    with pytest.raises(
        RunFailed, match=r"x: Input/output error\. What was committed before is intact"
    ):
        Space(60).write(tmp_path / "x", refusing(1, errno.EIO))
    with pytest.raises(FileExistsError):  # nothing is wrong with the disk
        Space(60).write(tmp_path / "x", refusing(1, errno.EEXIST))


@pytest.mark.parametrize("action", ["enospc", "eio"])
@pytest.mark.parametrize("point", ["begin", "written", "synced", "appended", "renamed"])
def test_a_file_is_the_old_one_or_the_new_one_after_an_error(
    tmp_path: Path, point: str, action: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, write = tmp_path / "f.json", append_line if point == "appended" else write_file
    write_file(path, b"old\n")
    monkeypatch.setenv(VARIABLE, f"file.{point}/f.json:{action}")
    with pytest.raises(OSError, match="f.json"):
        write(path, b"new\n")
    assert path.read_bytes() == (b"new\n" if point == "renamed" else b"old\n")
    assert os.listdir(tmp_path) == ["f.json"]


def test_a_record_that_did_not_fit_is_written_once_when_it_does(tmp_path: Path) -> None:
    recorder, left = Recorder(tmp_path), [2]
    recorder.write(1, {"reward/mean": 0.5})

    def full(point: str) -> None:
        left[0] -= 1
        if left[0] >= 0:
            raise OSError(errno.ENOSPC, "full")

    observers.append(full)
    try:
        Space(60).write(recorder.path, lambda: recorder.write(2, {"reward/mean": 0.25}))
    finally:
        observers.remove(full)
    assert [record["reward/mean"] for record in read(tmp_path)] == [0.5, 0.25]


def test_a_log_that_cannot_be_written_costs_a_line_and_no_traceback(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    log = logging.getLogger("lowroll.test")
    with log_file(tmp_path, 1):
        os.remove(tmp_path / "logs" / "attempt_1.log")
    os.symlink("/dev/full", tmp_path / "logs" / "attempt_2.log")
    with log_file(tmp_path, 2):
        for number in range(3):
            log.info("line %d", number)
    shown = capfd.readouterr().err
    assert shown.count("attempt_2.log: No space left on device") == 1 and "Traceback" not in shown
    assert "Logging error" not in shown


@pytest.mark.slow
def test_a_run_whose_every_write_finds_the_disk_full_once_is_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = demo.build_model(tmp_path / "model", 0, TINY)
    tree = settings(
        model, tmp_path / "whole", train={"max_steps": 2, "warmup_steps": 0}, ckpt={"keep_last": 1}
    )
    lowroll.run(from_mapping(tree))
    monkeypatch.setattr("lowroll.checkpoint.disk_space.FIRST_PAUSE", 1e-3)
    struck: list[str] = []

    def full(point: str) -> None:
        if point not in struck and point != "store.verified":  # which reads, and needs no room
            struck.append(point)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    observers.append(full)
    try:
        lowroll.run(from_mapping({**tree, "output_dir": str(tmp_path / "run")}))
    finally:
        observers.remove(full)
    assert fingerprint(tmp_path / "run") == fingerprint(tmp_path / "whole")
    asked = {
        "file.begin/config.yaml",
        "file.begin/about.json",
        "file.appended/metrics.jsonl",
        "publish.begin",
        "file.begin/step_000002.jsonl",
        "store.tensors_written/model",
        "publish.synced/config.json",
    }
    assert asked <= set(struck) and caplog.text.count("there is room again") > 6


def test_damaged_rollouts_cost_their_reader_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tag = BehaviorTag((PolicySpan(0, "d"),), "int8")
    sample = Sample(
        Prompt("p", "e", [], {}), [1, 2], Rollout([3], [-0.5], "stop", tag), "a", Score(1.0)
    )
    for step in (1, 2):
        write_rollouts(tmp_path / "rollouts", Batch(step, [sample, sample], 1.0))
    path = tmp_path / "rollouts" / "step_000002.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"text":"a"', b'"text":"b"', 1))
    batch = newest_batch(tmp_path, 2)
    assert batch is not None and batch.step == 1
    assert (
        "step_000002.jsonl: line 2: damaged" in caplog.text
        and "older rollouts take its place" in caplog.text
    )


def test_dropped_rollouts_are_no_part_of_an_excerpt() -> None:
    """What a learner has of its batch is what its log gives, which has the dropped ones too."""
    batch = batch_of(2)
    dropped = [replace(sample, group=-1) for sample in batch.samples]
    seen = excerpt(batch)
    assert seen is not None and len(seen.samples) == 2
    assert excerpt(replace(batch, samples=[*dropped, *batch.samples])) == seen
    assert excerpt(replace(batch, samples=dropped)) is None
