"""The learner's ranks as processes.

torchrun, srun or `lowroll train` with `train.gpus` above 1 set the environment. The latter starts
the trainer, which is rank 0, and the ranks that follow it (`runs.roles.rank_follower`). Their logs
are logs/trainer-rankN.log.

When one ends or is silent all end. The first signal goes to rank 0, which finishes the step.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lowroll.checkpoint.disk_space import NO_ROOM
from lowroll.config import RunConfig
from lowroll.metrics.record import read
from lowroll.runs.folder import RunFolder
from lowroll.runs.roles import devices
from lowroll.runs.roles.limits import refuse
from lowroll.runs.roles.local import LocalProcess, reserve_port
from lowroll.runs.roles.role import Role
from lowroll.runs.roles.run_paths import TRAINER, RunPaths, rank_role
from lowroll.runs.roles.supervisor import await_unlocked
from lowroll.runs.session import RunResult
from lowroll.runs.stop import Stop, polite_stop
from lowroll.types import RunFailed

NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LOCAL = "LOCAL_RANK"  # index on its machine; if unset all ranks are on one

POLL_S = 0.1
BLAME_S = 1.0  # after the first exit: the cause is not always seen first
LEAVING_S = 30.0  # for the others, after rank 0
LOST = 3  # exit code of a rank that lost another
STOPPED = 128 + signal.SIGTERM  # exit code of rank 0 after a requested stop


@dataclass(frozen=True)
class RankEnvironment:
    """A rank of a learner. local: its index on the machine. The ranks meet at host:port."""

    rank: int
    size: int
    local: int
    host: str
    port: int

    @classmethod
    def read(
        cls, cfg: RunConfig, environ: Mapping[str, str] = os.environ
    ) -> RankEnvironment | None:
        """Return this process's rank, if the environment names one. ValueError names a missing or
        wrong variable."""
        present = [name for name in ("RANK", "WORLD_SIZE") if environ.get(name)]
        if not present:
            return None
        if missing := [name for name in NAMES if not environ.get(name)]:
            raise ValueError(
                f"{missing[0]}: not set, and {present[0]} is: a rank of the learner needs "
                f"{', '.join(NAMES)} (torchrun sets them); without RANK and WORLD_SIZE lowroll train "
                "starts all ranks itself"
            )
        rank, size, port = (
            _read_number(name, environ) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT")
        )
        if size != cfg.train.gpus:
            raise ValueError(
                f"WORLD_SIZE: {size} ranks were started, and train.gpus is {cfg.train.gpus}: write "
                f"train.gpus={size}, or start as many"
            )
        if rank >= size:
            raise ValueError(
                f"RANK: {rank}, of {size} ranks (WORLD_SIZE), which are counted from 0"
            )
        local = _read_number(LOCAL, environ) if environ.get(LOCAL) else rank
        return cls(rank, size, local, environ["MASTER_ADDR"], port)

    @property
    def variables(self) -> dict[str, str]:
        """Return the environment variables for `read`."""
        values = (self.rank, self.size, self.host, self.port, self.local)
        return {name: str(value) for name, value in zip((*NAMES, LOCAL), values, strict=True)}


def _read_number(name: str, environ: Mapping[str, str]) -> int:
    text = environ[name]
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"{name}: expected a whole number, got {text!r}")
    return int(text)


def launch_ranks(cfg: RunConfig, words: Sequence[str], resume: bool, overwrite: bool) -> RunResult:
    """Learn with `train.gpus` ranks. words: the command after `lowroll`.

    ValueError has what a rank refuses, RunFailed the error of one that ended or hangs, OSError that
    of a full disk.
    """
    resolved = cfg.resolved()
    refuse(resolved)
    paths = RunPaths(cfg.output_dir)
    devices.check_ranks(resolved)
    RunFolder(resolved, "grpo", alone=False).check(resume, overwrite)
    await_unlocked(paths.run)
    with polite_stop() as stop:
        supervisor = RankSupervisor(cfg, paths, words, stop)
        try:
            signal_number = supervisor.run()
        finally:
            supervisor.close()
    return RunResult(paths.run, read(paths.run), signal=signal_number)


class RankSupervisor:
    """The ranks of a learner, which live and end together."""

    def __init__(self, cfg: RunConfig, paths: RunPaths, words: Sequence[str], stop: Stop) -> None:
        self.stop = stop
        self._meeting_point = reserve_port("127.0.0.1")
        host, port = self._meeting_point.getsockname()
        size = cfg.train.gpus
        self.ranks = []
        for rank in range(size):
            heartbeat = paths.heartbeat(rank_role(rank))
            heartbeat.unlink(missing_ok=True)
            env = os.environ | RankEnvironment(rank, size, rank, host, port).variables
            process = LocalProcess(env, paths.log(f"{TRAINER}-rank{rank}"))
            self.ranks.append(Role(f"rank {rank}", words, process, heartbeat))
        self._printed = self._log_size()

    def run(self) -> int:
        """Run to the end. Return the signal that ended the ranks early, else 0."""
        for rank in self.ranks:
            rank.start()
        leader = self.ranks[0]
        is_signaled = False
        while leader.process.is_alive():
            if self.stop and not is_signaled:
                leader.process.signal(signal.SIGTERM)
                is_signaled = True
            self.check()
            self._print_log()
            time.sleep(POLL_S)
        deadline = time.monotonic() + LEAVING_S
        while self._is_any_alive() and time.monotonic() < deadline:
            self.check()
            time.sleep(POLL_S)
        self.check()
        return self.stop.signal or (signal.SIGTERM if leader.exit_code == STOPPED else 0)

    def check(self) -> None:
        """Raise the error of a rank that has failed or hangs."""
        for rank in self.ranks:
            rank.update()
            if (hang := rank.find_hang()) is not None:
                raise RunFailed(f"{rank.name}: {hang} (log: {rank.process.log})")
        if self._failed():
            deadline = time.monotonic() + BLAME_S
            while time.monotonic() < deadline and self._is_any_alive():
                time.sleep(POLL_S)
            self._blame()

    def _blame(self) -> None:
        failed = self._failed()
        rank = next((rank for rank in failed if rank.exit_code != LOST), failed[0])
        rank.raise_users_mistake()
        if rank.exit_code == NO_ROOM:
            assert rank.process.exit is not None
            raise OSError(errno.ENOSPC, f"{rank.name}: {rank.process.exit.error}")
        raise RunFailed(rank.describe_exit())

    def _failed(self) -> list[Role]:
        ended = [rank for rank in self.ranks if not rank.process.is_alive()]
        for rank in ended:
            rank.process.kill()
        return [rank for rank in ended if rank.exit_code not in (0, STOPPED)]

    def _is_any_alive(self) -> bool:
        return any(rank.process.is_alive() for rank in self.ranks)

    def _print_log(self) -> None:
        if self._log_size() == self._printed:
            return
        with self.ranks[0].process.log.open("rb") as file:
            file.seek(self._printed)
            text = file.read()
        self._printed += len(text)
        sys.stdout.write(text.decode(errors="replace"))
        sys.stdout.flush()

    def _log_size(self) -> int:
        log = self.ranks[0].process.log
        return log.stat().st_size if log.exists() else 0

    def close(self) -> None:
        for rank in reversed(self.ranks):
            rank.process.kill()
        self._meeting_point.close()
        self._print_log()
