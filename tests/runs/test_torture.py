"""A little of `make torture`, and that what it writes is asked about at every point (python -m
tests.torture)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lowroll.checkpoint.faults import VARIABLE, observers
from lowroll.checkpoint.publish import verify_folder
from lowroll.runs import demo
from lowroll.runs.export import quantize_folder
from tests.fixtures import strike
from tests.fixtures.runs import TINY

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_little_torture() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.torture",
            "--trials",
            "1",
            "--seed",
            "5",
            "--suites",
            "kills",
            "errors",
            "damage",
        ],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=ROOT,
    )
    assert done.returncode == 0 and done.stdout.count(": 1 trials, 0 problems") == 3, (
        done.stdout + done.stderr
    )


@pytest.mark.slow
def test_a_quantized_folder_is_whole_or_absent_at_every_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, out, points = demo.build_model(tmp_path / "model", 0, TINY), tmp_path / "out" / "q", []
    observers.append(points.append)
    quantize_folder(model, out, "int8")
    observers.remove(points.append)
    assert {"publish.begin", "publish.synced/model.safetensors", "publish.renamed"} <= set(points)
    for index, point in enumerate(points):
        for action in strike.ERRORS:
            target = tmp_path / f"{index}{action}" / "q"
            monkeypatch.setenv(VARIABLE, f"{point}:{action}")
            with pytest.raises(OSError, match="/q") as caught:
                quantize_folder(model, target, "int8")
            monkeypatch.delenv(VARIABLE)
            committed = index >= points.index("publish.renamed")
            assert ("is published" in str(caught.value)) == committed == target.exists()
            assert os.listdir(target.parent) == ["q"] * committed
            if committed:
                assert verify_folder(target) == verify_folder(out)
