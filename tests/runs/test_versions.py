"""Which versions of the weights an orchestrator has its engines draw from, also when their trainer has
gone back."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from lowroll.model.transformer import Transformer
from lowroll.runs.roles.versions import Versions
from lowroll.transport.base import DeadlineExceeded
from lowroll.transport.broadcasts import Broadcast, Broadcasts
from tests.fixtures.broadcasts import adapted, broadcaster, moved
from tests.fixtures.tiny import hf_folder


class Pool:
    """What engines were told, and what was retracted before."""

    def __init__(self) -> None:
        self.told: list[tuple[int, int] | str] = []

    def update(self, broadcast: Broadcast) -> None:
        self.told.append((broadcast.version, broadcast.attempt))

    def retract(self, version: int) -> None:
        self.told.append(f"after {version}")


@pytest.fixture(scope="module")
def learner(tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    return adapted(hf_folder(tmp_path_factory.mktemp("versions") / "model"))


def watched(folder: Path) -> tuple[Versions, Pool]:
    pool = Pool()
    versions = Versions(Broadcasts(folder), pool, lambda: None, 0.0)  # type: ignore[arg-type]
    versions.retract = pool.retract
    return versions, pool


def test_no_version_is_taken_that_the_batchs_learner_does_not_have(
    tmp_path: Path, learner: Transformer
) -> None:
    at = broadcaster(tmp_path, learner, keep=9)
    versions, pool = watched(tmp_path)
    assert versions.at_least(0, 0) == 0 and versions.newer(4) is None
    for version in (1, 2, 3):
        at.publish(version)
    assert versions.at_least(1, 2) == 2 and versions.newer(2) is None
    assert versions.newer(3) == 3 and versions.exactly(2) == 2
    assert pool.told == [(2, 1), (3, 1), (2, 1)], "nothing is undone by going back alone"
    with pytest.raises(DeadlineExceeded, match="version 4 .*the newest is version 3"):
        versions.at_least(4, 4)


def test_what_was_drawn_from_weights_that_are_others_now_is_retracted(
    tmp_path: Path, learner: Transformer
) -> None:
    at = broadcaster(tmp_path, learner, keep=9)
    versions, pool = watched(tmp_path)
    for version in (1, 2, 3):
        at.publish(version)
        versions.newer(version)
    again = broadcaster(tmp_path, learner, keep=9, attempt=2)
    again.publish(2)
    assert versions.newer(9) is None, "the same bytes are the same version"
    moved(learner, 2)
    again.publish(2)
    assert versions.newer(9) is None, "3 was retired, and the engines have it"
    again.publish(3)
    assert versions.newer(9) == 3
    assert pool.told[3:] == ["after 1", (3, 2)]
    again.publish(4)
    assert versions.newer(9) == 4 and pool.told[5:] == [(4, 2)], "once"


def test_versions_of_an_undone_future_are_retracted(tmp_path: Path, learner: Transformer) -> None:
    at = broadcaster(tmp_path, learner, keep=9)
    versions, pool = watched(tmp_path)
    for version in (1, 2, 3):
        at.publish(version)
        versions.newer(version)
    broadcaster(tmp_path, learner, keep=9, attempt=2).forget_after(1)
    assert versions.at_least(1, 1) == 1
    assert pool.told[3:] == ["after 1", (1, 1)]


def test_what_one_attempt_writes_again_as_files_is_the_same(
    tmp_path: Path, learner: Transformer
) -> None:
    at = broadcaster(tmp_path, learner, keep=9)
    at.publish(1)
    versions, pool = watched(tmp_path)
    assert versions.newer(1) == 1
    shutil.rmtree(tmp_path / "step_000001")
    moved(learner, 3)
    at.publish(1)
    assert versions.newer(1) is None and pool.told == [(1, 1)]
