"""Rollouts on one GPU: our engine and vLLM in turns, format by format, work by work.

`bench.work` has the work: rollouts of fixed length of an RL step, filtered sampling, prompts of their
own, one token alone. Prompts are fresh in every round, so that no cache knows them, and the same for
all sides. vLLM runs in every setting that might be its fastest (`bench.rivals`), beside ours in one
GPU's memory; where not even one other fits, vLLM runs after it.

    rollout     tokens/s of whole calls, prefill included: the median of the rounds, the ratio of each round's sides;
                ms a decode step: (seconds for 256 new tokens - seconds for 1) / 255; its share of what the weights'
                and the cache's bytes need at this device's measured bandwidth (`bench.roofline`). Of 4 bits with
                dense copies; of a mixture, how many experts a step touches (`bench.roofline`)
    codes       the same of 4 bits at default settings, from the codes alone; and the memory that it takes
    filters     with top-p and top-k, and with each of min-p, a repetition penalty, min_tokens and stop ids: beside
                vLLM, and beside our own plain sampling (bf16)
    prompts     different prompts of 1,024 and 4,096 tokens, prefill and decoding apart (fp8, nvfp4)
    first       ms to the first token of one prompt of 256 tokens
    agreement   |log-prob recorded - log-prob of the bfloat16 learner|, mean and 99.9th percentile; the same against
                the engine's own prefill; and whether the same seed draws the same tokens again
    start       seconds from Engine(folder) to the first token, in a new process (`bench.startup`)
    lengths     rollouts of log-normal lengths, the batch shrinking (`bench.lengths`)

    python -m bench.decode [--models NAME ...] [--formats NAME ...] [--batches 1,64,256]
                           [--rounds 3] [--parts rollout codes filters ...]
                           [--peer vllm|none] [--runners V1 V2]
                           [--out FOLDER]

vLLM needs an installation of its own (docs/benchmarks.md). Rows are added to `decode.json`.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from bench import lengths, rivals, roofline, startup
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
    synchronize,
)
from bench.peer import Peer, PeerFailed, share_of_gpu
from bench.rivals import RUNNERS, Setting
from bench.roofline import bandwidth, kv_bytes_per_token, linear_weights, weight_bytes
from bench.shapes import SHAPES, random_model
from bench.targets import memory, named
from bench.turns import OURS, OWN_PLAIN, Case, Found, Ours, Side, keep, measure, rows_of
from bench.work import PARTS as WORKED
from bench.work import PLAIN, STOPS, Work, dense_works, works
from lowroll import Engine, Group, score
from lowroll.model.transformer import Transformer
from lowroll.quant.formats import formats, get_format

PARTS = (*WORKED, "agreement", "start", "lengths")
FORMATS = ("bf16", "fp8", "int8", "nvfp4")
SLACK = 6e9  # bytes an engine may take beside weights, cache and activations: context, graphs, workspaces
PREFILL = 16384  # tokens of a prefill step, for which both engines keep activations
SCORED = Work(64)  # whose log-probs are compared, or as many rows of it as the largest batch has
APART = "the two engines ran one after the other: together they do not fit"


# -- what fits on one GPU --------------------------------------------------------------------------


def dense_bytes(model: str, format: str) -> float:
    """Return the bytes of the dense matrices that our engine keeps beside 4-bit ones; experts are
    read as codes."""
    return 2.0 * linear_weights(SHAPES[model], touched=0) if get_format(format).bits < 8 else 0.0


def room(model: str, format: str, chosen: Sequence[Work]) -> tuple[float, float]:
    """Return the bytes that one engine takes without dense copies, and those of its KV cache."""
    config = SHAPES[model]
    tied = 0 if config["tie_word_embeddings"] else 2 * config["vocab_size"] * config["hidden_size"]
    tokens = max(work.cache_tokens() for work in chosen)
    cache = tokens * float(kv_bytes_per_token(config))
    wide = (
        config["intermediate_size"]
        if "num_experts" not in config
        else (config["moe_intermediate_size"] * config["num_experts_per_tok"])
    )
    return weight_bytes(config, format) + tied + cache + SLACK + PREFILL * 6 * wide, cache


def fitting(whole: float, more: float, device: torch.device) -> tuple[int, int]:
    """Return how many engines of `whole` bytes fit beside ours, which takes `more`, and without
    it."""
    if device.type != "cuda":
        return 64, 64
    total = torch.cuda.mem_get_info()[1]
    return max(0, int((total - more) / whole) - 1), max(1, int(total / whole))


def taken(engine: Engine) -> int:
    """Return the bytes of the GPU that this process has, beside its context and its kernels'
    code."""
    return torch.cuda.memory_reserved() + engine.stats().virtual_memory_bytes


# -- the sides -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Variant:
    """An engine of ours, and what is measured of it. codes: of 4 bits at default settings."""

    codes: bool
    works: tuple[Work, ...]


def variants(format: str, args: argparse.Namespace) -> list[Variant]:
    """Return our engines of a format, with dense copies first; one without any work where only the
    agreement is asked for."""
    dense = dense_works(format, args.parts, args.batches)
    plain = works(format, args.parts, args.batches)
    found = [Variant(False, tuple(dense))] if dense else []
    if plain:
        found.append(Variant(get_format(format).bits < 8, tuple(plain)))
    return found or [Variant(False, ())]


def weights_of(model: str, device: torch.device) -> Transformer:
    """Return random weights, with logits of 0 for STOPS."""
    master = random_model(SHAPES[model], device)
    master.lm_head_weight[list(STOPS)] = 0.0
    return master


def passing(model: str, format: str, chosen: Sequence[Variant]) -> float:
    """Return the bytes that ours takes at its fullest beside what every engine does: dense copies,
    and what a second engine is made from while vLLM is there."""
    kept = 0.0 if all(variant.codes for variant in chosen) else dense_bytes(model, format)
    return kept + (weight_bytes(SHAPES[model], "bf16") if len(chosen) > 1 else 0.0)


def make_engine(
    model: str, format: str, variant: Variant, device: torch.device
) -> tuple[Engine, float]:
    sizes = variant.works or (SCORED,)
    master = weights_of(model, device)
    synchronize(device)
    began = time.perf_counter()
    engine = Engine(
        master,
        weights=format,
        max_batch=max(work.batch for work in sizes),
        cache_tokens=max(work.cache_tokens() for work in sizes),
        max_prefill_tokens=PREFILL,
    )
    with released():
        del master
    if not variant.codes and dense_bytes(model, format):
        engine.keep_dense()
    synchronize(device)
    return engine, time.perf_counter() - began


def asked_of(model: str, format: str, chosen: Sequence[Work]) -> dict[str, object]:
    """Return what vLLM's workers are told of these works: as much of the GPU as they need."""
    whole, cache = room(model, format, chosen)
    return {
        "name": model,
        "shape": SHAPES[model],
        "batches": sorted({work.batch for work in chosen}),
        "length": max(work.prompt_tokens + work.new_tokens for work in chosen) + 16,
        "memory_fraction": share_of_gpu(whole),
        "cache_bytes": int(cache),
        "stops": list(STOPS),
    }


def rivals_of(format: str, args: argparse.Namespace, notes: list[str]) -> list[Setting]:
    if args.peer == "none":
        notes.append("vLLM: not run (not asked for)")
        return []
    try:
        return rivals.settings(format, args.runners)
    except PeerFailed as error:
        notes.append(f"vLLM: not run ({error})")
        return []


# -- the comparison --------------------------------------------------------------------------------

Store = Callable[..., None]


@dataclass
class Comparison:
    """The comparison of one model in one format. found: by variant and work, then by family of
    rivals."""

    model: str
    format: str
    args: argparse.Namespace
    read: float
    store: Store
    notes: list[str] = field(default_factory=list)
    versions: set[str] = field(default_factory=set)
    found: dict[tuple[bool, Work], dict[str, Found]] = field(default_factory=dict)
    touched: dict[Work, float] = field(default_factory=dict)
    seeds: Iterator[int] = field(default_factory=lambda: itertools.count(0, 1000))
    engine: tuple[Engine, float] | None = None
    agreed: bool = False

    def run(self) -> None:
        chosen = variants(self.format, self.args)
        every = [work for variant in chosen for work in variant.works]
        if not every:
            self.ours(chosen[0], {})
            return
        settings = rivals_of(self.format, self.args, self.notes)
        whole, _ = room(self.model, self.format, every)
        beside, alone = fitting(whole, passing(self.model, self.format, chosen), self.args.device)
        asked = asked_of(self.model, self.format, every)
        if not settings or not beside:
            for variant in chosen:
                self.ours(variant, {})
            self.notes += [APART] if settings else []
        together = beside or alone  # those of one family side by side
        for i in range(0, len(settings), together):
            if beside:  # while there is room for what it is made from
                self.stand(chosen[0])
            some = settings[i : i + together]
            with rivals.started(some, asked, self.notes) as peers:
                self.versions |= {peer.ready["vllm"] for peer in peers.values()}
                for name, peer in peers.items():
                    say(f"{name} is ready after {peer.ready['seconds']:.0f} s: {peer.ready}")
                for variant in chosen:
                    if beside:
                        self.ours(variant, peers)
                    elif peers:
                        self.turns(variant, self.sides(peers), peers)

    def stand(self, variant: Variant) -> None:
        with released():
            self.engine = make_engine(self.model, self.format, variant, self.args.device)

    def ours(self, variant: Variant, peers: Mapping[str, Peer]) -> None:
        """Measure a variant of our engine beside the peers; the first one's agreement too."""
        if self.engine is None:
            self.stand(variant)
        assert self.engine is not None
        (engine, made), self.engine = self.engine, None
        side = Ours(engine)
        name = named(self.model, self.format, "", variant.codes)
        if variant.works:
            self.touched |= experts(side, self.model, variant.works)
            self.turns(variant, self.sides(peers, side), peers)
            self.put([making_row(name, made, peers)])
        if variant.works and self.args.device.type == "cuda":
            self.put([Row(memory(name), "GB", taken(engine) / 1e9)])
        if not self.agreed and "agreement" in self.args.parts:
            work = replace(SCORED, batch=min(max(self.args.batches), SCORED.batch))
            self.put(agreement(side, self.model, self.format, work))
        self.agreed = True
        with released():
            del engine, side

    def sides(self, peers: Mapping[str, Peer], ours: Ours | None = None) -> dict[str, Side]:
        """Return the sides by name, ours first when it is there."""
        mine = {} if ours is None else {OURS: Side(ours.generate)}
        own = {} if ours is None else {OWN_PLAIN: Side(ours.generate, plain=True)}
        family = {name: name.rsplit(", ", 1)[1] for name in peers}
        theirs = {name: Side(peer.generate, family[name]) for name, peer in peers.items()}
        return {**mine, **own, **theirs}

    def turns(self, variant: Variant, sides: Mapping[str, Side], peers: Mapping[str, Peer]) -> None:
        for work in variant.works:
            taking = {
                name: side
                for name, side in sides.items()
                if not (side.plain and work.sampling == PLAIN)
                and not (name in peers and peers[name].failed)
            }
            held = self.found.setdefault((variant.codes, work), {})
            if new := self.measured(taking, peers, work):
                keep(held, new)
            notes = tuple(dict.fromkeys(self.notes))
            touched = self.touched.get(work)
            case = Case(self.model, self.format, variant.codes, work, self.read, notes, touched)
            self.put(rows_of(case, held))

    def measured(
        self, sides: dict[str, Side], peers: Mapping[str, Peer], work: Work
    ) -> Found | None:
        """Measure the sides in turns, without those that fail, of which a note is kept."""
        vocab = SHAPES[self.model]["vocab_size"]
        while sides:
            try:
                return measure(sides, work, vocab, self.args.rounds, next(self.seeds))
            except PeerFailed as error:
                failed = {name for name in sides if name in peers and peers[name].failed}
                self.notes.append(f"{', '.join(failed)}: not run ({error})")
                sides = {name: side for name, side in sides.items() if name not in failed}
        return None

    def put(self, rows: list[Row]) -> None:
        versions = {"vllm": ", ".join(sorted(self.versions))} if self.versions else {}
        self.store(rows, **versions)


def experts(ours: Ours, model: str, chosen: Sequence[Work]) -> dict[Work, float]:
    steps = [work for work in chosen if work.is_step]
    if "num_experts" not in SHAPES[model] or not steps:
        return {}
    largest = max(steps, key=lambda work: work.batch)
    ours.run(largest, seed=3)
    with released():
        batches = [work.batch for work in steps]
        found = roofline.touched(ours.engine.model, ours.sequences, largest.prompt_tokens, batches)
    return {work: found[work.batch] for work in steps}


def making_row(name: str, made: float, peers: Mapping[str, Peer]) -> Row:
    """Return the row of seconds until an engine stands, beside the quickest of vLLM's settings."""
    started = min((float(peer.ready["seconds"]) for peer in peers.values()), default=None)
    return less_row(
        f"{name}: engine made, weights in memory",
        "s",
        made,
        started,
        note="vLLM makes its weights, compiles and captures graphs; ours does the rest in its "
        "first calls",
    )


# -- correctness -----------------------------------------------------------------------------------


def agreement(ours: Ours, model: str, format: str, work: Work) -> list[Row]:
    """Compare recorded log-probs with the learner's (bfloat16, the weights before any rounding) and
    the engine's own."""
    engine, device = ours.engine, ours.engine.model.device
    engine.pool.clear_prefixes()
    ours.run(work, seed=5)
    first, sequences, tokens = ours.groups, ours.sequences, _tokens(ours.groups)
    engine.pool.clear_prefixes()
    ours.run(work, seed=5)
    starts = [work.prompt_tokens] * len(sequences)
    recorded = torch.tensor(
        [rollout.logprobs for group in first for rollout in group.rollouts]
    ).flatten()
    compared = [("engine's prefill", torch.cat(engine.score(sequences, starts)).cpu())]
    if device.type != "cuda" or torch.cuda.mem_get_info(device)[0] > 2.5 * linear_weights(
        SHAPES[model]
    ):
        with released():
            learner = torch.cat(score(weights_of(model, device), sequences, starts)).cpu()
        compared.insert(0, ("learner", learner))
    else:
        say(f"{model} {format}: no room for the learner beside the engine; not compared")
    name, again = f"{model} {format}", float(tokens == _tokens(ours.groups))
    same = Row(f"{name}: same seed, same tokens", "1 if so", again, must=1.0, aim=1.0)
    rows = [replace(same, goal="ours at least")]
    for whose, theirs in compared:
        off = (recorded - theirs).abs()
        for what, value in (("mean", off.mean()), ("p99.9", off.quantile(0.999))):
            title = f"{name}: |delta log-prob| to the {whose}, {what}"
            rows.append(Row(title, "nats", float(value)))
    return rows


def _tokens(groups: Sequence[Group]) -> list[list[int]]:
    return [rollout.token_ids for group in groups for rollout in group.rollouts]


# -- the command -----------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    device = args.device
    measured = set(WORKED) & set(args.parts)
    with released():
        read = bandwidth(device) if measured else 0.0

    settings = {"rounds": args.rounds} | ({"bandwidth": read} if read else {})
    results = Results("decode", args.out, **settings)
    for model in args.models:
        for format in args.formats:
            if measured or "agreement" in args.parts:
                Comparison(model, format, args, read, results.add).run()
            if "start" in args.parts:
                results.add(startup.rows(model, format, device))
        if "lengths" in args.parts:
            results.add(lengths.rows(model, device, args.rounds))
    return results.finish("Decoding")


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of(
        __doc__,
        models=SomeOf(SHAPES, ["qwen2.5-7b"]),
        formats=SomeOf(formats(), FORMATS),
        batches=[1, 64, 256],
        rounds=3,
        parts=SomeOf(PARTS),
        runners=SomeOf(RUNNERS),
        peer=OneOf(("vllm", "none"), "vllm"),
        device="auto",
    )
    args = parser.parse_args(argv)
    args.device, args.out = settle(parser, args.device, args.out)
    return args


if __name__ == "__main__":
    raise SystemExit(main())
