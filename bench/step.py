"""One whole RL step on one GPU by the real parts, and where its seconds go.

    generate    Engine.generate: 32 prompts of 256 random tokens, 8 rollouts of 256 tokens each, log-probs recorded
    score       a stub that counts: the share of even ids in a response (a real scorer's time is the task's)
    log-prob    forward passes without gradient inside `learn`: only responses of zero advantage, where the batch is on
                policy and updated once
    update      the rest of `trainer.step.learn`: forward, backward, optimiser (GRPO with TIS, AdamW)
    publish     Engine.update_weights: the new weights in the engine, in place, with their digest
    idle        the step's wall clock less all of these: batching, advantages, bookkeeping

The device is waited for at each border, so a part's seconds are its own. Numbers are medians over
the steps after a first one that warms up. A second measurement is publication alone, all linear
weights of a bfloat16 learner into another format, in place: `weights.publish.publish` as the
trainer calls it.

    python -m bench.step [--cases NAME ...] [--steps 3] [--out FOLDER]
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from bench.harness import (
    Results,
    Row,
    SomeOf,
    parser_of,
    released,
    seconds_of,
    settle,
    synchronize,
)
from bench.samples import sample_of
from bench.shapes import SHAPES, random_model
from bench.targets import publishing
from bench.work import Work
from lowroll import Engine, Request
from lowroll.advantages.group import grpo
from lowroll.model import lora
from lowroll.model.transformer import Transformer
from lowroll.objectives.objective import select
from lowroll.trainer import recompute
from lowroll.trainer.optim import Optimizer, OptimSettings
from lowroll.trainer.step import LearnSettings, PackedForward, learn
from lowroll.types import Batch, Group, Score
from lowroll.weights.publish import publish, quantize_base
from lowroll.weights.sync.update import WeightUpdate

PARTS = ("generate", "score", "log-prob", "update", "publish", "idle")


@dataclass(frozen=True)
class Case:
    """A model, how it learns, and the format of its rollouts."""

    model: str
    weights: str
    rank: int | None = None  # of LoRA; None: all weights learn
    work: Work = Work(256)
    tokens_per_microbatch: int = 8192
    share_prompts: bool = True

    @property
    def name(self) -> str:
        learning = "all weights" if self.rank is None else f"LoRA r{self.rank}"
        whole = "" if self.share_prompts else ", whole sequences"
        return f"{self.model} {learning}, {self.weights} rollouts{whole}"


PUBLISHED = ("qwen2.5-7b", "fp8")  # model, and format that its weights are published into
CASES = {
    "1.5b": Case("qwen2.5-1.5b", "fp8", tokens_per_microbatch=16384),
    "7b-lora": Case("qwen2.5-7b", "fp8", 16),
}
CASES |= {f"{name}-whole": replace(case, share_prompts=False) for name, case in CASES.items()}


@dataclass
class Clock:
    """Seconds by part, with the device waited for at each border."""

    device: torch.device
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        synchronize(self.device)
        began = time.perf_counter()
        yield
        synchronize(self.device)
        self.seconds[name] += time.perf_counter() - began

    @contextmanager
    def log_probs(self) -> Iterator[None]:
        """Count passes of the learner without an objective as log-prob, and not as update."""
        run = PackedForward.run

        def timed(forward: PackedForward, portions: Any, objective: Any = None) -> Any:
            if objective is not None or not portions:
                return run(forward, portions, objective)
            before = self.seconds["log-prob"]
            with self.part("log-prob"):
                trace = run(forward, portions)
            self.seconds["update"] -= self.seconds["log-prob"] - before
            return trace

        with patch.object(PackedForward, "run", timed):
            yield


class Loop:
    def __init__(self, case: Case, device: torch.device) -> None:
        self.case, self.device, self.version = case, device, 0
        self.model = _learner(case, device)
        self.engine = Engine(
            self.model,
            weights=case.weights,
            dtype=self.model.dtype,
            max_batch=case.work.batch,
            cache_tokens=case.work.cache_tokens(),
            max_prefill_tokens=16384,
        )
        self.optimizer = Optimizer(
            self.model.trainable_parameters(), OptimSettings(learning_rate=1e-6)
        )
        self.settings = LearnSettings(
            select("grpo", "tis"),
            tokens_per_microbatch=case.tokens_per_microbatch,
            share_prompts=case.share_prompts,
        )

    def step(self) -> dict[str, float]:
        clock = Clock(self.device)
        synchronize(self.device)
        began = time.perf_counter()
        requests = self._requests()
        with clock.part("generate"):
            groups = self.engine.generate(requests)
        with clock.part("score"):
            scores = [[_count(rollout.token_ids) for rollout in group.rollouts] for group in groups]
        batch = _batch(self.version + 1, groups, scores)
        with clock.part("update"), clock.log_probs():
            metrics = learn(self.model, batch, self.optimizer, self.settings)
        assert not metrics["optim/skipped"], "the update was not finite"
        self.version += 1
        with clock.part("publish"):
            self.engine.update_weights(WeightUpdate.local(self.model, self.version))
        clock.seconds["idle"] = time.perf_counter() - began - sum(clock.seconds.values())
        return clock.seconds

    def _requests(self) -> list[Request]:
        work = self.case.work
        return [
            Request(ids, n=work.copies, seed=self.version, **work.asked(work.new_tokens))
            for ids in work.prompts(self.model.spec.vocab_size, self.version)
        ]


def _learner(case: Case, device: torch.device) -> Transformer:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = random_model(SHAPES[case.model], device, dtype)
    if case.rank is None:
        return recompute.apply(model).requires_grad_(True)
    lora.attach(quantize_base(model, case.weights), case.rank, 2.0 * case.rank)
    return recompute.apply(model)


def _count(token_ids: Sequence[int]) -> Score:
    return Score(sum(token % 2 == 0 for token in token_ids) / len(token_ids))


def _batch(step: int, groups: Sequence[Group], scores: Sequence[Sequence[Score]]) -> Batch:
    samples = [
        sample_of(group.request.prompt_ids, rollout, advantage, index, score)
        for index, (group, marks) in enumerate(zip(groups, scores, strict=True))
        for rollout, score, advantage in zip(
            group.rollouts, marks, grpo([mark.reward for mark in marks]), strict=True
        )
    ]
    return Batch(step, samples, temperature=1.0)


def step_rows(case: Case, device: torch.device, steps: int) -> list[Row]:
    loop = Loop(case, device)
    loop.step()
    taken = [loop.step() for _ in range(steps)]
    whole = statistics.median(sum(seconds.values()) for seconds in taken)
    rows = [
        Row(f"{case.name}: {part}", "s", statistics.median(seconds[part] for seconds in taken))
        for part in PARTS
    ]
    tokens = case.work.tokens
    return [
        *rows,
        Row(f"{case.name}: whole step", "s", whole),
        Row(f"{case.name}: response tokens over the whole step", "tokens/s", tokens / whole),
    ]


def publish_rows(model: str, weights: str, device: torch.device, rounds: int = 9) -> list[Row]:
    """Return the milliseconds of publication alone, and with the digest that `update_weights`
    takes."""
    master = random_model(SHAPES[model], device)
    engine = Engine(
        master,
        weights=weights,
        dtype=master.dtype if weights != "fp32" else None,
        max_batch=1,
        cache_tokens=64,
    )
    places = _places(engine.model)
    ways: dict[str, Callable[[int], object]] = {
        publishing(model, weights): lambda version: publish(master, engine.model),
        f"{model} adopt bf16 to {weights} in place, with its digest": lambda version: (
            engine.update_weights(WeightUpdate.local(master, version))
        ),
    }
    rows = []
    for name, run in ways.items():
        taken = []
        for version in range(1, rounds + 2):
            taken.append(1e3 * seconds_of(partial(run, version), device))
        rows.append(Row(name, "ms", statistics.median(taken[1:])))
    assert _places(engine.model) == places, "publication moved a storage"
    return rows


def _places(model: Transformer) -> list[int]:
    tensors = [linear.weight.tensors.values() for _, linear in model.linears()]  # type: ignore[union-attr]
    return [tensor.data_ptr() for stored in tensors for tensor in stored] + [
        p.data_ptr() for p in model.parameters()
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__, cases=SomeOf(CASES), steps=3, device="auto")
    args = parser.parse_args(argv)
    device, out = settle(parser, args.device, args.out)
    results = Results("step", out, steps=args.steps)
    jobs = [partial(publish_rows, *PUBLISHED, device)]
    jobs += [partial(step_rows, CASES[name], device, args.steps) for name in args.cases]
    for job in jobs:
        with released():
            results.add(job())
    return results.finish("A whole RL step")


if __name__ == "__main__":
    raise SystemExit(main())
