"""The stored digests are of the runs that `make goldens` makes. That they are the same is its own
answer."""

from __future__ import annotations

import json
import sys

import pytest

from tests import goldens


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_case_has_its_digests(device: str) -> None:
    stored = json.loads((goldens.STORED / f"{device}.json").read_text())
    assert stored["digests"].keys() == goldens.cases(device)
    for case, digests in stored["digests"].items():
        drawn = {"tokens", "log-probs"}
        assert digests.keys() == (drawn if "rows" in case else drawn | {"metrics", "weights"})


def test_another_machine_is_told_what_it_can_compare(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(goldens, "machine", lambda device: "another")
    monkeypatch.setattr(sys, "argv", ["goldens"])
    assert goldens.main() == 2
    assert capsys.readouterr().out.endswith("compare two trees here with --against COMMIT\n")
