"""MLflow, at MLFLOW_TRACKING_URI or in its local store."""

from __future__ import annotations

import importlib
import re
import time

from lowroll.metrics.trackers import Metrics, Tracked

NOT_NAMED = re.compile(r"[^\w\-. :/]")  # characters that MLflow forbids in metric names
TAG = "lowroll.id"
MOST_AT_ONCE = 1000
MAX_VALUE = 500  # characters of a setting


class Mlflow:
    """An MLflow run tagged with this run's id."""

    def __init__(self, run: Tracked) -> None:
        self.client = importlib.import_module("mlflow").MlflowClient()
        self.metric = importlib.import_module("mlflow.entities").Metric
        found = self.client.get_experiment_by_name(run.project)
        experiment = (
            found.experiment_id if found is not None else self.client.create_experiment(run.project)
        )
        runs = self.client.search_runs([experiment], f"tags.`{TAG}` = '{run.id}'", max_results=1)
        if runs:
            self.id = runs[0].info.run_id
            self.client.update_run(self.id, status="RUNNING")
            return
        made = self.client.create_run(experiment, tags={TAG: run.id}, run_name=run.name)
        self.id = made.info.run_id
        for key, value in run.settings.items():
            self.client.log_param(self.id, key, str(value)[:MAX_VALUE])

    def log(self, step: int, metrics: Metrics) -> None:
        now = time.time_ns() // 1_000_000
        rows = [
            self.metric(NOT_NAMED.sub("_", name), value, now, step)
            for name, value in metrics.items()
        ]
        for first in range(0, len(rows), MOST_AT_ONCE):
            self.client.log_batch(self.id, metrics=rows[first : first + MOST_AT_ONCE])

    def close(self) -> None:
        self.client.set_terminated(self.id)


begin = Mlflow
