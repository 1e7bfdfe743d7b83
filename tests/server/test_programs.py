"""Random programs over the engine's loop, and that they notice a loop that is wrong."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lowroll.server.engine_loop import EngineLoop, InFlightRequest
from lowroll.server.engine_thread import EngineThread
from tests.fixtures.programs import Trial
from tests.fixtures.tiny import hf_folder


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trial]:
    root = tmp_path_factory.mktemp("programs")
    log = logging.getLogger("lowroll.server.engine_loop")
    log.setLevel(logging.CRITICAL)  # failures are told to it
    yield Trial([hf_folder(root / str(seed), seed=seed) for seed in range(2)])
    log.setLevel(logging.NOTSET)


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 10, 20, 30])
def test_programs_keep_their_promises(trial: Trial, first: int) -> None:
    assert [found for seed in range(first, first + 10) if (found := trial.run(seed))] == []


def _told_twice(self: InFlightRequest, sample: int, drawn: Any) -> Any:
    self._num_sent[sample] = max(0, self._num_sent.get(sample, 0) - 1)
    return _delta(self, sample, drawn)


def _not_forgotten(self: EngineThread, ticket: InFlightRequest) -> None:
    pass


def _dropped_alone(self: EngineLoop, request: InFlightRequest) -> None:
    if request in self.held:
        self.held.remove(request)


_delta = InFlightRequest._delta
BROKEN: dict[str, tuple[type, str, Callable[..., Any]]] = {
    "a token is told twice": (InFlightRequest, "_delta", _told_twice),
    "tickets stay open": (EngineThread, "forget", _not_forgotten),
    "nothing is aborted": (EngineLoop, "abort", _dropped_alone),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", BROKEN)
def test_programs_notice_what_is_broken(
    trial: Trial, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    where, name, instead = BROKEN[what]
    monkeypatch.setattr("tests.fixtures.programs.SECONDS", 2.0)
    monkeypatch.setattr(where, name, instead)
    assert any(trial.run(seed) for seed in range(20))
