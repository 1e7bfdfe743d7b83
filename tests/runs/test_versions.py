"""Which versions of the weights an orchestrator has its engines draw from, also when their trainer has
gone back."""

from __future__ import annotations

import logging
import shutil
import threading
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from lowroll.engine.remote import weight_broadcaster
from lowroll.engine.remote.pool import EnginePool
from lowroll.engine.remote.replica import PoolOptions
from lowroll.model.transformer import Transformer
from lowroll.runs.roles.versions import Versions
from lowroll.transport.base import DeadlineExceeded
from lowroll.weights.sync.base import Broadcast, Broadcasts
from tests.fixtures.broadcasts import adapted, broadcaster, moved
from tests.fixtures.fake_engine import FakeEngine, publish
from tests.fixtures.processes import eventually
from tests.fixtures.tiny import hf_folder

ADMIN = "the-admin-of-these-engines"


class Pool:
    """What engines were told, and what was retracted before."""

    def __init__(self) -> None:
        self.told: list[tuple[int, int] | str] = []

    def update(self, broadcast: Broadcast, superseded: object) -> None:
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


# -- a trainer that offers its newest version alone --------------------------------------------------


def pool_of(fake: FakeEngine, silent_s: float = 20.0, **options: Any) -> EnginePool:
    given = PoolOptions(admin_token=ADMIN, silent_s=silent_s, start_s=20.0)
    return EnginePool([fake.url], given, **options)


def test_an_engine_that_dies_while_it_is_told_a_version_takes_the_newest_when_it_is_back(
    tmp_path: Path,
) -> None:
    """The version that it was told is not offered any more."""
    publish(tmp_path, 1)
    taken: list[int] = []
    with FakeEngine(weights=tmp_path, admin=ADMIN) as fake, pool_of(fake) as pool:
        fake.mood.take_s, fake.mood.keeps = 1e6, 1
        versions = Versions(Broadcasts(tmp_path), pool, lambda: None, 5.0)
        told = threading.Thread(target=lambda: taken.append(versions.at_least(1, 2)), daemon=True)
        told.start()
        assert eventually(lambda: fake.orders == ["step_000001"])
        fake.stop()
        publish(tmp_path, 2)
        fake.mood.take_s = 0.0
        fake.restart()
        told.join(15)
        assert taken == [2] and fake.held.version == 2
        assert versions.held == Broadcasts(tmp_path).at(2)


def test_nothing_newer_than_is_allowed_is_taken(tmp_path: Path) -> None:
    publish(tmp_path, 1)
    looks = count()

    def alive() -> None:
        if fake.orders and next(looks) > 8:
            raise StopIteration  # which ends the wait

    with (
        FakeEngine(weights=tmp_path, admin=ADMIN) as fake,
        pool_of(fake, alive=alive) as pool,
    ):
        fake.mood.keeps = 1
        publish(tmp_path, 2)
        versions = Versions(Broadcasts(tmp_path), pool, lambda: None, 5.0)
        with pytest.raises(StopIteration):
            versions.at_least(1, 1)
        assert versions.held is None and fake.held.version == 0
        assert set(fake.orders) == {"step_000001"}


def test_an_engine_that_is_told_a_version_too_late_is_not_evicted(tmp_path: Path) -> None:
    """The trainer publishes the next one while the engines are told this one."""

    class Late(Broadcasts):
        def newest(self, most: int | None = None) -> Broadcast | None:
            found = super().newest(most)
            if found is not None and found.version == 1:
                publish(tmp_path, 2)
            return found

    publish(tmp_path, 1)
    with FakeEngine(weights=tmp_path, admin=ADMIN) as fake, pool_of(fake) as pool:
        fake.mood.keeps = 1
        assert Versions(Late(tmp_path), pool, lambda: None, 5.0).at_least(1, 9) == 2
        assert fake.orders == ["step_000001", "step_000002"] and fake.held.version == 2
        assert pool.report().metrics()["perf/engine_fenced"] == 0


def test_a_wait_for_an_engine_that_takes_a_version_says_so_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_broadcaster, "LOOK_S", 0.01)
    said: list[str] = []

    class Told(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    def alive() -> None:
        if sum("no engine has taken step_000001 yet" in line for line in said) > 1:
            raise KeyboardInterrupt

    first = publish(tmp_path, 1)
    log, handler = logging.getLogger("lowroll.engine.remote.weight_broadcaster"), Told()
    log.addHandler(handler)
    try:
        with (
            FakeEngine(weights=tmp_path, admin=ADMIN) as fake,
            pool_of(fake, 0.6, alive=alive) as pool,
        ):
            fake.mood.refuse_weights = 409
            with pytest.raises(KeyboardInterrupt):
                pool.update(first)
    finally:
        log.removeHandler(handler)
    assert any(fake.url in line and "said the test" in line for line in said)
