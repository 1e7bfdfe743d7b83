"""What a run says about itself: names that are explained once, one JSON line a step, a live view, a
report."""

from __future__ import annotations

from lowroll.metrics.names import METRICS, Metric, find, table
from lowroll.metrics.record import Recorder, read, reproducible

__all__ = ["METRICS", "Metric", "Recorder", "find", "read", "reproducible", "table"]
