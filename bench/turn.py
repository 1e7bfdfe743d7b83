"""What a step costs between its roles at level 0, part by part, where drawing and learning cost nothing.

    python -m bench.turn [--batch 512] [--tokens 384] [--adapter qwen2.5-1.5b] [--steps 8]

The orchestrator is `lowroll orchestrate` in a process of its own. The engine is another one: our server
over `bench.instant`, which has all tokens at once, and reads each version of the weights. This process
is the trainer: the real ends of the channel and of the broadcasts, with an adapter as large as that of
the model named, and half a second of sleep in the place of learning. Everything lies in memory
(/dev/shm). Rows, milliseconds in the median, go to bench/baselines/turn.json:

    write      the trainer: a version of the adapter, from its tensors to its STABLE
    take       until the engine has it: seen, told, read twice, handed over
    ask        until the engine has the first request
    generate   until the last answer has been read
    score      every response
    make       the batch: numbers, what must be on the disk, the frame
    read       the trainer: from the frame on the disk to the batch

Under a load these are long; the processor seconds that orchestrator, engine and trainer take for a step
are then to be looked at.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import yaml

from bench import vocabulary
from bench.harness import BASELINES, Row, finish, parser_of
from bench.instant import started
from bench.scale import SPEC, TEMPLATE, Process, orchestrated
from bench.shapes import SHAPES
from lowroll.config.load import load
from lowroll.model import lora
from lowroll.model.spec import spec_from_config
from lowroll.model.transformer import Transformer
from lowroll.runs.folder import CONFIG
from lowroll.runs.roles.heartbeat import Heartbeat
from lowroll.runs.roles.run_paths import TRAINER, RunPaths
from lowroll.transport.filesystem import Receiver
from lowroll.weights.sync.folder import FolderPublisher

GROUP, RANK, CONTEXT = 8, 16, 8192
LEARN_S = 0.5
BATCH_S = 120.0  # until one has come, the start included
WARM = 2  # steps that are left out
PARTS = ("write", "take", "ask", "generate", "score", "make", "read")
PROCESSES = ("orchestrator: processor", "engine: processor", "trainer: processor")


def settings(batch: int, tokens: int, steps: int, url: str, model: Path, out: Path) -> Any:
    """The run's file."""
    return {
        "model": str(model),
        "output_dir": str(out),
        "device": "cpu",
        "env": [{"id": "reverse-text"}],
        "batch_size": batch,
        "rollouts_per_example": GROUP,
        "rollout": {"max_tokens": tokens, "weights": "bf16"},
        "train": {"max_steps": steps, "lora": True, "lora_rank": RANK},
        "eval": {"interval": None},
        "client": {"base_url": [url], "skip_model_check": True},
    }


def learner(shape: str) -> Transformer:
    """A model whose adapter alone is written: its weights are never touched, so they take no
    memory."""
    return lora.attach(
        Transformer(spec_from_config(SHAPES[shape]), "cpu", torch.bfloat16), RANK, 32
    )


class Said:
    """When the engine had new weights, and when it was asked for tokens of them, by its own words."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.last: dict[str, float] = {}
        self._lines = process.stdout
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._lines is not None
        for line in self._lines:
            what, _, at = line.partition(" ")
            if what == "taken" or self.last.get("asked", 0.0) < self.last.get("taken", 0.0):
                self.last[what] = float(at)


def measure(args: argparse.Namespace, scratch: Path) -> dict[str, float]:
    """Seconds of each part, in the median."""
    place = RunPaths(scratch / "run")
    model = vocabulary.write(scratch / "model", SPEC | {"max_position_embeddings": CONTEXT})
    (model / "chat_template.jinja").write_text(TEMPLATE)
    place.broadcasts.mkdir(parents=True)
    with ExitStack() as stack:
        words = ("--shelf", str(place.broadcasts), "--admin", place.tokens()[1])
        engine, url = stack.enter_context(started(*words))
        file = scratch / "run.yaml"
        tree = settings(args.batch, args.tokens, args.steps, url, model, place.run)
        file.write_text(yaml.safe_dump(tree))
        (place.run / CONFIG).write_text(load(file).dump())
        heart = stack.enter_context(
            Heartbeat(place.heartbeat(TRAINER), TRAINER, 1, phase="waiting")
        )
        heart.update(phase="waiting", step=0)
        role = stack.enter_context(orchestrated(file, scratch / "orchestrator.log"))
        processes = (role, Process(engine.pid), Process(os.getpid()))
        found = steps(place, Said(engine), learner(args.adapter), args.steps, processes)
    return {part: statistics.median(one[part] for one in found[WARM:]) for part in found[0]}


def steps(
    place: RunPaths, said: Said, model: Transformer, count: int, processes: Sequence[Process]
) -> list[dict[str, float]]:
    """The trainer's side of all steps; of each the seconds of its parts, and of the processors."""
    channel = Receiver(place.spool, 1)
    broadcaster = FolderPublisher(place.broadcasts, model, attempt=1, keep=2)
    channel.receive(BATCH_S)
    found = []
    for step in range(1, count):
        spent = [process.cpu_s() for process in processes]
        time.sleep(LEARN_S)
        with torch.no_grad():
            next(one.adapter for _, one in model.linears() if one.adapter).b["q_proj"].add_(1.0)
        began = time.monotonic()
        broadcaster.publish(step)
        written = time.monotonic()
        batch = channel.receive(BATCH_S)
        received = time.monotonic()
        channel.commit(step)
        there = place.spool.joinpath(f"step_{step + 1:06d}.frame").stat().st_ctime
        framed = there - time.time() + time.monotonic()
        asked, stats = said.last["asked"], batch.stats
        drawn, scored = stats["time/generate"], stats["time/score"]
        taken, made = said.last["taken"], framed - asked - drawn - scored
        seconds = [written - began, taken - written, asked - taken, drawn, scored]
        seconds += [made, received - framed]
        parts = dict(zip(PARTS, seconds, strict=True))
        parts["all"] = sum(seconds)
        spent = [one.cpu_s() - before for one, before in zip(processes, spent, strict=True)]
        found.append(parts | dict(zip(PROCESSES, spent, strict=True)))
    return found


def main() -> int:
    p = parser_of(__doc__, out=BASELINES, batch=512, tokens=384, steps=8)
    p.add_argument("--adapter", default="qwen2.5-1.5b", choices=SHAPES, help="of which model")
    args = p.parse_args()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as scratch:
        found = measure(args, Path(scratch))
    title = f"{args.batch} x {args.tokens} tokens, adapter of {args.adapter}"
    rows = [Row(f"{title}: {part}", "ms", 1e3 * seconds) for part, seconds in found.items()]
    return finish("A turn between roles", "turn", rows, args.out, steps=args.steps)


if __name__ == "__main__":
    raise SystemExit(main())
