"""What a compaction costs at the shapes of a model, by the kernels and by plain torch, and what a
policy's watching adds to each decode step.

    python -m bench.compaction --model qwen2.5-7b --rows 8 64 256 --budget 512 --buffer 128

A line a policy and number of rows: milliseconds of a compaction of all rows and layers (the choice
and the move; from the host's first call to the end on the device), and milliseconds that watching
adds to a step, within a graph. Needs a CUDA device.

Legend: B rows, P pages of a row, K keys that stay.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple
from unittest.mock import patch

import torch

from bench.shapes import SHAPES
from lowroll.engine.runner import MOST_COMPACTED
from lowroll.kernels import launch
from lowroll.kv.cache import DecodeRows, KVCache
from lowroll.kv.policy.base import Selector
from lowroll.kv.policy.table import POLICIES, make
from lowroll.model.spec import ModelSpec, spec_from_config

PAGE = 16


class Cost(NamedTuple):
    """Milliseconds of a compaction of all rows, and of a step's watching."""

    compaction: float
    watching: float


def time_compaction(
    spec: ModelSpec,
    rows: int,
    budget: int = 512,
    buffer: int = 128,
    policies: Sequence[str] = tuple(name for name in POLICIES if name != "dense"),
    dtype: torch.dtype = torch.bfloat16,
    plain: bool = False,
) -> dict[str, Cost]:
    """What each policy costs when all rows are full at once. plain: by plain torch."""
    pages = -(-(budget + buffer) // PAGE)
    cache = KVCache(spec, rows * pages, PAGE, dtype, "cuda")
    generator = torch.Generator(device="cuda").manual_seed(0)
    for buffer_ in (*cache.keys, *cache.values):
        buffer_.normal_(generator=generator)
    table_BP = torch.randperm(rows * pages, device="cuda", generator=generator).view(rows, pages)
    lengths_B = torch.full((rows,), budget + buffer, dtype=torch.int32, device="cuda")
    slots_B = torch.arange(rows, device="cuda")
    full = DecodeRows(slots_B, table_BP.int(), lengths_B, lengths_B.long() - 1)
    offsets = torch.arange(PAGE, device="cuda")
    to_BK = (table_BP[..., None] * PAGE + offsets).flatten(1)[:, :budget].contiguous()
    found = {}
    with patch.object(launch, "triton", None if plain else launch.triton):
        for name in policies:
            selector = make(name, budget=budget, buffer=buffer).selector(spec, cache, rows)
            assert selector is not None
            found[name] = Cost(
                _wall(lambda selector=selector: _compact(selector, cache, full, to_BK)),
                _watching(selector, spec, full, dtype),
            )
    return found


@torch.inference_mode()
def _compact(selector: Selector, cache: KVCache, full: DecodeRows, to_BK: torch.Tensor) -> None:
    """As the runner does."""
    for first in range(0, len(full.slots_B), MOST_COMPACTED):
        at = slice(first, first + MOST_COMPACTED)
        some = DecodeRows(
            full.slots_B[at], full.table_BP[at], full.lengths_B[at], full.positions_B[at]
        )
        kept_LBGK = selector.compact(some, to_BK.shape[1])
        cache.keep(some.table_BP, kept_LBGK, to_BK[at])


@torch.inference_mode()
def _watching(selector: Selector, spec: ModelSpec, rows: DecodeRows, dtype: torch.dtype) -> float:
    if not selector.watches:
        return 0.0
    shape = (len(rows.slots_B), spec.num_heads, spec.head_dim)
    q_BHd = torch.randn(shape, device="cuda").to(dtype)

    def step() -> None:
        for layer in range(spec.num_layers):
            selector.decoded(layer, q_BHd, rows)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return _wall(graph.replay)


def _wall(call: Callable[[], object], times: int = 5) -> float:
    """Milliseconds of a call, the least of several."""
    best = float("inf")
    for _ in range(times):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best * 1e3


def main(arguments: list[str] | None = None) -> int:
    """Print what each policy costs, by the kernels and by plain torch."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="qwen2.5-7b", choices=SHAPES)
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 64, 256])
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--buffer", type=int, default=128)
    options = parser.parse_args(arguments)
    spec = spec_from_config(SHAPES[options.model])
    print("policy      rows   compaction ms: kernels   torch   watching ms a step: kernels   torch")
    for rows in options.rows:
        fast, slow = (
            time_compaction(spec, rows, options.budget, options.buffer, plain=plain)
            for plain in (False, True)
        )
        for name, cost in fast.items():
            print(
                f"{name:<10} {rows:>5} {cost.compaction:>24.2f} {slow[name].compaction:>7.2f} "
                f"{cost.watching:>29.3f} {slow[name].watching:>7.3f}",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
