"""Flags for degenerate rollouts that a reward may miss.

Gibberish: a rare token drawn with almost no probability,

    exists t: token_id_t > 100000  and  logprob_t < -ln(V) - 2          (byte-pair ids grow with rarity)

Repetition: 3000 consecutive tokens of which the policy was certain, logprob_t > ln 0.99.

Rules and constants are those of prime-rl and Surogate. With `enforce` a flagged rollout's loss mask
becomes 0, while its reward stays in the group's baseline.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from lowroll.types import Rollout


class Filter(Protocol):
    """A rule over a rollout's ids and log-probs."""

    @property
    def name(self) -> str: ...

    @property
    def enforce(self) -> bool: ...

    def matches(self, rollout: Rollout) -> bool:
        """Return whether to flag the rollout."""
        ...


@dataclass(frozen=True)
class Gibberish:
    """The gibberish rule, for V = vocab_size."""

    vocab_size: int
    token_id_threshold: int = 100_000
    logprob_offset: float = 2.0
    enforce: bool = False
    name: ClassVar[str] = "gibberish"

    @property
    def threshold(self) -> float:
        """The log-prob in nats below which a rare token is flagged."""
        return -math.log(self.vocab_size) - self.logprob_offset

    def matches(self, rollout: Rollout) -> bool:
        return any(
            token > self.token_id_threshold and logprob < self.threshold
            for token, logprob in zip(rollout.token_ids, rollout.logprobs, strict=True)
        )


@dataclass(frozen=True)
class Repetition:
    """The repetition rule."""

    window: int = 3000
    prob_threshold: float = 0.99
    enforce: bool = False
    name: ClassVar[str] = "repetition"

    def matches(self, rollout: Rollout) -> bool:
        run = 0
        threshold = math.log(self.prob_threshold)
        for logprob in rollout.drawn_logprobs:
            run = run + 1 if logprob > threshold else 0
            if run >= self.window:
                return True
        return False


def flag(rollout: Rollout, filters: Sequence[Filter]) -> Filter | None:
    """Return the first filter that matches, or None."""
    return next((rule for rule in filters if rule.matches(rollout)), None)
