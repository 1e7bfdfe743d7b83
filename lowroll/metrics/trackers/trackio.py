"""Trackio: a local database that `trackio show` draws, or a Space of the hub (TRACKIO_SPACE_ID)."""

from __future__ import annotations

import importlib

from lowroll.metrics.trackers import PackageRun, Tracked


def begin(run: Tracked) -> PackageRun:
    return PackageRun(
        importlib.import_module("trackio").init(
            project=run.project, name=run.name, config=dict(run.settings), resume="allow"
        )
    )
