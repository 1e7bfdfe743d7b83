"""Many engines in one process, which draw nothing and answer as late as measured ones do.

    python -m bench.fakes COUNT WEIGHTS_FOLDER [--rows 64] [--slow 1] [--median 220]

prints an address, under which `/0`, `/1`, ... are engines that speak our HTTP protocol, packed answers
and weights included. An answer has token ids and log-probs of the right lengths, so its bytes are
real; they are the same few pages of random numbers over and over. `/totals` has what all have done.

When an engine answers follows from two measurements of Qwen2.5-7B in bf16 on one H200
(bench/baselines): a request waits as long as the first token took at so many requests at a time
(`server.json`), then each of its samples is a row, and a step takes as long as one of so many rows
did (`decode.json`). What does not fit into `rows` waits for a row. `slow` stretches both times.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import heapq
import json
import math
import re
import time
from array import array
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from aiohttp import web

from lowroll.weights.sync.base import manifest_digest

BASELINES = Path(__file__).parent / "baselines"
MODEL_ID = "policy"
MODEL = "qwen2.5-7b bf16"
STEP = re.compile(rf"{re.escape(MODEL)} B=(\d+): decode step")
FIRST = re.compile(rf"{re.escape(MODEL)} C=(\d+) over vllm serve: time to first token")
CONTEXT, RANK, VOCAB = 8192, 16, 32768
SIGMA, LONGEST = 0.6, 2048  # of log-normal lengths, as GSM8K-like ones of bench.lengths
WORDS = 257  # ids from here on are words of bench.vocabulary
SAMPLER = (
    "prompt_ids n max_tokens min_tokens temperature top_k top_p min_p repetition_penalty stop_ids "
    "ignore_eos seed id"
)
Tree = dict[str, Any]


@dataclass(frozen=True)
class Curve:
    """Seconds, measured at some sizes: straight lines between them, and beyond the last one."""

    points: list[tuple[float, float]]

    @classmethod
    def stored(cls, file: str, row: re.Pattern[str]) -> Curve:
        """Return the curve of the rows of a baseline whose names have the size, in ms."""
        rows = json.loads((BASELINES / file).read_text())["rows"]
        found = [(row.fullmatch(one["name"]), one["ours"]) for one in rows]
        return cls(sorted((float(name[1]), ms / 1e3) for name, ms in found if name))

    def at(self, size: float) -> float:
        sizes = [point[0] for point in self.points]
        right = min(max(bisect_left(sizes, size), 1), len(sizes) - 1)
        (x0, y0), (x1, y1) = self.points[right - 1 : right + 1]
        return y0 + (y1 - y0) * (max(size, sizes[0]) - x0) / (x1 - x0)


@dataclass
class Totals:
    """Of all engines of the process."""

    requests: int = 0  # answered
    samples: int = 0
    tokens: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    orders: int = 0  # of weights
    looks: int = 0  # at health and counters
    open: int = 0  # requests that came and are not answered
    row_seconds: float = 0.0


@dataclass(order=True)
class Row:
    """A sample that is drawn, until its engine has made so many steps."""

    end: float
    number: int
    left: list[int] = field(compare=False)  # of its request, how many samples are not done
    done: asyncio.Future[None] = field(compare=False)


class Device:
    """The rows of one engine. A step takes longer the more there are."""

    def __init__(self, steps: Curve, slow: float, rows: int, totals: Totals) -> None:
        self.rows = rows
        self.totals = totals
        self.step_s = [slow * steps.at(count) for count in range(rows + 1)]
        self.drawn = 0.0  # tokens
        self._steps, self._at, self._count = 0.0, time.monotonic(), 0
        self._running: list[Row] = []
        self._waiting: deque[tuple[int, list[int], asyncio.Future[None]]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    async def draw(self, lengths: list[int]) -> None:
        """Wait until samples of these lengths are there."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        left = [len(lengths)]
        self._waiting.extend((length, left, done) for length in lengths)
        self._turn()
        await done

    def _turn(self) -> None:
        now, running = time.monotonic(), self._running
        passed, self._at = now - self._at, now
        steps = passed / self.step_s[len(running)]
        self._steps += steps
        self.drawn += steps * len(running)
        self.totals.row_seconds += passed * len(running)
        while running and running[0].end <= self._steps + 1e-6:
            row = heapq.heappop(running)
            row.left[0] -= 1
            if not row.left[0] and not row.done.done():
                row.done.set_result(None)
        while self._waiting and len(running) < self.rows:
            length, left, done = self._waiting.popleft()
            self._count += 1
            heapq.heappush(running, Row(self._steps + length, self._count, left, done))
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if running:
            wait = (running[0].end - self._steps) * self.step_s[len(running)]
            self._timer = asyncio.get_running_loop().call_later(max(wait, 0.002), self._turn)


class Fleet:
    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.totals = Totals()
        self.first = Curve.stored("server.json", FIRST)
        steps = Curve.stored("decode.json", STEP)
        self.devices = [
            Device(steps, given.slow, given.rows, self.totals) for _ in range(given.count)
        ]
        self.open = [0] * given.count
        self.held = [(0, "base")] * given.count
        self.manifests: dict[str, str] = {}
        dice = Random(0)
        ids = dice.choices(range(WORDS, VOCAB), k=2 * CONTEXT)
        single = array("f", (-dice.expovariate(1.0) for _ in range(2 * CONTEXT)))
        self.ids, self.logprobs = array("i", ids).tobytes(), array("d", single).tobytes()

    def app(self) -> web.Application:
        made = web.Application(client_max_size=1 << 26)
        for method, path, handler in (
            ("GET", "/totals", self._totals),
            ("GET", "/{engine}/health", self._health),
            ("GET", "/{engine}/v1/models", self._models),
            ("GET", "/{engine}/metrics", self._metrics),
            ("POST", "/{engine}/v1/completions", self._complete),
            ("POST", "/{engine}/weights", self._take),
            ("POST", "/{engine}/{order:pause|resume|reset_prefix_cache}", self._obey),
        ):
            made.router.add_route(method, path, handler)
        return made

    # -- what is asked beside rollouts -------------------------------------------------------------

    async def _totals(self, request: web.Request) -> web.Response:
        return web.json_response(vars(self.totals) | {"cpu_s": time.process_time()})

    async def _health(self, request: web.Request) -> web.Response:
        self.totals.looks += 1
        return web.json_response({"status": "running"})

    async def _obey(self, request: web.Request) -> web.Response:
        return web.json_response({"success": True})

    async def _metrics(self, request: web.Request) -> web.Response:
        self.totals.looks += 1
        number = _number(request)
        drawn = self.devices[number].drawn
        text = f"lowroll_requests_open {self.open[number]}\nlowroll_drawn_tokens {drawn:.0f}\n"
        return web.Response(text=text)

    async def _models(self, request: web.Request) -> web.Response:
        number = _number(request)
        capabilities = {
            "context_length": CONTEXT,
            "updates": ["adapter"],
            "updates_in_flight": True,
            "noise": False,
            "scores": False,
            "exact_logprobs": True,
            "sampler": sorted(SAMPLER.split()),
            "kv": {"policy": "dense", "options": {}},
            "kv_dtype": None,
            "records_evictions": False,
            "replays": False,
            "vocab_size": VOCAB,
            "lora_rank": RANK,
        }
        stated = {"capabilities": capabilities, "packs": True, "behavior": self._behavior(number)}
        model = {"id": MODEL_ID, "owned_by": "lowroll", "lowroll": stated}
        return web.json_response({"object": "list", "data": [model]})

    async def _take(self, request: web.Request) -> web.Response:
        """Take weights: the folder is there, and its manifest is read once for all."""
        name = str((await request.json())["version"])
        if name not in self.manifests:
            self.manifests = {name: manifest_digest(self.given.weights / name)}
        manifest, number = self.manifests[name], _number(request)
        self.held[number] = (int(name.rpartition("_")[2]), manifest[:32])
        self.totals.orders += 1
        policy = self._behavior(number)["policy"]
        said = {"version": name, "weights": "bf16", "policy": policy, "manifest_digest": manifest}
        return web.json_response(said)

    def _behavior(self, number: int, began: tuple[int, str] | None = None, middle: int = 0) -> Tree:
        now = self.held[number]
        spans = [(now, 0)] if began in (None, now) else [(began, 0), (now, middle)]
        return {
            "policy": [{"version": v, "digest": d, "start": at} for (v, d), at in spans],
            "weights": "bf16",
            "sampler": {},
        }

    # -- rollouts ----------------------------------------------------------------------------------

    async def _complete(self, request: web.Request) -> web.Response:
        number, totals = _number(request), self.totals
        text = await request.read()
        body = json.loads(text)
        lengths = self._lengths(body)
        began = self.held[number]
        self.open[number] += 1
        totals.open += 1
        try:
            await asyncio.sleep(self.given.slow * self.first.at(self.open[number]))
            await self.devices[number].draw(lengths)
        finally:
            self.open[number] -= 1
            totals.open -= 1
        choices = [self._choice(body, i, count, number, began) for i, count in enumerate(lengths)]
        answer = json.dumps({"model": MODEL_ID, "choices": choices}).encode()
        totals.requests += 1
        totals.samples += len(lengths)
        totals.tokens += sum(lengths)
        totals.bytes_in += len(text)
        totals.bytes_out += len(answer)
        return web.Response(body=answer, content_type="application/json")

    def _lengths(self, body: Tree) -> list[int]:
        dice, middle = Random(body["request_id"]), math.log(self.given.median)
        most = min(body["max_tokens"], LONGEST)
        drawn = (round(dice.lognormvariate(middle, SIGMA)) for _ in range(body["n"]))
        return [min(most, max(1, count)) for count in drawn]

    def _choice(
        self, body: Tree, index: int, count: int, number: int, began: tuple[int, str]
    ) -> Tree:
        start = (body["seed"] + 977 * index) % CONTEXT
        reason = "length" if count == body["max_tokens"] else "stop"
        settings = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "min_tokens")
        said = self._behavior(number, began, count // 2) | {
            "sampler": {name: float(body[name]) for name in settings},
            "seed": body["seed"],
            "request_id": body["request_id"],
            "sample": index,
        }
        return {
            "index": index,
            "packed": {
                "token_ids": _text(self.ids[4 * start : 4 * (start + count)]),
                "logprobs": _text(self.logprobs[8 * start : 8 * (start + count)]),
            },
            "finish_reason": reason,
            "lowroll": {"behavior": said},
        }


def _text(data: bytes) -> str:
    """Encode bytes as `engine.remote.protocol` does."""
    return base64.b64encode(data).decode()


def _number(request: web.Request) -> int:
    return int(request.match_info["engine"])


async def serve(given: argparse.Namespace) -> None:
    runner = web.AppRunner(Fleet(given).app(), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
    print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    await asyncio.Event().wait()


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("count", type=int, help="engines")
    p.add_argument("weights", type=Path, help="folder of the broadcasts")
    p.add_argument("--rows", type=int, default=64, help="samples that one draws at a time")
    p.add_argument("--slow", type=float, default=1.0, help="times as long for everything")
    p.add_argument("--median", type=float, default=220.0, help="tokens of a response")
    return p


if __name__ == "__main__":
    asyncio.run(serve(parser().parse_args()))
