"""A role whose process an actor of a Ray cluster owns."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lowroll.checkpoint.lock import RunLockedError, refuse_locked
from lowroll.checkpoint.logfile import last_error
from lowroll.runs.launch.bundle import Away, Bundle, Lost, answer
from lowroll.runs.launch.process import how
from lowroll.runs.launch.supervised_role import SupervisedRole

POLL_S = 0.25  # between two questions whether a process runs
LEFT_S = 60.0  # for a process to end whose actor or node was lost


class ActorRole(SupervisedRole):
    """A role whose process an actor owns. bundle: which has been taken once. lock: the folder that
    the role has while its process runs."""

    def __init__(
        self, role: str, command: Sequence[str], heart: Path, log: Path, bundle: Bundle, lock: Path
    ) -> None:
        super().__init__(role, command, heart, log)
        self.bundle = bundle
        self.lock = lock
        self.here = bundle.told["here"]
        self.pid = 0
        self._began = 0  # of its output in the log
        self._end: tuple[int, str, str] | None = None  # exit code, how, and last words
        self._asked: Any = None
        self._ask_at = 0.0
        self._lost_at = 0.0

    def placed(self) -> bool:
        if not self.bundle.take():
            return False
        self.here = self.bundle.told["here"]
        return not self._is_left()

    def _is_left(self) -> bool:
        """Return whether the process of a lost actor still has the role: it ends when it sees
        that."""
        if not self._lost_at or time.monotonic() - self._lost_at > LEFT_S:
            return False  # if it has, the next one says so by name
        try:
            refuse_locked(self.lock)
        except RunLockedError:
            return True
        self._lost_at = 0.0
        return False

    def begin(self, words: list[str]) -> None:
        self._end, self._asked, self.pid = None, None, 0
        try:
            told = self.bundle.ask("begin", self.role, words, os.getcwd(), str(self.log.absolute()))
            self.pid, self._began = told
        except Lost as error:
            self._lose(error)

    def is_free(self, port: int) -> bool:
        try:
            return bool(self.bundle.ask("is_free", self.here, port))
        except Lost:
            return True  # its next start will find that out

    def is_mine(self, said: dict[str, object]) -> bool:
        told = self.bundle.told
        return self.pid == said.get("pid") and told.get("host") == said.get("host")

    def alive(self) -> bool:
        if self._end is None and self.pid:
            self._ask()
        return self._end is None and self.pid > 0

    def _ask(self) -> None:
        try:
            if self._asked is None and time.monotonic() >= self._ask_at:
                self._asked = self.bundle.actor.ended.remote()
            if self._asked is None or (found := answer(self._asked)) is None:
                return
        except Away:
            self._asked, self._ask_at = None, time.monotonic() + POLL_S
            return  # when it stays so its role is silent, too
        except Lost as error:
            return self._lose(error)
        self._asked, self._ask_at = None, time.monotonic() + POLL_S
        for code, words in found:
            self._end = (code, how(code), words)

    def _lose(self, error: Lost) -> None:
        what = f"node {self.here}" if self.bundle.node_is_lost() else "actor"
        words = f"{last_error(self.log, self._began)} (log: {self.log})"
        self._end = (-signal.SIGKILL, f"its {what} was lost: {error}", words)
        self._lost_at = time.monotonic()
        self.bundle.leave()

    def signal(self, number: int) -> None:
        with suppress(Lost):
            self.bundle.ask("signal", number)

    def kill(self) -> None:
        if self._end is not None or not self.pid:
            return
        try:
            code, words = self.bundle.ask("kill")
            self._end = (code, how(code), words)
        except Lost as error:
            self._lose(error)

    @property
    def code(self) -> int:
        return 0 if self._end is None else self._end[0]

    def ended(self) -> str:
        return "" if self._end is None else self._end[1]

    def last_words(self) -> str:
        return "" if self._end is None else self._end[2]

    @property
    def name(self) -> str:
        return f"process {self.pid} on {self.here} ({self.bundle.told.get('host')})"
