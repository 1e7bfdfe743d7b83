"""The stages of a run."""

from __future__ import annotations

from lowroll.config import RunConfig


class Stages:
    """The current settings `now`."""

    def __init__(self, cfg: RunConfig) -> None:
        self.cfg = cfg
        self.now = cfg

    def enter(self, step: int) -> bool:
        """Apply the settings of a step; False without stages."""
        if self.cfg.stages:
            self.now = self.cfg.at(step)
        return bool(self.cfg.stages)

    def metrics(self, step: int) -> dict[str, float]:
        """Return the stage of a step, counted from 1, and its length, or {}."""
        if not self.cfg.stages:
            return {}
        num_begun = sum(stage.step <= step for stage in self.cfg.stages)
        return {
            "rollout/stage": 1.0 + num_begun,
            "rollout/max_tokens": float(self.now.rollout.max_tokens),
        }
