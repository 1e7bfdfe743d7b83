"""What do a program and a test cost in the sandbox of `code`?

    python -m bench.sandbox --cases 200

Prints milliseconds of wall clock: to start a sandbox for one program of one test, and each further
test, for programs that read and write and for functions; and tests a second of as many sandboxes as
there are cores.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

from lowroll.envs.sandbox import PRELUDE, Case, SandboxLimits, isolation, run_cases

PROGRAMS = {
    "standard input": ("print(sum(map(int, input().split())))", Case("3 4", "7")),
    "function": (f"{PRELUDE}def add(a, b):\n    return a + b", Case([3, 4], 7, "add")),
}
REPEATS = 7


def seconds(source: str, case: Case, count: int) -> float:
    start = time.monotonic()
    verdict = run_cases(source, [case] * count, SandboxLimits(total_seconds=600))
    assert verdict.all_passed, verdict.results[0]
    return time.monotonic() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=200, help="tests of a program")
    count = parser.parse_args().cases
    cores = len(os.sched_getaffinity(0))
    print(f"walls: {isolation.found().name}; {cores} cores")
    for name, (source, case) in PROGRAMS.items():
        first = statistics.median(seconds(source, case, 1) for _ in range(REPEATS))
        more = (seconds(source, case, count) - first) / (count - 1)
        with ThreadPoolExecutor(cores) as pool:
            start = time.monotonic()
            list(pool.map(seconds, [source] * cores, [case] * cores, [count] * cores))
            rate = cores * count / (time.monotonic() - start)
        print(
            f"{name:<15} start {first * 1e3:.0f} ms, a test {more * 1e3:.1f} ms, {rate:.0f} tests/s"
        )


if __name__ == "__main__":
    main()
