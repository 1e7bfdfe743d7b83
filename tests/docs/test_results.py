"""The experiments of docs/results.md: every variant is a run that can be made, and the sums are
right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import curves, pictures
from bench.harness import RESULTS, merged


def test_merging_replaces_leaves() -> None:
    assert merged({"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"b": 5}, "e": {"f": 6}}) == {
        "a": {"b": 5, "c": 2},
        "d": 3,
        "e": {"f": 6},
    }


def test_the_running_mean_leaves_out_what_is_missing() -> None:
    assert pictures.smooth([1.0, None, 4.0]) == [1.0, 1.0, 2.5]
    assert pictures.smooth([float(i) for i in range(12)])[-1] == pytest.approx(6.5)  # of 2..11


@pytest.mark.slow
def test_every_picture_is_drawn_from_what_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = {path.name for path in pictures.FOLDER.glob("*.png")}
    kept -= {name for name in kept if name.startswith("report_")}  # of a run, by `lowroll report`
    monkeypatch.setattr(pictures, "FOLDER", tmp_path)
    pictures.main()
    assert {path.name for path in tmp_path.iterdir()} == kept


def test_the_stored_curves_are_of_todays_settings() -> None:
    """So that the command makes again only what is missing, and no table shows an arm of yesterday."""
    record = json.loads((RESULTS / "curves.json").read_text())
    assert record["settings"] == curves.SETTINGS
    for run in record["runs"]:
        assert run["arm"] == curves.ARMS[run["variant"]]
        lengths = {len(curve) for curve in run["curves"].values()}
        assert len(lengths) == 1 and 0 < lengths.pop() <= record["steps"]
