"""Our own server over an engine that has all tokens of a request at once: what is left is the server.

python -m bench.instant [--vocab 32768]        prints its address, and serves until it is killed

With `--shelf FOLDER --admin TOKEN` it takes the adapters of a trainer too, and prints when it had
one, and when it was asked for the first tokens of it: seconds of this machine's clock.
"""

from __future__ import annotations

import argparse
import subprocess
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

from bench import vocabulary
from bench.harness import running
from bench.served import Served
from lowroll.engine.base import Capabilities, EngineStats, InFlight, PartialSample
from lowroll.engine.request import sampler_settings, validate
from lowroll.server.weight_store import WeightStore
from lowroll.types import BehaviorTag, Group, PolicySpan, Request, Rollout
from lowroll.weights.sync.update import WeightUpdate

CONTEXT = 8192
RANK = 64  # of adapters, at most
SAMPLER = (
    "prompt_ids n max_tokens min_tokens temperature top_k top_p min_p repetition_penalty stop_ids "
    "stop_strings ignore_eos seed id top_logprobs"
)


class Instant:
    """Every sample is `max_tokens` tokens of one list, with log-probs that float32 can hold."""

    def __init__(self, vocab_size: int) -> None:
        dice = Random(0)
        self.tokenizer = vocabulary.tokenizer(vocab_size)
        self.ids = dice.choices(vocabulary.words(self.tokenizer), k=CONTEXT)
        self.logprobs = list(array("f", (-dice.expovariate(1.0) for _ in range(CONTEXT))))
        self.behavior = BehaviorTag((PolicySpan(0, "0" * 32),), "bf16")
        self.capabilities = Capabilities(
            CONTEXT, frozenset({"adapter"}), True, False, False, True, frozenset(SAMPLER.split()),
            vocab_size=vocab_size, lora_rank=RANK,
        )  # fmt: skip
        self.told: Callable[[str], None] = lambda what: None  # of what happens
        self.drawn = 0
        self._open: dict[int, Request] = {}
        self._next = 0

    def add(self, request: Request) -> int:
        can = self.capabilities
        assert can.vocab_size is not None
        validate(
            request, vocab_size=can.vocab_size, context_length=CONTEXT, cache_tokens=CONTEXT,
            has_tokenizer=True,
        )  # fmt: skip
        if not self._open:
            self.told("asked")
        self._next += 1
        self._open[self._next] = request
        return self._next

    def step(self, meanwhile: Callable[[], None] = lambda: None) -> list[tuple[int, Group]]:
        meanwhile()
        ended = [(handle, self._group(request)) for handle, request in self._open.items()]
        self._open.clear()
        return ended

    def abort(self, handle: int) -> bool:
        return handle in self._open

    def so_far(self, handle: int) -> list[PartialSample]:
        return []

    def reset_prefix_cache(self) -> None:
        pass

    def update_weights(self, update: WeightUpdate, in_flight: InFlight = "keep") -> BehaviorTag:
        """Held as they came: what a device makes of them is the same in one process."""
        self.weights = dict(update.tensors())
        span = PolicySpan(update.version, f"{update.version:064x}")
        self.behavior = BehaviorTag((span,), "bf16")
        self.told("taken")
        return self.behavior

    def stats(self) -> EngineStats:
        return EngineStats("bf16", 16.0, CONTEXT, 0, 0, 0, 0, 0, 0, 0, self.drawn)

    def _group(self, request: Request) -> Group:
        most, sampler = request.max_tokens, sampler_settings(request)
        policy = self.behavior.policy
        self.drawn += request.n * most
        return Group(
            request,
            [
                Rollout(
                    self.ids[i : i + most],
                    self.logprobs[i : i + most],
                    "length",
                    BehaviorTag(
                        policy, "bf16", sampler=sampler, seed=request.seed, request_id=request.id,
                        sample=i,
                    ),
                )
                for i in range(request.n)
            ],
        )  # fmt: skip


@contextmanager
def started(*words: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The server in a process of its own, once it listens, and its address."""
    with running("bench.instant", *words) as process:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--shelf", type=Path, help="folder of a trainer's broadcasts")
    parser.add_argument("--admin", help="token of whoever asks for them")
    given = parser.parse_args()
    engine: Any = Instant(given.vocab)
    shelf = None
    if given.shelf is not None:
        shelf = WeightStore(given.shelf, given.shelf)
        engine.told = lambda what: print(what, time.monotonic(), flush=True)
    with Served(engine, "instant", given.admin, shelf) as served:
        print(served.url, flush=True)
        while True:
            time.sleep(3600.0)


if __name__ == "__main__":
    main()
