"""Rollouts on one GPU: our engine and vLLM in turns, format by format, batch by batch.

The work is a batch of rollouts of fixed length: prompts of 256 random tokens in groups of 8 equal
ones (a batch of 1 is one prompt), 256 new tokens each whatever is drawn, temperature 1, the sampled
token's log-prob recorded. Prompts are fresh in every round, so that no cache knows them, and the
same for both engines. Weights are random and of exact shapes (`bench.shapes`); vLLM's are its own
dummy ones. Both engines are resident in one GPU's memory and run in turns; where two copies of the
weights do not fit, ours runs its rounds first and vLLM after it, and the note says so.

    rollout     tokens/s of whole calls, prefill included: the median of the rounds, the ratio of each round's sides
    decode      ms a step: (seconds for 256 new tokens - seconds for 1) / 255; its share of what the weights' and the
                cache's bytes need at this device's measured bandwidth (`bench.roofline`)
    experts     of a mixture: how many a step touches, counted on our rollouts (`bench.routing`)
    agreement   |log-prob recorded - log-prob of the bfloat16 learner|, mean and 99.9th percentile; the same against
                the engine's own prefill; and whether the same seed draws the same tokens again
    start       seconds from Engine(folder) to the first token, in a new process (`bench.startup`)
    lengths     rollouts of log-normal lengths, the batch shrinking (`bench.lengths`)

    python -m bench.decode [--models NAME ...] [--formats NAME ...] [--batches 1,64,256]
                           [--rounds 3] [--parts rollout agreement start lengths]
                           [--peer vllm|none] [--out FOLDER]

vLLM 0.24.0 needs an installation of its own (docs/benchmarks.md). Without it the rows have no peer
and say so. Rows are added to `decode.json` as they are measured, so that a stopped command keeps
what it has.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from bench import lengths, routing, startup
from bench.peer import Peer, PeerFailed, vllm_command, vllm_path
from bench.record import Row, merge, settle, show, speed_row
from bench.roofline import (
    bandwidth,
    kv_bytes_per_token,
    linear_weights,
    step_bytes,
    synchronize,
    weight_bytes,
)
from bench.shapes import SHAPES, random_model
from bench.targets import aimed, rollout, roof
from lowroll import Engine, Group, Request, score
from lowroll.quant.formats import formats, get_format

PARTS = ("rollout", "agreement", "start", "lengths")
FORMATS = ("bf16", "fp8", "int8", "nvfp4")
SLACK = 6e9  # bytes an engine may take beside weights, cache and activations: context, graphs, workspaces
PREFILL = 16384  # tokens of a prefill step, for which both engines keep activations
SCORED = 64  # rollouts whose log-probs are compared


@dataclass(frozen=True)
class Work:
    """Lengths of a batch of rollouts, and how many share a prompt."""

    prompt_tokens: int = 256
    new_tokens: int = 256
    group: int = 8

    def prompts(self, batch: int, vocab_size: int, seed: int) -> tuple[list[list[int]], int]:
        """Prompts, and how many rollouts each has."""
        dice, copies = random.Random(seed), min(self.group, batch)
        return [
            [dice.randrange(vocab_size // 100, vocab_size) for _ in range(self.prompt_tokens)]
            for _ in range(batch // copies)
        ], copies

    def cache_tokens(self, batch: int) -> int:
        """KV positions of a batch that shares its prompts, with a page of slack at each end of a
        rollout."""
        return (
            batch // min(self.group, batch) * (self.prompt_tokens + 16)
            + batch * (self.new_tokens + 48)
            + 1024
        )


@dataclass
class Ours:
    """Our engine as a side of the comparison."""

    engine: Engine
    groups: list[Group] = field(default_factory=list)  # of the last call

    def generate(self, prompts: list[list[int]], copies: int, new_tokens: int) -> float:
        """Seconds of one call."""
        requests = [
            Request(
                ids, n=copies, max_tokens=new_tokens, min_tokens=new_tokens, ignore_eos=True, seed=7
            )
            for ids in prompts
        ]
        synchronize(self.engine.model.device)
        began = time.perf_counter()
        self.groups = self.engine.generate(requests)
        synchronize(self.engine.model.device)
        seconds = time.perf_counter() - began
        made = {len(rollout.logprobs) for group in self.groups for rollout in group.rollouts}
        assert made == {new_tokens}, f"the engine made {made} tokens instead of {new_tokens}"
        return seconds

    @property
    def sequences(self) -> list[list[int]]:
        """Prompt and response of every rollout of the last call."""
        return [
            group.request.prompt_ids + rollout.token_ids
            for group in self.groups
            for rollout in group.rollouts
        ]


Generate = Callable[[list[list[int]], int, int], float]


@dataclass(frozen=True)
class Times:
    """Seconds of a side's rounds: of whole calls, and of calls for one token."""

    whole: list[float]
    first: list[float]

    def step_ms(self, new_tokens: int) -> float:
        return (
            (statistics.median(self.whole) - statistics.median(self.first)) / (new_tokens - 1) * 1e3
        )


def measure(
    sides: Mapping[str, Generate], work: Work, batch: int, vocab_size: int, rounds: int
) -> dict[str, Times]:
    """Every side's times, taken in turns with the same prompts, after a warm-up of each."""

    def one(new_tokens: int, seed: int) -> dict[str, float]:
        prompts, copies = work.prompts(batch, vocab_size, seed)
        return {name: generate(prompts, copies, new_tokens) for name, generate in sides.items()}

    seeds = itertools.count(1000 * batch)  # no prompt twice, also not at another batch size
    for _ in range(2):
        one(min(32, work.new_tokens), next(seeds))
    whole, first = [], []
    for i in range(rounds):
        whole.append(one(work.new_tokens, next(seeds)))
        first.append(one(1, next(seeds)))
        seconds = ", ".join(f"{name} {value:.2f} s" for name, value in whole[-1].items())
        say(f"B={batch}, round {i + 1} of {rounds}: {seconds}")
    return {
        name: Times([values[name] for values in whole], [values[name] for values in first])
        for name in sides
    }


def rollout_rows(
    model: str,
    format: str,
    batch: int,
    work: Work,
    times: Mapping[str, Times],
    read: float,
    notes: Sequence[str],
    touched: float | None = None,
) -> list[Row]:
    """The rows of one batch size. `read` is the bandwidth in bytes a second, `notes` are what a
    reader must know, `touched` the experts that a step reads."""
    ours, peer = times["ours"], times.get("vllm")
    tokens, step = batch * work.new_tokens, ours.step_ms(work.new_tokens)
    ideal = (
        step_bytes(SHAPES[model], format, batch, work.prompt_tokens + work.new_tokens / 2, touched)
        / read
        * 1e3
    )
    theirs = None if peer is None else peer.step_ms(work.new_tokens)
    if peer is None:
        whole = Row(
            rollout(model, format, batch), "tokens/s", tokens / statistics.median(ours.whole)
        )
    else:
        whole = speed_row(rollout(model, format, batch), tokens, "tokens/s", ours.whole, peer.whole)
    rows = [
        whole,
        Row(
            f"{model} {format} B={batch}: decode step",
            "ms",
            step,
            theirs,
            None if theirs is None else theirs / step,
        ),
        Row(
            roof(model, format, batch),
            "fraction",
            ideal / step,
            None if theirs is None else ideal / theirs,
            None if theirs is None else theirs / step,
        ),
    ]
    if touched is not None:
        rows.append(experts_row(model, format, batch, touched, peer is not None))
    return aimed(replace(row, note="; ".join(notes)) for row in rows)


def experts_row(model: str, format: str, batch: int, touched: float, beside: bool) -> Row:
    """Ours as counted, and what vLLM's simulator comes to on average."""
    config = SHAPES[model]
    return Row(
        f"{model} {format} B={batch}: experts touched by a step",
        f"of {config['num_experts']}",
        touched,
        routing.simulated(config, batch) if beside else None,
        must=0.95 * routing.uniform(config, batch),
        goal="ours at least",
    )


# -- both engines on one GPU -----------------------------------------------------------------------


def dense_bytes(model: str, format: str) -> float:
    """Bytes of the dense matrices that our engine keeps beside 4-bit ones; experts are read as
    codes."""
    return 2.0 * linear_weights(SHAPES[model], touched=0) if get_format(format).bits < 8 else 0.0


def room(model: str, format: str, batch: int, work: Work) -> tuple[float, float]:
    """Bytes that one engine takes without them, and those of them that are its KV cache."""
    config = SHAPES[model]
    tied = 0 if config["tie_word_embeddings"] else 2 * config["vocab_size"] * config["hidden_size"]
    cache = work.cache_tokens(batch) * float(kv_bytes_per_token(config))
    wide = (
        config["intermediate_size"]
        if "num_experts" not in config
        else (config["moe_intermediate_size"] * config["num_experts_per_tok"])
    )
    return weight_bytes(config, format) + tied + cache + SLACK + PREFILL * 6 * wide, cache


def fit_together(model: str, format: str, batch: int, work: Work, device: torch.device) -> bool:
    """Whether both engines can be resident."""
    needed = 2 * room(model, format, batch, work)[0] + dense_bytes(model, format)
    return device.type != "cuda" or needed < torch.cuda.mem_get_info()[1]


def make_engine(
    model: str, format: str, batch: int, work: Work, device: torch.device
) -> tuple[Engine, float]:
    """Our engine with random weights, and the seconds that it took; the model that they came from
    is dropped."""
    master = random_model(SHAPES[model], device)
    synchronize(device)
    began = time.perf_counter()
    engine = Engine(
        master,
        weights=format,
        max_batch=batch,
        cache_tokens=work.cache_tokens(batch),
        max_prefill_tokens=PREFILL,
    )
    with released():
        del master
    if dense_bytes(model, format):
        engine.keep_dense()
    synchronize(device)
    return engine, time.perf_counter() - began


@contextmanager
def vllm(
    model: str,
    format: str,
    batches: Sequence[int],
    work: Work,
    args: argparse.Namespace,
    notes: list[str],
) -> Iterator[Peer | None]:
    """vLLM with as much of the GPU as it needs; None, and a note on the reason, when it cannot be
    had."""
    whole, cache = room(model, format, max(batches), work)
    total = torch.cuda.mem_get_info()[1] if torch.cuda.is_available() else whole
    settings = {
        "name": model,
        "shape": SHAPES[model],
        "format": format,
        "batches": list(batches),
        "length": work.prompt_tokens + work.new_tokens + 16,
        "memory_fraction": min(0.95, whole / total),
        "cache_bytes": int(cache),
    }
    try:
        if args.peer == "none":
            raise PeerFailed("not asked for")
        peer = Peer(settings, vllm_command(args.vllm_python), vllm_path(args.vllm_path))
    except PeerFailed as error:
        notes.append(f"vLLM: not run ({error})")
        yield None
        return
    say(f"vLLM {peer.ready['vllm']} is ready after {peer.ready['seconds']:.0f} s")
    with peer:
        yield peer


@contextmanager
def released() -> Iterator[None]:
    """Afterwards, memory that nothing holds is the device's again, for another process or another
    engine."""
    try:
        yield
    finally:
        gc.collect()  # an engine and its scheduler hold each other
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def compare(
    model: str,
    format: str,
    work: Work,
    args: argparse.Namespace,
    read: float,
    store: Callable[..., None],
) -> None:
    """Rollouts of every batch size, and how well their log-probs agree. `store` gets rows as they
    are made."""
    device, batches = args.device, sorted(args.batches)
    together = fit_together(model, format, batches[-1], work, device)
    vocab, notes, mine = SHAPES[model]["vocab_size"], [], {}
    with released():
        engine, made = make_engine(model, format, batches[-1], work, device)
    ours = Ours(engine)
    touched = experts(ours, model, work, batches) if "rollout" in args.parts else {}
    if "rollout" in args.parts and together:
        with vllm(model, format, batches, work, args, notes) as peer:
            for batch in batches:
                times = measure_with(ours, peer, work, batch, vocab, args.rounds, notes)
                store(
                    rollout_rows(model, format, batch, work, times, read, notes, touched.get(batch))
                )
            store([making_row(model, format, made, peer)], **version(peer))
    elif "rollout" in args.parts:
        mine = {
            batch: measure({"ours": ours.generate}, work, batch, vocab, args.rounds)
            for batch in batches
        }
    if "agreement" in args.parts:
        store(agreement(ours, model, format, work, min(batches[-1], SCORED)))
    with released():
        del engine, ours
    if mine:  # vLLM's turn, now that there is room for it
        notes.append("the two engines ran one after the other: together they do not fit")
        with vllm(model, format, batches, work, args, notes) as peer:
            for batch in batches:
                theirs = (
                    {}
                    if peer is None
                    else measure({"vllm": peer.generate}, work, batch, vocab, args.rounds)
                )
                store(
                    rollout_rows(
                        model,
                        format,
                        batch,
                        work,
                        mine[batch] | theirs,
                        read,
                        notes,
                        touched.get(batch),
                    )
                )
            store([making_row(model, format, made, peer)], **version(peer))


def experts(ours: Ours, model: str, work: Work, batches: Sequence[int]) -> dict[int, float]:
    """By batch size, the experts that a step touches; empty for a model without."""
    if "num_experts" not in SHAPES[model]:
        return {}
    prompts, copies = work.prompts(batches[-1], SHAPES[model]["vocab_size"], 3)
    ours.generate(prompts, copies, work.new_tokens)
    with released():
        return routing.touched(ours.engine.model, ours.sequences, work.prompt_tokens, batches)


def measure_with(
    ours: Ours,
    peer: Peer | None,
    work: Work,
    batch: int,
    vocab_size: int,
    rounds: int,
    notes: list[str],
) -> dict[str, Times]:
    """Both sides in turns; ours alone, and a note, once vLLM has failed."""
    if peer is not None and not peer.failed:
        try:
            return measure(
                {"ours": ours.generate, "vllm": peer.generate}, work, batch, vocab_size, rounds
            )
        except PeerFailed as error:
            notes.append(f"vLLM: not run ({error})")
    return measure({"ours": ours.generate}, work, batch, vocab_size, rounds)


def making_row(model: str, format: str, made: float, peer: Peer | None) -> Row:
    started = None if peer is None else float(peer.ready["seconds"])
    return Row(
        f"{model} {format}: engine made, weights in memory",
        "s",
        made,
        started,
        None if started is None else started / made,
        note="vLLM makes its weights, compiles and captures graphs; ours does the rest in its "
        "first calls",
    )


def version(peer: Peer | None) -> dict[str, str]:
    return {} if peer is None else {"vllm": peer.ready["vllm"]}


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# -- correctness -----------------------------------------------------------------------------------


def agreement(ours: Ours, model: str, format: str, work: Work, batch: int) -> list[Row]:
    """Recorded log-probs against the learner's (bfloat16, the weights before any rounding) and the
    engine's own."""
    engine, device = ours.engine, ours.engine.model.device
    prompts, copies = work.prompts(batch, engine.spec.vocab_size, 5)
    engine.pool.clear_prefixes()
    ours.generate(prompts, copies, work.new_tokens)
    first, sequences, tokens = ours.groups, ours.sequences, _tokens(ours.groups)
    engine.pool.clear_prefixes()
    ours.generate(prompts, copies, work.new_tokens)
    starts = [work.prompt_tokens] * len(sequences)
    recorded = torch.tensor(
        [rollout.logprobs for group in first for rollout in group.rollouts]
    ).flatten()
    compared = [("engine's prefill", torch.cat(engine.score(sequences, starts)).cpu())]
    if device.type != "cuda" or torch.cuda.mem_get_info(device)[0] > 2.5 * linear_weights(
        SHAPES[model]
    ):
        with released():
            learner = torch.cat(score(random_model(SHAPES[model], device), sequences, starts)).cpu()
        compared.insert(0, ("learner", learner))
    else:
        say(f"{model} {format}: no room for the learner beside the engine; not compared")
    rows = [
        Row(
            f"{model} {format}: same seed, same tokens",
            "1 if so",
            float(tokens == _tokens(ours.groups)),
            must=1.0,
            aim=1.0,
            goal="ours at least",
        )
    ]
    for whose, theirs in compared:
        difference = (recorded - theirs).abs()
        for name, value in (("mean", difference.mean()), ("p99.9", difference.quantile(0.999))):
            rows.append(
                Row(
                    f"{model} {format}: |delta log-prob| to the {whose}, {name}",
                    "nats",
                    float(value),
                )
            )
    return rows


def _tokens(groups: Sequence[Group]) -> list[list[int]]:
    return [rollout.token_ids for group in groups for rollout in group.rollouts]


# -- the command -----------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    if args.first_token is not None:
        return startup.report(*args.first_token)
    device, work, rows = args.device, Work(), []
    with released():
        read = bandwidth(device) if "rollout" in args.parts else 0.0

    def store(new: list[Row], **settings: str) -> None:
        rows.extend(new)
        merge(
            "decode",
            new,
            args.out,
            prompt_tokens=work.prompt_tokens,
            new_tokens=work.new_tokens,
            group=work.group,
            rounds=args.rounds,
            **settings,
            **({"bandwidth": read} if read else {}),
        )

    for model in args.models:
        for format in args.formats:
            if {"rollout", "agreement"} & set(args.parts):
                compare(model, format, work, args, read, store)
            if "start" in args.parts:
                store(aimed(startup.rows(model, format, device)))
        if "lengths" in args.parts:
            store(aimed(lengths.rows(model, device, args.rounds)))
    met = show(f"Decoding, prompts of {work.prompt_tokens}, {work.new_tokens} new tokens", rows)
    print(args.out / "decode.json")
    return 0 if met else 1


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Rollouts on one GPU: our engine and vLLM in turns."
    )
    parser.add_argument(
        "--models", nargs="+", default=["qwen2.5-7b"], choices=SHAPES, metavar="NAME"
    )
    parser.add_argument(
        "--formats", nargs="+", default=list(FORMATS), choices=formats(), metavar="NAME"
    )
    parser.add_argument(
        "--batches", type=lambda text: [int(b) for b in text.split(",")], default=[1, 64, 256]
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--peer", default="vllm", choices=("vllm", "none"))
    parser.add_argument(
        "--vllm-python", help="the Python that has vLLM; default: LOWROLL_VLLM_PYTHON, or this one"
    )
    parser.add_argument(
        "--vllm-path", help="the folder that vLLM is unpacked in; default: LOWROLL_VLLM_PATH"
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--first-token", nargs=2, metavar=("FOLDER", "FORMAT"), help=argparse.SUPPRESS
    )
    args = parser.parse_args(argv)
    if args.first_token is None:
        args.device, args.out = settle(parser, args.device, args.out)
    return args


if __name__ == "__main__":
    raise SystemExit(main())
