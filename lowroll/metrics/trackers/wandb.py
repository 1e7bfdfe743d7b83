"""Weights & Biases. WANDB_MODE=offline keeps a run in the run folder; `wandb sync` sends it later."""

from __future__ import annotations

import importlib

from lowroll.metrics.trackers import Metrics, Tracked


class Wandb:
    """A Weights & Biases run with this run's id."""

    def __init__(self, run: Tracked) -> None:
        self.run = importlib.import_module("wandb").init(
            project=run.project,
            name=run.name,
            id=run.id,
            resume="allow",
            dir=str(run.folder),
            config=dict(run.settings),
        )

    def log(self, step: int, metrics: Metrics) -> None:
        self.run.log(dict(metrics), step=step)

    def close(self) -> None:
        self.run.finish()


begin = Wandb
