"""Rollouts a second of several engines over those of one, each a `lowroll serve` on a GPU of its own.

    python -m bench.replicas qwen2.5-1.5b --weights bf16          two GPUs; must 1.9x
    python -m bench.replicas qwen2.5-7b --engines 4 --requests 512
    python -m bench.replicas tiny --cpu --requests 8 --tokens 8   small: does it run?

MODEL is a folder, or the name of shapes that get random weights. All engines run during the whole
measurement; a pool of the first alone and a pool of all draw the same requests in turns, each of
`--samples` samples of `--tokens` tokens. Two rows: as a level above 0 asks (each request by itself), and
as level 0 does (in parts). Ends with 1 when a ratio is less than 0.95 for each engine, unless on a
CPU, whose cores all engines share.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

from bench.harness import Row, finish, interleave, parser_of, running, speed_row
from bench.roles import folder
from lowroll.engine.remote.pool import EnginePool
from lowroll.engine.remote.replica import PoolOptions
from lowroll.runs.roles.devices import visible
from lowroll.types import Request

ADMIN = "BENCH_ADMIN_TOKEN"
TOKEN = "the-admin-of-these-engines"
MUST = 0.95  # of each engine
START_S = 900.0
DRAWN_S = 3600.0  # of one round


def serving(args: argparse.Namespace, gpu: int) -> AbstractContextManager[subprocess.Popen[str]]:
    words = ["serve", args.model, "--port", 0, "--weights", args.weights]
    words += ["--cache-tokens", args.cache, "--max-batch", args.batch]
    words += ["--admin-token-env", ADMIN, "--max-requests", 8192]
    words += ["--device", "cpu" if args.cpu else "cuda"]
    env = os.environ | {ADMIN: TOKEN}
    env |= {"OMP_NUM_THREADS": "1"} if args.cpu else {"CUDA_VISIBLE_DEVICES": visible()[gpu]}
    return running("lowroll", *words, env=env)


def address(process: subprocess.Popen[str]) -> str:
    """Return where it serves, once it says so. RuntimeError when it ends before."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("serving"):
            return line.split()[-1].removesuffix("/v1")
    raise RuntimeError(f"an engine has ended with {process.wait(30.0)} before it served")


def requests(args: argparse.Namespace, seed: int) -> list[Request]:
    return [
        Request(
            [2 + (seed + 31 * i + 7 * j) % 50 for j in range(args.prompt)],
            n=args.samples,
            max_tokens=args.tokens,
            seed=seed,
            id=f"{seed}/{i}",
            ignore_eos=True,
        )
        for i in range(args.requests)
    ]


def one_by_one(pool: EnginePool, asked: list[Request]) -> None:
    open_, end = {pool.add(request) for request in asked}, time.monotonic() + DRAWN_S
    while open_:
        if time.monotonic() > end:
            raise RuntimeError(f"{len(open_)} requests were not answered within {DRAWN_S:g} s")
        open_ -= {handle for handle, _ in pool.step()}


def measure(args: argparse.Namespace, one: EnginePool, several: EnginePool) -> list[Row]:
    ways: dict[str, Callable[[EnginePool, list[Request]], Any]] = {
        "each by itself": one_by_one,
        "in parts": lambda pool, asked: pool.generate(asked),
    }
    found = []
    for name, draw in ways.items():
        seeds = iter(range(1 << 20))
        sides = {
            "one": lambda draw=draw, seeds=seeds: draw(one, requests(args, next(seeds))),
            "several": lambda draw=draw, seeds=seeds: draw(several, requests(args, next(seeds))),
        }
        seconds = interleave(sides, args.rounds, warm=1)
        must = None if args.cpu else MUST * args.engines
        title = f"{args.title} {args.weights}: {args.engines} engines over one, {name}"
        amount = args.requests * args.samples
        row = speed_row(title, amount, "rollouts/s", seconds["several"], seconds["one"], must)
        found.append(row)
    return found


def arguments(words: list[str] | None) -> argparse.Namespace:
    """Return the options; end the command where this machine has not got what they ask for."""
    parser = parser_of(
        __doc__,
        engines=2,
        weights="bf16",
        requests=256,
        samples=8,
        tokens=512,
        prompt=128,
        batch=256,
        cache=262_144,
        rounds=3,
        cpu=False,
    )
    parser.add_argument("model")
    args = parser.parse_args(words)
    if args.engines < 2:
        parser.error("--engines: two at least are compared with one")
    if not args.cpu and (gpus := len(visible())) < args.engines:
        parser.error(f"--engines: {args.engines} need a GPU each, and {gpus} are here (or --cpu)")
    args.title = Path(args.model).name
    return args


def main(words: list[str] | None = None) -> None:
    args = arguments(words)
    with ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm"))
        args.model = folder(args, Path(scratch))
        engines = [stack.enter_context(serving(args, i)) for i in range(args.engines)]
        urls = [address(engine) for engine in engines]
        pools = [
            stack.enter_context(EnginePool(some, PoolOptions(admin_token=TOKEN, start_s=START_S)))
            for some in (urls[:1], urls)
        ]
        rows = measure(args, *pools)
    given = {"words": words or sys.argv[1:]}
    sys.exit(finish("Several engines over one", "replicas", rows, args.out, **given))


if __name__ == "__main__":
    main()
