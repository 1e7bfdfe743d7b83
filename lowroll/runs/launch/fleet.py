"""The roles of a run: which there are, when each is started, watched and restarted, and what is
shown of them. The launcher decides how and where their processes are started
(`supervised_role`)."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from lowroll.checkpoint.logfile import Warnings
from lowroll.checkpoint.space import NO_ROOM
from lowroll.config import RunConfig
from lowroll.metrics.live import LiveView
from lowroll.metrics.record import EVALUATIONS_FILE, METRICS_FILE, read, read_evaluations
from lowroll.runs.folder import LOGS
from lowroll.runs.launch.supervised_role import SupervisedRole
from lowroll.runs.roles.run_paths import ENGINE, ORCHESTRATOR, TRAINER, RunPaths, rank_role
from lowroll.runs.stop import Stop
from lowroll.types import RunFailed

log = logging.getLogger(__name__)

LOOK_S = 0.1
ENDING_S = 30.0  # for a role that has nothing more to do
STOPPING_S = 590.0  # for the trainer's step and checkpoint
USERS_MISTAKE = 2  # the exit code of commands
ROOM_S = 10.0  # until a role is started again that found no room on the disk

Make = Callable[[str, list[str]], SupervisedRole]  # of a role and its words behind `lowroll`


def engines(cfg: RunConfig) -> list[str]:
    """Return the roles of the engines that a launcher starts; none where the settings name
    others."""
    if cfg.client.base_url or cfg.client.elastic.hostname is not None:
        return []
    return [f"{ENGINE}-{i}" for i in range(cfg.rollout.engines)]


class Fleet:
    """The roles of a run and their supervision. cfg: resolved. settings: the file that they read.
    make: called once for each role."""

    def __init__(
        self,
        cfg: RunConfig,
        place: RunPaths,
        settings: Path,
        make: Make,
        view: LiveView,
        stop: Stop,
        *,
        resume: bool = False,
        overwrite: bool = False,
    ) -> None:
        self.cfg = cfg
        self.place = place
        self.view = view
        self.stop = stop
        self.flags = ["--resume"] if resume else ["--overwrite"] if overwrite else []
        self.at: dict[str, tuple[str, int]] = {}  # where engines have served, by role
        self.shown = 0  # the last step whose record was shown
        self.evaluated = read_evaluations(place.run)  # that were shown
        self._sizes: list[int] = []
        logs = place.run / LOGS
        self.warnings = {
            TRAINER: Warnings(logs, "attempt", *map(rank_role, range(1, cfg.train.gpus))),
            ORCHESTRATOR: Warnings(logs, ORCHESTRATOR),
        }
        self.trainer = make(TRAINER, ["train", str(settings)])
        self.orchestrator = make(ORCHESTRATOR, ["orchestrate", str(settings)])
        self.engines = [make(role, ["serve", str(settings)]) for role in engines(cfg)]
        for role in (TRAINER, ORCHESTRATOR, *place.engines()):  # of another launch
            place.heart(role).unlink(missing_ok=True)  # nobody is to take them for alive or ended
        if resume and (place.run / METRICS_FILE).is_file():
            self.shown = max((record["step"] for record in read(place.run)), default=0)

    @property
    def members(self) -> list[SupervisedRole]:
        """Return the roles in the order in which they are started."""
        return [*self.engines, self.orchestrator, self.trainer]

    def run(self) -> int:
        """Run until the run has ended; return the number of the signal that ended it early, else
        0."""
        for member in self.members:
            member.again_at = time.monotonic()
        while not self.trainer.done:
            if self.stop:
                return self._stop()
            for member in self.members:
                self._look(member)
            self._rejoin()
            self._show()
            time.sleep(LOOK_S)
        while not self.orchestrator.done and not self.stop:  # the last evaluation
            for member in (*self.engines, self.orchestrator):
                self._look(member)
            time.sleep(LOOK_S)
        self._show()
        for engine in self.engines:
            engine.end(ENDING_S)
        return self.stop.signal

    def _start(self, member: SupervisedRole) -> None:
        member.start(*self._addresses(member))
        log.info("%s: %s: lowroll %s", member.role, member.name, " ".join(member.command))

    def _addresses(self, member: SupervisedRole) -> list[str]:
        """Return the settings and flags of a role that are known when it is started."""
        here = member.here
        if member in self.engines:
            # of a direct way: the one that the trainer names in the run folder
            listens = [f"serve.host={here}", f"serve.port={self._port(member)}"]
            return [*listens, *self._meet("127.0.0.1")]
        if member is self.trainer:
            return [*self._meet(here), *(["--resume"] if member.ready else self.flags)]
        if ip_address(here).is_loopback:
            return []
        return [f"rollout_transport.host={here}"]

    def _meet(self, here: str) -> list[str]:
        if not self.engines:
            return []
        return [f"weight_broadcast.host={here}", "weight_broadcast.port=0"]

    def _port(self, engine: SupervisedRole) -> int:
        """Return the port of an engine: a free one at first (0), then the one that the orchestrator
        knows. Where that one is on another machine or taken by another process now, return a new
        one and restart the orchestrator, which asks the engines where they are."""
        host, port = self.at.get(engine.role, ("", 0))
        if not port or (host == engine.here and engine.is_free(port)):
            return port
        why = f"its port {port} was taken by another process"
        if host != engine.here:
            why = f"it has moved from {host} to {engine.here}"
        log.warning(
            "%s: %s: it gets a new port, and the orchestrator is started again to find it",
            engine.role,
            why,
        )
        self.orchestrator.kill()
        del self.at[engine.role]
        return 0

    def _look(self, member: SupervisedRole) -> None:
        """Restart a role that has ended or hangs. RunFailed when that does not help."""
        if member.done:
            return
        member.look()
        url = (member.watch.said or {}).get("url") if member.ready else None
        if url:  # one that is lost while it starts again says none
            where = urlsplit(str(url))
            self.at[member.role] = (where.hostname or "", where.port or 0)
        if member.again_at:
            if time.monotonic() >= member.again_at and member.placed():
                member.again_at = 0.0
                self._start(member)
            return
        if (hangs := member.hangs()) is not None:
            member.kill()
            self._again(member, hangs)
        elif not member.alive():
            member.kill()  # what is left of its group
            if member.code == 0 and member not in self.engines:
                member.done = True
                return
            told = f"{member.role} has ended ({member.ended()}): {member.last_words()}"
            self._again(member, told)

    def _rejoin(self) -> None:
        """Restart an orchestrator that has ended, when the trainer waits for a batch: the trainer
        was lost while it finished, and its last checkpoint is damaged."""
        if self.orchestrator.done and self.trainer.phase == "waiting":
            log.warning("the trainer has gone back, and the orchestrator is started again")
            self.orchestrator.done, self.orchestrator.again_at = False, time.monotonic()

    def _again(self, member: SupervisedRole, why: str) -> None:
        if member.code == NO_ROOM:
            return self._await_room(member, why)
        pause = member.pause()
        if member.code == USERS_MISTAKE and not member.ready:
            raise ValueError(f"{member.role}: {member.last_words().removeprefix('error: ')}")
        if pause is None:
            raise RunFailed(
                f"{member.role}: stopped after {len(member.starts) - 1} restarts: {why}"
            )
        log.warning("%s; it is started again in %.1f s", why, pause)
        member.again_at = time.monotonic() + pause

    def _await_room(self, member: SupervisedRole, why: str) -> None:
        """Restart a role that found no room on the disk, until there is some. RunFailed after
        `ckpt.wait_for_space` seconds."""
        most = self.cfg.ckpt.wait_for_space
        waited = member.without_room()
        if waited >= most:
            raise RunFailed(
                f"{why}. There was no room within {most:g} s (ckpt.wait_for_space). What was committed "
                "before is intact: make room, then go on with --resume"
            )
        log.warning(
            "%s. It is started again in %g s, and so on until there is room; the run ends in %.0f s "
            "(ckpt.wait_for_space)",
            why,
            ROOM_S,
            most - waited,
        )
        member.again_at = time.monotonic() + ROOM_S

    def _stop(self) -> int:
        """Stop after a signal: the trainer finishes its step, then all end."""
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
        for member in (self.orchestrator, *self.engines):
            member.end(ENDING_S)
        return self.stop.signal

    def _show(self) -> None:
        """Show new records, evaluations and warnings, and what each role does."""
        files = [self.place.run / name for name in (METRICS_FILE, EVALUATIONS_FILE)]
        sizes = [path.stat().st_size if path.is_file() else 0 for path in files]
        if sizes != self._sizes and self.trainer.ready:
            self._sizes = sizes
            self._show_records()
        for role, warnings in self.warnings.items():
            for line in warnings.new():
                self.view.note(f"{role}: {line}")
        self.view.phase(" | ".join(map(self._told, self.members)), 0, 0)

    def _show_records(self) -> None:
        """Show new records, and each evaluation after the record of its step, or with it."""
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

    def _told(self, member: SupervisedRole) -> str:
        """Describe what a role does."""
        member.look()
        if not member.alive():
            return f"{member.role}: {'done' if member.done else 'ended'}"
        if member.watch.said is None:
            return f"{member.role}: starting"
        silent = member.watch.silent_for
        if silent > member.watch.silent_s / 2 and member.ready:
            return f"{member.role}: silent for {silent:.0f} s ({member.watch.told()})"
        return f"{member.role}: {member.watch.told()}"

    def close(self) -> None:
        """End all roles."""
        for member in reversed(self.members):
            member.kill()
