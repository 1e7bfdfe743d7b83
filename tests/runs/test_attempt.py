"""What surrounds a run, shown on supervised ones, which are quick: its folder, kills, resume,
signals, its log."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import shutil
import signal
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch

import lowroll
from lowroll import machine
from lowroll.checkpoint.fault_injection import VARIABLE, observers
from lowroll.checkpoint.lock import RunLock, RunLockedError
from lowroll.checkpoint.store import Store
from lowroll.config import from_mapping, load
from lowroll.metrics.record import read, reproducible
from lowroll.metrics.report import write_report
from lowroll.orchestrator.loop import Orchestrator
from lowroll.runs import sft, stop
from lowroll.runs.evaluations import Evaluations
from lowroll.runs.session import RunResult
from lowroll.runs.sft import SftRun, run_sft
from lowroll.trainer.sft import SftLearner
from tests.fixtures.runs import copy_stopped_after, fingerprint
from tests.fixtures.runs import settings as grpo_settings


@pytest.fixture
def tree(model: Path, tmp_path: Path) -> dict[str, Any]:
    return {
        "model": str(model),
        "output_dir": str(tmp_path / "run"),
        "device": "cpu",
        "dtype": "float32",
        "env": [{"id": "reverse-text", "args": {"max_words": 1, "min_len": 3, "max_len": 5}}],
        "ckpt": {"interval": 1, "keep_last": 2},
        "sft": {
            "num_examples": 10,
            "steps": 4,
            "batch_size": 4,
            "learning_rate": 1e-2,
            "lr_scheduler_type": "constant",
        },
    }


def run_supervised(tree: dict[str, Any], **options: bool) -> RunResult:
    return run_sft(from_mapping(tree), **options)


def contents(folder: Path) -> dict[str, str]:
    """Everything in a folder: links, folders, and files by their digests."""
    return {
        path.relative_to(folder).as_posix(): os.readlink(path)
        if path.is_symlink()
        else ""
        if path.is_dir()
        else hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
    }


def learned(folder: Path) -> dict[str, Any]:
    """What a resumed run must repeat."""
    last = Store(folder / "checkpoints").load().path
    final = next((folder / "final").glob("*model.safetensors"))
    files = [*(path for path in last.iterdir() if path.name != "MANIFEST.json"), final]
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    records = [
        {name: value for name, value in reproducible(record).items()} for record in read(folder)
    ]
    return digests | {
        "records": records,
        "last": last.name,
        "leftovers": sorted(
            path.name
            for parent in (folder, folder / "checkpoints")
            for path in parent.glob(".[!l]*")
        ),
    }


def story(folder: Path, attempt: int = 1) -> str:
    return (folder / "logs" / f"attempt_{attempt}.log").read_text()


# -- whose folder it is ----------------------------------------------------------------------------


def write(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("a person's")


FOREIGN: dict[str, Callable[[Path], object]] = {
    "final": lambda run: write(run / "final" / "model.safetensors"),
    "final is not a folder": lambda run: write(run / "final"),
    "final, a link": lambda run: (
        write(run / "elsewhere" / "x"),
        (run / "final").symlink_to("elsewhere"),
    ),
    "step_000005": lambda run: write(run / "checkpoints" / "step_000005" / "model.safetensors"),
    "step_000005 is a file": lambda run: write(run / "checkpoints" / "step_000005"),
    "config.yaml": lambda run: write(run / "config.yaml"),
    "metrics.jsonl": lambda run: write(run / "metrics.jsonl"),
    "about.json": lambda run: write(run / "about.json"),
    "rollouts": lambda run: write(run / "rollouts" / "step_000001.jsonl"),
    "logs is a file": lambda run: write(run / "logs"),
    "the folder itself": write,
}


@pytest.mark.parametrize("name", FOREIGN)
def test_what_no_run_made_is_refused_at_the_start_and_stays(
    name: str, tree: dict[str, Any], tmp_path: Path
) -> None:
    FOREIGN[name](tmp_path / "run")
    before = contents(tmp_path)
    for options in ({}, {"overwrite": True}):
        for start in (
            run_supervised,
            lambda tree, **options: lowroll.run(from_mapping(tree), **options),
        ):
            with pytest.raises(
                ValueError,
                match=rf"^output_dir: .*{name.split(',')[0].split(' is ')[0].split()[-1]}\b"
                if name != "the folder itself"
                else "is not a folder",
            ):
                start(tree, **options)
    with pytest.raises(ValueError, match="holds no run to resume|is not a folder"):
        run_supervised(tree, resume=True)
    assert contents(tmp_path) == before  # not even a lock


def test_a_folder_that_cannot_be_written_is_named(tree: dict[str, Any]) -> None:
    why = "(No such file or directory|/proc is write-protected)"  # the second for who is not root
    with pytest.raises(ValueError, match=f"^output_dir: /proc/nobodys cannot be written: {why}$"):
        run_supervised({**tree, "output_dir": "/proc/nobodys"})


def test_a_run_beside_a_persons_files(
    tree: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in (
        "notes.txt",
        ".tmp-build/x",
        "checkpoints/notes.txt",
        "checkpoints/.trash-mine",
        "logs/mine.log",
    ):
        write(tmp_path / name)
    before = contents(tmp_path)
    assert len(run_supervised({**tree, "output_dir": "."}).records) == 4
    run_supervised({**tree, "output_dir": ".", "seed": 1}, overwrite=True)
    assert before.items() <= contents(tmp_path).items()
    about = json.loads((tmp_path / "about.json").read_text())
    assert (about["title"], about["command"]) == (tmp_path.name, "sft") and "4 a step" in about[
        "data"
    ]


@pytest.mark.slow
def test_a_folder_without_a_step_is_taken_over(
    tree: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After a failure before step 1, and when there is only a lock or a log."""
    with pytest.raises(ValueError, match="nowhere"):
        run_supervised({**tree, "model": str(tmp_path / "nowhere")})
    assert {path.name for path in (tmp_path / "run").iterdir()} == {".lock", "logs"}
    assert "Traceback" in story(tmp_path / "run") and "nowhere" in story(tmp_path / "run")
    with monkeypatch.context() as failing, pytest.raises(RuntimeError, match="in its first step"):
        failing.setattr(
            SftLearner,
            "step",
            lambda self: (_ for _ in ()).throw(RuntimeError("in its first step")),
        )
        run_supervised(tree)
    assert story(tmp_path / "run", 2).rstrip().endswith("RuntimeError: in its first step")
    for folder in ("again", "resumed"):
        shutil.copytree(tmp_path / "run", tmp_path / folder)
    for name, options in (("again", {}), ("resumed", {"resume": True})):
        changed = {**tree, "seed": 5, "output_dir": str(tmp_path / name)}
        assert (
            len(run_supervised(changed, **options).records) == 4
            and load(tmp_path / name / "config.yaml").seed == 5
        )
    for name in (".lock", "logs/attempt_1.log"):
        write(tmp_path / "bare" / name)
        assert len(run_supervised({**tree, "output_dir": str(tmp_path / "bare")}).records) == 4
        shutil.rmtree(tmp_path / "bare")


@pytest.mark.slow
def test_overwriting_replaces_a_run_and_nothing_else(
    tree: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    run_supervised(tree)
    with pytest.raises(
        ValueError,
        match="already holds a run; continue it with --resume, replace it with --overwrite",
    ):
        run_supervised(tree)
    with pytest.raises(ValueError, match="give one of the two"):
        run_supervised(tree, resume=True, overwrite=True)
    with pytest.raises(ValueError, match="holds a run of lowroll sft: resume it with that command"):
        lowroll.run(from_mapping(tree), resume=True)
    with pytest.raises(
        ValueError, match=r"the run reads .*final, which a new run in .* would replace"
    ):
        run_supervised({**tree, "model": str(run / "final")}, overwrite=True)
    write(run / "notes.txt")
    write_report(run)
    before = contents(run)
    with RunLock(run), pytest.raises(RunLockedError, match="is in use by"):
        run_supervised(tree, overwrite=True)
    with pytest.raises(
        ValueError, match="nowhere"
    ):  # what fails before its beginning replaces nothing
        run_supervised({**tree, "model": str(tmp_path / "nowhere")}, overwrite=True)
    assert {
        name: before[name] for name in before if "log" not in name and "lock" not in name
    }.items() <= contents(run).items()
    write(run / "final" / "mine.txt")
    with pytest.raises(
        ValueError, match=r"final/mine.txt: it was not published with the folder. A run would write"
    ):
        run_supervised(tree, overwrite=True)
    (run / "final" / "mine.txt").unlink()
    fresh = run_supervised({**tree, "output_dir": str(tmp_path / "fresh"), "seed": 4})
    again = run_supervised({**tree, "seed": 4}, overwrite=True)
    assert learned(again.folder) == learned(fresh.folder)
    assert not (run / "report.html").exists()
    assert (
        run / "notes.txt"
    ).read_text() == "a person's" and "no run made them: notes.txt" in caplog.text


def test_overwriting_a_run_whose_folders_lie_elsewhere(
    tree: dict[str, Any], tmp_path: Path
) -> None:
    """Checkpoints on a larger disk, and a place for rollouts in which somebody keeps files of such
    a name."""
    run = tmp_path / "run"
    fresh = run_supervised(tree)
    mine = tmp_path / "rollouts" / "step_000001.jsonl"
    write(mine)
    (run / "checkpoints").rename(tmp_path / "checkpoints")
    for name in ("checkpoints", "rollouts"):
        (run / name).symlink_to(tmp_path / name)
    with pytest.raises(
        ValueError, match="step_000001.jsonl does not begin as rollouts do. A run would write there"
    ):
        run_supervised(tree, overwrite=True)
    mine.unlink()
    assert learned(run_supervised(tree, overwrite=True).folder) == learned(fresh.folder)
    assert (run / "checkpoints").is_symlink()


# -- kills -----------------------------------------------------------------------------------------


def in_a_child(action: Callable[[], object], fault: str = "") -> int:
    """Run in a forked process, with a fault point that kills; its wait status."""
    child = os.fork()
    if child == 0:
        if fault:
            os.environ[VARIABLE] = f"{fault}:kill"
        try:
            action()
            os._exit(0)
        finally:
            os._exit(1)
    deadline = time.monotonic() + 60
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.01)
    return ended[1]


@pytest.fixture
def points() -> Iterator[list[str]]:
    passed: list[str] = []
    observers.append(passed.append)
    yield passed
    observers.remove(passed.append)


@pytest.mark.slow
def test_a_kill_at_any_point_costs_nothing(
    tree: dict[str, Any], tmp_path: Path, points: list[str]
) -> None:
    """A run of two steps, lengthened to four, so that its final/ is replaced."""
    short = {**tree, "sft": {**tree["sft"], "steps": 2}}

    def go(folder: str, resume: bool = True) -> None:
        run_supervised(
            {**short, "output_dir": str(tmp_path / folder)},
            resume=resume and (tmp_path / folder).exists(),
        )
        run_supervised({**tree, "output_dir": str(tmp_path / folder)}, resume=True)

    go("whole")
    whole = learned(tmp_path / "whole")  # within a publication: test_checkpoint, and `make torture`
    between = ("file.", "replace.", "store.v", "store.r", "publish.b")
    names = [name for name in dict.fromkeys(points) if name.startswith(between)]
    assert {"file.written/config.yaml", "replace.moved", "store.removed/step_000001"} <= set(names)
    for number, name in enumerate(names):
        folder = f"killed{number}"
        assert in_a_child(lambda: go(folder), name) == signal.SIGKILL, name
        assert (
            (tmp_path / folder / "final").exists()
            or not name.startswith("replace.")
            or name == "replace.moved"
        )
        if name == "file.written/config.yaml":  # neither a run nor another's
            run_supervised({**short, "output_dir": str(tmp_path / folder)})
        elif Store(tmp_path / folder / "checkpoints").steps():
            with pytest.raises(ValueError, match="already holds a run"):
                run_supervised({**short, "output_dir": str(tmp_path / folder)})
        run_supervised({**tree, "output_dir": str(tmp_path / folder)}, resume=True)
        assert learned(tmp_path / folder) == whole, name
        shutil.rmtree(tmp_path / folder)


@pytest.mark.slow
def test_a_kill_while_an_old_run_is_removed(tree: dict[str, Any], tmp_path: Path) -> None:
    """A folder that is half gone is nobody's: the run that replaces it can begin again. Until the
    last checkpoint has gone, the old run has all that it made."""
    run, folders = tmp_path / "run", [2]
    run_supervised({**tree, "ckpt": {"interval": 2, "keep_last": None}})
    shutil.copytree(run, tmp_path / "kept")
    whole = learned(run)

    def die_removing(folder: Path, *_: object, **__: object) -> None:
        folders[0] -= 1
        (folder / "MANIFEST.json").unlink()
        if folders[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()

    def replace() -> None:
        shutil.rmtree = die_removing
        run_supervised({**tree, "seed": 4}, overwrite=True)

    assert in_a_child(replace) == signal.SIGKILL  # two checkpoints are gone, and half of final/
    assert len(run_supervised({**tree, "seed": 4}, overwrite=True).records) == 4
    assert not [*run.glob(".tmp*"), *run.glob("final-*")]
    shutil.rmtree(run)
    (tmp_path / "kept").rename(run)
    folders[0] = 1
    assert in_a_child(replace) == signal.SIGKILL  # the older checkpoint is gone
    run_supervised({**tree, "ckpt": {"interval": 2, "keep_last": None}}, resume=True)
    assert learned(run) == whole


def test_damaged_settings_without_a_checkpoint_are_named(
    tree: dict[str, Any], tmp_path: Path
) -> None:
    run = run_supervised(tree).folder
    shutil.rmtree(run / "checkpoints")
    mark = (run / "config.yaml").read_text().splitlines()[0]
    for text in ("model: [", "a", "\x00"):
        (run / "config.yaml").write_text(f"{mark}\n{text}")
        with pytest.raises(
            ValueError,
            match=r"^.+config.yaml: damaged, and there is no checkpoint to go on with: "
            r"--overwrite begins again",
        ):
            run_supervised(tree, resume=True)


@pytest.mark.slow
@pytest.mark.parametrize("train", [{}, {"lora": True, "lora_rank": 2}, {"optimizer": "muon"}])
def test_a_supervised_run_resumed_after_any_step_is_bitwise_the_uninterrupted_one(
    train: dict[str, Any], tree: dict[str, Any], tmp_path: Path
) -> None:
    tree |= {
        "train": train,
        "ckpt": {"interval": 1, "keep_last": None},
        "sft": {**tree["sft"], "lr_scheduler_type": "cosine", "warmup_steps": 2},
    }
    whole = run_supervised(tree)
    for step in (1, 2, 3):
        (tmp_path / "run" / "rollouts").mkdir(exist_ok=True)
        copy_stopped_after(whole.folder, step, tmp_path / "cut")
        run_supervised({**tree, "output_dir": str(tmp_path / "cut")}, resume=True)
        assert learned(tmp_path / "cut") == learned(whole.folder)
        shutil.rmtree(tmp_path / "cut")
    for change in ({"seed": 1}, {"sft": {**tree["sft"], "steps": 5}}):
        with pytest.raises(
            ValueError, match="resume: the configuration is not that of the checkpoint: s"
        ):
            run_supervised({**tree, **change}, resume=True)


def test_a_resumption_elsewhere_says_that_bits_may_differ(
    tree: dict[str, Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree["sft"] |= {"steps": 1}
    run_supervised(tree)
    run_supervised(tree, resume=True)
    assert "resumed elsewhere" not in caplog.text
    threads = torch.get_num_threads()
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads + 1)
    run_supervised(tree, resume=True)
    assert (
        f"device was cpu, float32, {threads} threads and is cpu, float32, {threads + 1} threads"
        in caplog.text
    )


def test_other_demonstrations_are_refused(tree: dict[str, Any], tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    talk = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "ba"}]
    rows.write_text(json.dumps({"messages": talk}) + "\n")
    tree["sft"] |= {"data": str(rows), "steps": 1}
    run_supervised(tree)
    rows.write_text(json.dumps({"messages": talk}) + "\n\n")
    with pytest.raises(
        ValueError, match=r"resume: the run does not read what it began with: sft\.data was sha256"
    ):
        run_supervised(tree, resume=True)


# -- signals ---------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """A shell's background job, as the tests may be, begins with SIGINT ignored, and one of nohup
    with SIGHUP."""
    before = {number: signal.getsignal(number) for number in stop.SIGNALS}
    for number in stop.SIGNALS:
        signal.signal(
            number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        )
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def at_step_two(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """Something happens in the second step."""

    def arrange(action: Callable[[], object]) -> None:
        step = SftRun.step

        def stepped(self: SftRun, number: int) -> Any:
            if number == 2:
                action()
            return step(self, number)

        monkeypatch.setattr(SftRun, "step", stepped)

    return arrange


@pytest.mark.parametrize("number", stop.SIGNALS)
def test_a_signal_is_a_checkpoint_and_the_run_goes_on(
    number: signal.Signals, tree: dict[str, Any], tmp_path: Path, at_step_two: Callable[..., None]
) -> None:
    tree["ckpt"] = {"interval": 50}
    whole = run_supervised({**tree, "output_dir": str(tmp_path / "whole")})

    def ask() -> None:
        signal.raise_signal(number)
        signal.raise_signal(number)  # as terminals and wrappers do

    at_step_two(ask)
    handlers = [signal.getsignal(each) for each in stop.SIGNALS]
    result = run_supervised(tree)
    assert [signal.getsignal(each) for each in stop.SIGNALS] == handlers
    assert (result.signal, len(result.records), result.interrupted) == (number, 2, True)
    told = story(tmp_path / "run")
    assert (
        f"{number.name}: finishing this step" in told
        and "dropped, to be made again" in told
        and "in 600 s" in told
    )
    assert "stopped after step 2 of 4; go on with --resume" in told
    run_supervised(tree, resume=True)
    assert learned(tmp_path / "run") == learned(whole.folder)


def test_a_second_signal_of_any_kind_is_at_once(
    tree: dict[str, Any],
    tmp_path: Path,
    at_step_two: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stop, "ECHO_S", 0.0)
    second = signal.SIGINT

    def ask() -> None:
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(second)

    at_step_two(ask)
    with pytest.raises(KeyboardInterrupt):
        run_supervised(tree)
    assert "KeyboardInterrupt" in story(tmp_path / "run")
    for second in (signal.SIGTERM, signal.SIGHUP):
        assert in_a_child(lambda: run_supervised(tree, overwrite=True)) == second
    assert len(read(tmp_path / "run")) == 1


def test_a_run_that_ends_at_once_says_who_stopped_it(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread says it, and it may be late."""
    warning = stop.log.warning
    monkeypatch.setattr(stop.log, "warning", lambda *said: (time.sleep(0.2), warning(*said)))
    with stop.polite_stop():
        signal.raise_signal(signal.SIGTERM)
    assert "SIGTERM: finishing this step" in caplog.text


def test_an_ignored_signal_stays_ignored(
    tree: dict[str, Any], at_step_two: Callable[..., None]
) -> None:
    """As SIGHUP is under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        at_step_two(lambda: signal.raise_signal(signal.SIGHUP))
        assert run_supervised(tree).signal == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_grace_has_an_end(
    tree: dict[str, Any],
    tmp_path: Path,
    at_step_two: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stop, "END_S", 0.1)

    def ask() -> None:
        signal.raise_signal(signal.SIGTERM)
        time.sleep(30)

    at_step_two(ask)
    assert os.waitstatus_to_exitcode(in_a_child(lambda: run_supervised(tree))) == 143
    assert "SIGTERM: not stopped after 0 s; ending without a checkpoint of this step" in story(
        tmp_path / "run"
    )
    assert Store(tmp_path / "run" / "checkpoints").steps() == [1]


def test_a_run_whose_reader_is_gone_gets_to_its_checkpoint(
    tree: dict[str, Any], tmp_path: Path, at_step_two: Callable[..., None]
) -> None:
    """As after Ctrl-C in `lowroll sft ... 2>&1 | tee`, and when a terminal is closed."""
    reader, writer = os.pipe()

    def lose() -> None:
        os.close(reader)
        signal.raise_signal(signal.SIGINT)

    at_step_two(lose)

    def go() -> None:
        for descriptor, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(writer, descriptor)
            setattr(sys, name, open(descriptor, "w", buffering=1))
        os.close(writer)
        assert run_supervised(tree).signal == signal.SIGINT

    assert in_a_child(go) == 0
    assert story(tmp_path / "run").splitlines()[-1].partition(": the attempt took ")[1]
    assert Store(tmp_path / "run" / "checkpoints").load().step == 2


@pytest.mark.slow
@pytest.mark.parametrize("at", [1, 2])
def test_a_long_generation_is_dropped_and_made_again(
    at: int, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = grpo_settings(model, tmp_path / "whole", train={"max_steps": 3}, ckpt={"interval": 50})
    whole = fingerprint(lowroll.run(from_mapping(tree)).folder)
    made = Orchestrator.step

    def stepped(self: Orchestrator, number: int, version: int | None = None) -> Any:
        if number == at:
            signal.raise_signal(signal.SIGTERM)
        return made(self, number, version)

    for name, drop_s in (("dropped", 0.0), ("finished", 20.0)):
        cut = {**tree, "output_dir": str(tmp_path / name)}
        with monkeypatch.context() as slow:
            slow.setattr(stop, "DROP_S", drop_s)
            slow.setattr(Orchestrator, "step", stepped)
            assert lowroll.run(from_mapping(cut)).signal == signal.SIGTERM
        assert Store(tmp_path / name / "checkpoints").steps() == [
            at - 1 if name == "dropped" else at
        ]
        assert (f"step {at} was dropped" in story(tmp_path / name)) == (name == "dropped")
        assert fingerprint(lowroll.run(from_mapping(cut), resume=True).folder) == whole


@pytest.mark.slow
def test_the_evaluation_before_the_first_step_can_be_dropped(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = grpo_settings(
        model,
        tmp_path / "whole",
        train={"max_steps": 2},
        ckpt={"interval": 50},
        eval={"interval": 2, "num_examples": 4},
    )
    whole = fingerprint(lowroll.run(from_mapping(tree)).folder)
    cut, evaluate = {**tree, "output_dir": str(tmp_path / "cut")}, Evaluations.before

    def evaluated(self: Evaluations, *args: Any, **options: Any) -> dict[str, float]:
        signal.raise_signal(signal.SIGTERM)
        return evaluate(self, *args, **options)

    with monkeypatch.context() as slow:
        slow.setattr(stop, "DROP_S", 0.0)
        slow.setattr(Evaluations, "before", evaluated)
        assert lowroll.run(from_mapping(cut)).signal == signal.SIGTERM
    assert read(tmp_path / "cut") == [] and "step 1 was dropped" in story(tmp_path / "cut")
    assert fingerprint(lowroll.run(from_mapping(cut), resume=True).folder) == whole


# -- its log ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_log_tells_the_story(
    model: Path,
    tree: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    lowroll.run(
        from_mapping(
            grpo_settings(
                model,
                tmp_path / "grpo",
                train={"max_steps": 2},
                ckpt={"interval": 1},
                eval={"interval": 2, "num_examples": 2},
            )
        )
    )
    told = story(tmp_path / "grpo").splitlines()
    wanted = [
        "lowroll grpo (version",
        "correction: acr, because",
        "model: ",
        "step    1/2  reward",
        "checkpoint of step 1",
        "step    2/2",
        "checkpoint of step 2",
        "finished after step 2",
        "attempt took",
    ]
    found = [next(number for number, line in enumerate(told) if words in line) for words in wanted]
    assert "eval/reverse-text/reward" in told[found[5]] and found == sorted(found)
    capsys.readouterr()
    run_supervised(tree)
    assert capsys.readouterr().err.count("loss ") == 4 == story(tmp_path / "run").count("loss ")
    with sft.progress(3) as show:
        assert "loss 0.0000  lr 0.0e+00  grad norm nan" in show(
            {"step": 2, "sft/loss": 0.0, "optim/lr": 0.0, "optim/grad_norm": None}
        )


def test_what_a_run_began_with_is_not_collected_during_its_steps(
    tree: dict[str, Any], monkeypatch: pytest.MonkeyPatch, collected: None
) -> None:
    """But what a step asks for is; and a process that holds on to more goes on doing so."""

    class Cycle:
        def __init__(self) -> None:
            self.itself = self

    def step(sft_run: SftRun, number: int) -> Any:
        kept.clear()
        gc.collect()
        seen.append((gc.get_freeze_count(), len(gone)))
        Thread(target=machine.collect_garbage).start()
        machine.collect_garbage()
        seen.append((gc.get_freeze_count(), len(gone)))
        return real(sft_run, number)

    real, seen, gone = SftRun.step, list[tuple[int, int]](), list[int]()
    before, cycle = gc.get_freeze_count(), Cycle()
    weakref.finalize(cycle, gone.append, 1)
    kept = [cycle]
    del cycle
    monkeypatch.setattr(SftRun, "step", step)
    run_supervised(tree)
    assert [count for _, count in seen] == [0, *[1] * 7]
    assert min(frozen for frozen, _ in seen) > before + 10_000 and gc.get_freeze_count() <= before
    shutil.rmtree(tree["output_dir"])
    with machine.long_lived():
        run_supervised(tree)
        assert gc.get_freeze_count() > before + 10_000
    assert gc.get_freeze_count() <= before
