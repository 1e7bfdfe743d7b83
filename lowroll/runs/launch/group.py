"""`lowroll train` with `train.gpus` above 1: the learner's ranks as children of this command, on this
machine.

    rank 0         the trainer: its words are this command's        log logs/trainer-rank0.log
    rank 1, ...    do what it says (`runs.roles.rank_follower`)            log logs/trainer-rank1.log, ...

One that has ended or gives no sign of life ends them all: no rank goes on without the others. Who
started this command starts it again from the checkpoint. The first signal goes to rank 0, which
finishes the step, writes a checkpoint, and lets the others go. Children end with this process,
however it ends.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
from collections.abc import Sequence

from lowroll.checkpoint.space import NO_ROOM
from lowroll.config import RunConfig
from lowroll.metrics.record import read
from lowroll.runs.attempt import RunResult
from lowroll.runs.folder import RunFolder
from lowroll.runs.launch import devices
from lowroll.runs.launch.child import Child
from lowroll.runs.launch.fleet import USERS_MISTAKE
from lowroll.runs.launch.launcher import free
from lowroll.runs.launch.process import reserved
from lowroll.runs.roles.limits import refuse
from lowroll.runs.roles.rank_environment import RankEnvironment
from lowroll.runs.roles.run_paths import TRAINER, RunPaths, rank_role
from lowroll.runs.stop import Stop, polite_stop
from lowroll.types import RunFailed

LOOK_S = 0.1
BLAME_S = 1.0  # for others to end too, after the first: the cause is not always seen first
LEAVING_S = 30.0  # for the others, after rank 0
LOST = 3  # exit code of a rank that could not go on without another
STOPPED = 128 + signal.SIGTERM  # of rank 0 that was asked to stop


def start(cfg: RunConfig, words: Sequence[str], resume: bool, overwrite: bool) -> RunResult:
    """Learn with as many ranks as `train.gpus` says; words: of the command, after `lowroll`.

    ValueError has what a rank says of the settings, the folder or the devices; RunFailed names the
    rank that ended or hangs, with its own last error and its log; OSError one that found no room on the
    disk.
    """
    resolved = cfg.resolved()
    refuse(resolved)
    place = RunPaths(cfg.output_dir)
    devices.check_ranks(resolved)
    RunFolder(resolved, "grpo", alone=False).check(resume, overwrite)
    free(place.run)
    with polite_stop() as stop:
        crew = Crew(cfg, place, words, stop)
        try:
            number = crew.run()
        finally:
            crew.close()
    return RunResult(place.run, read(place.run), signal=number)


class Crew:
    """The processes of the ranks and their supervision."""

    def __init__(self, cfg: RunConfig, place: RunPaths, words: Sequence[str], stop: Stop) -> None:
        self.stop = stop
        self._meeting = reserved("127.0.0.1")
        size, (host, port) = cfg.train.gpus, self._meeting.getsockname()
        self.ranks = []
        for rank in range(size):
            heart = place.heart(rank_role(rank))
            heart.unlink(missing_ok=True)  # of another launch
            env = os.environ | RankEnvironment(rank, size, rank, host, port).variables
            self.ranks.append(
                Child(f"rank {rank}", words, env, heart, place.log(f"{TRAINER}-rank{rank}"))
            )
        self._said = self._size()

    def run(self) -> int:
        """Run until all ranks have ended; return the number of the signal that ended them early,
        else 0. RunFailed when one fails."""
        for rank in self.ranks:
            rank.start()
        first, told = self.ranks[0], False
        while first.alive():
            if self.stop and not told:
                first.signal(signal.SIGTERM)
                told = True
            self._look()
            self._speak()
            time.sleep(LOOK_S)
        until = time.monotonic() + LEAVING_S
        while any(rank.alive() for rank in self.ranks) and time.monotonic() < until:
            self._look()
            time.sleep(LOOK_S)
        self._look()
        return self.stop.signal or (signal.SIGTERM if first.code == STOPPED else 0)

    def _look(self) -> None:
        """Raise RunFailed when a rank has ended before its time, or hangs."""
        for rank in self.ranks:
            rank.look()
            if (hangs := rank.hangs()) is not None:
                raise RunFailed(f"{rank.role}: {hangs} (log: {rank.log})")
        if any(map(_failed, self.ranks)):
            until = time.monotonic() + BLAME_S
            while time.monotonic() < until and any(rank.alive() for rank in self.ranks):
                time.sleep(LOOK_S)
            self._blame()

    def _blame(self) -> None:
        """Raise the error of the rank that ended by itself."""
        failed = [rank for rank in self.ranks if _failed(rank)]
        rank = next((rank for rank in failed if rank.code != LOST), failed[0])
        if rank.code == USERS_MISTAKE and not rank.ready:
            raise ValueError(f"{rank.role}: {rank.last_words().removeprefix('error: ')}")
        if rank.code == NO_ROOM:
            raise OSError(errno.ENOSPC, f"{rank.role}: {rank.last_words()}")
        raise RunFailed(f"{rank.role} has ended ({rank.ended()}): {rank.last_words()}")

    def _speak(self) -> None:
        """Print what rank 0 has written since the last call."""
        if self._size() == self._said:
            return
        with self.ranks[0].log.open("rb") as file:
            file.seek(self._said)
            words = file.read()
        self._said += len(words)
        sys.stdout.write(words.decode(errors="replace"))
        sys.stdout.flush()

    def _size(self) -> int:
        log = self.ranks[0].log
        return log.stat().st_size if log.exists() else 0

    def close(self) -> None:
        """End all ranks, and print rank 0's last words."""
        for rank in reversed(self.ranks):
            rank.kill()
        self._meeting.close()
        self._speak()


def _failed(rank: Child) -> bool:
    """Return whether a rank has ended otherwise than it should."""
    if rank.alive():
        return False
    rank.kill()  # what is left of its group
    return rank.code not in (0, STOPPED)
