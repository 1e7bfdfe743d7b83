"""vLLM's own bench client (`vllm bench serve`) in a process that keeps it loaded: JSON lines in,
JSON lines out (`bench.peer.Peer`).

It runs with the Python that vLLM is installed for, and needs no lowroll. The first line in is {},
the first line out {"ready": true, "vllm": ...}. Then each

    {"arguments": ["--base-url", "http://127.0.0.1:8000", ...]}

are arguments of `vllm bench serve`, answered by the numbers that it stores with --save-result. What
vLLM prints goes to the error stream.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

Bench = Callable[[list[str]], dict[str, Any]]


def load() -> tuple[Bench, dict[str, Any]]:
    """vLLM's command as a function, and what `ready` says of it."""
    import vllm
    from vllm.benchmarks import serve

    parser = argparse.ArgumentParser()
    serve.add_cli_args(parser)
    serve.get_tokenizer = cache(serve.get_tokenizer)  # seconds, for a large one

    def bench(arguments: list[str]) -> dict[str, Any]:
        found = asyncio.run(serve.main_async(parser.parse_args(arguments)))
        return {key: value for key, value in found.items() if isinstance(value, int | float | str)}

    return bench, {"ready": True, "vllm": vllm.__version__}


def serve(
    lines: Iterable[str],
    say: Callable[[dict[str, Any]], None],
    load: Callable[[], tuple[Bench, dict[str, Any]]],
) -> None:
    """Answer every line until they end."""
    orders = iter(lines)
    next(orders)
    bench, ready = load()
    say(ready)
    for line in orders:
        say(bench(json.loads(line)["arguments"]))


def main() -> None:
    for name, value in (
        ("HF_HUB_OFFLINE", "1"),
        ("VLLM_NO_USAGE_STATS", "1"),
        ("VLLM_LOGGING_LEVEL", "WARNING"),
    ):
        os.environ.setdefault(name, value)
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what it prints must not get between the answers

    def say(answer: dict[str, Any]) -> None:
        print(json.dumps(answer), file=channel, flush=True)

    serve(sys.stdin, say, load)


if __name__ == "__main__":
    main()
