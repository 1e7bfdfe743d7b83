"""Seconds from the end of a learner's step to the first token of the new version, by each way that
weights take to an engine in another process.

    python -m bench.broadcast --models qwen2.5-1.5b qwen2.5-7b --format int8     # on one GPU or two
    python -m bench.broadcast --models tiny --device cpu

The learner is on the first GPU, the engine in a process of its own on the second, or on the same one
where there is no other (NCCL then has no way to go and is left out). Weights are random; the folder
is in memory (/dev/shm). What is timed: `Broadcaster.publish`, the engine's reading and taking of it,
and one token of a short prompt. The median of `--repeats`; the first version is not counted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from bench.shapes import SHAPES, random_model
from lowroll.engine.native import NativeEngine
from lowroll.model import hf
from lowroll.server.shelf import WeightShelf, read_again
from lowroll.types import Request
from lowroll.weights.broadcast import Broadcaster
from lowroll.weights.collector import Collector
from lowroll.weights.offers import Offers

TINY = {**SHAPES["qwen2.5-0.5b"], "num_hidden_layers": 2, "vocab_size": 4096, "hidden_size": 448}
TINY |= {"intermediate_size": 1024, "num_attention_heads": 7, "num_key_value_heads": 1}
TINY |= {"bos_token_id": 1, "eos_token_id": 2}
MODELS = {**SHAPES, "tiny": TINY}
WAYS = ("filesystem", "nccl", "cuda_ipc")
START_S = 600.0


def engine(folder: Path, shelf: Path, format: str, device: str, port: int) -> None:
    """The other process: a version's name on each line in, its digest and seconds on each line
    out."""
    place = torch.device(device)
    made = NativeEngine(folder, format, device=place, cache_tokens=4096, max_batch=8)
    made.warm_up()
    ask = Request([5, 6, 7], max_tokens=1, ignore_eos=True)
    made.generate([ask])
    collector = Collector("127.0.0.1", port, place, 120.0) if port else None
    versions = WeightShelf(shelf, folder, collector)
    print("ready", flush=True)
    for line in sys.stdin:
        began = time.monotonic()
        _, updates = read_again(versions, line.strip(), 0, made.capabilities, made.behavior.weights)
        read = time.monotonic()
        for one, update in updates:
            made.update_weights(update)
            versions.current = one
        del updates
        taken = time.monotonic()
        made.generate([ask])
        spent = {"read": read - began, "take": taken - read, "token": time.monotonic() - taken}
        print(json.dumps({"digest": made.behavior.policy[0].digest, **spent}), flush=True)


class Reader:
    """An engine in a process of its own, which reads the versions that a broadcaster puts on a
    shelf. Use it in a `with`; RuntimeError where it ends instead of answering."""

    def __init__(
        self, folder: Path, shelf: Path, format: str, device: torch.device | str, port: int = 0
    ) -> None:
        words = [sys.executable, "-m", "bench.broadcast", "--engine", str(folder), str(shelf)]
        self.child = subprocess.Popen(
            [*words, format, str(device), str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Reader:
        return self

    def ready(self) -> None:
        """Wait until the engine runs."""
        if self._line() != "ready\n":
            raise RuntimeError("the engine did not start")

    def ask(self, version: int) -> None:
        """Have it take a version."""
        assert self.child.stdin is not None
        self.child.stdin.write(f"step_{version}\n")
        self.child.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """Digest of what it holds, and the seconds that reading, taking and a first token took."""
        said: dict[str, Any] = json.loads(self._line() or "null")
        if said is None:
            raise RuntimeError("the engine ended instead of taking a version")
        return said

    def _line(self) -> str:
        assert self.child.stdout is not None
        return self.child.stdout.readline()

    def __exit__(self, *_: object) -> None:
        self.child.kill()
        self.child.communicate(timeout=60)


def measure(
    learner: Any, folder: Path, format: str, way: str, devices: list[torch.device], repeats: int
) -> dict[str, Any]:
    """Medians of one way."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as shelf:
        offers = None if way == "filesystem" else Offers(way, devices[0], timeout_s=120.0)
        at = Broadcaster(shelf, learner, attempt=1, keep=1, offers=offers)
        port = 0 if offers is None else offers.port
        try:
            with Reader(folder, Path(shelf), format, devices[-1], port) as reader:
                reader.ready()
                found = []
                for version in range(1, repeats + 2):
                    with torch.no_grad():
                        next(learner.parameters()).mul_(1.001)
                    if devices[0].type == "cuda":
                        torch.cuda.synchronize(devices[0])
                    began = time.monotonic()
                    at.publish(version)
                    published = time.monotonic()
                    reader.ask(version)
                    said = reader.answer()
                    spent = {"seconds": time.monotonic() - began, "publish": published - began}
                    found.append(spent | {k: v for k, v in said.items() if k != "digest"})
            if offers is not None and offers.broken:
                raise RuntimeError(f"{way}: it came to nothing, and went by files")
        finally:
            if offers is not None:
                offers.close()
    return {key: round(statistics.median(one[key] for one in found[1:]), 4) for key in found[0]}


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    p.add_argument("--models", nargs="+", default=["qwen2.5-1.5b"], choices=MODELS)
    p.add_argument("--format", default="int8")
    p.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    p.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    p.add_argument("--repeats", type=int, default=3)
    p.add_argument("--out", type=Path, help="a file for the rows, a line of JSON each")
    p.add_argument("--engine", nargs=5, help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.engine:
        folder, shelf, format, device, port = args.engine
        return engine(Path(folder), Path(shelf), format, device, int(port))
    devices = [torch.device("cpu")]
    if args.device == "cuda":
        devices = [torch.device("cuda", i) for i in range(min(2, torch.cuda.device_count()))]
    for model in args.models:
        learner = random_model(MODELS[model], devices[0])
        with tempfile.TemporaryDirectory(dir="/dev/shm") as temporary:
            folder = Path(temporary) / "model"
            hf.save(learner, folder)
            for way in args.ways:
                alone = len(devices) == 1 and args.device == "cuda"
                if (way == "nccl" and alone) or (way == "cuda_ipc" and args.device == "cpu"):
                    continue
                where = " to ".join(map(str, devices))
                row = {"model": model, "format": args.format, "way": way, "devices": where}
                row |= measure(learner, folder, args.format, way, devices, args.repeats)
                print(json.dumps(row), flush=True)
                if args.out:
                    with args.out.open("a") as out:
                        out.write(json.dumps(row) + "\n")
        del learner


if __name__ == "__main__":
    main()
