"""TensorBoard: event files in the run folder's `tensorboard/`, for `tensorboard --logdir`."""

from __future__ import annotations

import importlib
import time

from lowroll.metrics.trackers import Metrics, Tracked


class Tensorboard:
    """Scalars by step. A resumed run hides the old values of repeated steps."""

    def __init__(self, run: Tracked) -> None:
        files = "tensorboard.summary.writer.event_file_writer"
        self.proto = importlib.import_module("tensorboard.compat.proto.event_pb2")
        self.summary = importlib.import_module("tensorboard.compat.proto.summary_pb2").Summary
        self.writer = importlib.import_module(files).EventFileWriter(
            str(run.folder / "tensorboard")
        )
        if run.step:
            session = self.proto.SessionLog(status=self.proto.SessionLog.START)
            self._write(run.step + 1, session_log=session)

    def log(self, step: int, metrics: Metrics) -> None:
        values = [self.summary.Value(tag=name, simple_value=metrics[name]) for name in metrics]
        self._write(step, summary=self.summary(value=values))

    def close(self) -> None:
        self.writer.close()

    def _write(self, step: int, **what: object) -> None:
        self.writer.add_event(self.proto.Event(step=step, wall_time=time.time_ns() / 1e9, **what))
        self.writer.flush()


begin = Tensorboard
