"""Decode attention of one layer over a bfloat16 cache and over an 8-bit one, captured and replayed.

The shapes are a 7B model's (28 query heads, 4 KV heads of 128; a 32B model has 40 and 8, one of
1.5B 12 and 2), pages of 16 in random order, every row at the same length. Several layers' caches
are replayed in turns, more than the L2 cache holds. Bytes are those of the stored keys and values,
with their scales.

    python -m bench.kv_decode [--batch 64] [--contexts 4096,16384,32768] [--shared 0] [--heads 28,4]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from lowroll.kernels.attention import paged
from lowroll.kernels.attention.codes import Codes
from lowroll.kernels.attention.decode import paged_decode
from lowroll.kernels.attention.decode8 import paged_decode8

D, PAGE, LAYERS = 128, 16, 2
REPLAYS, ROUNDS = 10, 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--contexts", default="4096,16384,32768")
    parser.add_argument("--shared", type=int, default=0, help="prompt tokens that 8 rows share")
    parser.add_argument("--heads", default="28,4", help="query heads and KV heads")
    chosen = parser.parse_args()
    heads, kv_heads = map(int, chosen.heads.split(","))
    for context in map(int, chosen.contexts.split(",")):
        measure(chosen.batch, context, chosen.shared, heads, kv_heads)


@torch.inference_mode()
def measure(batch: int, context: int, shared: int, heads: int, kv_heads: int) -> None:
    """Print microseconds a layer and TB/s of each kernel."""
    q, k, v = (torch.randn(batch, n, D).bfloat16().cuda() for n in (heads, kv_heads, kv_heads))
    pages = -(-context // PAGE)
    table = torch.randperm(batch * pages, device="cuda").int().view(batch, pages)
    for row in range(batch):
        table[row, : shared // PAGE] = table[row // 8 * 8, : shared // PAGE]
    lengths = torch.full((batch,), context, dtype=torch.int32, device="cuda")
    shape = (batch * pages, PAGE, kv_heads)
    channels = torch.arange(16, device="cuda").repeat(kv_heads, 1) * 8

    def numbers() -> Tensor:
        return torch.randn(*shape, D, device="cuda", dtype=torch.bfloat16)

    def codes(width: int) -> Tensor:
        return torch.randint(0, 120, (*shape, width), dtype=torch.uint8, device="cuda")

    tail = (table, lengths, D**-0.5)
    plain = [(numbers(), numbers()) for _ in range(LAYERS)]
    took = {"bf16": _time([partial(paged_decode, q, k, v, *p, *tail) for p in plain])}
    del plain
    coded = [Codes(codes(D), codes(D), codes(16), codes(2).fill_(120)) for _ in range(LAYERS)]
    calls = [partial(paged_decode8, q, k, v, c, channels, *tail) for c in coded]
    kernel = "paged.cu" if paged.supports(q, k, v, coded[0].keys_TGd) else "triton"
    took[f"fp8 {kernel}"] = _time(calls)
    fewest, paged.FEWEST = paged.FEWEST, 1 << 30
    took["fp8 triton"] = _time(calls)
    paged.FEWEST = fewest
    for name, us in took.items():
        token = 4 * D if name == "bf16" else 2 * D + 18
        rate = batch * context * kv_heads * token / us / 1e6
        print(
            f"batch {batch} context {context} shared {shared} {name:12} {us:8.1f} us a layer "
            f"{rate:5.2f} TB/s  {took['bf16'] / us:.2f}x",
            flush=True,
        )


def _time(calls: Sequence[Callable[[], Tensor]]) -> float:
    """Microseconds of a call, median of the rounds."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    rounds = []
    for _ in range(ROUNDS):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(REPLAYS):
            graph.replay()
        stop.record()
        stop.synchronize()
        rounds.append(start.elapsed_time(stop) * 1000 / REPLAYS / len(calls))
    return statistics.median(rounds)


if __name__ == "__main__":
    main()
