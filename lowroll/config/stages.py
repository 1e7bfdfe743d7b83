"""The `stages:` of a run: lengths and counts that change from given steps on.

A run may begin with short responses and lengthen them once they are used well (DeepScaleR: 8k, 16k,
then 24k tokens, with twice the rollouts a prompt from the second stage on). The run's own keys are
its first stage. A later one names its first step and what is new; what it leaves out stays as it
was in the stage before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated

from pydantic import Field

from lowroll.config.document import Path
from lowroll.config.section import Count, GroupSize, Problem, Section

# where a stage's key stands among the run's own keys
KEYS: dict[str, tuple[str, ...]] = {
    "max_tokens": ("rollout", "max_tokens"),
    "batch_size": ("batch_size",),
    "rollouts_per_example": ("rollouts_per_example",),
    "overlong_max": ("dapo", "overlong_max"),
    "overlong_cache": ("dapo", "overlong_cache"),
}


class StageConfig(Section):
    """A later stage, from `step` on. null: as in the stage before."""

    step: Annotated[int, Field(ge=2)]  # the stage's first step; a run's first step is 1
    max_tokens: Count | None = None  # rollout.max_tokens
    batch_size: Count | None = None  # rollouts a step
    rollouts_per_example: GroupSize | None = None  # the group's size
    overlong_max: Count | None = None  # dapo.overlong_max
    overlong_cache: Count | None = None  # dapo.overlong_cache

    def changes(self) -> dict[str, dict[str, int]]:
        """The new values by the section that they belong to, "" for the top of the tree."""
        tree: dict[str, dict[str, int]] = {}
        for name, path in KEYS.items():
            value = getattr(self, name)
            if value is not None:
                tree.setdefault(path[0] if len(path) == 2 else "", {})[path[-1]] = value
        return tree


def order_problems(stages: Sequence[StageConfig], overlong_max: int | None) -> Iterator[Problem]:
    """Stages out of order, and a soft length limit that stays behind when responses grow."""
    before = 1
    for i, stage in enumerate(stages):
        here: Path = ("stages", i)
        if stage.step <= before:
            yield (
                ((*here, "step"),),
                f"stages[{i}].step ({stage.step}) must come after step {before}",
            )
        before = max(before, stage.step)
        if stage.max_tokens is not None and stage.overlong_max is None and overlong_max is not None:
            yield (
                ((*here, "max_tokens"),),
                f"stages[{i}] changes max_tokens, so it needs overlong_max too (dapo.overlong_max is set)",
            )


def blame(index: int, problem: Problem) -> Problem:
    """A problem of the run as it is in a stage: the stage's own keys are to blame first."""
    keys, message = problem
    mine: list[Path] = [
        ("stages", index, name) for key in keys for name, path in KEYS.items() if path == key
    ]
    return (*mine, *keys), f"from stages[{index}] on: {message}"


def stage_notes(stages: Sequence[StageConfig], max_steps: int) -> Iterator[str]:
    """Stages that the run is too short for."""
    for i, stage in enumerate(stages):
        if stage.step > max_steps:
            yield f"stages[{i}]: step {stage.step} comes after the run's last step, {max_steps}: it never begins"
