"""Caches that stop growing, and caches of 8 bits, against our own dense bfloat16 cache on one GPU.

Steady decoding at a mean context: samples are placed behind prompts of noise (`bench.placed`), one
each, and nothing is shared. Random weights of exact shapes (`bench.shapes`), a context of 65,536.

    dense, fp8      all rows stand at the mean context; a round is 32 steps
    rkv, snapkv,    budget 512, buffer 128: a cache holds 512 to 639 keys wherever its row stands, so one
    streaming, h2o  measurement serves every context. Rows are spread over the buffer, so that in each
                    round of 128 steps every row is compacted once, and few at a time
    rkv+fp8         both

    decode step     ms, the median of the rounds; over the dense bfloat16 cache at the same batch. Where the
                    dense cache cannot hold 256 rows, at as many as it holds
    roofline        share of the step that reading weights, head and cached keys and values takes at this
                    device's measured bandwidth (`bench.roofline`)
    compaction      ms for one sample's cache, and the share of a round, in a round of its own
    largest batch   rows whose worst case fits (`kv.policy.base.footprint`): a prompt of 256 tokens, and
                    responses of up to twice the mean context, in the memory that weights and 6 GB leave;
                    1,024 at most. Tokens/s of steady decoding with so many rows
    in step         rkv with all rows compacted in one turn; the same behind real positions of 16,384

    python -m bench.kv [--weights bf16 nvfp4] [--caches rkv fp8 rkv+fp8 snapkv streaming h2o]
                       [--contexts 4096,16384,32768] [--batches 64,256] [--rounds 2]
                       [--parts equal largest position] [--peer vllm|none] [--out FOLDER]

The dense cache is measured first in every run, since two such caches do not fit. vLLM 0.24.0 (dense,
its own cache of bfloat16) runs last, at the same contexts and batches of up to a million tokens: real
prompts, which its prefix cache serves when it decodes; ms = (seconds for 129 tokens - seconds for 1) /
128. Rows are added to `kv.json`.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench import targets
from bench.decode import SLACK, dense_bytes
from bench.harness import (
    OneOf,
    Results,
    Row,
    SomeOf,
    less_row,
    parser_of,
    released,
    say,
    settle,
)
from bench.peer import Peer, PeerFailed, share_of_gpu, start_vllm
from bench.placed import Compacting, Placed
from bench.roofline import bandwidth, kv_bytes_per_token, weight_bytes
from bench.shapes import SHAPES, random_model
from lowroll import Engine
from lowroll.kv.policy.base import CachePolicy, footprint, num_slots
from lowroll.kv.policy.bounded import Bounded
from lowroll.kv.policy.dense import DENSE
from lowroll.kv.policy.table import make
from lowroll.model.device import free_memory
from lowroll.model.transformer import Transformer
from lowroll.quant.formats import formats

PARTS = ("equal", "largest", "position")
PAGE = 16
PROMPT = 256  # tokens, of the worst case that admission reserves
GROWN_STEPS = 32  # of a round, where nothing is compacted
MOST_ROWS = 1024
CONTEXT = 65536  # the model's
PEER_TOKENS = 129
MOST_PEER = 1 << 20  # tokens of prompts that vLLM is given
PEER_PREFILL_S = 300.0


@dataclass(frozen=True)
class Cache:
    """A kind of cache. only: the one batch size that it is measured at."""

    kv: CachePolicy = DENSE
    kv_dtype: str | None = None
    only: int | None = None

    @property
    def options(self) -> dict[str, Any]:
        return {"kv": self.kv} | ({"kv_dtype": self.kv_dtype} if self.kv_dtype else {})


DENSE_CACHE = "dense"
CACHES: dict[str, Cache] = {
    DENSE_CACHE: Cache(),
    "rkv": Cache(make("rkv", budget=512, buffer=128)),
    "fp8": Cache(kv_dtype="fp8"),
    "rkv+fp8": Cache(make("rkv", budget=512, buffer=128), "fp8"),
    "snapkv": Cache(make("snapkv", budget=512, buffer=128)),
    "streaming": Cache(make("streaming", budget=512, buffer=128)),
    "h2o": Cache(make("h2o", budget=512, buffer=128), only=64),
}


@dataclass(frozen=True)
class Measured:
    """Rounds of one batch. cached: keys of a row, the mean over rows and steps."""

    batch: int
    rounds: list[float]  # ms a step
    cached: float
    compacting: Compacting | None = None

    @property
    def ms(self) -> float:
        return statistics.median(self.rounds)

    @property
    def tokens_per_s(self) -> float:
        return self.batch / self.ms * 1e3

    def over(self, peer: Measured) -> tuple[float, tuple[float, float]]:
        """Return how many times shorter its step is than the peer's, and the range over rounds."""
        extent = min(peer.rounds) / max(self.rounds), max(peer.rounds) / min(self.rounds)
        return peer.ms / self.ms, extent


Equal = dict[tuple[str, int, int], Measured]  # by cache, context and batch


@dataclass
class Memory:
    """What rows cost under a cache: found with an engine of one page."""

    token_bytes: float  # of the cache, a key of all layers
    state_bytes: float  # of the policy, a sample
    free: float  # that cache and state may take

    def rows(self, kv: CachePolicy, context: int) -> int:
        """Return the largest batch when responses of twice the mean context are reserved."""
        prompt = min(PROMPT, context)
        pages = footprint(kv, prompt, 2 * context - prompt, PAGE).alone
        each = pages * PAGE * self.token_bytes + self.state_bytes
        return min(MOST_ROWS, int((self.free - 2 * self.state_bytes) / each))


@dataclass
class Bench:
    """One model in one format, with the caches in turn. `store` gets rows as they are made."""

    name: str
    format: str
    base: Transformer
    args: argparse.Namespace
    read: float  # bytes a second
    store: Callable[..., None]
    room: float  # bytes for a cache
    dense_largest: dict[int, Measured] = field(default_factory=dict)  # by context
    equal: Equal = field(default_factory=dict)
    failed: bool = False

    def run(self) -> None:
        for name in (DENSE_CACHE, *self.args.caches):
            try:
                say(f"{self.name} {self.format}: {name}")
                cache = CACHES[name]
                with released():
                    if isinstance(cache.kv, Bounded):
                        self.bounded(name, cache, cache.kv)
                    else:
                        self.grown(name, cache)
            except RuntimeError:  # such as no memory: the caches after it are measured still
                self.failed = True
                traceback.print_exc()
                row = Row(f"{self.name} {self.format} {name}", "ms", None, note="failed")
                self.store([row])

    def engine(self, cache: Cache, max_batch: int, tokens: int) -> Placed:
        return Placed(
            Engine(
                self.base,
                weights=self.format,
                max_batch=max_batch,
                cache_tokens=tokens,
                page_size=PAGE,
                max_prefill_tokens=1 << 40,
                **cache.options,
            )
        )

    def memory(self, cache: Cache) -> Memory:
        with released():
            probe = self.engine(cache, 1, PAGE).engine
            stats = probe.stats()
            state = vars(probe.runner.selector).values() if probe.runner.selector else ()
            state_bytes = sum(x.nbytes for x in state if isinstance(x, Tensor)) / num_slots(1)
            del probe, state
        return Memory(stats.cache_bytes / stats.cache_tokens, state_bytes, self.room)

    # -- caches that grow --------------------------------------------------------------------------

    def grown(self, name: str, cache: Cache) -> None:
        """Measure every context and batch, in one cache of all the memory there is."""
        args, memory = self.args, self.memory(cache)
        most = {context: memory.rows(cache.kv, context) for context in args.contexts}
        tokens = int(memory.free / memory.token_bytes) // PAGE * PAGE
        placed = self.engine(cache, max(*args.batches, *most.values()), tokens)
        for context in args.contexts if "equal" in args.parts else ():
            for batch in self.grown_batches(name, context, tokens):
                measured = self.at(placed, [context] * batch, self.grown_tokens, GROWN_STEPS)
                self.equal[name, context, batch] = measured
                here = targets.case(self.name, self.format, name, batch, context)
                roof = self.roof(here, measured, memory)
                self.store([*self.beside_dense(name, context, measured), roof])
        for context in args.contexts if "largest" in args.parts else ():
            measured = self.at(placed, [context] * most[context], context, GROWN_STEPS)
            if name == DENSE_CACHE:
                self.dense_largest[context] = measured
            self.store(self.largest(name, context, measured))

    @property
    def grown_tokens(self) -> int:
        return GROWN_STEPS * (self.args.rounds + 2)

    def grown_batches(self, name: str, context: int, tokens: int) -> list[int]:
        """Return the batches asked for, or what the dense cache holds of them."""
        if name != DENSE_CACHE:
            return [n for kind, at, n in self.equal if (kind, at) == (DENSE_CACHE, context)]
        most = tokens // (context + self.grown_tokens + PAGE)
        most = most // 8 * 8 or most
        return sorted({min(batch, most) for batch in self.args.batches})

    # -- caches that do not ------------------------------------------------------------------------

    def bounded(self, name: str, cache: Cache, kv: Bounded) -> None:
        """Measure every batch of the dense cache once, and the largest."""
        parts, memory = self.args.parts, self.memory(cache)
        dense = {batch for kind, _, batch in self.equal if kind == DENSE_CACHE}
        batches = sorted(set(self.args.batches) | dense)
        batches = [batch for batch in batches if cache.only in (None, batch)]
        has_largest = "largest" in parts and cache.only is None
        most = memory.rows(kv, max(self.args.contexts)) if has_largest else 0
        widest = max([most, *batches])
        if not widest:
            return
        placed = self.engine(cache, widest, self.bounded_tokens(kv, widest))
        for batch in batches if "equal" in parts else ():
            self.store(self.spread_rows(name, placed, kv, batch, memory))
        if most:
            measured = self.at(placed, spread(kv, most), self.cycled(kv), kv.buffer)
            for context in self.args.contexts:
                self.store(self.largest(name, context, measured))
        if "position" in parts and name == "rkv":
            self.store(self.positions(name, placed, kv, batches[0]))

    def cycled(self, kv: Bounded) -> int:
        """Return the tokens that a row makes while it is measured: a round to warm up, one to time
        the compactions, and steps in which not all rows take part."""
        return kv.buffer * (self.args.rounds + 3)

    def bounded_tokens(self, kv: Bounded, batch: int) -> int:
        """Return the tokens of a cache for so many rows, behind prompts of up to budget + buffer,
        and for one behind the longest context."""
        prompt = kv.budget + kv.buffer - 1
        rows = batch * footprint(kv, prompt, self.cycled(kv), PAGE).alone
        longest = footprint(kv, max(self.args.contexts), self.cycled(kv), PAGE).alone
        return max(rows, longest) * PAGE

    def spread_rows(
        self, name: str, placed: Placed, kv: Bounded, batch: int, memory: Memory
    ) -> list[Row]:
        measured = self.at(placed, spread(kv, batch), self.cycled(kv), kv.buffer, is_costed=True)
        here, costs = targets.case(self.name, self.format, name, batch), measured.compacting
        assert costs is not None
        note = f"{costs.samples} samples in {costs.calls} turns"
        rows = [
            Row(f"{here}: decode step", "ms", measured.ms),
            self.roof(here, measured, memory),
            Row(f"{here}: compaction, a sample", "ms", costs.ms, note=note),
            Row(targets.compacting(self.name, self.format, name, batch), "fraction", costs.share),
        ]
        for context in self.args.contexts:
            self.equal[name, context, batch] = measured
            rows += self.beside_dense(name, context, measured)
        return rows

    def positions(self, name: str, placed: Placed, kv: Bounded, batch: int) -> list[Row]:
        """Measure a batch with all rows in step, behind their budget and behind a real context in
        the middle of those asked for."""
        context, rows = self.args.contexts[len(self.args.contexts) // 2], []
        for where, length in (
            ("in step", kv.budget),
            (f"in step at {targets.thousands(context)}", context),
        ):
            measured = self.at(placed, [length] * batch, self.cycled(kv), kv.buffer)
            here = targets.case(self.name, self.format, name, batch)
            rows.append(Row(f"{here} {where}: decode step", "ms", measured.ms))
        return rows

    # -- one batch, and its rows -------------------------------------------------------------------

    def at(
        self,
        placed: Placed,
        contexts: list[int],
        new_tokens: int,
        steps: int,
        is_costed: bool = False,
    ) -> Measured:
        """Measure rounds of so many steps, after one to warm up, and one for what compactions
        cost."""
        placed.stand(contexts, new_tokens)
        placed.step_ms(steps)
        before = placed.cached()
        rounds = [placed.step_ms(steps) for _ in range(self.args.rounds)]
        cached = (before + placed.cached()) / 2
        costs = placed.compacting(steps) if is_costed else None
        placed.clear()
        batch = len(contexts)
        say(f"B={batch} at {contexts[0]}: {', '.join(f'{ms:.2f}' for ms in rounds)} ms a step")
        return Measured(batch, rounds, cached, costs)

    def roof(self, here: str, measured: Measured, memory: Memory) -> Row:
        needed = weight_bytes(SHAPES[self.name], self.format)
        needed += measured.batch * measured.cached * memory.token_bytes
        share = needed / self.read * 1e3 / measured.ms
        return Row(f"{here}: fraction of the bandwidth roofline", "fraction", share)

    def beside_dense(self, name: str, context: int, measured: Measured) -> list[Row]:
        """Return the row over the dense cache at the same batch; nothing where that holds fewer
        rows."""
        if name == DENSE_CACHE:
            here = targets.case(self.name, self.format, name, measured.batch, context)
            return [Row(f"{here}: decode step", "ms", measured.ms)]
        dense = self.equal.get((DENSE_CACHE, context, measured.batch))
        if dense is None:
            return []
        ratio, extent = measured.over(dense)
        here = targets.over_dense(self.name, self.format, name, measured.batch, context)
        return [Row(here, "ms", measured.ms, dense.ms, ratio, extent)]

    def largest(self, name: str, context: int, measured: Measured) -> list[Row]:
        dense = None if name == DENSE_CACHE else self.dense_largest.get(context)
        here = targets.fullest(self.name, self.format, name, context)
        note = f"{measured.batch} rows"
        if dense is None:
            return [Row(here, "tokens/s", measured.tokens_per_s, note=note)]
        times = measured.batch / dense.batch
        ratio, extent = measured.over(dense)
        speed = Row(
            here,
            "tokens/s",
            measured.tokens_per_s,
            dense.tokens_per_s,
            ratio * times,
            (extent[0] * times, extent[1] * times),
            note=f"{note}, the dense cache {dense.batch}",
        )
        count = here.replace(": tokens/s", ": rows")
        return [speed, Row(count, "rows", measured.batch, dense.batch, times)]


def spread(kv: Bounded, batch: int) -> list[int]:
    return [kv.budget + i * kv.buffer // batch for i in range(batch)]


def base_model(name: str, format: str, device: torch.device) -> Transformer:
    config = SHAPES[name] | {"max_position_embeddings": CONTEXT}
    master = random_model(config, device)
    engine = Engine(master, weights=format, max_batch=1, cache_tokens=PAGE, page_size=PAGE)
    if dense_bytes(name, format):
        engine.keep_dense()
    return engine.model


def caches(
    format: str, args: argparse.Namespace, read: float, store: Callable[..., None]
) -> tuple[Equal, bool]:
    """Measure every cache under one format; return what was measured at equal batches, and whether
    none failed. Nothing stays in memory."""
    with released():
        base = base_model(args.model, format, args.device)
    bench = Bench(args.model, format, base, args, read, store, free_room(args.device))
    bench.run()
    return bench.equal, not bench.failed


def free_room(device: torch.device) -> float:
    free = free_memory(device)
    assert free is not None
    return free - SLACK


# -- vLLM ------------------------------------------------------------------------------------------


def peer_settings(model: str, format: str, points: list[tuple[int, int]]) -> dict[str, Any]:
    config = SHAPES[model]
    cache = max(b * (c + PEER_TOKENS + 64) for c, b in points) * kv_bytes_per_token(config)
    whole = cache + weight_bytes(config, format) + 3 * SLACK
    return {
        "name": model,
        "shape": config | {"max_position_embeddings": CONTEXT},
        "format": format,
        "batches": sorted({batch for _, batch in points}),
        "length": max(context for context, _ in points) + PEER_TOKENS + 16,
        "memory_fraction": share_of_gpu(whole),
        "cache_bytes": int(cache),
    }


def beside_vllm(
    format: str,
    ours: Equal,
    args: argparse.Namespace,
    store: Callable[..., None],
) -> None:
    """Measure vLLM's steps beside those of every cache that was measured where the dense one
    was."""
    points = [(c, b) for name, c, b in ours if name == DENSE_CACHE and c * b <= MOST_PEER]
    if not points:
        return
    vocab_size = SHAPES[args.model]["vocab_size"]
    try:
        with start_vllm(peer_settings(args.model, format, points)) as peer:
            say(f"vLLM {peer.ready['vllm']} is ready after {peer.ready['seconds']:.0f} s")
            for context, batch in points:
                theirs = peer_ms(peer, context, batch, vocab_size, args.rounds)
                say(f"vLLM, B={batch} at {context}: {theirs:.2f} ms a step")
                names = partial(targets.over_vllm, args.model, format, batch=batch, context=context)
                rows = [
                    less_row(names(name), "ms", measured.ms, theirs)
                    for (name, *point), measured in ours.items()
                    if point == [context, batch]
                ]
                store(rows, vllm=peer.ready["vllm"])
    except PeerFailed as error:
        note = f"vLLM: not run ({error})"
        store([Row(f"{args.model} {format} over vLLM", "ms", None, note=note)])


def peer_ms(peer: Peer, context: int, batch: int, vocab_size: int, rounds: int) -> float:
    """Return vLLM's ms a step. The prompts run once; later calls find them in vLLM's prefix
    cache."""
    dice = random.Random(context + batch)
    prompts = [dice.choices(range(vocab_size), k=context) for _ in range(batch)]
    peer.generate(prompts, 1, 1, deadline_s=PEER_PREFILL_S)
    first = [peer.generate(prompts, 1, 1) for _ in range(rounds)]
    whole = [peer.generate(prompts, 1, PEER_TOKENS) for _ in range(rounds)]
    return (statistics.median(whole) - statistics.median(first)) / (PEER_TOKENS - 1) * 1e3


# -- the command -----------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    complete = True
    with released():
        read = bandwidth(args.device)
    results = Results("kv", args.out, bandwidth=read, rounds=args.rounds)
    for format in args.weights:
        with released():
            ours, is_whole = caches(format, args, read, results.add)
        complete &= is_whole
        if args.peer == "vllm":
            beside_vllm(format, ours, args, results.add)
    return results.finish("Decoding with bounded and 8-bit caches", complete)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    others = [name for name in CACHES if name != DENSE_CACHE]
    parser = parser_of(
        __doc__,
        model=OneOf(SHAPES, "qwen2.5-7b"),
        weights=SomeOf(formats(), ["bf16", "nvfp4"]),
        caches=SomeOf(others),
        contexts=[4096, 16384, 32768],
        batches=[64, 256],
        rounds=2,
        parts=SomeOf(PARTS),
        peer=OneOf(("vllm", "none"), "none"),
        device="auto",
    )
    args = parser.parse_args(argv)
    args.device, args.out = settle(parser, args.device, args.out)
    return args


if __name__ == "__main__":
    sys.exit(main())
