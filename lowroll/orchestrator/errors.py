"""The orchestrator's errors, and the rule that distinguishes a broken scorer from a hard task.

A score that could not be computed is an error and never a reward of 0. The remaining scores are
biased, so above an error rate the run stops.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Iterable, Sequence

from lowroll.types import RunFailed, Score, ScoreError, printable

logger = logging.getLogger(__name__)

MESSAGE_LIMIT = 500  # logged characters of a scorer's message


class InvalidRollout(ValueError):
    """An engine's answer that must not be learned from."""


class ScoringFailed(RunFailed):
    """A broken scorer; the message counts the errors by kind."""


class NoSignal(RunFailed):
    """A step without a group of differing rewards."""


class ErrorWindow:
    """The outcomes of recent scores, and their allowed error rate."""

    def __init__(self, max_error_rate: float, min_scores: int, size: int) -> None:
        self.max_error_rate = max_error_rate
        self.min_scores = min_scores
        self._outcomes: deque[bool] = deque(maxlen=max(size, min_scores))

    def check(self, scores: Iterable[Score | ScoreError]) -> None:
        """Add new scores. ScoringFailed when too many of enough scores are errors."""
        errors = []
        for score in scores:
            if isinstance(score, Score):
                self._outcomes.append(False)
            elif score.failed:
                self._outcomes.append(True)
                errors.append(score)
        total, failures = len(self._outcomes), sum(self._outcomes)
        if errors and total >= self.min_scores and failures > self.max_error_rate * total:
            raise ScoringFailed(
                f"{failures} of the last {total} scores are errors (limit "
                f"{self.max_error_rate:.1%}): {describe(errors)}"
            )

    def unjudged(self) -> str:
        """Describe errors among too few scores to judge; "" without any."""
        total, failures = len(self._outcomes), sum(self._outcomes)
        if not failures or total >= self.min_scores:
            return ""
        return (
            f"{failures} of all {total} scores are errors; score.max_error_rate "
            f"({self.max_error_rate:.1%}) was not applied, as it is judged from "
            f"{self.min_scores} scores on"
        )

    def state(self) -> str:
        """Return one character a score, oldest first: 1 is an error."""
        return "".join("1" if failed else "0" for failed in self._outcomes)

    def restore(self, state: str) -> None:
        """Restore `state()`. ValueError unless it consists of 0 and 1."""
        if not isinstance(state, str) or set(state) - {"0", "1"}:
            raise ValueError("error window: expected a string of 0 and 1")
        self._outcomes.clear()
        self._outcomes.extend(character == "1" for character in state)


def check_any(scores: Sequence[Score | ScoreError], what: str) -> None:
    """Raise ScoringFailed when all scores of `what` are errors; warn when none applies."""
    errors = [score for score in scores if isinstance(score, ScoreError)]
    failed = [error for error in errors if error.failed]
    if len(errors) < len(scores):
        return
    if failed:
        raise ScoringFailed(
            f"all {len(failed)} scores of the {what} are errors: {describe(failed)}"
        )
    logger.warning("no reward function says anything of any rollout of the %s", what)


def describe(errors: list[ScoreError]) -> str:
    """Return the kinds with counts, most frequent first, and the first message."""
    kinds = Counter(sorted(error.kind for error in errors))
    counts_text = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    return f"{counts_text}; first: {errors[0].kind}: {printable(errors[0].message[:MESSAGE_LIMIT], 4 * MESSAGE_LIMIT)}"
