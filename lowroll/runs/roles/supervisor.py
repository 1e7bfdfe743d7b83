"""The supervisor of a run's roles, for `launcher: local` and `launcher: ray`.

A role that has ended or is silent is restarted alone. After 5 restarts within 10 minutes the run
stops with its last error. The first signal lets the trainer finish its step and write a checkpoint,
the second ends everything at once.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from lowroll.checkpoint.atomic_files import write_file
from lowroll.checkpoint.disk_space import NO_ROOM
from lowroll.checkpoint.lock import LOCK, RunLock, RunLockedError, refuse_locked
from lowroll.checkpoint.logfile import Warnings
from lowroll.config import RunConfig
from lowroll.metrics.live import LiveView
from lowroll.metrics.record import EVALUATIONS_FILE, METRICS_FILE, read, read_evaluations
from lowroll.runs.folder import LOGS, RunFolder
from lowroll.runs.roles import local
from lowroll.runs.roles.limits import refuse
from lowroll.runs.roles.role import Role, RoleProcess
from lowroll.runs.roles.run_paths import (
    LAUNCHER,
    ORCHESTRATOR,
    TRAINER,
    RunPaths,
    engine_roles,
    rank_role,
)
from lowroll.runs.session import RunResult, log_file
from lowroll.runs.stop import Stop, polite_stop
from lowroll.types import RunFailed

log = logging.getLogger(__name__)

POLL_S = 0.1
ENDING_S = 30.0  # for a finished role
STOPPING_S = 590.0  # for the trainer's step and checkpoint
DYING_S = 5.0  # for the trainer of a killed launcher
FULL_DISK_PAUSE_S = 10.0  # before a restart


def launch(
    cfg: RunConfig,
    texts: Mapping[Path, str] | None = None,
    *,
    resume: bool,
    overwrite: bool,
) -> RunResult:
    """Make a run by its roles. texts: files of a notebook or script.

    RunLockedError names another run in the folder, ValueError has what a role refuses, RunFailed
    the last error of a role that kept ending.
    """
    resolved = cfg.resolved()
    refuse(resolved)
    paths = RunPaths(cfg.output_dir)
    folder = RunFolder(resolved, "grpo", alone=False)
    if not (paths.roles / LAUNCHER / LOCK).exists():
        folder.check(resume, overwrite)  # before the lock, which would create a file
    with ExitStack() as stack:
        lock = stack.enter_context(RunLock(paths.roles / LAUNCHER))
        await_unlocked(paths.run)
        folder.check(resume, overwrite)
        stack.enter_context(log_file(paths.run, lock.attempt, LAUNCHER))
        folder.keep(texts or {})
        settings = paths.roles / "launch.yaml"
        write_file(settings, cfg.dump().encode())
        processes = _make_processes(resolved, paths, stack)
        stop = stack.enter_context(polite_stop())  # Ray takes signals for itself
        title = (
            f"{paths.run}: {resolved.algorithm}, {resolved.correction}; logs in {paths.run / LOGS}"
        )
        view = stack.enter_context(
            LiveView(resolved.train.max_steps, title, every=resolved.logging_steps)
        )
        display = Display(resolved, paths, view, resume)
        flags = ["--resume"] if resume else ["--overwrite"] if overwrite else []
        supervisor = Supervisor(resolved, paths, settings, processes, display, stop, flags)
        stack.callback(supervisor.close)
        signal_number = supervisor.run()
    return RunResult(paths.run, read(paths.run), signal=signal_number)


def _make_processes(cfg: RunConfig, paths: RunPaths, stack: ExitStack) -> Mapping[str, RoleProcess]:
    if cfg.launcher == "local":
        return local.processes(cfg, paths)
    from lowroll.runs.roles import ray

    return ray.processes(cfg, paths, stack)


def await_unlocked(folder: Path) -> None:
    """Wait DYING_S for the processes of a dead launcher; raise RunLockedError if one still runs."""
    deadline = time.monotonic() + DYING_S
    while True:
        try:
            return refuse_locked(folder)
        except RunLockedError:
            if time.monotonic() > deadline:
                raise
        time.sleep(POLL_S)


class Supervisor:
    """The roles of a run, kept alive until they are done. settings: the roles' file. flags: of the
    trainer's first start."""

    def __init__(
        self,
        cfg: RunConfig,
        paths: RunPaths,
        settings: Path,
        processes: Mapping[str, RoleProcess],
        display: Display,
        stop: Stop,
        flags: Sequence[str] = (),
    ) -> None:
        def role(name: str, command: str) -> Role:
            return Role(name, [command, str(settings)], processes[name], paths.heartbeat(name))

        self.disk_deadline_s = cfg.ckpt.wait_for_space
        self.display = display
        self.stop = stop
        self.flags = list(flags)
        self.addresses: dict[str, tuple[str, int]] = {}
        self.trainer = role(TRAINER, "train")
        self.orchestrator = role(ORCHESTRATOR, "orchestrate")
        self.engines = [role(name, "serve") for name in engine_roles(cfg)]
        for name in (TRAINER, ORCHESTRATOR, *paths.engines()):  # heartbeats of another launch
            paths.heartbeat(name).unlink(missing_ok=True)

    @property
    def roles(self) -> list[Role]:
        return [*self.engines, self.orchestrator, self.trainer]

    def run(self) -> int:
        """Run to the end. Return the signal that ended it early, else 0."""
        for role in self.roles:
            role.start_at = time.monotonic()
        while not self.trainer.is_done:
            if self.stop:
                return self._stop_roles()
            for role in self.roles:
                self.keep_alive(role)
            self.recall_orchestrator()
            self.show()
            time.sleep(POLL_S)
        # the trainer has ended: the last evaluation needs engines and orchestrator alone
        while not self.orchestrator.is_done and not self.stop:
            for role in (*self.engines, self.orchestrator):
                self.keep_alive(role)
            time.sleep(POLL_S)
        self.show()
        for engine in self.engines:
            engine.stop(ENDING_S)
        return self.stop.signal

    def _stop_roles(self) -> int:
        """Ask the trainer to write a checkpoint and end, then end the others. Return the signal."""
        self.trainer.process.signal(signal.SIGTERM)
        deadline = time.monotonic() + STOPPING_S
        while self.trainer.process.is_alive() and time.monotonic() < deadline:
            self.trainer.update()
            if (hang := self.trainer.find_hang()) is not None:
                log.warning("%s; it is ended, and --resume goes on from its checkpoint", hang)
                break
            for engine in self.engines:
                self.keep_alive(engine)
            if not self.orchestrator.is_done:
                self.keep_alive(self.orchestrator)
            self.show()
            time.sleep(POLL_S)
        self.trainer.process.kill()
        for role in (self.orchestrator, *self.engines):
            role.stop(ENDING_S)
        return self.stop.signal

    def show(self) -> None:
        self.display.show(self.roles, records=self.trainer.is_ready)

    def close(self) -> None:
        for role in reversed(self.roles):
            role.process.kill()

    # -- restarts ----------------------------------------------------------------------------------

    def keep_alive(self, role: Role) -> None:
        """Start a due role, and restart one that has ended or hangs."""
        if role.is_done:
            return
        role.update()
        self._note_address(role)
        if role.start_at:
            if time.monotonic() >= role.start_at and role.process.is_placed():
                role.start_at = 0.0
                self._start(role)
            return
        if (hang := role.find_hang()) is not None:
            role.process.kill()
            self._restart(role, hang)
        elif not role.process.is_alive():
            role.process.kill()
            if role.exit_code == 0 and role not in self.engines:
                role.is_done = True
                return
            self._restart(role, role.describe_exit())

    def recall_orchestrator(self) -> None:
        """Restart an ended orchestrator when the trainer, back at an older checkpoint, waits for a
        batch."""
        if self.orchestrator.is_done and self.trainer.phase == "waiting":
            log.warning("the trainer has gone back, and the orchestrator is started again")
            self.orchestrator.is_done, self.orchestrator.start_at = False, time.monotonic()

    def _restart(self, role: Role, why: str) -> None:
        if role.exit_code == NO_ROOM:
            return self._restart_after_full_disk(role, why)
        pause_s = role.budget.pause_s()
        role.raise_users_mistake()
        if pause_s is None:
            raise RunFailed(f"{role.name}: stopped after {role.budget.restarts} restarts: {why}")
        log.warning("%s; it is started again in %.1f s", why, pause_s)
        role.start_at = time.monotonic() + pause_s

    def _restart_after_full_disk(self, role: Role, why: str) -> None:
        waited = role.budget.count_full_disk()
        if waited >= self.disk_deadline_s:
            raise RunFailed(
                f"{why}. There was no room within {self.disk_deadline_s:g} s (ckpt.wait_for_space). What "
                "was committed before is intact: make room, then go on with --resume"
            )
        log.warning(
            "%s. It is started again in %g s, and so on until there is room; the run ends in %.0f s "
            "(ckpt.wait_for_space)",
            why,
            FULL_DISK_PAUSE_S,
            self.disk_deadline_s - waited,
        )
        role.start_at = time.monotonic() + FULL_DISK_PAUSE_S

    # -- starts and addresses ----------------------------------------------------------------------

    def _start(self, role: Role) -> None:
        role.start(*self.late_words(role))
        log.info("%s: %s: lowroll %s", role.name, role.process.describe(), " ".join(role.words))

    def late_words(self, role: Role) -> list[str]:
        """Return the settings and flags that are known only at a role's start."""
        address = role.process.address
        if role in self.engines:
            # for direct weights, whose address is in the run folder
            serve_settings = [f"serve.host={address}", f"serve.port={self._engine_port(role)}"]
            return [*serve_settings, *self._weight_words("127.0.0.1")]
        if role is self.trainer:
            flags = ["--resume"] if role.is_ready else self.flags
            return [*self._weight_words(address), *flags]
        if ip_address(address).is_loopback:
            return []
        return [f"rollout_transport.host={address}"]

    def _weight_words(self, address: str) -> list[str]:
        if not self.engines:
            return []
        return [f"weight_broadcast.host={address}", "weight_broadcast.port=0"]

    def _note_address(self, role: Role) -> None:
        url = (role.monitor.report or {}).get("url")
        if url and role.is_ready:
            parts = urlsplit(str(url))
            self.addresses[role.name] = (parts.hostname or "", parts.port or 0)

    def _engine_port(self, engine: Role) -> int:
        """Return the port that the orchestrator knows, at first 0 for any. If it is taken or of
        another machine, return 0 and restart the orchestrator."""
        address = engine.process.address
        host, port = self.addresses.get(engine.name, ("", 0))
        if not port or (host == address and engine.process.is_port_free(port)):
            return port
        reason = f"its port {port} was taken by another process"
        if host != address:
            reason = f"it has moved from {host} to {address}"
        log.warning(
            "%s: %s: it gets a new port, and the orchestrator is started again to find it",
            engine.name,
            reason,
        )
        self.orchestrator.process.kill()
        del self.addresses[engine.name]
        return 0


class Display:
    """The terminal of a launch."""

    def __init__(self, cfg: RunConfig, paths: RunPaths, view: LiveView, resume: bool) -> None:
        self.run = paths.run
        self.view = view
        self.step = 0
        if resume and (self.run / METRICS_FILE).is_file():
            self.step = max((record["step"] for record in read(self.run)), default=0)
        self.evaluations = read_evaluations(self.run)  # already shown
        self._sizes: list[int] = []
        logs = self.run / LOGS
        self.warnings = {
            TRAINER: Warnings(logs, "attempt", *map(rank_role, range(1, cfg.train.gpus))),
            ORCHESTRATOR: Warnings(logs, ORCHESTRATOR),
        }

    def show(self, roles: Sequence[Role], records: bool) -> None:
        """Show the roles' news, and with `records` the run folder's."""
        files = [self.run / name for name in (METRICS_FILE, EVALUATIONS_FILE)]
        sizes = [path.stat().st_size if path.is_file() else 0 for path in files]
        if records and sizes != self._sizes:
            self._sizes = sizes
            self._show_records()
        for role, warnings in self.warnings.items():
            for line in warnings.new():
                self.view.note(f"{role}: {line}")
        self.view.phase(" | ".join(map(_describe_activity, roles)), 0, 0)

    def _show_records(self) -> None:
        recorded_steps = set()
        for record in read(self.run):
            if record["step"] > self.step:
                self.step = record["step"]
                recorded_steps.add(self.step)
                log.info("%s", self.view.show(record))
        for step, evaluation in read_evaluations(self.run).items():
            if self.evaluations.get(step) != evaluation and max(1, step) <= self.step:
                self.evaluations[step] = evaluation
                if max(1, step) not in recorded_steps:
                    self.view.evaluation(evaluation)


def _describe_activity(role: Role) -> str:
    role.update()
    if not role.process.is_alive():
        return f"{role.name}: {'done' if role.is_done else 'ended'}"
    monitor = role.monitor
    if monitor.report is None:
        return f"{role.name}: starting"
    silent_s = monitor.silent_for
    if silent_s > monitor.silent_s / 2 and role.is_ready:
        return f"{role.name}: silent for {silent_s:.0f} s ({monitor.describe_report()})"
    return f"{role.name}: {monitor.describe_report()}"
