"""The assignment of GPUs to a launcher's children. No torch.

The learner's ranks have the first GPUs, one each. The engines share the others, or the learner's if
there are no others, each as many as it needs. All share a single GPU.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lowroll.config import RunConfig

VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Placement:
    """The GPU of each rank and those of each engine; empty if nothing is assigned."""

    ranks: tuple[str, ...] = ()
    engines: tuple[tuple[str, ...], ...] = ()

    @property
    def learner(self) -> dict[str, str]:
        return {VISIBLE: ",".join(self.ranks)} if self.ranks else {}

    def engine(self, number: int) -> dict[str, str]:
        return {VISIBLE: ",".join(self.engines[number])} if self.engines else {}

    @property
    def shares(self) -> int:
        """Return the most engines on one rank's GPU."""
        return max(
            (sum(gpu in engine_gpus for engine_gpus in self.engines) for gpu in self.ranks),
            default=0,
        )

    def line(self) -> str:
        if not self.ranks:
            return "devices: the learner and the engines share one"
        assignments = [f"rank {rank}: GPU {gpu}" for rank, gpu in enumerate(self.ranks)]
        if len(assignments) == 1:
            assignments = [f"learner: GPU {self.ranks[0]}"]
        assignments += [
            f"engine {number}: GPU {', '.join(engine_gpus)}"
            for number, engine_gpus in enumerate(self.engines)
        ]
        sharing_text = "shared with engines" if self.shares else "each on its own"
        return f"devices: {'; '.join(assignments)} (the learner's are {sharing_text})"


def visible() -> list[str]:
    """Return this process's GPUs: CUDA_VISIBLE_DEVICES, else all."""
    if VISIBLE in os.environ:
        return [name.strip() for name in os.environ[VISIBLE].split(",") if name.strip()]
    names = (path.name[6:] for path in Path("/dev").glob("nvidia[0-9]*"))
    return sorted(names, key=int)


def place(gpus: Sequence[str], ranks: int = 1, engines: int = 1, each: int = 1) -> Placement:
    """Assign GPUs to ranks and engines. ValueError for fewer GPUs, unless none, than ranks or than
    one engine needs."""
    if not gpus or len(gpus) == ranks == each == 1:
        return Placement()
    if len(gpus) < ranks:
        raise ValueError(
            f"train.gpus: {ranks} ranks need a GPU each, and there are {len(gpus)} "
            f"({', '.join(gpus)}; {VISIBLE} says which are used)"
        )
    if len(gpus) < each:
        raise ValueError(
            f"rollout.vllm.tensor_parallel_size: an engine needs {each} GPUs, and there are "
            f"{len(gpus)} ({', '.join(gpus)}; {VISIBLE} says which are used)"
        )
    other_gpus = gpus[ranks:]
    shared_gpus = other_gpus if len(other_gpus) >= each else gpus
    num_sets = len(shared_gpus) // each  # an incomplete set stays unused
    gpu_sets = [tuple(shared_gpus[i * each : (i + 1) * each]) for i in range(num_sets)]
    engine_gpus = tuple(gpu_sets[number % num_sets] for number in range(engines))
    return Placement(tuple(gpus[:ranks]), engine_gpus)


def of_run(cfg: RunConfig) -> Placement:
    """Place the roles of a run. ValueError as in `place`."""
    gpus_per_engine = 1 if cfg.rollout.engine == "native" else cfg.rollout.vllm.tensor_parallel_size
    gpus = [] if cfg.device == "cpu" else visible()
    return place(gpus, cfg.train.gpus, cfg.rollout.engines, gpus_per_engine)


def check_ranks(cfg: RunConfig) -> None:
    """Raise ValueError for fewer GPUs, unless none, than ranks."""
    if cfg.device != "cpu":
        place(visible(), cfg.train.gpus)


def own_first(local: int, gpus: Sequence[str]) -> dict[str, str]:
    """Return the environment of the machine's rank `local`: its own GPU first, then the others',
    which NCCL reaches. ValueError without one."""
    if len(gpus) < 2 and not local:
        return {}
    if local >= len(gpus):
        raise ValueError(
            f"LOCAL_RANK: {local}, and {len(gpus)} GPUs are used here ({VISIBLE} says which); every "
            "rank needs one of its own"
        )
    return {VISIBLE: ",".join([gpus[local], *gpus[:local], *gpus[local + 1 :]])}
