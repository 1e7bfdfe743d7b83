"""`launcher: local`: the roles of a run as children of one command, on this machine.

    engine-0, ...   lowroll serve          each on a port that the system chose
    orchestrator    lowroll orchestrate
    trainer         lowroll train          which starts its ranks itself (`group`)

A role that has ended, or gives no sign of life for 30 s, is started again alone: an engine takes the
newest weights first, the orchestrator goes on from its last batch, the trainer from its checkpoint.
After 5 restarts within 10 minutes the run stops with that role's own last error. The first signal
lets the trainer finish its step and write a checkpoint; the second ends everything at once. Children
end with this process, however it ends.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

from lowroll.checkpoint.files import write_file
from lowroll.checkpoint.lock import LOCK, RunLock, RunLockedError, refuse_locked
from lowroll.checkpoint.logfile import Warnings
from lowroll.config import RunConfig
from lowroll.metrics.live import LiveView
from lowroll.metrics.record import EVALUATIONS_FILE, METRICS_FILE, read, read_evaluations
from lowroll.runs.attempt import RunResult, log_file
from lowroll.runs.folder import LOGS, RunFolder
from lowroll.runs.launch import devices
from lowroll.runs.launch.child import Child
from lowroll.runs.roles.limits import refuse
from lowroll.runs.roles.place import ADMIN, ENGINE, LAUNCHER, ORCHESTRATOR, TOKEN, TRAINER, Place, rank_role
from lowroll.runs.roles.serve import ROLE
from lowroll.runs.stop import Stop, polite_stop
from lowroll.types import RunFailed

log = logging.getLogger(__name__)

LOOK_S = 0.1
DYING_S = 5.0  # for the trainer of a launcher that was killed
ENDING_S = 30.0  # for a role that has nothing more to do
STOPPING_S = 590.0  # for the trainer's step and checkpoint
USERS_MISTAKE = 2  # the exit code of commands


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
    place = Place(cfg.output_dir)
    home = RunFolder(resolved, "grpo", alone=False)
    if not (place.roles / LAUNCHER / LOCK).exists():
        home.check(resume, overwrite)  # a folder that nobody has touched is not even given a lock
    with ExitStack() as stack:
        lock = stack.enter_context(RunLock(place.roles / LAUNCHER))
        _free(place.run)
        home.check(resume, overwrite)
        stack.enter_context(log_file(place.run, lock.attempt, LAUNCHER))
        home.keep(texts or {})
        settings = place.roles / "launch.yaml"
        write_file(settings, cfg.dump().encode())
        stop = stack.enter_context(polite_stop())
        title = (
            f"{place.run}: {resolved.algorithm}, {resolved.correction}; logs in {place.run / LOGS}"
        )
        view = stack.enter_context(
            LiveView(resolved.train.max_steps, title, every=resolved.logging_steps)
        )
        launcher = Launcher(resolved, place, settings, resume, overwrite, view, stop)
        stack.callback(launcher.close)
        number = launcher.run()
    return RunResult(place.run, read(place.run), signal=number)


def _free(folder: Path) -> None:
    """RunLockedError when a process makes a run there that no launcher started; the roles of one
    that has just died may still have a moment to go."""
    until = time.monotonic() + DYING_S
    while True:
        try:
            return refuse_locked(folder)
        except RunLockedError:
            if time.monotonic() > until:
                raise
        time.sleep(LOOK_S)


class Launcher:
    """The children, joined."""

    def __init__(
        self,
        cfg: RunConfig,
        place: Place,
        settings: Path,
        resume: bool,
        overwrite: bool,
        view: LiveView,
        stop: Stop,
    ) -> None:
        self.place = place
        self.view = view
        self.stop = stop
        self.flags = ["--resume"] if resume else ["--overwrite"] if overwrite else []
        self.ports: dict[str, int] = {}  # of engines that have served, by role
        self.shown = 0  # the last step whose record was shown
        self.evaluated = read_evaluations(place.run)  # that were shown
        self._sizes: list[int] = []
        logs = place.run / LOGS
        self.warnings = {
            TRAINER: Warnings(logs, "attempt", *map(rank_role, range(1, cfg.train.gpus))),
            ORCHESTRATOR: Warnings(logs, ORCHESTRATOR),
        }
        env = dict(os.environ) | {TOKEN: secrets.token_hex(16), ADMIN: secrets.token_hex(16)}
        own = not cfg.client.base_url and cfg.client.elastic.hostname is None
        # of a direct way: one that is free, which the engine finds in the run folder
        meet = ["weight_broadcast.host=127.0.0.1", "weight_broadcast.port=0"] if own else []
        placed = devices.of_run(cfg)
        log.info("%s", placed.line())
        self.trainer = self._child(TRAINER, ["train", str(settings), *meet], env | placed.learner)
        self.orchestrator = self._child(ORCHESTRATOR, ["orchestrate", str(settings)], env)
        words = ["serve", str(settings), "serve.host=127.0.0.1", *meet]
        self.engines = [
            self._child(role, words, env | placed.engine(number) | {ROLE: role})
            for number in range(cfg.rollout.engines if own else 0)
            for role in [f"{ENGINE}-{number}"]
        ]
        for role in (TRAINER, ORCHESTRATOR, *place.engines()):  # of another launch
            place.heart(role).unlink(missing_ok=True)  # nobody is to take them for alive or ended
        if resume and (place.run / METRICS_FILE).is_file():
            self.shown = max((record["step"] for record in read(place.run)), default=0)

    def _child(self, role: str, words: list[str], env: Mapping[str, str]) -> Child:
        logs = self.place.run / LOGS
        return Child(role, words, env, self.place.heart(role), logs / f"{role}.log")

    @property
    def children(self) -> list[Child]:
        """In the order in which they are started."""
        return [*self.engines, self.orchestrator, self.trainer]

    def run(self) -> int:
        """Until the run has ended; the number of the signal that ended it early, else 0."""
        for child in self.children:
            self._start(child)
        while not self.trainer.done:
            if self.stop:
                return self._stop()
            for child in self.children:
                self._look(child)
            self._rejoin()
            self._show()
            time.sleep(LOOK_S)
        while not self.orchestrator.done and not self.stop:  # the last evaluation
            for child in (*self.engines, self.orchestrator):
                self._look(child)
            time.sleep(LOOK_S)
        self._show()
        for engine in self.engines:
            engine.end(ENDING_S)
        return self.stop.signal

    def _start(self, child: Child) -> None:
        more: list[str] = []
        if child is self.trainer:
            more = ["--resume"] if child.ready else self.flags
        elif child in self.engines:
            more = [f"serve.port={self._port(child)}"]
        child.start(*more)
        pid = child.process.pid if child.process else 0
        log.info("%s: process %d: lowroll %s", child.role, pid, " ".join(child.command))

    def _port(self, engine: Child) -> int:
        """One that is free at first (0); then the one that the orchestrator knows, or, where somebody
        else has that now, a new one: then the orchestrator is started again, which asks the engines
        where they are."""
        port = self.ports.get(engine.role, 0)
        if not port or is_free("127.0.0.1", port):
            return port
        log.warning(
            "%s: its port %d was taken by another process: it gets a new one, and the orchestrator is "
            "started again to find it",
            engine.role,
            port,
        )
        self.orchestrator.kill()
        del self.ports[engine.role]
        return 0

    def _look(self, child: Child) -> None:
        """Start again what has ended or hangs. RunFailed when that does not help."""
        if child.done:
            return
        child.look()
        url = (child.watch.said or {}).get("url") if child.ready else None
        if url:  # one that is lost while it starts again says none
            self.ports[child.role] = urlsplit(str(url)).port or 0
        if child.again_at:
            if time.monotonic() >= child.again_at:
                child.again_at = 0.0
                self._start(child)
            return
        if (hangs := child.hangs()) is not None:
            child.kill()
            self._again(child, hangs)
        elif not child.alive():
            child.kill()  # what is left of its group
            if child.code == 0 and child not in self.engines:
                child.done = True
                return
            told = f"{child.role} has ended ({_ended(child.code)}): {child.last_words()}"
            self._again(child, told)

    def _rejoin(self) -> None:
        """Start an orchestrator again that has ended, when the trainer waits for a batch: it was lost
        while it finished, and its last checkpoint is damaged."""
        if self.orchestrator.done and self.trainer.phase == "waiting":
            log.warning("the trainer has gone back, and the orchestrator is started again")
            self.orchestrator.done, self.orchestrator.again_at = False, time.monotonic()

    def _again(self, child: Child, why: str) -> None:
        pause = child.pause()
        if child.code == USERS_MISTAKE and not child.ready:
            raise ValueError(f"{child.role}: {child.last_words().removeprefix('error: ')}")
        if pause is None:
            raise RunFailed(f"{child.role}: stopped after {len(child.starts) - 1} restarts: {why}")
        log.warning("%s; it is started again in %.1f s", why, pause)
        child.again_at = time.monotonic() + pause

    def _stop(self) -> int:
        """A signal came: the trainer finishes its step, then all end."""
        self.trainer.signal(signal.SIGTERM)
        until = time.monotonic() + STOPPING_S
        while self.trainer.alive() and time.monotonic() < until:
            self.trainer.look()
            if (hangs := self.trainer.hangs()) is not None:
                log.warning("%s; it is ended, and --resume goes on from its checkpoint", hangs)
                break
            for engine in self.engines:
                self._look(engine)
            if not self.orchestrator.done:
                self._look(self.orchestrator)
            self._show()
            time.sleep(LOOK_S)
        self.trainer.kill()
        for child in (self.orchestrator, *self.engines):
            child.end(ENDING_S)
        return self.stop.signal

    def _show(self) -> None:
        """New records, evaluations and warnings, and what each role does."""
        files = [self.place.run / name for name in (METRICS_FILE, EVALUATIONS_FILE)]
        sizes = [path.stat().st_size if path.is_file() else 0 for path in files]
        if sizes != self._sizes and self.trainer.ready:
            self._sizes = sizes
            self._show_records()
        for role, warnings in self.warnings.items():
            for line in warnings.new():
                self.view.note(f"{role}: {line}")
        self.view.phase(" | ".join(map(self._told, self.children)), 0, 0)

    def _show_records(self) -> None:
        """An evaluation comes after the record of its step, or with it."""
        with_record = set()
        for record in read(self.place.run):
            if record["step"] > self.shown:
                self.shown = record["step"]
                with_record.add(self.shown)
                self.view.step(record)
                log.info("%s", self.view.line())
        for step, evaluation in read_evaluations(self.place.run).items():
            if self.evaluated.get(step) != evaluation and max(1, step) <= self.shown:
                self.evaluated[step] = evaluation
                if max(1, step) not in with_record:
                    self.view.evaluation(evaluation)

    def _told(self, child: Child) -> str:
        """What a role does, in words."""
        child.look()
        if not child.alive():
            return f"{child.role}: {'done' if child.done else 'ended'}"
        silent = child.watch.silent_for
        if silent > child.watch.silent_s / 2 and child.ready:
            return f"{child.role}: silent for {silent:.0f} s ({child.watch.told()})"
        return f"{child.role}: {child.watch.told()}"

    def close(self) -> None:
        """Nothing of it is left."""
        for child in reversed(self.children):
            child.kill()


def is_free(host: str, port: int) -> bool:
    """Whether nobody listens there, so that a server could."""
    with socket.socket() as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((host, port))
        except OSError:
            return False
    return True


def _ended(code: int | None) -> str:
    if code is not None and code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"
