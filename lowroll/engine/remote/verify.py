"""Checks of an engine's weights by the log-probs of a few tokens, against what the engine does not
know: bad memory, a misread model, a vLLM that kept its old weights.

An engine that joins a pool has to agree with one that works (`check_canary`). A vLLM is compared
with the learner after an update (`Verifier`):

 1. distance    is the engine near the learner? The bound allows for the rounding of formats.
 2. movement    with d the learner's change since a reference and m the engine's, the share
                <m, d> / <d, d> is 1 when updates arrive and 0 when they do not. A stale policy
                passes (1) when steps are small. It is judged once d exceeds the distance clearly;
                until then the reference stays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lowroll.engine.remote.http_client import HttpCall, ServerError
from lowroll.engine.remote.protocol import PATH, prompt_logprobs
from lowroll.engine.remote.server_base import EngineServer

CLEAR = 5.0  # a movement is judged at this multiple of the distance
LEAST = 1e-4  # nats: below this, no movement is judged
SHARE = 0.5
TOKENS = 24  # of the scored text; fewer in a short context
CANARY_BOUND = 0.1  # nats a token, root mean square
CANARY_BYTES = 1 << 20  # length limit of the canary's answer

Learner = Callable[[list[int]], Sequence[float]]  # ids -> log-probs of ids[1:], at temperature 1


class NotArrived(ServerError):
    """The engine does not draw from the weights that it was given."""


@dataclass(frozen=True)
class _LogprobPair:
    learner: list[float]
    engine: list[float]

    @property
    def apart(self) -> float:
        return distance(self.learner, self.engine)


class Verifier:
    """The tests of an engine against the learner. bound: the largest root mean square distance, in
    nats a token."""

    def __init__(self, vocab_size: int, context_length: int, bound: float) -> None:
        self.ids = text(vocab_size, context_length)
        self.bound = bound
        self._reference: _LogprobPair | None = None

    def check(self, learner: Sequence[float], engine: Sequence[float], version: int) -> None:
        """Raise NotArrived, which names the version, when the engine fails a test."""
        pair = _LogprobPair([float(x) for x in learner], [float(x) for x in engine])
        if not pair.apart <= self.bound:  # also true for NaN
            raise NotArrived(
                f"update to version {version}: vLLM's log-probs are {pair.apart:.3g} nats from the "
                f"learner's, and {self.bound:g} are allowed; it does not hold these weights"
            )
        if self._reference is None:
            self._reference = pair
        elif self._check_movement(self._reference, pair, version):
            self._reference = pair

    def _check_movement(self, before: _LogprobPair, now: _LogprobPair, version: int) -> bool:
        """Return whether the learner has moved clearly. NotArrived if the engine then has not moved
        with it. The distance between the two under the same weights counts as noise."""
        learner_change = _differences(now.learner, before.learner)
        engine_change = _differences(now.engine, before.engine)
        noise = before.apart
        if any(engine_change):  # else the distance contains the movement that the engine missed
            noise = max(noise, now.apart)
        moved_nats = distance(now.learner, before.learner)
        if moved_nats <= max(CLEAR * noise, LEAST):
            return False
        common = sum(m * d for m, d in zip(engine_change, learner_change, strict=True))
        share = common / sum(d * d for d in learner_change)
        if share < SHARE:
            raise NotArrived(
                f"update to version {version}: the learner's log-probs have moved by "
                f"{moved_nats:.3g} nats, and vLLM's by {share:.0%} of that; "
                f"it still draws from older weights"
            )
        return True


async def canary_logprobs(server: EngineServer, deadline_s: float) -> list[float]:
    ids = text(server.vocab_size, server.capabilities.context_length)
    label = "its canary score"
    call = HttpCall("POST", PATH, label, server.scoring(ids, 0, 1.0), deadline_s, CANARY_BYTES)
    scores_by_position = prompt_logprobs(await server.http.answer(call), ids, label)
    return [
        scores[token].logprob for scores, token in zip(scores_by_position, ids[1:], strict=True)
    ]


def check_canary(mine: list[float], theirs: list[float], witness: str) -> None:
    """Raise ServerError when log-probs are too far from the witness's."""
    distance_nats = distance(mine, theirs) if mine else 0.0
    if math.isnan(distance_nats) or distance_nats > CANARY_BOUND:
        raise ServerError(
            f"canary: its log-probs are {distance_nats:.3g} nats a token from those of {witness}, and "
            f"{CANARY_BOUND:g} are allowed: it does not compute with the same weights"
        )


def text(vocab_size: int, context_length: int) -> list[int]:
    count = min(TOKENS, context_length - 1)
    return [(7919 * (i + 1) + i * i * 104729) % vocab_size for i in range(count)]


def distance(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the root mean square of the differences, in nats a token."""
    return math.dist(a, b) / math.sqrt(len(a))


def _differences(a: Sequence[float], b: Sequence[float]) -> list[float]:
    return [x - y for x, y in zip(a, b, strict=True)]
