"""A run asks its engine for what the protocol has, and for nothing else: through a proxy of the
protocol's members alone it gives the same numbers, also when every update travels as a stream."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lowroll.engine import base
from lowroll.engine.base import InFlight
from lowroll.engine.native import NativeEngine
from lowroll.runs.assembly import engines
from lowroll.weights.sync.update import WeightUpdate
from tests.fixtures.runs import ALWAYS, fingerprint, settings, train

MEMBERS = [name for name in vars(base.Engine) if not name.startswith("_")]
LORA = {"lora": True, "lora_rank": 2}


class Distant:
    """An engine of which nothing but the protocol can be reached."""

    def __init__(self, engine: NativeEngine, streams: bool) -> None:
        self.engine, self.streams, self.num_streams = engine, streams, 0

    def __getattr__(self, name: str) -> Any:
        if name not in MEMBERS:
            raise AttributeError(f"{name} is not in the protocol")
        return getattr(self.engine, name)

    def update_weights(self, update: WeightUpdate, in_flight: InFlight = "keep") -> Any:
        if self.streams and update.kind in self.capabilities.updates:
            self.num_streams += 1
            sent = update.as_stream()
            arrived = [(name, tensor.clone()) for name, tensor in sent.tensors()]
            update = replace(sent, tensors=lambda: iter(arrived))
        return self.engine.update_weights(update, in_flight=in_flight)


@pytest.mark.slow
@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {"rollout": {"weights": "int8"}, "eval": {"interval": 2, "num_examples": 3}},
        {
            "rollout": {"weights": "nvfp4"},
            "train": LORA,
            "noise": {"sigma_start": 0.02, "num_stages": 2},
        },
        {"rollout": {"weights": "int4"}, "guard": {"action": "fallback", **ALWAYS}},
    ],
    ids=["evaluated", "lora-noise", "fallback"],
)
def test_a_run_needs_no_more_than_the_protocol(
    changes: dict[str, Any],
    streams: bool,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shorter = {**changes, "train": {**changes.get("train", {}), "max_steps": 3}}
    train(settings(model, tmp_path / "near", **shorter))
    plain, made = engines.make, list[Distant]()

    def distant(*args: Any, **options: Any) -> Distant:
        made.append(Distant(plain(*args, **options), streams))
        return made[-1]

    monkeypatch.setattr(engines, "make", distant)
    train(settings(model, tmp_path / "far", **shorter))
    assert made and (sum(engine.num_streams for engine in made) > 0) == streams
    assert fingerprint(tmp_path / "far") == fingerprint(tmp_path / "near")
