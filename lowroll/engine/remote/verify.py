"""Checks of an engine's weights by a few log-probs.

An engine that joins a pool has to agree with one that works (`check_canary`). Beside the stated
version and digest, this finds what the engine does not know: bad memory, a model that was read
wrongly, a vLLM that kept its old weights. Both run the same tokens alone, so only the rounding of
other kernels or another GPU is allowed.

After an update of a run's vLLM its log-probs are compared with the learner's (`Verifier`) by two
tests, since neither alone is enough:

 1. distance    is the engine near the learner? A wrong folder, a torn transfer or another model is
                far away. What formats and dtypes round is allowed for by the bound.
 2. movement    has the engine moved as the learner has? Small steps hide below the bound, so a
                stale policy passes (1). With d the learner's change since a reference and m the
                engine's, the share <m, d> / <d, d> is 1 when updates arrive and 0 when they do not.
                It is asked as soon as d stands out of the distance between the two; until then the
                reference stays, and small steps add up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lowroll.engine.remote.http_client import HttpCall, ServerError
from lowroll.engine.remote.protocol import PATH, prompt_logprobs
from lowroll.engine.remote.server_base import EngineServer

CLEAR = 5.0  # how many times the distance a movement must be, to be judged
LEAST = 1e-4  # nats: below this, no movement is judged
SHARE = 0.5
TOKENS = 24  # of the text that is scored; fewer in a short context
CANARY_BOUND = 0.1  # nats a token, root mean square
CANARY_BYTES = 1 << 20  # of its answer

Learner = Callable[[list[int]], Sequence[float]]  # ids -> log-probs of ids[1:], at temperature 1


class NotArrived(ServerError):
    """The engine does not draw from the weights that it was given."""


@dataclass(frozen=True)
class _Pair:
    learner: list[float]
    engine: list[float]

    @property
    def apart(self) -> float:
        return distance(self.learner, self.engine)


class Verifier:
    """The tests of an engine against the learner. bound: the largest accepted root mean square
    distance, in nats a token."""

    def __init__(self, vocab_size: int, context_length: int, bound: float) -> None:
        self.ids = text(vocab_size, context_length)
        self.bound = bound
        self._reference: _Pair | None = None

    def check(self, learner: Sequence[float], engine: Sequence[float], version: int) -> float:
        """Return the distance to the learner in nats. NotArrived names the version."""
        now = _Pair([float(x) for x in learner], [float(x) for x in engine])
        if not now.apart <= self.bound:  # also true for NaN
            raise NotArrived(
                f"update to version {version}: vLLM's log-probs are {now.apart:.3g} nats from the "
                f"learner's, and {self.bound:g} are allowed; it does not hold these weights"
            )
        before = self._reference
        if before is None:
            self._reference = now
            return now.apart
        d = [b - a for a, b in zip(before.learner, now.learner, strict=True)]
        m = [b - a for a, b in zip(before.engine, now.engine, strict=True)]
        noise = max(before.apart, now.apart) if _moved(m) else before.apart
        if _size(d) > max(CLEAR * noise, LEAST):
            share = sum(a * b for a, b in zip(m, d, strict=True)) / sum(a * a for a in d)
            if share < SHARE:
                raise NotArrived(
                    f"update to version {version}: the learner's log-probs have moved by "
                    f"{_size(d):.3g} nats, and vLLM's by {share:.0%} of that; it still draws from "
                    f"older weights"
                )
            self._reference = now
        return now.apart


async def canary_logprobs(server: EngineServer, deadline_s: float) -> list[float]:
    ids = text(server.vocab_size, server.capabilities.context_length)
    what = "its canary score"
    call = HttpCall("POST", PATH, what, server.scoring(ids, 0, 1.0), deadline_s, CANARY_BYTES)
    rows = prompt_logprobs(await server.http.answer(call), ids, what)
    return [row[token][0] for row, token in zip(rows, ids[1:], strict=True)]


def check_canary(mine: list[float], theirs: list[float], witness: str) -> None:
    apart = distance(mine, theirs) if mine else 0.0
    if math.isnan(apart) or apart > CANARY_BOUND:
        raise ServerError(
            f"canary: its log-probs are {apart:.3g} nats a token from those of {witness}, and "
            f"{CANARY_BOUND:g} are allowed: it does not compute with the same weights"
        )


def text(vocab_size: int, context_length: int) -> list[int]:
    """Return meaningless token ids to be scored."""
    count = min(TOKENS, context_length - 1)
    return [(7919 * (i + 1) + i * i * 104729) % vocab_size for i in range(count)]


def distance(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the root mean square of the differences, in nats a token."""
    return _size([x - y for x, y in zip(a, b, strict=True)])


def _moved(change: list[float]) -> bool:
    return any(change)


def _size(values: list[float]) -> float:
    return math.sqrt(sum(x * x for x in values) / len(values))
