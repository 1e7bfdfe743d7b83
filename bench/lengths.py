"""Rollouts of log-normal lengths: the batch shrinks as they end, and the tail decides.

Two workloads of 512 rollouts, 8 of a prompt of 128 tokens: GSM8K-like, median 220 tokens, and
MATH-like, median 900, at most 8,192, with lengths divided by 4 so that a round takes seconds.
The spreads (sigma 0.6 and 0.87) give means of 1.2 and 1.46 medians. The same lengths are forced on both
sides: a rollout is a request of its own with that many tokens and no stop; the first of each prompt
enters one step before the others, which then find the prompt in the cache.

    ours    nvfp4 weights for the tail and fp8 for large batches, chosen by the number of live rows
    peer    our own bf16 engine
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from bench.harness import Row, interleave, released, say, speed_row, synchronize
from bench.shapes import SHAPES, random_model
from bench.targets import adaptive
from lowroll import Engine, Request

# median, sigma, longest, and what lengths are divided by
SIZES = {"gsm8k-like": (220, 0.6, 2048, 1), "math-like": (900, 0.87, 8192, 4)}
ROLLOUTS, GROUP, PROMPT = 512, 8, 128  # and tokens of a prompt
WARM_UP = 24  # tokens of a rollout


@dataclass(frozen=True)
class Lengths:
    """Prompts of equal length, and the tokens of each rollout of each."""

    prompts: list[list[int]]
    tokens: list[list[int]]

    @classmethod
    def drawn(
        cls,
        vocab_size: int,
        median: int,
        sigma: float,
        longest: int,
        rollouts: int,
        shrink: int = 1,
        prompt: int = PROMPT,
    ) -> Lengths:
        """Draw prompts of so many tokens and log-normal lengths, which are divided by `shrink`."""
        dice = random.Random(0)

        def length() -> int:
            drawn = round(dice.lognormvariate(math.log(median), sigma))
            return min(longest, max(shrink, drawn)) // shrink

        prompts = [
            [dice.randrange(2, vocab_size) for _ in range(prompt)] for _ in range(rollouts // GROUP)
        ]
        return cls(prompts, [[length() for _ in range(GROUP)] for _ in prompts])

    def cut(self, most: int) -> Lengths:
        return Lengths(self.prompts, [[min(n, most) for n in counts] for counts in self.tokens])

    @property
    def total(self) -> int:
        return sum(map(sum, self.tokens))

    @property
    def longest(self) -> int:
        return max(map(max, self.tokens))

    def cache_tokens(self) -> int:
        """Return the KV positions that hold every rollout at its full length, with its prompt
        shared."""
        return sum(
            len(ids) + 32 + sum(n + 32 for n in counts)
            for ids, counts in zip(self.prompts, self.tokens, strict=True)
        )


def run(engine: Engine, work: Lengths) -> int:
    engine.pool.clear_prefixes()
    made = 0
    for sample in (slice(0, 1), slice(1, None)):
        for i, (ids, counts) in enumerate(zip(work.prompts, work.tokens, strict=True)):
            for j, count in list(enumerate(counts))[sample]:
                engine.add(Request(ids, max_tokens=count, ignore_eos=True, seed=7, id=f"{i}.{j}"))
        made += _tokens(engine.step())
    while engine.has_work:
        made += _tokens(engine.step())
    synchronize(engine.model.device)
    assert made == work.total, f"{made} tokens instead of {work.total}"
    return made


def _tokens(finished: list[tuple[int, Any]]) -> int:
    return sum(len(rollout.token_ids) for _, group in finished for rollout in group.rollouts)


def rows(model: str, device: torch.device, rounds: int = 2) -> list[Row]:
    config = SHAPES[model]
    works = {
        name: Lengths.drawn(config["vocab_size"], median, sigma, longest, ROLLOUTS, shrink)
        for name, (median, sigma, longest, shrink) in SIZES.items()
    }
    options: dict[str, Any] = {
        "max_batch": ROLLOUTS,
        "cache_tokens": max(work.cache_tokens() for work in works.values()),
        "max_prefill_tokens": 16384,
    }
    with released():
        master = random_model(config, device)
        ours = Engine(master, weights="nvfp4", large_batch_weights="fp8", **options)
        peer = Engine(master, weights="bf16", **options)
        del master
    return [
        compare(adaptive(model, name), {"adaptive": ours, "bf16": peer}, work, rounds)
        for name, work in works.items()
    ]


def compare(title: str, engines: dict[str, Engine], work: Lengths, rounds: int) -> Row:
    for engine in engines.values():
        engine.warm_up()
        run(engine, work.cut(WARM_UP))
    say(f"{title}: {work.total} tokens")
    runs = {name: partial(run, engine, work) for name, engine in engines.items()}
    ours, peer = interleave(runs, rounds).values()
    return speed_row(title, work.total, "tokens/s", ours, peer)
