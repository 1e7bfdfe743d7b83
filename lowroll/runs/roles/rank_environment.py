"""The rank of this process among the learner's, as torchrun, srun or `runs.launch.group` say it in
the environment. No torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from lowroll.config import RunConfig

NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LOCAL = "LOCAL_RANK"  # among those of its machine; without it all are on one


@dataclass(frozen=True)
class RankEnvironment:
    """Rank `rank` of `size`, the `local`th of its machine; they meet at host:port."""

    rank: int
    size: int
    local: int
    host: str
    port: int

    @property
    def variables(self) -> dict[str, str]:
        """The environment that says so."""
        values = (self.rank, self.size, self.host, self.port)
        return dict(zip((*NAMES, LOCAL), map(str, (*values, self.local)), strict=True))


def seat(cfg: RunConfig, environ: Mapping[str, str] = os.environ) -> RankEnvironment | None:
    """Return the rank that the environment makes of this process; None where it says nothing of
    ranks. ValueError names the variable that is missing or wrong, or the setting that wants another
    number of ranks."""
    given = [name for name in NAMES[:2] if environ.get(name)]
    if not given:
        return None
    if missing := [name for name in NAMES if not environ.get(name)]:
        raise ValueError(
            f"{missing[0]}: not set, and {given[0]} is: a rank of the learner needs {', '.join(NAMES)} "
            "(torchrun sets them); without RANK and WORLD_SIZE lowroll train starts all ranks itself"
        )
    rank, size, port = (_number(name, environ) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    if size != cfg.train.gpus:
        raise ValueError(
            f"WORLD_SIZE: {size} ranks were started, and train.gpus is {cfg.train.gpus}: write "
            f"train.gpus={size}, or start as many"
        )
    if rank >= size:
        raise ValueError(f"RANK: {rank}, of {size} ranks (WORLD_SIZE), which are counted from 0")
    local = _number(LOCAL, environ) if environ.get(LOCAL) else rank
    return RankEnvironment(rank, size, local, environ["MASTER_ADDR"], port)


def _number(name: str, environ: Mapping[str, str]) -> int:
    text = environ[name]
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"{name}: expected a whole number, got {text!r}")
    return int(text)
