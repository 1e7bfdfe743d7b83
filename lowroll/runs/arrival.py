"""Whether a run's updates reach the engine in its process.

An engine that keeps its old weights draws on without an error, and a mismatch of small steps hides in
that of the formats. But an engine repeats its own bits: when the learner's log-probs of a few tokens
have changed and not one bit of the engine's has, the new weights did not arrive. vLLM, whose bits are
not its own, has a test by distances (`engine.remote.verify`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lowroll.engine.base import Engine
from lowroll.engine.remote.verify import LEAST, NotArrived, text
from lowroll.model.scoring import score
from lowroll.model.transformer import Transformer


@dataclass(frozen=True)
class _Scores:
    """Log-probs of the same tokens, float32 on the CPU."""

    learner: Tensor
    engine: Tensor


class ArrivalCheck:
    """The comparison of an engine's movement with the learner's, from one version to the next."""

    def __init__(self, model: Transformer, engine: Engine) -> None:
        """Score the tokens with the weights that both have now."""
        self.model = model
        self.engine = engine
        self.ids = text(model.spec.vocab_size, engine.capabilities.context_length)
        self._before = self._scores()

    def check(self, version: int) -> None:
        """Raise NotArrived when the learner has moved by LEAST nats or more since the engine last
        moved, and the engine has not."""
        now = self._scores()
        if not torch.equal(now.engine, self._before.engine):
            self._before = now
            return
        moved = (now.learner - self._before.learner).square().mean().sqrt().item()
        if moved > LEAST:
            raise NotArrived(
                f"update to version {version}: the learner's log-probs have moved by {moved:.3g} nats, and "
                "not one bit of the engine's has: it still draws from older weights"
            )

    def _scores(self) -> _Scores:
        (learner,) = score(self.model, [self.ids], [1])
        (engine,) = self.engine.score([self.ids], [1])
        return _Scores(learner.cpu(), engine)
