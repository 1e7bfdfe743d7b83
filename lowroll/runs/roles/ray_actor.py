"""A role's process on a Ray cluster, which ends with the actor that owns it.

`ActorProcess` is the launcher's side, `RoleActor` the actor on its node. Ray carries only commands,
addresses and exits; secrets travel in a file.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowroll.checkpoint.atomic_files import read_file
from lowroll.checkpoint.lock import RunLockedError, refuse_locked
from lowroll.runs.roles.local import LocalProcess, exit_of, is_port_free
from lowroll.runs.roles.role import Exit, RoleProcess, is_writer
from lowroll.types import RunFailed, printable

WORD = "word"  # identifies the launcher's file
# Variables that a role does not get: it uses no cluster, and Ray limits its threads.
OURS, THREADS = "RAY_", "OMP_NUM_THREADS"
ANSWER_S = 20.0  # for a known actor
POLL_S = 0.25  # between checks of a process
LEFT_S = 60.0  # for a process to end after its actor or node was lost


class RoleActor:
    def __init__(self) -> None:
        self.process: LocalProcess | None = None
        self.variables: dict[str, Any] = {}

    def meet(self, folder: str, variables: str, word: str) -> dict[str, str]:
        """Return the actor's address, host and node, and as `wrong` why the role cannot run there.
        variables: the file of environment variables."""
        import ray

        node_info = {
            "address": ray.util.get_node_ip_address(),
            "host": socket.gethostname(),
            "node": ray.get_runtime_context().get_node_id(),
        }
        path = Path(variables)
        run = printable(path.parent.parent)
        try:
            content = json.loads(read_file(path))
        except (OSError, ValueError) as error:
            return node_info | {"wrong": f"does not see the run folder: {printable(error)}"}
        if content.get(WORD) != word:
            return node_info | {"wrong": f"has another {run}, which is not the run folder"}
        if not os.access(path.parent, os.W_OK):
            return node_info | {"wrong": f"may not write to the run folder {run}"}
        if not Path(folder).is_dir():
            return node_info | {
                "wrong": f"has no {printable(folder)}, where this command was started"
            }
        self.variables = content
        return node_info

    def start(self, role: str, words: list[str], folder: str, log: str) -> tuple[int, int]:
        """Start the process; return its ID and the earlier size of its log."""
        env = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
        env.pop(THREADS, None)
        env |= self.variables["all"] | self.variables.get(role, {})
        self.process = LocalProcess(env, Path(log), Path(folder))
        self.process.start(words)
        return self.process.pid, self.process.log_start

    def ends(self) -> list[Exit]:
        """Return the process's end in a list, which is empty before."""
        if self.process is None or self.process.is_alive():
            return []
        return [self.kill()]

    def kill(self) -> Exit:
        assert self.process is not None, "the launcher asks for one that was started"
        self.process.kill()
        assert self.process.exit is not None
        return self.process.exit

    def signal(self, number: int) -> bool:
        if self.process is not None:
            self.process.signal(number)
        return True  # an answer, unlike None

    def is_port_free(self, host: str, port: int) -> bool:
        return is_port_free(host, port)


class ActorLost(Exception):
    """A lost or silent actor."""


class ActorAway(ActorLost):
    """An actor that does not answer now; Ray will report whether it is gone."""


@dataclass(frozen=True)
class Bundle:
    """A bundle of the run's placement group."""

    group: Any
    index: int
    cpus: float
    gpus: float

    def create_actor(self) -> Any:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        # by name: lowroll is installed on every node
        options = ray.remote(RoleActor).options(
            num_cpus=self.cpus,
            num_gpus=self.gpus,
            scheduling_strategy=PlacementGroupSchedulingStrategy(self.group, self.index),
            max_restarts=0,
            max_task_retries=0,
        )
        return options.remote()


class ActorProcess(RoleProcess):
    """A process that an actor owns. met: arguments of `RoleActor.meet`. deadline_s: until a node
    has the actor. lock: the folder that the role locks."""

    def __init__(
        self,
        role: str,
        bundle: Bundle,
        met: tuple[str, str, str],
        deadline_s: float,
        log: Path,
        lock: Path,
    ) -> None:
        self.role = role
        self.bundle = bundle
        self.met = met
        self.deadline_s = deadline_s
        self.log = log
        self.lock = lock
        self.pid = 0
        self.node: dict[str, str] = {}
        self.actor: Any = None
        self._meeting: Any = None
        self._unplaced_since = 0.0
        self._log_start = 0
        self._ends: Any = None  # the pending reply of `ends`
        self._ask_at = 0.0
        self._lost_at = 0.0

    # -- placing -----------------------------------------------------------------------------------

    def is_placed(self) -> bool:
        """Return whether an actor has a node, and no process of a lost actor has the role.
        RunFailed when no node has it in time."""
        return self._meet() and not self._is_left()

    def _meet(self) -> bool:
        """Return whether the actor has a usable node; create it if there is none. Errors are those
        of `is_placed`, and ValueError for an unusable node."""
        if self.node:
            return True
        if self.actor is None:
            self._unplaced_since = self._unplaced_since or time.monotonic()
            self.actor = self.bundle.create_actor()
            self._meeting = self.actor.meet.remote(*self.met)
        try:
            reply = answer(self._meeting)
        except ActorLost:
            self.leave()  # the next call creates another
            reply = None
        if reply is None:
            if time.monotonic() - self._unplaced_since > self.deadline_s:
                raise RunFailed(self._no_room())
            return False
        if "wrong" in reply:
            node_text = f"{reply['address']} ({printable(reply['host'])})"
            raise ValueError(
                f"launcher: ray: node {node_text}, where the {self.role} is placed, {reply['wrong']}; "
                "all nodes need the same output_dir and working directory, on a shared file system"
            )
        self.node = reply
        self.address = reply["address"]
        self._unplaced_since = 0.0
        return True

    def _no_room(self) -> str:
        import ray

        resources = ray.available_resources()
        return (
            f"{self.role}: no node of the Ray cluster has had room for it ({self.bundle.cpus:g} CPUs, "
            f"{self.bundle.gpus:g} GPUs) within {self.deadline_s:.0f} s (ray.node_deadline); free are "
            f"{resources.get('CPU', 0):g} CPUs and {resources.get('GPU', 0):g} GPUs in all"
        )

    def _is_left(self) -> bool:
        if not self._lost_at or time.monotonic() - self._lost_at > LEFT_S:
            return False
        try:
            refuse_locked(self.lock)
        except RunLockedError:
            return True
        self._lost_at = 0.0
        return False

    # -- the process -------------------------------------------------------------------------------

    def start(self, words: Sequence[str]) -> None:
        self.exit, self._ends, self.pid = None, None, 0
        folder, log = os.getcwd(), str(self.log.absolute())
        try:
            self.pid, self._log_start = self.ask("start", self.role, list(words), folder, log)
        except ActorLost as error:
            self._lose(error)

    def is_alive(self) -> bool:
        if self.exit is None and self.pid:
            self._ask_for_exit()
        return self.exit is None and self.pid > 0

    def _ask_for_exit(self) -> None:
        """Set `exit` when the actor reports the end, without waiting."""
        if self._ends is None:
            if time.monotonic() < self._ask_at:
                return
            self._ends = self.actor.ends.remote()
        try:
            exits = answer(self._ends)
        except ActorAway:
            exits = []  # the heartbeat decides, as the role is silent too
        except ActorLost as error:
            return self._lose(error)
        if exits is None:
            return
        self._ends = None
        self._ask_at = time.monotonic() + POLL_S
        if exits:
            (self.exit,) = exits

    def wrote(self, heartbeat: Mapping[str, object]) -> bool:
        return is_writer(self.pid, heartbeat) and self.node.get("host") == heartbeat.get("host")

    def is_port_free(self, port: int) -> bool:
        try:
            return bool(self.ask("is_port_free", self.address, port))
        except ActorLost:
            return True  # the next start detects it

    def signal(self, number: int) -> None:
        with suppress(ActorLost):
            self.ask("signal", number)

    def kill(self) -> None:
        if self.exit is not None or not self.pid:
            return
        try:
            self.exit = self.ask("kill")
        except ActorLost as error:
            self._lose(error)

    def describe(self) -> str:
        return f"process {self.pid} on {self.address} ({self.node.get('host')})"

    # -- the actor ---------------------------------------------------------------------------------

    def ask(self, method: str, *words: object) -> Any:
        """Return the actor's answer to a call, or raise ActorLost."""
        if self.actor is None:
            raise ActorLost("there is none")
        reply = answer(getattr(self.actor, method).remote(*words), ANSWER_S)
        if reply is None:
            raise ActorLost(f"it has not answered for {ANSWER_S:.0f} s")
        return reply

    def leave(self) -> None:
        import ray

        if self.actor is not None:
            ray.kill(self.actor, no_restart=True)
        self.actor, self.node = None, {}

    def is_node_lost(self) -> bool:
        import ray

        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        return bool(self.node) and self.node["node"] not in alive

    def _lose(self, error: ActorLost) -> None:
        lost_part = f"node {self.address}" if self.is_node_lost() else "actor"
        cause = f"its {lost_part} was lost: {error}"
        self.exit = exit_of(-signal.SIGKILL, self.log, self._log_start, cause)
        self._lost_at = time.monotonic()
        self.leave()


def answer(request: Any, timeout_s: float = 0.0) -> Any:
    """Return an actor's answer, None while it is pending. ActorLost when there will be none,
    ActorAway to ask again."""
    import ray

    ready, _ = ray.wait([request], timeout=timeout_s)
    if not ready:
        return None
    try:
        return ray.get(request, timeout=ANSWER_S)
    except ray.exceptions.ActorUnavailableError as error:
        raise ActorAway(first_cause(error)) from None
    except ray.exceptions.RayActorError as error:
        raise ActorLost(first_cause(error)) from None


def first_cause(error: Exception) -> str:
    """Return the cause in Ray's message about an actor's end."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    causes = [line for line in lines if "because" in line]
    sentence = (causes or lines or [type(error).__name__])[0]
    return printable(sentence.partition(". ")[0].rstrip("."), 160)
