"""One attempt at a run of any kind: its folder, log and steps."""

from __future__ import annotations

import logging
import os
import platform
import re
import shlex
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Protocol

import lowroll
from lowroll import machine
from lowroll.checkpoint.lock import LOCK, RunLock
from lowroll.config import RunConfig
from lowroll.metrics import trackers
from lowroll.metrics.live import duration
from lowroll.metrics.record import Record
from lowroll.runs.folder import FINAL, LOGS, RunFolder
from lowroll.runs.stop import StepDropped, Stop, leave_lost_outputs

log = logging.getLogger(__name__)

_RESULT_METRICS = (
    "reward/mean",
    "sft/loss",
    "mismatch/kl_k3",
    "rollout/length_mean",
    "optim/grad_norm",
)


@dataclass(frozen=True, repr=False)
class RunResult:
    """A finished or interrupted run. signal: what interrupted it, else 0."""

    folder: Path
    records: list[Record]
    ended: str = ""
    signal: int = 0

    @property
    def model(self) -> Path:
        return self.folder / FINAL

    @property
    def metrics(self) -> Record:
        return self.records[-1] if self.records else {}

    @property
    def interrupted(self) -> bool:
        return bool(self.signal)

    def __repr__(self) -> str:
        outcome = self.ended or "finished"
        if self.signal:
            outcome = f"stopped by signal {self.signal}"
        last_metrics = self.metrics
        shown_metrics = [
            f"{name} {last_metrics[name]:.4g}"
            for name in _RESULT_METRICS
            if last_metrics.get(name) is not None
        ]
        shown_metrics += [
            f"{name} {value:.4g}"
            for name, value in last_metrics.items()
            if re.fullmatch(r"eval/.+/reward", name) and value is not None
        ]
        return "\n".join(
            (
                f"RunResult({str(self.folder)!r}, step {last_metrics.get('step', 0)}, {outcome})",
                f"  last step: {', '.join(shown_metrics) or 'no step has been recorded'}",
                f"  more: .metrics, .records ({len(self.records)}), .model; "
                f"lowroll report {shlex.quote(str(self.folder))}",
            )
        )


class StepRunner(Protocol):
    """The steps of a run, for `run_steps`."""

    def step(self, step: int) -> Record: ...

    def drop(self, step: int) -> None: ...

    def checkpoint(self, step: int) -> None: ...

    def finish(self, step: int) -> None: ...


@contextmanager
def attempt(
    cfg: RunConfig,
    command: str,
    resume: bool = False,
    overwrite: bool = False,
    alone: bool = True,
) -> Iterator[RunFolder]:
    """Own `output_dir` for one launch of a command, and log to its log file.

    ValueError, before any change, when the folder is unusable; RunLockedError when another process
    has it. `overwrite` replaces its run once the new one begins. alone: as `RunFolder`.
    """
    if resume and overwrite:
        raise ValueError(
            "--overwrite: it replaces the run that --resume goes on with; give one of the two"
        )
    trackers.check(cfg.track)
    if cfg.push_to_hub is not None:
        from lowroll.runs import hub  # imported only for such a run

        hub.check(cfg.push_to_hub)
    folder = RunFolder(cfg, command, alone)
    if not (folder.path / LOCK).exists():
        folder.check(resume, overwrite)  # before the lock, which would create the folder
    with own(folder.path) as lock:
        folder.check(resume, overwrite)
        folder.settle()
        folder.attempt = lock.attempt
        with log_file(folder.path, lock.attempt), _logged(cfg, command, lock.attempt):
            try:
                yield folder
            finally:
                folder.close()
            if folder.published and cfg.push_to_hub is not None:
                hub.offer(folder.final, cfg)


@machine.long_lived()
def run_steps(
    steps: StepRunner, first: int, last: int, every: int, show: Callable[[Record], str], stop: Stop
) -> int:
    """Make the steps `first` to `last`, with a checkpoint every `every` steps and after a requested
    stop. Return the stop's signal, else 0.

    A step's record precedes its checkpoint, so a process that dies between them repeats the step.
    """
    for step in range(first, last + 1):
        try:
            record = steps.step(step)
        except StepDropped:
            steps.drop(step)
            leave_lost_outputs()
            log.warning("step %d was dropped, and is made again by --resume", step)
            return stop.signal
        if stop:
            leave_lost_outputs()
        log.info(show(record))
        if step % every == 0 or stop:
            steps.checkpoint(step)
        if stop:
            leave_lost_outputs()
            log.warning("stopped after step %d of %d; go on with --resume", step, last)
            return stop.signal
    steps.finish(last)
    log.info("finished after step %d", last)
    return 0


def tell(*lines: str) -> None:
    for line in lines:
        log.info("%s", line)
        print(line, file=sys.stderr, flush=True)


def own(folder: Path) -> RunLock:
    """Lock a folder. RunLockedError names its holder, ValueError another obstacle."""
    try:
        return RunLock(folder)
    except OSError as error:
        raise ValueError(f"output_dir: {folder} cannot be written: {error.strerror}") from None


class LogFile(logging.FileHandler):
    """A log whose write failures cost one warning and not the run."""

    _has_warned = False

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if isinstance(error, OSError):
            self._warn(error)
        else:
            super().handleError(record)

    def close(self) -> None:
        try:
            super().close()
        except OSError as error:
            self._warn(error)

    def _warn(self, error: OSError) -> None:
        if not self._has_warned:
            self._has_warned = True
            print(
                f"warning: {self.baseFilename}: {error.strerror}: lines of the log may be lost",
                file=sys.stderr,
            )


@contextmanager
def log_file(folder: Path, attempt: int, name: str = "attempt") -> Iterator[None]:
    """Log to logs/<name>_N.log, and warnings also to the terminal."""
    (folder / LOGS).mkdir(exist_ok=True)
    file_handler = LogFile(folder / LOGS / f"{name}_{attempt}.log", encoding="utf-8")
    terminal_handler = logging.StreamHandler()
    file_handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    terminal_handler.setLevel(logging.WARNING)
    # The command shows the error; its traceback is for the file.
    terminal_handler.addFilter(lambda record: not record.exc_info)
    root = logging.getLogger("lowroll")
    previous_level = root.level
    root.setLevel(logging.INFO)
    for handler in (file_handler, terminal_handler):
        root.addHandler(handler)
    try:
        yield
    finally:
        root.setLevel(previous_level)
        for handler in (file_handler, terminal_handler):
            root.removeHandler(handler)
            handler.close()


@contextmanager
def _logged(cfg: RunConfig, command: str, attempt: int) -> Iterator[None]:
    began = time.monotonic()
    log.info(
        "lowroll %s (version %s), attempt %d in %s: process %d on %s, Python %s, torch %s",
        command,
        lowroll.__version__,
        attempt,
        Path(cfg.output_dir).resolve(),
        os.getpid(),
        socket.gethostname(),
        platform.python_version(),
        metadata.version("torch"),
    )
    if command == "grpo":
        for note in cfg.notes:
            log.info("%s", note)
    try:
        yield
    except BaseException as error:
        log.error(
            "the attempt failed after %s: %s: %s",
            duration(time.monotonic() - began),
            type(error).__name__,
            error,
            exc_info=True,
        )
        raise
    log.info("the attempt took %s", duration(time.monotonic() - began))
