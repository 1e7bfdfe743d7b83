"""Requests that come one by one: how often should the host look, and should prompts be gathered?

A server does not know its requests beforehand. The more steps lie between two looks of the host
(`lookahead`), the fewer looks a token pays for, and the longer a request waits at the door; and
every prompt holds up the rows that decode, a few together hardly longer than one (`gather`). The
engine runs in this process, without HTTP.

    decode      ms a step, of rows that stand at a context of 256 tokens and decode together
    closed      so many clients, each of which sends a prompt of fresh random tokens, waits for all
                of its tokens, and sends the next one a turn of the engine later: requests/s, ms to
                the first token and ms between tokens (of the whole response but its first), the
                median and the 99th percentile of the requests after the first of each client

    python -m bench.arrivals [--models NAME ...] [--formats NAME ...] [--clients 1,16,64,256]
                             [--lookaheads 1,2,4,8,16] [--prompt 256] [--response 128]
                             [--requests 4] [--out FOLDER]

Rows are added to `arrivals.json` as they are measured.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.harness import Results, Row, parser_of, settle, synchronize
from bench.placed import Placed
from bench.shapes import SHAPES, random_model
from lowroll import Engine, Request
from lowroll.quant.formats import formats

CONTEXT = 256  # tokens of a row that decodes
STEPS = 64  # of which the mean is taken


@dataclass
class Client:
    """One request after the other, and when what of them was seen."""

    asked: float = 0.0
    first: float = 0.0  # 0 until a token was seen
    served: int = 0
    to_first: list[float] = field(default_factory=list)  # seconds
    between: list[float] = field(default_factory=list)

    def done(self, now: float, tokens: int) -> None:
        self.served += 1
        if self.served > 1:  # the first ones all come at once
            self.to_first.append(self.first - self.asked)
            self.between.append((now - self.first) / max(1, tokens - 1))


class Closed:
    """So many clients around an engine."""

    def __init__(self, engine: Engine, clients: int, prompt: int, response: int) -> None:
        self.engine = engine
        self.clients = [Client() for _ in range(clients)]
        self.prompt, self.response = prompt, response
        self.dice = random.Random(clients)
        self.flying: dict[int, Client] = {}

    def run(self, requests: int) -> float:
        """Seconds in which every client had that many requests answered."""
        synchronize(self.engine.model.device)
        began = time.perf_counter()
        back = list(self.clients)  # who sends before the next turn
        while back or self.flying:
            for client in back:
                self._send(client)
            finished = self.engine.step()
            now = time.perf_counter()
            for handle, client in self.flying.items():
                if not client.first and self._has_begun(handle):
                    client.first = now
            back = []
            for handle, _ in finished:
                client = self.flying.pop(handle)
                client.first = client.first or now
                client.done(now, self.response)
                if client.served < requests:
                    back.append(client)
        return time.perf_counter() - began

    def _send(self, client: Client) -> None:
        vocab = self.engine.spec.vocab_size
        ids = [self.dice.randrange(vocab // 100, vocab) for _ in range(self.prompt)]
        request = Request(ids, max_tokens=self.response, ignore_eos=True, seed=7)
        client.asked, client.first = time.perf_counter(), 0.0
        self.flying[self.engine.add(request)] = client

    def _has_begun(self, handle: int) -> bool:
        return any(drawn.token_ids for drawn in self.engine.so_far(handle))


def set_looks(engine: Engine, lookahead: int, gather: int) -> None:
    engine.scheduler.lookahead, engine.scheduler.gather = lookahead, gather


def closed_rows(engine: Engine, name: str, clients: int, args: argparse.Namespace) -> list[Row]:
    """Each lookahead with prompts run at once and, where that is something else, gathered."""
    rows = []
    set_looks(engine, max(args.lookaheads), 0)
    Closed(engine, clients, args.prompt, args.response).run(1)  # captures what is missing
    for lookahead in args.lookaheads:
        for gather in sorted({0, lookahead - 1}):
            set_looks(engine, lookahead, gather)
            engine.reset_prefix_cache()
            side = Closed(engine, clients, args.prompt, args.response)
            seconds = side.run(args.requests)
            where = f"{name} C={clients} lookahead={lookahead} gather={gather}"
            served = sum(client.served for client in side.clients)
            rows.append(Row(f"{where}: requests", "requests/s", served / seconds))
            for what, times in (
                ("to the first token", [t for c in side.clients for t in c.to_first]),
                ("between tokens", [t for c in side.clients for t in c.between]),
            ):
                ranked = sorted(times)
                median, worst = statistics.median(ranked), ranked[int(0.99 * (len(ranked) - 1))]
                rows.append(Row(f"{where}: {what}, median", "ms", median * 1e3))
                rows.append(Row(f"{where}: {what}, 99th percentile", "ms", worst * 1e3))
    return rows


def decode_rows(engine: Engine, name: str, args: argparse.Namespace) -> list[Row]:
    """The engine's prefill is gone after this (`bench.placed`)."""
    rows = []
    side = Placed(engine)
    for batch in args.clients:
        set_looks(engine, max(args.lookaheads), 0)
        side.stand([CONTEXT] * batch, STEPS * (2 + len(args.lookaheads)) + max(args.lookaheads))
        side.step_ms(STEPS // 2)
        for lookahead in args.lookaheads:
            set_looks(engine, lookahead, 0)
            ms = side.step_ms(STEPS)
            rows.append(Row(f"{name} B={batch} lookahead={lookahead}: decode", "ms a step", ms))
        side.clear()
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    sizes = {"prompt": args.prompt, "response": args.response, "requests": args.requests}
    results = Results("arrivals", args.out, context=CONTEXT, **sizes)
    most = max(args.clients)
    longest = max(args.prompt + args.response, CONTEXT + STEPS * (3 + len(args.lookaheads)))
    for model in args.models:
        for format in args.formats:
            engine = Engine(
                random_model(SHAPES[model], args.device),
                weights=format,
                max_batch=most,
                cache_tokens=most * (longest + 64),
            )
            engine.keep_dense()
            engine.warm_up()
            for clients in args.clients:
                results.add(closed_rows(engine, f"{model} {format}", clients, args))
            results.add(decode_rows(engine, f"{model} {format}", args))
            del engine
    return results.finish("Requests that come one by one")


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of(
        __doc__,
        clients=[1, 16, 64, 256],
        lookaheads=[1, 2, 4, 8, 16],
        prompt=256,
        response=128,
        device="auto",
    )
    parser.add_argument("--requests", type=int, default=4, help="of each client; at least 2")
    for name, one, choices in (("models", "qwen2.5-7b", SHAPES), ("formats", "nvfp4", formats())):
        parser.add_argument(f"--{name}", nargs="+", default=[one], choices=choices, metavar="NAME")
    args = parser.parse_args(argv)
    if args.requests < 2:
        parser.error("--requests: the first of each client is not counted; at least 2")
    args.device, args.out = settle(parser, args.device, args.out)
    return args


if __name__ == "__main__":
    raise SystemExit(main())
