"""An engine that takes each version of the weights from a folder, as a worker of `bench.peer`.

An order is the version's number, the answer the digest of what the engine then holds.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from bench.peer import Peer
from bench.worker import Answer, serve
from lowroll.engine.native import NativeEngine
from lowroll.server.weight_store import WeightStore
from lowroll.types import Request

WAIT_S = 1500.0  # for the engine to start, and to take a version


def reader(model: Path, versions: Path, format: str, device: str) -> Peer:
    """Start such an engine, in a process of its own."""
    settings = {"model": str(model), "versions": str(versions), "format": format, "device": device}
    return Peer(settings, [sys.executable, "-m", "bench.reader"], start_s=WAIT_S)


def reader_of(settings: dict[str, Any]) -> tuple[dict[str, bool], Answer]:
    model, device = Path(settings["model"]), torch.device(settings["device"])
    engine = NativeEngine(model, settings["format"], device=device, cache_tokens=4096, max_batch=8)
    engine.warm_up()
    request = Request([5, 6, 7], max_tokens=1, ignore_eos=True)
    engine.generate([request])
    store = WeightStore(Path(settings["versions"]), model)

    def take(order: dict[str, Any]) -> dict[str, str]:
        name = f"step_{order['version']}"
        _, updates = store.load(name, 0, engine.capabilities, engine.behavior.weights)
        for version, update in updates:
            engine.update_weights(update)
            store.current = version
        del updates
        engine.generate([request])
        return {"digest": engine.behavior.policy[0].digest}

    return {"ready": True}, take


if __name__ == "__main__":
    serve(reader_of)
