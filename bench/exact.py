"""What `rollout.exact` costs: the same LoRA run with it and without, in turns in one process.

    rollout     a batch of rollouts of an RL step (`bench.work`): seconds of whole calls
    prompts     prompts of 256 tokens, one token each: prefill
    update      one GRPO update of 16 sequences of 128 tokens
    step        generating those sequences and learning from them

    python -m bench.exact [--model smollm2] [--weights int8_rotated] [--rounds 5] [--out FOLDER]

Without it the learner's forward is dense, as a run has it by default. Rows are added to `exact.json`;
a ratio is of tokens a second with it over those without.
"""

from __future__ import annotations

import argparse
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import torch

from bench import laptop
from bench.record import BASELINES, Row, interleave, merge, show, speed_row
from bench.turns import Ours
from bench.work import Work
from lowroll import Engine
from lowroll.config import RunConfig
from lowroll.model.folder import resolve
from lowroll.runs.build import models, trainer
from lowroll.runs.build.compute import Compute
from lowroll.trainer.optim import Optimizer
from lowroll.trainer.step import learn

ROLLOUTS = (Work(1, 64, 64), Work(16, 64, 64), Work(16, 256, 1, group=1))
STEP = Work(16, 64, 64)
STEP_MUST, DECODE_MUST = 0.80, 0.80  # of the speed without it: a step 25 % slower at most
SIDES = {"exact": True, "plain": False}


class Side:
    """A run's learner and engine."""

    def __init__(self, args: Namespace, exact: bool) -> None:
        cfg = RunConfig.model_validate(
            {
                "model": str(args.model),
                "device": "cpu",
                "rollout": {"weights": args.weights, "exact": exact},
                "train": {"lora": True, "tokens_per_microbatch": 512, "logprob_chunk": 256},
            }
        ).resolved()
        self.model = models.learner(cfg, Compute.of(cfg))
        self.optimizer = Optimizer(self.model.trainable_parameters(), trainer.optim(cfg))
        self.settings = trainer.learn(cfg)
        tokens = max(work.cache_tokens() for work in ROLLOUTS)
        engine = Engine(self.model, weights=args.weights, cache_tokens=tokens, max_batch=16)
        self.ours = Ours(engine)
        rows = Namespace(
            rows=STEP.batch,
            length=STEP.prompt_tokens + STEP.new_tokens,
            prompt=STEP.prompt_tokens,
            weights=args.weights,
        )
        self.batch = laptop.batch_of(rows, self.model.spec.vocab_size)

    def update(self) -> None:
        """One update of a batch that is there."""
        learn(self.model, self.batch, self.optimizer, self.settings)


def in_turns(
    title: str,
    amount: int,
    run: Callable[[Side, int], object],
    sides: dict[str, Side],
    args: Namespace,
) -> tuple[list[float], list[float], Row]:
    """Seconds of both, and their row."""
    seeds = {name: iter(range(10_000)) for name in sides}

    def turn(name: str) -> None:
        run(sides[name], next(seeds[name]))

    for name in sides:
        turn(name)
    seconds = interleave({name: lambda name=name: turn(name) for name in sides}, args.rounds)  # type: ignore[misc]
    must = DECODE_MUST if "B=" in title else None
    row = speed_row(title, amount, "tokens/s", seconds["exact"], seconds["plain"], must)
    return seconds["exact"], seconds["plain"], row


def measure(args: Namespace) -> list[Row]:
    """All rows of a model."""
    sides = {name: Side(args, exact) for name, exact in SIDES.items()}
    name, rows = f"{args.name} {args.weights} exact over plain", list[Row]()
    for work in ROLLOUTS:
        amount = work.batch * (work.prompt_tokens if work.is_apart else work.new_tokens)
        run = lambda side, seed, work=work: side.ours.run(work, seed)  # noqa: E731
        rows.append(in_turns(f"{name} {work.title}", amount, run, sides, args)[-1])
    amount = STEP.batch * (STEP.prompt_tokens + STEP.new_tokens)
    rows.append(in_turns(f"{name} update", amount, lambda side, _: side.update(), sides, args)[-1])

    def step(side: Side, seed: int) -> None:
        side.ours.run(STEP, seed)
        side.update()

    exact, plain, _ = in_turns(f"{name} step", amount, step, sides, args)
    rows.append(speed_row(f"{name} step", amount, "tokens/s", exact, plain, STEP_MUST))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description="rollout.exact, with and without, in turns.")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--weights", default="int8_rotated")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, default=BASELINES)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.name, args.model = args.model, resolve(args.model)
    began = time.monotonic()
    rows = measure(args)
    print(merge("exact", rows, args.out, threads=args.threads, rounds=args.rounds))
    met = show(f"rollout.exact ({time.monotonic() - began:.0f} s)", rows)
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
