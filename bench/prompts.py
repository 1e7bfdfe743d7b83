"""The pass over prompts: how long it takes, by itself and beside rows that decode, and where its
time goes.

    turn       ms of a turn of the engine with so many prompt tokens, in prompts of 512, beside so many
               rows that decode: a step of theirs before the pass, or in it (`one_pass`)
    host       ms of the turn until the device has all of its work
    part       us a prompt token of each kind of kernel, by torch's profiler (CUDA)

    python -m bench.prompts [--model NAME] [--format NAME] [--tokens 512,1024,2048,4096,8192]
                            [--rows 0,64,256] [--prompt 512] [--turns 5] [--out FOLDER]

Rows are added to `prompts.json`.
"""

from __future__ import annotations

import argparse
import random
import re
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from bench.harness import Row, finish, parser_of, say, settle, synchronize
from bench.shapes import SHAPES, random_model
from lowroll import Engine, Request
from lowroll.quant.formats import formats

CONTEXT = 512  # tokens of a row that decodes, when it begins
STAND = 96  # that a row may draw until all others stand
KINDS = {  # of kernels, by their names; the first that is found counts
    "attention": r"flash|fmha|attn|attention|sdpa|paged",
    "products": r"gemm|nvjet|cutlass|xmma|splitk|matmul|cublas",
    "norms": r"norm",
    "rotations": r"rotat|rope",
    "gate": r"silu|swiglu|gate",
    "cache": r"write_pages|index_copy|index_put",
    "draw": r"draw|sample|softmax",
    "copies": r"copy|memcpy|cat|index|gather",
}


class Turns:
    """An engine with rows that decode, and turns in which prompts run beside them."""

    def __init__(self, engine: Engine, prompt: int) -> None:
        self.engine, self.prompt = engine, prompt
        self.dice = random.Random(0)
        self.rows: list[int] = []

    def stand(self, rows: int, room: int) -> None:
        """Have so many rows decode, which can draw `room` tokens."""
        for handle in self.rows:
            self.engine.abort(handle)
        while self.engine.has_work:
            self.engine.step()
        self.rows = [self._add(CONTEXT, room) for _ in range(rows)]
        while any(not drawn.token_ids for h in self.rows for drawn in self.engine.so_far(h)):
            self.engine.step()

    def turn(self, tokens: int) -> tuple[float, float]:
        """Seconds of a turn with so many prompt tokens, and until the device has its work."""
        for _ in range(tokens // self.prompt):
            self._add(self.prompt, 1)
        synchronize(self.engine.model.device)
        given: list[float] = []
        began = time.perf_counter()
        ended = self.engine.step(lambda: given.append(time.perf_counter() - began))
        seconds = time.perf_counter() - began
        if len(ended) != tokens // self.prompt:
            raise RuntimeError(f"{len(ended)} prompts ran in a turn instead of {tokens} tokens'")
        return seconds, given[0]

    def _add(self, prompt: int, response: int) -> int:
        vocab = self.engine.spec.vocab_size
        ids = [self.dice.randrange(vocab // 100, vocab) for _ in range(prompt)]
        return self.engine.add(Request(ids, max_tokens=response, ignore_eos=True, seed=7))


def measure(turns: Turns, name: str, args: argparse.Namespace) -> list[Row]:
    """Every number of prompt tokens beside every number of rows."""
    rows = []
    ways = (False, True)
    for beside in args.rows:
        turns.stand(beside, 2 * (args.turns + 2) * len(args.tokens) + STAND)
        for tokens in args.tokens:
            for together in ways if beside else ways[:1]:
                turns.engine.runner.one_pass = together
                times = [turns.turn(tokens) for _ in range(args.turns + 2)][2:]
                whole, host = (statistics.median(one) * 1e3 for one in zip(*times, strict=True))
                way = " in one pass" if together else ""
                where = f"{name}, {tokens} prompt tokens beside {beside} rows{way}"
                rows.append(Row(f"{where}: turn", "ms", whole))
                rows.append(Row(f"{where}: host", "ms", host))
                say(f"{where}: {whole:.2f} ms, {host:.2f} of the host")
    return rows


def parts(turns: Turns, name: str, tokens: int) -> list[Row]:
    """Of a pass by itself."""
    turns.stand(0, 1)
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        turns.turn(tokens)
        synchronize(turns.engine.model.device)
    spent: Counter[str] = Counter()
    kernels: Counter[str] = Counter()
    for event in profile.key_averages():
        spent[kind(event.key)] += event.self_device_time_total
        kernels[event.key] += event.self_device_time_total
    for kernel, us in kernels.most_common(16):
        say(f"{us / 1e3:8.2f} ms {kind(kernel):10} {kernel[:110]}")
    return [
        Row(f"{name}, {tokens} prompt tokens: {what}", "us a token", us / tokens)
        for what, us in spent.most_common()
    ]


def kind(kernel: str) -> str:
    """What a kernel is for, by its name."""
    name = kernel.lower()
    return next((what for what, words in KINDS.items() if re.search(words, name)), "others")


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    most = max(args.rows) + max(args.tokens) // args.prompt
    room = CONTEXT + 2 * (args.turns + 2) * len(args.tokens) + STAND + 64
    config: dict[str, Any] = SHAPES[args.model]
    engine = Engine(
        random_model(config, args.device),
        weights=args.format,
        max_batch=most,
        max_prefill_tokens=max(*args.tokens, CONTEXT),
        cache_tokens=max(args.rows) * room + max(args.tokens) + most * 64,
        lookahead=1,
    )
    engine.warm_up()
    turns, name = Turns(engine, args.prompt), f"{args.model} {args.format}"
    rows = measure(turns, name, args)
    if args.device.type == "cuda":
        engine.runner.one_pass = False
        for tokens in (min(args.tokens), max(args.tokens)):
            rows += parts(turns, name, tokens)
    settings = {"prompt": args.prompt, "context": CONTEXT}
    return finish("The pass over prompts", "prompts", rows, args.out, **settings)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of(
        __doc__,
        tokens=[512, 1024, 2048, 4096, 8192],
        rows=[0, 64, 256],
        prompt=512,
        turns=5,
        device="auto",
    )
    parser.add_argument("--model", default="qwen2.5-7b", choices=SHAPES, metavar="NAME")
    parser.add_argument("--format", default="bf16", choices=formats(), metavar="NAME")
    args = parser.parse_args(argv)
    args.device, args.out = settle(parser, args.device, args.out)
    return args


if __name__ == "__main__":
    raise SystemExit(main())
