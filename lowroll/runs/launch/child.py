"""A role as a child of the launcher's own process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from lowroll.runs.launch.process import RoleProcess, how, is_free
from lowroll.runs.launch.supervised_role import SupervisedRole


class Child(SupervisedRole):
    """A role on this machine. env: of its process, whole."""

    def __init__(
        self, role: str, command: Sequence[str], env: Mapping[str, str], heart: Path, log: Path
    ) -> None:
        super().__init__(role, command, heart, log)
        self.env = dict(env)
        self.process: RoleProcess | None = None

    def begin(self, words: list[str]) -> None:
        self.process = RoleProcess(words, self.env, self.log)

    def is_free(self, port: int) -> bool:
        return is_free(self.here, port)

    def is_mine(self, said: dict[str, object]) -> bool:
        return self.process is not None and self.process.pid in (
            said.get("pid"),
            said.get("parent"),
        )

    def alive(self) -> bool:
        return self.process is not None and self.process.alive()

    def signal(self, number: int) -> None:
        if self.process is not None:
            self.process.signal(number)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()

    @property
    def code(self) -> int:
        return 0 if self.process is None else self.process.process.returncode or 0

    def ended(self) -> str:
        return how(self.code)

    def last_words(self) -> str:
        return "" if self.process is None else self.process.last_words()

    @property
    def name(self) -> str:
        return f"process {self.process.pid}" if self.process else "no process"
