"""`rollout.exact` of a LoRA run: what it costs, and in how many steps of a run it keeps its promise.

    speed   a run with it and one without, in turns in one process; a ratio is of tokens a second
            rollouts of an RL step (`bench.work`), prompts of one token each, one GRPO update of 16 sequences
            of 128 tokens (on a GPU 64 of 512), eight of each prompt, and a step: those sequences generated
            and learnt from
    bits    a run of --steps steps: in how many of them what was recorded is, bit for bit, what the learner
            computes. Prompts are read in pieces, rows wait for room, and micro-batches are small, so that
            few tokens have the same neighbours on both sides

    python -m bench.exact [--parts speed bits] [--model smollm2] [--weights int8_rotated] [--out FOLDER]
                          [--rounds 5] [--steps 200] [--env records]
    python -m bench.exact --device cuda --shape qwen2.5-7b        random weights of `bench.shapes`

By default it measures the speed. Without exactness the learner's forward is what a run has by default.
With --shape, `bits` takes the tokenizer and the vocabulary of --model. Rows are added to `exact.json`,
of a GPU to `exact-gpu.json`.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from bench.harness import (
    BASELINES,
    OneOf,
    Row,
    SomeOf,
    finish,
    interleave,
    parser_of,
    speed_row,
    synchronize,
)
from bench.samples import batch_of, random_ids
from bench.shapes import SHAPES, random_model
from bench.turns import Ours
from bench.work import Work
from lowroll import Engine, run
from lowroll.config import from_mapping
from lowroll.metrics.record import read
from lowroll.model import hf
from lowroll.model.folder import resolve
from lowroll.model.spec import read_spec
from lowroll.runs.assembly import models, trainer
from lowroll.runs.assembly.compute import Compute
from lowroll.trainer.optim import Optimizer
from lowroll.trainer.step import learn

PARTS = ("speed", "bits")


@dataclass(frozen=True)
class Sizes:
    """The works of a kind of device, and what a step must keep of the speed without exactness."""

    rollouts: tuple[Work, ...]
    step: Work
    microbatch: int  # tokens
    must: float


SIZES = {
    "cpu": Sizes(
        (Work(1, 64, 64), Work(16, 64, 64), Work(16, 256, 1, group=1)), Work(16, 64, 64), 512, 0.80
    ),
    "cuda": Sizes(
        (Work(1, 256, 128), Work(16), Work(64), Work(256), Work(32, 1024, 1, group=1)),
        Work(64),
        16384,
        0.87,
    ),
}
DECODE_MUST = 0.80
FILES = {"cpu": "exact", "cuda": "exact-gpu"}  # of the baselines
EQUAL = "mismatch/logp_diff_max"


# -- speed -----------------------------------------------------------------------------------------


class Side:
    def __init__(self, args: Namespace, model: Path, exact: bool) -> None:
        sizes = SIZES[args.device]
        tree = {
            "model": str(model),
            "device": args.device,
            "rollout": {"weights": args.weights, "exact": exact},
            "train": {"lora": True, "tokens_per_microbatch": sizes.microbatch},
        }
        cfg = from_mapping(tree).resolved()
        step, compute = sizes.step, Compute.of(cfg)
        format = compute.format(args.weights)
        self.model = models.learner(cfg, compute)
        self.optimizer = Optimizer(self.model.trainable_parameters(), trainer.optim(cfg))
        self.settings = trainer.learn(cfg)
        engine = Engine(
            self.model,
            weights=format,
            dtype=compute.dtype,
            cache_tokens=max(work.cache_tokens() for work in sizes.rollouts),
            max_batch=max(work.batch for work in sizes.rollouts),
        )
        self.ours = Ours(engine)
        length, prompt = step.prompt_tokens + step.new_tokens, step.prompt_tokens
        ids = random_ids(self.model.spec.vocab_size, step.batch, length)
        ids[:, :prompt] = ids[:: step.copies, :prompt].repeat_interleave(step.copies, 0)
        self.batch = batch_of(ids.tolist(), prompt, format, group=step.copies)

    def update(self) -> None:
        learn(self.model, self.batch, self.optimizer, self.settings)
        synchronize(self.model.device)

    def step(self, work: Work, seed: int) -> None:
        self.ours.run(work, seed)
        self.update()


def compare(args: Namespace, model: Path) -> list[Row]:
    sizes = SIZES[args.device]
    sides = {name: Side(args, model, name == "exact") for name in ("exact", "plain")}

    def row(
        title: str, tokens: int, act: Callable[[Side, int], object], must: float | None = None
    ) -> Row:
        """Measure both sides with the same seeds, none of which comes twice."""
        seeds = {name: itertools.count() for name in sides}

        def turn(name: str) -> None:
            act(sides[name], next(seeds[name]))

        turns = {name: partial(turn, name) for name in sides}
        ours, peer = interleave(turns, args.rounds, warm=1).values()
        title = f"{args.name} {args.weights} exact over plain {title}"
        return speed_row(title, tokens, "tokens/s", ours, peer, must)

    rows = []
    for work in sizes.rollouts:
        must = DECODE_MUST if "B=" in work.title else None
        rows.append(row(work.title, work.tokens, partial(_drawn, work), must))
    tokens = sizes.step.batch * (sizes.step.prompt_tokens + sizes.step.new_tokens)
    rows.append(row("update", tokens, lambda side, _: side.update()))
    rows.append(row("step", tokens, lambda side, seed: side.step(sizes.step, seed), sizes.must))
    return rows


def _drawn(work: Work, side: Side, seed: int) -> None:
    side.ours.run(work, seed)


# -- the same bits ---------------------------------------------------------------------------------


def count_equal(args: Namespace, model: Path, folder: Path) -> list[Row]:
    """Make a run; return the row of its steps in which no bit differs."""
    rollout = {"weights": args.weights, "exact": True, "max_tokens": 32}
    train = {"max_steps": args.steps, "tokens_per_microbatch": 300}
    tree = {
        "model": str(model),
        "device": args.device,
        "output_dir": str(folder / "run"),
        "env": [{"id": args.env}],
        "batch_size": 8,
        "rollouts_per_example": 4,
        "rollout": {**rollout, "prefill_chunk": 24, "max_batch": 5},
        "train": {**train, "lora": True, "learning_rate": 1e-4},
        "ckpt": {"interval": args.steps},
    }
    records = read(run(from_mapping(tree)).folder)
    for one in records:
        print(f"{one['step']}: reward {one['reward/mean']:.3f}, {EQUAL} {one[EQUAL]}")
    first, last = (
        statistics.mean(one["reward/mean"] for one in some)
        for some in (records[:10], records[-10:])
    )
    how = f"{args.name} {args.weights} LoRA"
    return [
        Row(
            f"{how}: steps with the same bits on both sides, of {args.steps}",
            "steps",
            float(sum(one[EQUAL] == 0 for one in records)),
            must=float(args.steps),
            goal="ours at least",
            note=f"reward of the first ten {first:.2f}, of the last {last:.2f}; no correction",
        )
    ]


# -- the command -----------------------------------------------------------------------------------


def shaped(args: Namespace, folder: Path, source: Path | None = None) -> Path:
    """Return a folder with random weights of --shape. source: the model whose tokenizer and
    vocabulary they get."""
    config = SHAPES[args.shape]
    if source is not None:
        config = {**config, "vocab_size": read_spec(source).vocab_size}
    return hf.save(random_model(config, args.device), folder, tokenizer_from=source)


def main(argv: list[str] | None = None) -> int:
    parser = parser_of(
        __doc__,
        out=BASELINES,
        parts=SomeOf(PARTS, ["speed"]),
        model="smollm2",
        weights="int8_rotated",
        device=OneOf(SIZES, "cpu"),
        rounds=5,
        threads=torch.get_num_threads(),
        env="records",
        steps=200,
        shape=OneOf(SHAPES),
    )
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    args.name, began = args.shape or args.model, time.monotonic()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if "speed" in args.parts:
            model = shaped(args, folder / args.shape) if args.shape else resolve(args.model)
            rows += compare(args, model)
        if "bits" in args.parts:
            model = resolve(args.model)
            model = shaped(args, folder / "model", model) if args.shape else model
            rows += count_equal(args, model, folder)
    title = f"rollout.exact ({time.monotonic() - began:.0f} s)"
    settings = {"threads": args.threads, "rounds": args.rounds}
    return finish(title, FILES[args.device], rows, args.out, **settings)


if __name__ == "__main__":
    raise SystemExit(main())
