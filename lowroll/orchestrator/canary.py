"""Two responses whose scores are known, sent through the scorer that the run uses.

Every environment's gold answer must count as solved and its perturbed answer must not. A verifier
that broke in the middle of a run fails here at once, long before the reward curve shows it. An
environment without stored answers (`gold` raises NotImplementedError) is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from lowroll.envs.tasks import prompt_at
from lowroll.orchestrator.client import Scorer
from lowroll.orchestrator.errors import describe
from lowroll.orchestrator.settings import SOLVED
from lowroll.types import Prompt, ScoreError

if TYPE_CHECKING:
    from lowroll.envs.base import Environment


def canaries(
    envs: Mapping[str, Environment], scorer: Scorer, positions: Mapping[str, int]
) -> list[str]:
    """Return one line for each canary that scored wrongly. `positions`: the training task to use of
    each environment."""
    items: list[tuple[Prompt, str]] = []
    for name, env in envs.items():
        prompt = prompt_at(env, positions[name], "train")
        try:
            items += [(prompt, env.gold(prompt)), (prompt, env.perturbed(prompt))]
        except NotImplementedError:
            continue
    failures = []
    for index, ((prompt, _), outcome) in enumerate(zip(items, scorer.score(items), strict=True)):
        kind, solved = ("perturbed", False) if index % 2 else ("gold", True)
        if isinstance(outcome, ScoreError):
            failures.append(
                f"environment {prompt.env!r}: the {kind} answer of {prompt.id!r} could not be "
                f"scored: {describe([outcome])}"
            )
        elif (outcome.reward >= SOLVED) != solved:
            failures.append(
                f"environment {prompt.env!r}: the {kind} answer of {prompt.id!r} scored "
                f"{outcome.reward}"
            )
    return failures
