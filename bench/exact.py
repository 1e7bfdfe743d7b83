"""What `rollout.exact` costs: the same LoRA run with it and without, in turns in one process.

    rollout     a batch of rollouts of an RL step (`bench.work`): seconds of whole calls
    prompts     prompts of 256 tokens, one token each: prefill
    update      one GRPO update of 16 sequences of 128 tokens (on a GPU 64 of 512)
    step        generating those sequences and learning from them

    python -m bench.exact [--model smollm2] [--weights int8_rotated] [--rounds 5] [--out FOLDER]
    python -m bench.exact --device cuda --shape qwen2.5-7b        random weights of `bench.shapes`

Without it the learner's forward is what a run has by default. Rows are added to `exact.json`, of a GPU
to `exact-gpu.json`; a ratio is of tokens a second with it over those without.
"""

from __future__ import annotations

import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from bench.harness import BASELINES, OneOf, Row, finish, in_turns, parser_of, synchronize
from bench.samples import batch_of, random_ids
from bench.shapes import SHAPES, random_model
from bench.turns import Ours
from bench.work import Work
from lowroll import Engine
from lowroll.config import RunConfig
from lowroll.model import hf
from lowroll.model.folder import resolve
from lowroll.runs.assembly import models, trainer
from lowroll.runs.assembly.compute import Compute
from lowroll.trainer.optim import Optimizer
from lowroll.trainer.step import learn


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
SIDES = {"exact": True, "plain": False}


class Side:
    """A run's learner and engine."""

    def __init__(self, args: Namespace, exact: bool) -> None:
        cfg = RunConfig.model_validate(
            {
                "model": str(args.model),
                "device": args.device,
                "rollout": {"weights": args.weights, "exact": exact},
                "train": {"lora": True, "tokens_per_microbatch": args.sizes.microbatch},
            }
        ).resolved()
        step, compute = args.sizes.step, Compute.of(cfg)
        self.model = models.learner(cfg, compute)
        self.optimizer = Optimizer(self.model.trainable_parameters(), trainer.optim(cfg))
        self.settings = trainer.learn(cfg)
        most = max(work.batch for work in args.sizes.rollouts)
        engine = Engine(
            self.model,
            weights=compute.format(args.weights),
            dtype=compute.dtype,
            cache_tokens=max(work.cache_tokens() for work in args.sizes.rollouts),
            max_batch=most,
        )
        self.ours = Ours(engine)
        ids = random_ids(
            self.model.spec.vocab_size, step.batch, step.prompt_tokens + step.new_tokens
        )
        format = compute.format(args.weights)
        self.batch = batch_of(ids.tolist(), step.prompt_tokens, format, group=4)

    def update(self) -> None:
        """Make one update on a batch that is there."""
        learn(self.model, self.batch, self.optimizer, self.settings)
        synchronize(self.model.device)


def measure(args: Namespace) -> list[Row]:
    """Return all rows of a model."""
    sides = {name: Side(args, exact) for name, exact in SIDES.items()}
    name, rows, step_work = f"{args.name} {args.weights} exact over plain", [], args.sizes.step

    def row(
        title: str, tokens: int, run: Callable[[Side, int], object], must: float | None
    ) -> None:
        runs = {name: partial(run, side) for name, side in sides.items()}
        rows.append(in_turns(f"{name} {title}", tokens, runs, args.rounds, must))

    def step(side: Side, seed: int) -> None:
        side.ours.run(step_work, seed)
        side.update()
        synchronize(side.model.device)

    for work in args.sizes.rollouts:
        must = DECODE_MUST if "B=" in work.title else None
        row(work.title, work.tokens, lambda side, seed, w=work: side.ours.run(w, seed), must)
    tokens = step_work.batch * (step_work.prompt_tokens + step_work.new_tokens)
    row("update", tokens, lambda side, _: side.update(), None)
    row("step", tokens, step, args.sizes.must)
    return rows


def main() -> int:
    parser = parser_of(
        __doc__,
        out=BASELINES,
        model="smollm2",
        weights="int8_rotated",
        rounds=5,
        threads=torch.get_num_threads(),
        device=OneOf(SIZES, "cpu"),
    )
    parser.add_argument("--shape", choices=SHAPES, help="random weights of this shape, on a GPU")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.sizes, began = SIZES[args.device], time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        if args.shape:
            args.name = args.shape
            random = random_model(SHAPES[args.shape], args.device)
            args.model = hf.save(random, Path(folder) / args.shape)
            del random
        else:
            args.name, args.model = args.model, resolve(args.model)
        rows = measure(args)
    file, title = FILES[args.device], f"rollout.exact ({time.monotonic() - began:.0f} s)"
    return finish(title, file, rows, args.out, threads=args.threads, rounds=args.rounds)


if __name__ == "__main__":
    raise SystemExit(main())
