"""A place for a role on a Ray cluster: a bundle of the run's placement group, and the actor in it."""

from __future__ import annotations

import time
from typing import Any

from lowroll.runs.launch.role_actor import RoleActor
from lowroll.types import RunFailed, printable

ANSWER_S = 20.0  # for an actor that has been met


class Lost(Exception):
    """An actor that is gone, or answers no more; the message says why."""


class Away(Lost):
    """An actor that does not answer now; Ray will say whether it is gone."""


class Bundle:
    """A bundle of the placement group and the actor in it. group, index: of the bundle. cpus, gpus:
    in it. met: arguments of `RoleActor.meet`. deadline_s: until there is room."""

    def __init__(
        self,
        role: str,
        group: Any,
        index: int,
        cpus: float,
        gpus: float,
        met: tuple[str, str, str],
        deadline_s: float,
    ) -> None:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self.role = role
        self.cpus, self.gpus = cpus, gpus
        self.met = met
        self.deadline_s = deadline_s
        self.strategy = PlacementGroupSchedulingStrategy(group, index)
        self.actor: Any = None
        self.told: dict[str, str] = {}  # by the actor, of where it is
        self._meeting: Any = None
        self._since = 0.0

    def take(self) -> bool:
        """Return whether the actor has reported where it is; create one when there is none.
        ValueError when the role cannot run where it is, RunFailed when there is no room in time."""
        import ray

        if self.told:
            return True
        if self.actor is None:
            self._since = self._since or time.monotonic()
            # the class itself is sent by its name: lowroll is installed on every node
            owner = ray.remote(RoleActor).options(
                num_cpus=self.cpus,
                num_gpus=self.gpus,
                scheduling_strategy=self.strategy,
                max_restarts=0,
                max_task_retries=0,
            )
            self.actor = owner.remote()
            self._meeting = self.actor.meet.remote(*self.met)
        try:
            told = answer(self._meeting)
        except Lost:
            self.leave()
            told = None
        if told is None:
            if time.monotonic() - self._since > self.deadline_s:
                raise RunFailed(self._no_room())
            return False
        if "wrong" in told:
            where = f"{told['here']} ({printable(told['host'])})"
            raise ValueError(
                f"launcher: ray: node {where}, where the {self.role} is placed, {told['wrong']}; "
                "all nodes need the same output_dir and working directory, on a shared file system"
            )
        self.told = told
        self._since = 0.0
        return True

    def _no_room(self) -> str:
        import ray

        free = ray.available_resources()
        return (
            f"{self.role}: no node of the Ray cluster has had room for it ({self.cpus:g} CPUs, "
            f"{self.gpus:g} GPUs) within {self.deadline_s:.0f} s (ray.node_deadline); free are "
            f"{free.get('CPU', 0):g} CPUs and {free.get('GPU', 0):g} GPUs in all"
        )

    def ask(self, method: str, *words: object) -> Any:
        """Call a method of the actor and return its answer. Lost when there is none."""
        import ray

        if self.actor is None:
            raise Lost("there is none")
        asked = getattr(self.actor, method).remote(*words)
        try:
            return ray.get(asked, timeout=ANSWER_S)
        except ray.exceptions.GetTimeoutError:
            raise Lost(f"it has not answered for {ANSWER_S:.0f} s") from None
        except ray.exceptions.RayActorError as error:
            raise Lost(why(error)) from None

    def leave(self) -> None:
        """End the actor, and the role's process with it."""
        import ray

        if self.actor is not None:
            ray.kill(self.actor, no_restart=True)
        self.actor, self.told = None, {}

    def node_is_lost(self) -> bool:
        """Return whether the cluster has given up the node of the actor that was met."""
        import ray

        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        return bool(self.told) and self.told["node"] not in alive


def answer(asked: Any) -> Any:
    """Return an actor's answer; None while there is none. Lost when there will be none, Away when
    it has to be asked again."""
    import ray

    ready, _ = ray.wait([asked], timeout=0)
    if not ready:
        return None
    try:
        return ray.get(asked, timeout=ANSWER_S)
    except ray.exceptions.ActorUnavailableError as error:
        raise Away(why(error)) from None
    except ray.exceptions.RayActorError as error:
        raise Lost(why(error)) from None


def why(error: Exception) -> str:
    """Return the cause of an actor's end, from Ray's first sentence about it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    causes = [line for line in lines if "because" in line]
    told = (causes or lines or [type(error).__name__])[0]
    return printable(told.partition(". ")[0].rstrip("."), 160)
