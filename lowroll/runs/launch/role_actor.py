"""The actor of a Ray cluster that owns a role's process, and ends with it.

What it is told and tells are commands, addresses, exit codes and last lines of logs: weights, rollouts
and requests travel by lowroll's own transports, and secrets by a file of the run folder.
"""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

from lowroll.checkpoint.files import read_file
from lowroll.runs.launch.process import RoleProcess, is_free
from lowroll.types import printable

WORD = "word"  # by which a file is known to be the launcher's own
# of a worker's own environment, that a role does not get: it speaks to no cluster, and Ray sets the
# number of threads where nobody has
OURS, THREADS = "RAY_", "OMP_NUM_THREADS"


class RoleActor:
    """The actor on its node, in a process of its own."""

    def __init__(self) -> None:
        self.process: RoleProcess | None = None
        self.variables: dict[str, str] = {}

    def meet(self, folder: str, variables: str, word: str) -> dict[str, str]:
        """Return where the actor is (address, host, node), and as `wrong` why the role cannot run
        there. folder: in which the role is started. variables: the file of the role's environment
        variables, in the run folder."""
        import ray

        told = {
            "here": ray.util.get_node_ip_address(),
            "host": socket.gethostname(),
            "node": ray.get_runtime_context().get_node_id(),
        }
        path = Path(variables)
        run = printable(path.parent.parent)
        try:
            found = json.loads(read_file(path))
        except (OSError, ValueError) as error:
            return told | {"wrong": f"does not see the run folder: {printable(error)}"}
        if found.get(WORD) != word:
            return told | {"wrong": f"has another {run}, which is not the run folder"}
        if not os.access(path.parent, os.W_OK):
            return told | {"wrong": f"may not write to the run folder {run}"}
        if not Path(folder).is_dir():
            return told | {"wrong": f"has no {printable(folder)}, where this command was started"}
        self.variables = found
        return told

    def begin(self, role: str, words: list[str], folder: str, log: str) -> tuple[int, int]:
        """Start the role's process; return its ID, and where in the log it begins."""
        env = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
        env.pop(THREADS, None)
        env |= self.variables["all"] | self.variables.get(role, {})  # type: ignore[operator]
        self.process = RoleProcess(words, env, Path(log), Path(folder))
        return self.process.pid, self.process.began

    def ended(self) -> list[tuple[int, str]]:
        """Return its exit code and last words, once the process has ended, and all of its group
        with it; else []."""
        if self.process is None or self.process.alive():
            return []
        return [self.kill()]

    def kill(self) -> tuple[int, str]:
        """End the process; return its exit code and last words."""
        assert self.process is not None, "the launcher asks for one that was started"
        return self.process.kill(), self.process.last_words()

    def signal(self, number: int) -> None:
        """Send a signal to the process."""
        if self.process is not None:
            self.process.signal(number)

    def is_free(self, host: str, port: int) -> bool:
        """Return whether a server could listen there."""
        return is_free(host, port)
