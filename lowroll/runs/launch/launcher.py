"""A run by its roles, whoever starts them (`launcher: local`, `launcher: ray`).

    engine-0, ...   lowroll serve          each on a port that the system chose
    orchestrator    lowroll orchestrate
    trainer         lowroll train

A role that has ended, or gives no sign of life for 30 s, is started again alone: an engine takes the
newest weights first, the orchestrator goes on from its last batch, the trainer from its checkpoint.
After 5 restarts within 10 minutes the run stops with that role's own last error. The first signal
lets the trainer finish its step and write a checkpoint; the second ends everything at once. The roles
end with this process, however it ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

from lowroll.checkpoint.files import write_file
from lowroll.checkpoint.lock import LOCK, RunLock, RunLockedError, refuse_locked
from lowroll.config import RunConfig
from lowroll.metrics.live import LiveView
from lowroll.metrics.record import read
from lowroll.runs.attempt import RunResult, log_file
from lowroll.runs.folder import LOGS, RunFolder
from lowroll.runs.launch import local
from lowroll.runs.launch.fleet import LOOK_S, Fleet, Make
from lowroll.runs.roles.limits import refuse
from lowroll.runs.roles.run_paths import LAUNCHER, RunPaths
from lowroll.runs.stop import polite_stop

DYING_S = 5.0  # for the trainer of a launcher that was killed


def launch(
    cfg: RunConfig,
    texts: Mapping[Path, str] | None = None,
    *,
    resume: bool = False,
    overwrite: bool = False,
) -> RunResult:
    """Make a run by its roles; returns the run folder and its records. The folder is treated as by
    `lowroll.run`. texts: files of a notebook or script that the roles need.

    RunLockedError names who makes or launches a run in the folder already; ValueError has what a role
    says of the settings or the folder, RunFailed names the one that could not be kept alive, with its own
    last error.
    """
    resolved = cfg.resolved()
    refuse(resolved)
    place = RunPaths(cfg.output_dir)
    home = RunFolder(resolved, "grpo", alone=False)
    if not (place.roles / LAUNCHER / LOCK).exists():
        home.check(resume, overwrite)  # a folder that nobody has touched is not even given a lock
    with ExitStack() as stack:
        lock = stack.enter_context(RunLock(place.roles / LAUNCHER))
        free(place.run)
        home.check(resume, overwrite)
        stack.enter_context(log_file(place.run, lock.attempt, LAUNCHER))
        home.keep(texts or {})
        settings = place.roles / "launch.yaml"
        write_file(settings, cfg.dump().encode())
        make = _crew(resolved)(resolved, place, stack)
        stop = stack.enter_context(polite_stop())  # Ray has taken signals for itself
        title = (
            f"{place.run}: {resolved.algorithm}, {resolved.correction}; logs in {place.run / LOGS}"
        )
        view = stack.enter_context(
            LiveView(resolved.train.max_steps, title, every=resolved.logging_steps)
        )
        fleet = Fleet(
            resolved, place, settings, make, view, stop, resume=resume, overwrite=overwrite
        )
        stack.callback(fleet.close)
        number = fleet.run()
    return RunResult(place.run, read(place.run), signal=number)


def _crew(cfg: RunConfig) -> Callable[[RunConfig, RunPaths, ExitStack], Make]:
    """Return the function that prepares the roles for the launcher of the settings."""
    if cfg.launcher == "local":
        return local.crew
    from lowroll.runs.launch import ray

    return ray.crew


def free(folder: Path) -> None:
    """Raise RunLockedError when a process makes a run there that no launcher started; the roles of
    one that has just died may still have a moment to go."""
    until = time.monotonic() + DYING_S
    while True:
        try:
            return refuse_locked(folder)
        except RunLockedError:
            if time.monotonic() > until:
                raise
        time.sleep(LOOK_S)
