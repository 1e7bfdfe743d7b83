"""What a pool of engines costs the process that has it: requests a second and CPU time a request,
over fake engines that answer at once.

    python -m bench.pool [--engines 1 2 8] [--requests 400] [--samples 8] [--tokens 128] [--record]

Fakes are children and take the machine's other cores; with fewer cores than engines they are what
limits the rate, while the CPU time of this process stays what it is.
"""

from __future__ import annotations

import argparse
import time
from contextlib import ExitStack

from lowroll.engine.remote.pool import EnginePool
from lowroll.types import Request
from tests.fixtures.fake_engine import started


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--engines", type=int, nargs="+", default=[1, 2, 8])
    p.add_argument("--requests", type=int, default=400)
    p.add_argument("--samples", type=int, default=8)
    p.add_argument("--tokens", type=int, default=128)
    given = p.parse_args()
    print(f"{given.samples} samples of {given.tokens} tokens a request")
    print("engines  requests/s  CPU ms/request  us/token")
    for count in given.engines:
        measure(count, given.requests, given.samples, given.tokens)


def measure(count: int, total: int, samples: int, tokens: int) -> None:
    """One row."""
    requests = [
        Request([2] * 64, n=samples, max_tokens=tokens, seed=1, id=f"r{i}", ignore_eos=True)
        for i in range(total)
    ]
    with ExitStack() as stack:
        urls = [stack.enter_context(started()).url for _ in range(count)]
        pool = stack.enter_context(EnginePool(urls, start_s=60.0))
        pool.generate(requests[: 8 * count])
        wall, cpu = time.perf_counter(), time.process_time()
        pool.generate(requests)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    each = 1e6 * cpu / (total * samples * tokens)
    print(f"{count:7}  {total / wall:10.0f}  {1e3 * cpu / total:14.2f}  {each:12.2f}", flush=True)


if __name__ == "__main__":
    main()
