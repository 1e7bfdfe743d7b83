"""What replaying a bounded cache costs the learner, beside dense attention of the same tokens.

    python -m bench.replay                                    # on a GPU; a layer of a 7B model
    python -m bench.replay --device cpu --tokens 512 --budget 64 --buffer 16 --repeat 2

A packed row of `count` sequences, whose caches kept random keys. Prints a line a way: milliseconds
of the forward pass and of both passes of a layer's attention, and the most memory that both took
beside the inputs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lowroll.kv.policy.recorder import CompactionRecorder, Dropped
from lowroll.model.attention import Attend, varlen
from lowroll.model.replay import check_evictions, replayed
from lowroll.types import Evictions


def main(argv: Sequence[str] | None = None) -> int:
    """Time both ways in turns."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (
        ("tokens", 4096),
        ("prompt", 256),
        ("count", 2),
        ("budget", 512),
        ("buffer", 128),
        ("heads", 28),
        ("kv-heads", 4),
        ("head-dim", 128),
        ("repeat", 20),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(argv)
    device = torch.device(args.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    lengths = [args.tokens] * args.count
    evictions = [drawn(args, seed) for seed in range(args.count)]
    for one in evictions:
        check_evictions(one, 1, args.kv_heads, args.tokens + 1)
    generator = torch.Generator().manual_seed(0)
    qkv = [
        torch.randn(sum(lengths), heads, args.head_dim, generator=generator)
        .to(device, dtype)
        .requires_grad_()
        for heads in (args.heads, args.kv_heads, args.kv_heads)
    ]
    ways = {"dense": varlen(lengths, device), "replayed": replayed(lengths, evictions, device)}
    forward: dict[str, list[float]] = {name: [] for name in ways}
    both: dict[str, list[float]] = {name: [] for name in ways}
    memory = {name: 0.0 for name in ways}
    for turn in range(args.repeat + 2):
        for name, attend in ways.items():
            with torch.no_grad():
                once = timed(lambda attend=attend: attend(0, *qkv), device)
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
                before = torch.cuda.memory_allocated(device)
            twice = timed(lambda attend=attend: learn(attend, qkv), device)
            if device.type == "cuda":
                memory[name] = (torch.cuda.max_memory_allocated(device) - before) / 2**20
            if turn >= 2:
                forward[name].append(once)
                both[name].append(twice)
    print(f"{args.count} x {args.tokens} tokens, {len(evictions[0].after)} compactions each")
    for name in ways:
        print(
            f"{name:9} forward {median(forward[name]):8.3f} ms   both {median(both[name]):8.3f} ms"
            f"   {memory[name]:8.1f} MiB"
        )
    return 0


def drawn(args: argparse.Namespace, seed: int) -> Evictions:
    """Of a layer whose heads keep random keys."""
    generator = torch.Generator().manual_seed(seed)
    recorder = CompactionRecorder(1, 1, args.kv_heads, args.budget, "cpu")
    cached = args.prompt
    for position in range(args.prompt - 1, args.tokens):
        cached += position >= args.prompt
        if cached >= args.budget + args.buffer:
            scores = torch.rand(1, 1, args.kv_heads, cached, generator=generator)
            kept = scores.topk(args.budget).indices.sort(-1).values
            recorder.compacted([Dropped(0, cached, args.budget, position)], kept)
            cached = args.budget
    return recorder.evictions(0)


def learn(attend: Attend, qkv: Sequence[Tensor]) -> None:
    for x in qkv:
        x.grad = None
    attend(0, *qkv).sum().backward()


def timed(work: Callable[[], object], device: torch.device) -> float:
    """Milliseconds."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return 1e3 * (time.perf_counter() - began)


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


if __name__ == "__main__":
    raise SystemExit(main())
