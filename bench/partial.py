"""Partial rollouts on log-normal lengths: the wall time of a step's rollouts against waiting for all.

A step wants a batch of rollouts, each a request of its own with a length that is drawn beforehand
(log-normal, no stop), and then new weights come: every number of every matrix is off by a relative
normal `--change`, rounded to the weights' own type. In three ways, one after the other on one
engine, over the same list of lengths:

    off      the batch is sent, and the step ends with its last rollout
    keep     `--over` times as many are in flight; the step ends when a batch of them has ended, and
             the others go on under the new weights with their older tokens and keys
    replay   the same, and the others are replayed: what they had drawn is checked under the new
             weights and kept up to the first token that differs (`engine.drafts`)

What ends a step early is not free: the rollouts that it leaves in flight were begun in it. So the
first `--warm` steps are not counted, and tokens are those of the rollouts that a step delivered.

    step        seconds until the batch is there, the median of the steps; replays are part of it
    delivered   tokens of the batches over those seconds
    kept        of what unfinished rollouts had drawn when new weights came, the part that was kept;
                with `--change 0` what rounding alone leaves
    entropy     mean -log-prob of the tokens: random weights are flat, so the last norm is scaled by
                `--sharpness`

    python -m bench.partial [--models NAME ...] [--weights NAME] [--changes 0,1e-4,1e-3] [--batch 256]
                            [--over 1.5] [--median 220] [--sigma 0.8] [--longest 4096] [--steps 6]
                            [--warm 3] [--sharpness 9] [--device auto] [--out FOLDER]
    python -m bench.partial --models tiny --device cpu --batch 24 --median 40 --longest 400 --out FOLDER

Rows are added to `partial.json` as they are measured.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
import time
from dataclasses import dataclass, field
from typing import Literal

import torch

from bench.harness import Results, Row, parser_of, settle, synchronize
from bench.shapes import SHAPES, TINY, random_model
from lowroll import Engine, Request
from lowroll.engine.base import InFlight
from lowroll.model.transformer import Transformer
from lowroll.quant.formats import formats
from lowroll.types import Group
from lowroll.weights.sync.update import WeightUpdate

Mode = Literal["off", "keep", "replay"]
MODES: tuple[Mode, ...] = ("off", "keep", "replay")


@dataclass(frozen=True)
class Work:
    """Rollouts without an end: lengths, prompts and noise go by their number."""

    batch: int
    over: float
    median: int
    sigma: float
    longest: int
    prompt: int
    vocab_size: int

    def request(self, number: int) -> Request:
        dice = random.Random(f"partial {number}")
        length = round(dice.lognormvariate(math.log(self.median), self.sigma))
        ids = [dice.randrange(2, self.vocab_size) for _ in range(self.prompt)]
        tokens = min(self.longest, max(1, length))
        return Request(ids, max_tokens=tokens, ignore_eos=True, seed=1, id=str(number))


@dataclass
class Found:
    """What the counted steps came to."""

    seconds: list[float] = field(default_factory=list)
    tokens: int = 0
    surprise: float = 0.0  # nats, of all tokens
    checked: int = 0  # tokens that unfinished rollouts had drawn
    kept: int = 0

    @property
    def step(self) -> float:
        return statistics.median(self.seconds)

    @property
    def delivered(self) -> float:
        return self.tokens / sum(self.seconds)


def changed(model: Transformer, size: float, version: int) -> WeightUpdate:
    """The next weights, in the model's own storages: rounded as a learner's are."""
    generator = torch.Generator(device=model.device).manual_seed(version)
    for p in model.parameters():
        if p.ndim > 1 and size:
            noise = torch.randn(p.shape, generator=generator, device=p.device)
            p.data.copy_(p.data.float() * (1 + size * noise))
    return WeightUpdate.local(model, version)


def measure(
    engine: Engine, model: Transformer, work: Work, mode: Mode, change: float, steps: range
) -> Found:
    """The steps of one way, of which those in `steps` count. Beside the timed part, what is left at
    the end is aborted."""
    found, number, waiting = Found(), 0, list[Group]()
    in_flight: InFlight = "replay" if mode == "replay" else "keep"
    most = work.batch if mode == "off" else round(work.over * work.batch)
    live = 0
    for step in range(steps.stop):
        before = engine.stats()
        synchronize(engine.model.device)
        began = time.perf_counter()
        engine.update_weights(changed(model, 0.0, step), in_flight=in_flight)
        published = time.perf_counter() - began
        while live < most:
            engine.add(work.request(number))
            number, live = number + 1, live + 1
        while len(waiting) < work.batch:
            ended = [group for _, group in engine.step()]
            live -= len(ended)
            waiting += ended
        synchronize(engine.model.device)
        seconds = time.perf_counter() - began - published
        batch, waiting = waiting[: work.batch], waiting[work.batch :]
        changed(model, change, step)  # the learner's step; the engine takes it in the next turn
        if step in steps:
            after = engine.stats()
            found.seconds.append(seconds)
            rollouts = [rollout for group in batch for rollout in group.rollouts]
            found.tokens += sum(len(rollout.token_ids) for rollout in rollouts)
            found.surprise -= sum(sum(rollout.logprobs) for rollout in rollouts)
            found.checked += after.replayed_tokens - before.replayed_tokens
            found.kept += after.kept_tokens - before.kept_tokens
        print(f"{mode}, step {step}: {seconds:.2f} s", file=sys.stderr)
    for handle in list(engine.scheduler._groups):
        engine.abort(handle)
    engine.step()
    return found


def rows_of(name: str, found: dict[Mode, Found]) -> list[Row]:
    off = found["off"]
    rows = []
    for mode in ("keep", "replay"):
        one = found[mode]
        rows += [
            Row(f"{name} {mode}: step", "s", one.step, off.step, off.step / one.step),
            Row(
                f"{name} {mode}: delivered",
                "tokens/s",
                one.delivered,
                off.delivered,
                one.delivered / off.delivered,
                note=f"entropy {one.surprise / one.tokens:.2f} nats",
            ),
        ]
    replay = found["replay"]
    kept = replay.kept / max(1, replay.checked)
    note = f"of {replay.checked:,} tokens that unfinished rollouts had drawn"
    return [*rows, Row(f"{name} replay: kept", "fraction", kept, note=note)]


def engine_on(args: argparse.Namespace, name: str) -> tuple[Engine, Transformer, Work]:
    device = args.device
    cuda = device.type == "cuda"
    model = random_model(
        TINY if name == "tiny" else SHAPES[name],
        device,
        torch.bfloat16 if cuda else torch.float32,
    )
    model.norm.weight.data.mul_(args.sharpness)
    sizes = args.batch, args.over, args.median, args.sigma, args.longest, args.prompt
    work = Work(*sizes, model.spec.vocab_size)
    most = round(args.over * args.batch)
    engine = Engine(
        model,
        args.weights or ("bf16" if cuda else "fp32"),
        device=device,
        max_batch=most,
        cache_tokens=most * (min(args.longest, 6 * args.median) + args.prompt + 32),
    )
    if cuda:
        engine.warm_up()
    return engine, model, work


def main() -> None:
    parser = parser_of(
        __doc__,
        changes="0,1e-4,1e-3",
        batch=256,
        over=1.5,
        prompt=64,
        median=220,
        sigma=0.8,
        longest=4096,
        steps=6,
        warm=3,
        sharpness=9.0,
        device="auto",
    )
    parser.add_argument("--models", nargs="+", default=["qwen2.5-1.5b"], choices=[*SHAPES, "tiny"])
    parser.add_argument("--weights", choices=formats())
    args = parser.parse_args()
    args.device, args.out = settle(parser, args.device, args.out)
    counted = range(args.warm, args.warm + args.steps)
    sizes = {"batch": args.batch, "over": args.over, "steps": args.steps}
    results = Results("partial", args.out, **sizes)
    for name in args.models:
        engine, model, work = engine_on(args, name)
        for size in map(float, args.changes.split(",")):
            where = f"{name} {engine.format.name}, a change of {size:g}"
            found = {mode: measure(engine, model, work, mode, size, counted) for mode in MODES}
            results.add(rows_of(where, found))
    results.finish("Partial rollouts")


if __name__ == "__main__":
    main()
