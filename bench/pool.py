"""What HTTP between a run and its engines costs: requests a second, and CPU time of the pool's process
and of a server's, over engines that have all tokens at once (`bench.instant`).

    python -m bench.pool [--engines 1 2] [--requests 400] [--samples 8] [--tokens 128]
    python -m bench.pool --samples 1 --prompt 256

Servers are children and take the machine's other cores; with fewer cores than engines they are what
limits the rate, while the CPU times stay what they are.
"""

from __future__ import annotations

import argparse
import time
from contextlib import ExitStack

from bench.instant import started
from lowroll.engine.remote.pool import EnginePool
from lowroll.types import Request


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--engines", type=int, nargs="+", default=[1, 2])
    p.add_argument("--requests", type=int, default=400)
    p.add_argument("--samples", type=int, default=8)
    p.add_argument("--tokens", type=int, default=128)
    p.add_argument("--prompt", type=int, default=64)
    given = p.parse_args()
    print(f"{given.samples} samples of {given.tokens} tokens a request, {given.prompt} of a prompt")
    print("engines  requests/s  CPU ms/request: pool  server  us/token: pool  server")
    for count in given.engines:
        measure(count, given.requests, given.samples, given.tokens, given.prompt)


def measure(count: int, total: int, samples: int, tokens: int, prompt: int) -> None:
    """One row."""
    ids = [300 + i for i in range(prompt)]
    requests = [
        Request(ids, n=samples, max_tokens=tokens, seed=1, id=f"r{i}", ignore_eos=True)
        for i in range(total)
    ]
    with ExitStack() as stack:
        servers = [stack.enter_context(started()) for _ in range(count)]
        pool = stack.enter_context(EnginePool([one.url for one in servers], start_s=60.0))
        pool.generate(requests[: 8 * count])
        before = sum(one.cpu_s() for one in servers)
        wall, cpu = time.perf_counter(), time.process_time()
        pool.generate(requests)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        theirs = sum(one.cpu_s() for one in servers) - before
    drawn = total * samples * tokens
    print(
        f"{count:7}  {total / wall:10.0f}  {1e3 * cpu / total:20.2f}  {1e3 * theirs / total:6.2f}"
        f"  {1e6 * cpu / drawn:14.2f}  {1e6 * theirs / drawn:6.2f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
