"""Weights & Biases. WANDB_MODE=offline keeps a run in the run folder; `wandb sync` sends it later."""

from __future__ import annotations

import importlib

from lowroll.metrics.trackers import PackageRun, Tracked


def begin(run: Tracked) -> PackageRun:
    return PackageRun(
        importlib.import_module("wandb").init(
            project=run.project,
            name=run.name,
            id=run.id,
            resume="allow",
            dir=str(run.folder),
            config=dict(run.settings),
        )
    )
