"""How many engines does one orchestrator serve?

    python -m bench.scale [--engines 1,2,4,...,512] [--works full light] [--seconds 20]

The orchestrator is `lowroll orchestrate`, unchanged, in a process of its own. Engines are `bench.fakes`:
they answer with as many bytes and as late as measured ones, and draw nothing. The learner is this
process, which takes each batch at once and has new weights ready. Time is real.

    full    Qwen2.5-7B in bf16 on an H200 with 64 rows: 13,200 tokens/s an engine
    light   8 rows, 16 times as slow: what an engine costs that answers rarely

Responses have 220 tokens in the median (`light`: 64), groups 8 samples. One and a half times what the
engines can draw at once is open, at level 1, and a batch is half of that, 1,024 samples at most. Processor seconds
of orchestrator, scoring workers and fakes are counted apart: on a machine with fewer free cores than
processes the rates fall, and these stay. Rows go to bench/baselines/scale.json; `python -m
bench.pictures` draws them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import urlopen

import yaml

from bench import fakes, vocabulary
from bench.harness import BASELINES, Results, Row, SomeOf, parser_of, running, say
from bench.shapes import TINY
from bench.worker import resident
from lowroll.checkpoint.atomic_files import write_file
from lowroll.checkpoint.atomic_folders import publish_folder
from lowroll.config.load import load
from lowroll.runs.folder import CONFIG
from lowroll.runs.roles.heartbeat import Heartbeat
from lowroll.runs.roles.run_paths import TRAINER, RunPaths
from lowroll.transport.base import Cursor
from lowroll.transport.spool import Spool
from lowroll.weights.sync.base import (
    FORMAT,
    STABLE,
    encode_marker,
    folder_name,
    manifest_digest,
)

SPEC = {
    **TINY,
    "vocab_size": fakes.VOCAB,
    "max_position_embeddings": fakes.CONTEXT,
    "eos_token_id": 0,
}
GROUP, OPEN, LARGEST = 8, 1.5, 1024
KEPT = 3  # broadcasts that lie there
LOOK_S = 0.02
BATCH_S = 240.0  # until one has come, the start included
TICKS = os.sysconf("SC_CLK_TCK")


class Quantity(NamedTuple):
    """A quantity's unit, and the head of its column in docs/scale.md, where it has one."""

    unit: str
    shown: str = ""


QUANTITIES = {
    "rollouts a second": Quantity("rollouts/s", "rollouts/s"),
    "tokens a second": Quantity("tokens/s"),
    "orchestrator: processor": Quantity("cores", "orchestrator, cores"),
    "orchestrator: processor for a rollout": Quantity("ms", "ms a rollout"),
    "orchestrator: main thread's part": Quantity("fraction", "main thread's part"),
    "scoring workers: processor": Quantity("cores"),
    "fakes: processor": Quantity("cores", "fakes, cores"),
    "orchestrator: memory, peak": Quantity("MB", "memory, MB"),
    "rows of the engines that draw": Quantity("fraction", "rows that draw"),
    "groups asked for and not back": Quantity("groups", "groups in flight"),
    "groups at engines": Quantity("groups", "at engines"),
    "groups back, not in a batch": Quantity("groups", "back, waiting"),
    "batches": Quantity("batches/s"),
    "wire": Quantity("MB/s"),
    "engines fenced": Quantity("engines"),
}
SHOWN = {name: one.shown for name, one in QUANTITIES.items() if one.shown}


@dataclass(frozen=True)
class Work:
    """What the engines are. rows: that one draws at a time; slow: times as long for everything."""

    rows: int
    slow: float = 1.0
    median: float = 220.0


WORKS = {"full": Work(64), "light": Work(8, slow=16.0, median=64.0)}


def settings(work: Work, urls: list[str], model: Path, out: Path) -> dict[str, Any]:
    rows = work.rows * len(urls)
    batch = max(2 * GROUP, min(LARGEST, rows // 2 // GROUP * GROUP))
    return {
        "model": str(model),
        "output_dir": str(out),
        "device": "cpu",
        "env": [{"id": "arithmetic"}],
        "batch_size": batch,
        "rollouts_per_example": GROUP,
        "rollout": {"max_tokens": fakes.LONGEST, "weights": "bf16"},
        "train": {"max_steps": 10**6, "lora": True, "lora_rank": fakes.RANK},
        "eval": {"interval": None},
        "asynchrony": {
            "max_async_level": 1,
            "max_off_policy_steps": 10**6,
            "oversampling_factor": max(1.0, OPEN * rows / batch),
        },
        "client": {"base_url": urls, "skip_model_check": True},
    }


class Learner:
    """Takes each batch at once, and publishes the next version, on a thread of its own."""

    def __init__(self, place: RunPaths) -> None:
        self.place = place
        self.spool = Spool(place.spool)
        self.step = 0  # of the last batch
        self.stats: dict[str, float] = {}  # of that batch
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Learner:
        self.spool.progress.report(Cursor(0, 0, 1))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(10.0)

    def _run(self) -> None:
        while not self._over.wait(LOOK_S):
            for step in sorted(step for step in self.spool.steps() if step > self.step):
                self.stats = _header(self.spool.path(step))["stats"]
                self._publish(step)  # every one: the orchestrator waits for each in its turn
                self.step = step
                self.spool.progress.report(Cursor(step, step, 1))

    def _publish(self, version: int) -> None:
        """Write a manifest and the marker: fakes read no weights."""
        folder = self.place.broadcasts / folder_name(version)
        meta = {"broadcast": FORMAT, "version": version, "kind": "adapter", "noise": None}
        publish_folder(
            folder,
            lambda target: write_file(target / "weights.txt", str(version).encode()),
            {**meta, "step": version},
        )
        marker = encode_marker(version, 1, "adapter", manifest_digest(folder), None)
        (folder / STABLE).write_bytes(marker)
        old = self.place.broadcasts / folder_name(version - KEPT)
        with suppress(FileNotFoundError):
            for file in [old / STABLE, *old.iterdir()]:
                file.unlink(missing_ok=True)
            old.rmdir()


def _header(frame: Path) -> dict[str, Any]:
    with frame.open("rb") as file:
        file.readline()
        return dict(json.loads(file.readline()))


def _below(pid: int) -> list[int]:
    """Return the processes that a process has started, and theirs."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    below = [int(child) for task in tasks for child in task.read_text().split()]
    return below + [far for child in below for far in _below(child)]


def _cpu_s(place: str) -> float:
    """Return the processor seconds of a process or a thread below /proc; 0 when it has ended."""
    try:
        fields = Path(f"/proc/{place}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / TICKS


@contextmanager
def started(count: int, work: Work, weights: Path) -> Iterator[str]:
    words = ["--rows", work.rows, "--slow", work.slow, "--median", work.median]
    with running("bench.fakes", count, weights, *words) as child:
        assert child.stdout is not None
        yield child.stdout.readline().strip()


def totals(url: str) -> dict[str, float]:
    with urlopen(f"{url}/totals", timeout=30.0) as answer:  # noqa: S310  of our own child
        return dict(json.load(answer))


@contextmanager
def orchestrated(file: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run the real orchestrator; stop it as a user does."""
    command = [sys.executable, "-m", "lowroll", "orchestrate", str(file)]
    with log.open("wb") as out:
        child = subprocess.Popen(command, stdout=out, stderr=out)
    try:
        yield child
        if child.poll() is not None:
            raise RuntimeError(f"the orchestrator has ended: {log.read_text()[-2000:]}")
    finally:
        child.send_signal(signal.SIGTERM)
        try:
            child.wait(30.0)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait(30.0)


def measure(
    count: int, work: Work, scratch: Path, seconds: float, warm_s: float
) -> dict[str, float]:
    run = scratch / "run"
    place = RunPaths(run)
    model = vocabulary.write(scratch / "model", SPEC, chats=True)
    place.broadcasts.mkdir(parents=True)
    place.roles.mkdir()
    with started(count, work, place.broadcasts) as url, ExitStack() as stack:
        file = scratch / "run.yaml"
        tree = settings(work, [f"{url}/{i}" for i in range(count)], model, run)
        file.write_text(yaml.safe_dump(tree))
        (run / CONFIG).write_text(load(file).dump())
        heartbeat = Heartbeat(place.heartbeat(TRAINER), TRAINER, 1, phase="waiting")
        heart = stack.enter_context(heartbeat)
        heart.update(phase="waiting", step=0)
        learner = stack.enter_context(Learner(place))
        log = scratch / "orchestrator.log"
        process = stack.enter_context(orchestrated(file, log))
        for steps, after_s in ((2, 0.0), (1, warm_s)):
            time.sleep(after_s)
            _next_batch(learner, steps, process, log)
        before = _look(process.pid, url, learner)
        time.sleep(seconds)
        _next_batch(learner, 1, process, log)
        after = _look(process.pid, url, learner)
        return _row(before, after, learner.stats, count * work.rows, tree["batch_size"])


def _next_batch(learner: Learner, count: int, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until so many more batches have come: a measurement begins and ends with one."""
    wanted, end = learner.step + count, time.monotonic() + BATCH_S
    while learner.step < wanted:
        if time.monotonic() > end or process.poll() is not None:
            raise RuntimeError(f"no batch within {BATCH_S:g} s: {log.read_text()[-2000:]}")
        time.sleep(LOOK_S)


def _look(pid: int, url: str, learner: Learner) -> dict[str, float]:
    return totals(url) | {
        "at": time.monotonic(),
        "own": _cpu_s(f"{pid}"),
        "main": _cpu_s(f"{pid}/task/{pid}"),
        "scorers": sum(_cpu_s(f"{child}") for child in _below(pid)),
        "peak": resident("VmHWM", pid) / 2**20,
        "step": learner.step,
    }


def _row(
    before: dict[str, float],
    after: dict[str, float],
    stats: dict[str, float],
    rows: int,
    batch: int,
) -> dict[str, float]:
    passed = {name: after[name] - before[name] for name in after}
    wall, samples = passed["at"], passed["step"] * batch
    in_flight = stats["rollout/in_flight_groups"]
    values = (
        samples / wall,
        samples / wall * passed["tokens"] / max(passed["samples"], 1),
        passed["own"] / wall,
        1e3 * passed["own"] / samples,
        passed["main"] / max(passed["own"], 1e-9),
        passed["scorers"] / wall,
        passed["cpu_s"] / wall,
        after["peak"],
        passed["row_seconds"] / wall / rows,
        in_flight,
        after["open"],
        stats["rollout/open_groups"] - in_flight,
        passed["step"] / wall,
        (passed["bytes_in"] + passed["bytes_out"]) / wall / 1e6,
        stats["perf/engine_fenced"],
    )
    return dict(zip(QUANTITIES, values, strict=True))


def main() -> int:
    p = parser_of(
        __doc__,
        out=BASELINES,
        engines=[2**i for i in range(10)],
        works=SomeOf(WORKS),
        seconds=20.0,
        warm=10.0,
    )
    args = p.parse_args()
    results = Results("scale", args.out, seconds=args.seconds)
    for label in args.works:
        for count in args.engines:
            with tempfile.TemporaryDirectory(dir="/dev/shm") as scratch:
                found = measure(count, WORKS[label], Path(scratch), args.seconds, args.warm)
            results.add(
                Row(f"{label} E={count}: {what}", QUANTITIES[what].unit, value)
                for what, value in found.items()
            )
            say(f"{label}, {count} engines: {found}")
    return results.finish("One orchestrator")


if __name__ == "__main__":
    raise SystemExit(main())
