"""Our server on random weights of exact shapes: against our own engine without it, against
`vllm serve`, and while its weights change.

Clients are a process of their own (`bench.load`), so they take no time from the server.

    vllm       `vllm serve` and ours, resident together and measured in turns by vLLM's own client
               (`vllm bench serve`): random texts of 512 tokens, 128 new ones each, streamed, C requests at a
               time. Requests/s; mean time to first token; mean time of a token after it, of each request
    rollout    calls of 64 and 256 rollouts, 256 prompt tokens and 128 new ones, in groups of 1 and of 8, over
               the server and by `generate` of the same engine in turns: token ids in, ids and log-probs out
    update     64 streams while all weights change: the longest gap between two reads of any of them,
               without an update, with one, and with one between pause (keep) and resume

    python -m bench.server [--model NAME] [--formats bf16] [--concurrency 1,16,64,256]
                           [--batches 64,256] [--rounds 2] [--parts vllm rollout update] [--peer vllm|none]
                           [--out FOLDER]

On a CPU `--model demo --peer none` measures the second and third part. vLLM 0.24.0 needs an
installation of its own (docs/benchmarks.md). Rows are added to `server.json`, those of a CPU to
`server-cpu.json`.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench import vllm_worker, vocabulary
from bench.engine import MODELS
from bench.harness import (
    BASELINES,
    OneOf,
    Results,
    Row,
    SomeOf,
    device_of,
    in_turns,
    parser_of,
    released,
    say,
    seconds_of,
    speed_row,
    synchronize,
)
from bench.peer import Peer, PeerFailed, share_of_gpu, start_vllm
from bench.roofline import kv_bytes_per_token, weight_bytes
from bench.served import Served
from bench.shapes import SHAPES, random_model
from bench.targets import over_vllm_server, through_server
from bench.vllm_server import VllmServer
from lowroll import Engine, Request
from lowroll.cli.serve import LOOKAHEAD, PROMPTS
from lowroll.model.tokenizer import load_tokenizer
from lowroll.quant.formats import formats
from lowroll.weights.sync.update import WeightUpdate

PARTS = ("vllm", "rollout", "update")
PROMPT, NEW = 512, 128  # tokens, of a client's request
ROLLED, GROUPS = 256, (1, 8)  # prompt tokens of a rollout, and rollouts of a prompt
STREAMS = 64  # that see an update
LONG = {"cuda": 512, "cpu": 128}  # tokens of each
SLACK = 8e9  # bytes that vLLM may take beside weights and cache
Seen = Mapping[str, float]  # what `vllm bench serve` stored of a run


class Quantity(NamedTuple):
    """What is compared: its unit, its name in `Seen`, and whether more of it is better."""

    unit: str
    key: str
    is_rate: bool = False


QUANTITIES = {
    "requests a second": Quantity("requests/s", "request_throughput", is_rate=True),
    "time to first token": Quantity("ms", "mean_ttft_ms"),
    "time of a token": Quantity("ms", "mean_tpot_ms"),
}
GAP = "p99_itl_ms"  # between two parts of a stream, the 99th percentile
STREAMED: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}


def check(answer: Mapping[str, Any]) -> None:
    if answer["errors"]:
        raise PeerFailed(f"{answer['errors']} requests failed: {answer['error']}")


def check_vllms(answer: Mapping[str, Any], requests: int, new_tokens: int) -> Seen:
    """Return what `vllm bench serve` stored. PeerFailed when a request failed or is short."""
    if answer["completed"] != requests or answer["total_output_tokens"] != requests * new_tokens:
        raise PeerFailed(
            f"{answer['completed']} of {requests} requests with {answer['total_output_tokens']} "
            f"tokens in all"
        )
    return answer


# -- the sides -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pace:
    """Decode steps between two looks of the host (None: what is best for throughput), and how
    prompts run (`lowroll.Engine`)."""

    steps: int | None = None
    gather: int = 0
    max_prefill_tokens: int = 8192
    one_pass: bool = False


@dataclass
class Side:
    model: str
    config: dict[str, Any]
    format: str
    served: Served
    folder: Path
    client: Peer
    pace: Pace  # of the server

    def prompts(self, count: int, tokens: int, seed: int) -> list[list[int]]:
        dice, words = random.Random(seed), vocabulary.words(self.served.engine.tokenizer)
        return [dice.choices(words, k=tokens) for _ in range(count)]

    def texts(self, count: int, tokens: int, seed: int) -> list[str]:
        decode = self.served.engine.tokenizer.decode
        return [decode(ids) for ids in self.prompts(count, tokens, seed)]

    def take(self, pace: Pace) -> None:
        scheduler, runner = self.served.engine.scheduler, self.served.engine.runner
        scheduler.lookahead = pace.steps or runner.lookahead
        scheduler.passes = 1 if pace.steps else runner.lookahead
        scheduler.gather = pace.gather
        scheduler.max_prefill_tokens = pace.max_prefill_tokens
        runner.one_pass = pace.one_pass and runner.selector is None

    def forget(self) -> None:
        self.served.call(lambda engine: engine.reset_prefix_cache(), "a fresh cache")

    def ask(self, url: str, prompts: list[Any], concurrency: int, **body: Any) -> dict[str, Any]:
        order = {"url": url, "concurrency": concurrency, "prompts": prompts}
        order["body"] = {"model": self.model, "temperature": 1.0, "ignore_eos": True, **body}
        return self.client.ask(order, f"{len(prompts)} requests", 300.0)


@contextmanager
def side(args: argparse.Namespace, format: str, folder: Path) -> Iterator[Side]:
    config = shape(args.model)
    vocabulary.write(folder, config)
    most = max(*args.concurrency, *args.batches, STREAMS)
    with ExitStack() as stack:
        client = stack.enter_context(Peer({}, [sys.executable, "-m", "bench.load"]))
        dtype = torch.bfloat16 if args.device.type == "cuda" else torch.float32
        began = time.perf_counter()
        engine = Engine(
            random_model(config, args.device, dtype),
            weights=format,
            tokenizer=load_tokenizer(folder),
            max_batch=most,
            cache_tokens=cache_tokens(args),
        )
        engine.warm_up()
        say(f"our engine is ready after {time.perf_counter() - began:.1f} s")
        served = stack.enter_context(Served(engine, args.model))
        ours = Side(args.model, config, format, served, folder, client, args.pace)
        ours.take(args.pace)
        yield ours


def shape(model: str) -> dict[str, Any]:
    return SHAPES[model] if model in SHAPES else {**MODELS[model], "max_position_embeddings": 1024}


def cache_tokens(args: argparse.Namespace) -> int:
    """Return the tokens of a cache for the most streams and the most rollouts, with slack."""
    streams = max(*args.concurrency, STREAMS) * (PROMPT + NEW + 64)
    rollouts = max(args.batches) * (ROLLED + NEW + 64)
    return max(streams, rollouts, STREAMS * (PROMPT + 512 + 64)) + 4096


# -- against vllm serve ----------------------------------------------------------------------------


def serve_vllm(args: argparse.Namespace, format: str, folder: Path) -> VllmServer:
    config = shape(args.model)
    cache = cache_tokens(args) * kv_bytes_per_token(config)
    whole = cache + weight_bytes(config, format) + SLACK
    settings = {
        "folder": str(vocabulary.write(folder, config)),
        "name": args.model,
        "shape": config,
        "format": format,
        "batch": max(args.concurrency),
        "length": PROMPT + NEW + 64,
        "cache_bytes": int(cache),
        "memory_fraction": share_of_gpu(whole, 0.9),
        "device": args.device.type,
    }
    return VllmServer(settings)


def vllm_client(ours: Side, client: Peer, url: str, concurrency: int, seed: int) -> Seen:
    """Measure a server by vLLM's own client, with random texts made by the model's tokenizer."""
    count = max(8, min(4 * concurrency, 768))  # some waves of requests
    words = (
        f"--backend openai --base-url {url} --endpoint /v1/completions --model {ours.model} "
        f"--dataset-name random --random-input-len {PROMPT} --random-output-len {NEW} "
        f"--num-prompts {count} --max-concurrency {concurrency} --seed {seed} --ignore-eos "
        f"--temperature 1.0 --disable-tqdm --percentile-metrics ttft,tpot,itl"
    )
    order = {"arguments": [*words.split(), "--tokenizer", str(ours.folder)]}
    return check_vllms(client.ask(order, f"{count} requests of vLLM's", 300.0), count, NEW)


def beside_vllm(
    ours: Side, vllm: VllmServer, args: argparse.Namespace, store: Callable[..., None]
) -> None:
    """Measure what clients see of both servers, in turns, at every concurrency."""
    say(f"vLLM serves after {vllm.wait():.0f} s")
    warm(ours, vllm.url)
    with start_vllm({}, "clients") as client:
        for concurrency in args.concurrency:

            def of(url: str, concurrency: int = concurrency) -> Callable[[], Seen]:
                seeds = itertools.count(1000)
                return lambda: vllm_client(ours, client, url, concurrency, next(seeds))

            sides = {"ours": of(ours.served.url), "vLLM": of(vllm.url)}
            seen = in_turns(sides, args.rounds, title=f"C={concurrency} ")
            store(over_vllm(ours, concurrency, seen["ours"], seen["vLLM"]), vllm=vllm.version)


def warm(ours: Side, url: str) -> None:
    """Send the first requests, which may compile."""
    for concurrency in (1, 32):
        texts = ours.texts(2 * concurrency, PROMPT, seed=1)
        check(ours.ask(url, texts, concurrency, max_tokens=NEW, **STREAMED))


def over_vllm(ours: Side, concurrency: int, mine: list[Seen], theirs: list[Seen]) -> list[Row]:
    """Return a row for each quantity; a ratio is how many times better ours is."""
    gaps = (f"{statistics.median(one[GAP] for one in seen):.0f}" for seen in (mine, theirs))
    note = "by vllm bench serve; gaps {} ms, vLLM's {}".format(*gaps)
    rows = []
    for what, (unit, key, is_rate) in QUANTITIES.items():
        own, peers = ([one[key] for one in seen] for seen in (mine, theirs))
        better = [a / b if is_rate else b / a for a, b in zip(own, peers, strict=True)]
        name = over_vllm_server(ours.model, ours.format, concurrency, what)
        ours_at, theirs_at, ratio = map(statistics.median, (own, peers, better))
        extent = min(better), max(better)
        rows.append(Row(name, unit, ours_at, theirs_at, ratio, extent, note=note))
    return rows


# -- against the engine without a server -----------------------------------------------------------


def rollouts(ours: Side, batch: int, group: int, rounds: int, store: Callable[..., None]) -> None:
    """Store the row of the same rollouts over the server and in process, in turns."""

    def side(measure: Callable[[Side, list[list[int]], int], float]) -> Callable[[], float]:
        seeds = itertools.count(100)

        def seconds() -> float:
            prompts = ours.prompts(batch // group, ROLLED, next(seeds))
            ours.forget()
            return measure(ours, prompts, group)

        return seconds

    sides = {"server": side(over_http), "engine": side(in_process)}
    # the first round compiles what these shapes need
    taken = in_turns(sides, rounds, warm=1, title=f"B={batch} n={group}, ")
    name = through_server(ours.model, ours.format, batch, group)
    store([speed_row(name, batch * NEW, "tokens/s", taken["server"], taken["engine"])])


def over_http(ours: Side, prompts: list[list[int]], group: int) -> float:
    """Ask the server as a trainer does, all requests at once; return the seconds."""
    answer = ours.ask(
        ours.served.url,
        prompts,
        len(prompts),
        n=group,
        max_tokens=NEW,
        seed=7,
        return_token_ids=True,
        packed=True,
    )
    check(answer)
    if answer["tokens"] != len(prompts) * group * NEW:
        raise PeerFailed(f"{answer['tokens']} tokens instead of {len(prompts) * group} x {NEW}")
    return float(answer["seconds"])


def in_process(ours: Side, prompts: list[list[int]], group: int) -> float:
    """Call `generate` at the pace that is best for it; return the seconds."""
    asked = [Request(ids, n=group, max_tokens=NEW, ignore_eos=True, seed=7) for ids in prompts]

    def generate(engine: Engine) -> float:
        return seconds_of(lambda: engine.generate(asked), engine.model.device)

    ours.take(Pace())
    try:
        return ours.served.call(generate, "a rollout")
    finally:
        ours.take(ours.pace)


# -- while weights change --------------------------------------------------------------------------


def updates(ours: Side, device: torch.device, store: Callable[..., None]) -> None:
    """Store the rows of the longest gap of any stream: without an update, in one, and while
    paused."""
    engine = ours.served.engine
    master = random_model(ours.config, device, engine.model.dtype, seed=1)
    seconds: list[float] = []
    versions = iter(range(1, 100))

    def take(engine: Engine) -> None:
        began = time.perf_counter()
        engine.update_weights(WeightUpdate.local(master, next(versions)))
        synchronize(device)
        seconds.append(time.perf_counter() - began)

    def paused() -> None:
        ours.served.wait(ours.served.loop.pause("keep"))
        ours.served.call(take, "new weights")
        ours.served.wait(ours.served.loop.resume())

    ours.served.call(take, "the first new weights")  # it may compile
    ways: dict[str, Callable[[], None]] = {
        "no update": lambda: None,
        "update": lambda: ours.served.call(take, "new weights"),
        "pause, update, resume": paused,
    }
    name = f"{ours.model} {ours.format} {STREAMS} streams"
    rows = []
    for way, act in ways.items():
        longest = [gap(ours, act, seed) * 1e3 for seed in (1, 2)]
        rows.append(Row(f"{name}: longest gap, {way}", "ms", statistics.median(longest)))
        say(f"longest gap, {way}: {', '.join(f'{ms:.1f}' for ms in longest)} ms")
    rows.append(Row(f"{name}: the update itself", "ms", statistics.median(seconds[1:]) * 1e3))
    store(rows)


def gap(ours: Side, act: Callable[[], None], seed: int) -> float:
    """Call `act` in mid-stream; return the seconds of the longest gap that ended after it began."""
    engine = ours.served.engine
    prompts = ours.prompts(STREAMS, 64, seed)
    longest = LONG[engine.model.device.type]
    ours.forget()
    before = engine.stats().tokens
    with ThreadPoolExecutor(1) as clients:
        asked = clients.submit(
            ours.ask, ours.served.url, prompts, STREAMS, max_tokens=longest, **STREAMED
        )
        while not asked.done() and engine.stats().tokens < before + STREAMS * 32:
            time.sleep(0.02)
        began = time.perf_counter()
        act()
    answer = asked.result()
    check(answer)
    return max((seconds for seconds, end in answer["gaps"] if end > began), default=0.0)


# -- the command -----------------------------------------------------------------------------------


def measure(
    args: argparse.Namespace, format: str, folder: Path, store: Callable[..., None]
) -> bool:
    """Measure all parts; return whether none failed."""
    with ExitStack() as stack:
        vllm = None
        if "vllm" in args.parts and args.peer == "vllm":
            vllm = serve_vllm(args, format, folder / f"vllm-{format}")
            stack.callback(vllm.close)
        ours = stack.enter_context(side(args, format, folder / "ours"))
        warm(ours, ours.served.url)
        ran = []
        if vllm is not None:
            ran.append(runs("vLLM", partial(beside_vllm, ours, vllm, args, store)))
            vllm.close()
        if "rollout" in args.parts:
            for batch, group in itertools.product(args.batches, GROUPS):
                act = partial(rollouts, ours, batch, group, args.rounds, store)
                ran.append(runs(f"{batch} rollouts", act))
        if "update" in args.parts:
            ran.append(runs("updates", partial(updates, ours, args.device, store)))
    return all(ran)


def runs(part: str, act: Callable[[], None]) -> bool:
    """Measure a part; print why where it fails, so that other parts go on. Return whether it ran."""
    try:
        act()
    except PeerFailed as error:
        say(f"{part}: not run ({error})")
        return False
    return True


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    name = "server" if args.device.type == "cuda" else "server-cpu"
    results = Results(name, args.out, rounds=args.rounds)
    if args.device.type == "cpu":
        torch.set_num_threads(args.threads)
    complete = True
    with tempfile.TemporaryDirectory(prefix="bench-server-") as temporary:
        for format in args.formats:
            with released():
                complete &= measure(args, format, Path(temporary), results.add)
    return results.finish("Our server", complete)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of(
        __doc__,
        out=BASELINES,
        model=OneOf([*SHAPES, "demo"], "qwen2.5-7b"),
        formats=SomeOf(formats(), []),
        concurrency=[1, 16, 64, 256],
        batches=[64, 256],
        rounds=2,
        parts=SomeOf(PARTS),
        device="auto",
        threads=1,
        peer=OneOf(("vllm", "none"), "vllm"),
    )
    args = parser.parse_args(argv)
    args.device = device_of(parser, args.device)
    on_gpu = args.device.type == "cuda"
    args.pace = Pace(LOOKAHEAD, **PROMPTS) if on_gpu else Pace()
    args.formats = args.formats or ["bf16" if on_gpu else "fp32"]
    unknown = sorted(set(args.formats) - set(vllm_worker.FORMATS))
    if "vllm" in args.parts and args.peer == "vllm" and unknown:
        parser.error(f"--formats: vLLM is not measured with {', '.join(unknown)}; --peer none")
    return args


if __name__ == "__main__":
    sys.exit(main())
