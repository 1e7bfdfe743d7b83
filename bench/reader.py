"""An engine in a process of its own that takes each version of the weights from a folder.

    python -m bench.reader MODEL_FOLDER BROADCASTS FORMAT DEVICE

A version's name on each line in, the digest of what the engine holds on each line out.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from bench.harness import running
from lowroll.engine.native import NativeEngine
from lowroll.server.weight_store import WeightStore
from lowroll.types import Request


def serve(folder: Path, shelf: Path, format: str, device: torch.device) -> None:
    """Take the versions that the lines name, and draw a token after each."""
    made = NativeEngine(folder, format, device=device, cache_tokens=4096, max_batch=8)
    made.warm_up()
    ask = Request([5, 6, 7], max_tokens=1, ignore_eos=True)
    made.generate([ask])
    versions = WeightStore(shelf, folder)
    print("ready", flush=True)
    for line in sys.stdin:
        _, updates = versions.load(line.strip(), 0, made.capabilities, made.behavior.weights)
        for one, update in updates:
            made.update_weights(update)
            versions.current = one
        del updates
        made.generate([ask])
        print(json.dumps({"digest": made.behavior.policy[0].digest}), flush=True)


class Reader:
    """Such an engine, used in a `with`. RuntimeError where it ends instead of answering."""

    def __init__(self, folder: Path, shelf: Path, format: str, device: str) -> None:
        self._running = running("bench.reader", folder, shelf, format, device)

    def __enter__(self) -> Reader:
        self._child = self._running.__enter__()
        return self

    def ready(self) -> None:
        """Wait until the engine runs."""
        if self._line() != "ready\n":
            raise RuntimeError("the engine did not start")

    def ask(self, version: int) -> None:
        """Have it take a version."""
        assert self._child.stdin is not None
        self._child.stdin.write(f"step_{version}\n")
        self._child.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """Return the digest of what it holds."""
        said: dict[str, Any] = json.loads(self._line() or "null")
        if said is None:
            raise RuntimeError("the engine ended instead of taking a version")
        return said

    def _line(self) -> str:
        assert self._child.stdout is not None
        return self._child.stdout.readline()

    def __exit__(self, *error: Any) -> None:
        self._running.__exit__(*error)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, kind in (("model", Path), ("broadcasts", Path), ("format", str), ("device", str)):
        parser.add_argument(name, type=kind)
    args = parser.parse_args()
    serve(args.model, args.broadcasts, args.format, torch.device(args.device))


if __name__ == "__main__":
    main()
