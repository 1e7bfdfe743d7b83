"""Rollouts of log-normal lengths: the batch shrinks as they end, and the tail decides.

Two workloads of 512 rollouts, 8 of a prompt of 128 tokens: GSM8K-like, median 220 tokens, and
MATH-like, median 900, at most 8,192, with lengths divided by SHRINK so that a round takes seconds.
The spreads (sigma 0.6 and 0.87) are those that give means of 1.2 and 1.46 medians. The same list of
lengths is forced on both sides: a rollout is a request of its own with that many tokens and no
stop; the first of each prompt enters one step before the others, which then find the prompt in the
cache.

    ours    nvfp4 weights for the tail and fp8 for large batches, chosen by the number of live rows
    peer    our own bf16 engine
"""

from __future__ import annotations

import gc
import math
import random
import sys
from dataclasses import dataclass
from typing import Any

import torch

from bench.harness import Row, interleave, speed_row, synchronize
from bench.shapes import SHAPES, random_model
from bench.targets import adaptive
from lowroll import Engine, Request

SHRINK = {"gsm8k-like": 1, "math-like": 4}
SIZES = {"gsm8k-like": (220, 0.6, 2048), "math-like": (900, 0.87, 8192)}  # median, sigma, longest
GROUP = 8


@dataclass(frozen=True)
class Lengths:
    """Prompts, and the tokens of each rollout."""

    prompts: list[list[int]]
    tokens: list[list[int]]

    @classmethod
    def drawn(
        cls,
        workload: str,
        vocab_size: int,
        rollouts: int = 512,
        prompt_tokens: int = 128,
        seed: int = 0,
    ) -> Lengths:
        median, sigma, longest = SIZES[workload]
        dice, shrink = random.Random(seed), SHRINK[workload]
        prompts = [
            [dice.randrange(2, vocab_size) for _ in range(prompt_tokens)]
            for _ in range(rollouts // GROUP)
        ]
        tokens = [
            [
                min(longest, max(shrink, round(dice.lognormvariate(math.log(median), sigma))))
                // shrink
                for _ in range(GROUP)
            ]
            for _ in prompts
        ]
        return cls(prompts, tokens)

    @property
    def total(self) -> int:
        return sum(map(sum, self.tokens))

    def cache_tokens(self) -> int:
        """KV positions that hold every rollout at its full length, with its prompt shared."""
        return sum(
            len(ids) + 32 + sum(n + 32 for n in counts)
            for ids, counts in zip(self.prompts, self.tokens, strict=True)
        )


def run(engine: Engine, work: Lengths) -> int:
    """Generate the workload; returns the tokens made."""
    engine.pool.clear_prefixes()
    made = 0
    for sample in (slice(0, 1), slice(1, None)):
        for i, (ids, counts) in enumerate(zip(work.prompts, work.tokens, strict=True)):
            for j, count in list(enumerate(counts))[sample]:
                engine.add(
                    Request(
                        ids,
                        max_tokens=count,
                        min_tokens=count,
                        ignore_eos=True,
                        seed=7,
                        id=f"{i}.{j}",
                    )
                )
        made += _tokens(engine.step())
    while engine.has_work:
        made += _tokens(engine.step())
    synchronize(engine.model.device)
    assert made == work.total, f"{made} tokens instead of {work.total}"
    return made


def _tokens(finished: list[tuple[int, Any]]) -> int:
    return sum(len(rollout.token_ids) for _, group in finished for rollout in group.rollouts)


def rows(model: str, device: torch.device, rounds: int = 2, rollouts: int = 512) -> list[Row]:
    """A row a workload."""
    config = SHAPES[model]
    works = {name: Lengths.drawn(name, config["vocab_size"], rollouts) for name in SIZES}
    most = max(work.cache_tokens() for work in works.values())
    master = random_model(config, device)
    options: dict[str, Any] = {
        "max_batch": rollouts,
        "cache_tokens": most,
        "max_prefill_tokens": 16384,
    }
    ours = Engine(master, weights="nvfp4", large_batch_weights="fp8", **options)
    peer = Engine(master, weights="bf16", **options)
    del master
    gc.collect()
    rows = []
    for name, work in works.items():
        for engine in (ours, peer):
            engine.warm_up()
            run(
                engine,
                Lengths(work.prompts, [[min(n, 24) for n in counts] for counts in work.tokens]),
            )
        print(f"{name}: {work.total} tokens", file=sys.stderr, flush=True)
        seconds = interleave(
            {"adaptive": lambda w=work: run(ours, w), "bf16": lambda w=work: run(peer, w)}, rounds
        )
        rows.append(
            speed_row(
                adaptive(model, name), work.total, "tokens/s", seconds["adaptive"], seconds["bf16"]
            )
        )
    return rows
