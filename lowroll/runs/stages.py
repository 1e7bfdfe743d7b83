"""The stages of a run: which settings the step that is being made has."""

from __future__ import annotations

from lowroll.config import RunConfig


class Stages:
    """`now` are the settings of the current step: the run's own, with those of the stages that have
    begun laid over them."""

    def __init__(self, cfg: RunConfig) -> None:
        self.cfg = cfg
        self.now = cfg

    def enter(self, step: int) -> bool:
        """Go over to the settings of a step. False in a run without stages: nothing changes."""
        if self.cfg.stages:
            self.now = self.cfg.at(step)
        return bool(self.cfg.stages)

    def metrics(self, step: int) -> dict[str, float]:
        """Return the stage of a step, counted from 1, and its length; {} in a run without
        stages."""
        if not self.cfg.stages:
            return {}
        begun = sum(stage.step <= step for stage in self.cfg.stages)
        return {
            "rollout/stage": 1.0 + begun,
            "rollout/max_tokens": float(self.now.rollout.max_tokens),
        }
