"""Trackers beside `metrics.jsonl`: what they are told, that a resumed run is the same one there, and
that none of them holds a run up. With the real packages where they are installed."""

from __future__ import annotations

import importlib.util
import json
import logging
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from lowroll.metrics import trackers
from lowroll.metrics.trackers import Tracked, Trackers, check

SETTINGS = {"model": "m", "train": {"lora": True}}


def tell(names: list[str], folder: Path, steps: range, before: int = 0) -> None:
    """A run that makes these steps."""
    told = Trackers(names, Tracked(folder, "project", SETTINGS, before))
    for step in steps:
        told.log(step, {"step": step, "reward/mean": step / 4, "loss/total": None})
    told.close()


def fake(monkeypatch: pytest.MonkeyPatch, name: str, **attributes: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(attributes)
    monkeypatch.setitem(sys.modules, name, module)
    return module


class FakeRun:
    """A run of wandb's and trackio's kind: calls, in their order."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def init(self, **given: Any) -> FakeRun:
        self.calls.append(given)
        return self

    def log(self, metrics: dict[str, float], step: int) -> None:
        self.calls.append((step, metrics))

    def finish(self) -> None:
        self.calls.append("finish")


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_run_that_goes_on_is_the_same_run_there(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = FakeRun()
    fake(monkeypatch, name, init=run.init)
    tell([name], tmp_path, range(1, 3))
    tell([name], tmp_path, range(2, 4), before=1)
    first, second = (call for call in run.calls if isinstance(call, dict))
    assert first == second and first["project"] == "project" and first["resume"] == "allow"
    assert first["config"] == SETTINGS
    told = [call for call in run.calls if not isinstance(call, dict)]
    rows = [(1, {"reward/mean": 0.25}), (2, {"reward/mean": 0.5})]
    assert told == [*rows, "finish", rows[1], (3, {"reward/mean": 0.75}), "finish"]
    tell([name], tmp_path, range(1, 1))
    assert run.calls[-2]["name"] != first["name"], "a run that begins again is another one"


def test_mlflow_is_told_by_its_names_and_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    class Client:
        runs: list[Any] = []

        def get_experiment_by_name(self, name: str) -> Any:
            return SimpleNamespace(experiment_id="7") if self.runs else None

        def create_experiment(self, name: str) -> str:
            return "7"

        def search_runs(self, where: list[str], query: str, max_results: int) -> list[Any]:
            return [run for run in self.runs if f"= '{run.tag}'" in query]

        def create_run(self, where: str, tags: dict[str, str], run_name: str) -> Any:
            info = SimpleNamespace(run_id=f"run {len(self.runs)}")
            self.runs.append(SimpleNamespace(info=info, tag=tags["lowroll.id"]))
            return self.runs[-1]

        def __getattr__(self, name: str) -> Callable[..., None]:
            return lambda *given, **more: calls.append((name, *given, *more.values()))

    fake(monkeypatch, "mlflow", MlflowClient=Client)
    fake(monkeypatch, "mlflow.entities", Metric=lambda *given: given)
    tell(["mlflow"], tmp_path, range(1, 2))
    told = Trackers(["mlflow"], Tracked(tmp_path, "project", SETTINGS, 1))
    told.log(2, {"eval/x/avg@4": 1.0})
    told.close()
    assert [call[:2] for call in calls] == [
        ("log_param", "run 0"),
        ("log_param", "run 0"),
        ("log_batch", "run 0"),
        ("set_terminated", "run 0"),
        ("update_run", "run 0"),
        ("log_batch", "run 0"),
        ("set_terminated", "run 0"),
    ]
    name, value, _, step = calls[5][2][0]
    assert (name, value, step) == ("eval/x/avg_4", 1.0, 2)


def test_one_that_fails_is_told_once_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = FakeRun()
    fake(monkeypatch, "trackio", init=run.init)
    fake(monkeypatch, "wandb", init=lambda **given: (_ for _ in ()).throw(OSError("no\nnetwork")))
    with caplog.at_level(logging.WARNING):
        tell(["wandb", "trackio"], tmp_path, range(1, 5))
    assert [line.message for line in caplog.records] == [
        "track: wandb failed, and the run goes on without it (metrics.jsonl has everything): "
        "OSError: no network"
    ]
    assert len(run.calls) == 6


def test_one_that_hangs_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    free = threading.Event()
    fake(monkeypatch, "wandb", init=lambda **given: free.wait(30))
    monkeypatch.setattr(trackers, "MOST_WAITING", 2)
    monkeypatch.setattr(trackers, "CLOSE_LIMIT", 0.05)
    with caplog.at_level(logging.WARNING):
        tell(["wandb"], tmp_path, range(1, 9))
    free.set()
    told = [line.message for line in caplog.records]
    assert told[0] == "track: wandb is too slow: records are left out there"
    assert told[1] == "track: wandb has not taken everything after 0.05 s, and is left"


def test_a_damaged_id_begins_a_new_run_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / trackers.TRACKED_FILE).write_text("[")
    assert len(trackers.run_id(tmp_path / trackers.TRACKED_FILE, 3)) == 8
    assert "damaged" in caplog.text


def test_a_package_that_is_missing_is_named_with_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for name in trackers.NAMES:
        with pytest.raises(ValueError, match=rf"pip install 'lowroll\[{name}\]'"):
            check([name])
    check([])


# -- the real ones -------------------------------------------------------------------------------


def test_tensorboard_reads_the_steps_of_a_resumed_run(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="pip install 'lowroll[tensorboard]'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tell(["tensorboard"], tmp_path, range(1, 4))
    tell(["tensorboard"], tmp_path, range(2, 5), before=1)
    files = EventAccumulator(str(tmp_path / "tensorboard"))
    files.Reload()
    found = [(event.step, event.value) for event in files.Scalars("reward/mean")]
    assert found == [(1, 0.25), (2, 0.5), (3, 0.75), (4, 1.0)]


def test_wandb_offline_writes_below_the_run_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb", reason="pip install 'lowroll[wandb]'")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    tell(["wandb"], tmp_path, range(1, 3))
    name = json.loads((tmp_path / trackers.TRACKED_FILE).read_text())["id"]
    assert list((tmp_path / "wandb").glob(f"offline-run-*/run-{name}.wandb"))


def test_trackio_keeps_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "store"))
    pytest.importorskip("trackio", reason="pip install 'lowroll[trackio]'")
    tell(["trackio"], tmp_path, range(1, 3))
    tell(["trackio"], tmp_path, range(3, 4), before=2)
    from trackio import Api

    (run,) = Api().runs("project")
    assert run.name.startswith(tmp_path.name)


def test_mlflow_keeps_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="pip install 'lowroll[mlflow]'")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "store").as_uri())
    tell(["mlflow"], tmp_path, range(1, 3))
    tell(["mlflow"], tmp_path, range(3, 4), before=2)
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("project")
    (run,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(run.info.run_id, "reward/mean")
    assert [(one.step, one.value) for one in history] == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert run.info.status == "FINISHED"
