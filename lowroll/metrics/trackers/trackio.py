"""Trackio: a local database that `trackio show` draws, or a Space of the hub (TRACKIO_SPACE_ID)."""

from __future__ import annotations

import importlib

from lowroll.metrics.trackers import Metrics, Tracked


class Trackio:
    """A Trackio run, named after this run and its id."""

    def __init__(self, run: Tracked) -> None:
        self.run = importlib.import_module("trackio").init(
            project=run.project, name=run.name, config=dict(run.settings), resume="allow"
        )

    def log(self, step: int, metrics: Metrics) -> None:
        self.run.log(dict(metrics), step=step)

    def close(self) -> None:
        self.run.finish()


begin = Trackio
