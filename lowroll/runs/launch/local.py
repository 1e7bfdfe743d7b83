"""`launcher: local`: the roles of a run as children of one command, on this machine, which end with it."""

from __future__ import annotations

import os
import secrets
from contextlib import ExitStack
from pathlib import Path

from lowroll.config import RunConfig
from lowroll.runs.launch.child import Child
from lowroll.runs.launch.fleet import Make, engines
from lowroll.runs.roles.place import ADMIN, TOKEN, TRAINER, Place
from lowroll.runs.roles.serve import ROLE


def crew(cfg: RunConfig, place: Place, stack: ExitStack) -> Make:
    """What makes a role a child of this process, on its share of the devices."""
    env = dict(os.environ)
    roles = engines(cfg)
    if roles:  # else they have tokens of their own
        env |= {TOKEN: secrets.token_hex(16), ADMIN: secrets.token_hex(16)}
    first, *others = _devices(cfg.rollout.engines, _gpus(cfg))
    named = [devices | {ROLE: role} for role, devices in zip(roles, others, strict=False)]
    own = dict(zip(roles, named, strict=True)) | {TRAINER: first}

    def make(role: str, words: list[str]) -> Child:
        return Child(role, words, env | own.get(role, {}), place.heart(role), place.log(role))

    return make


def _gpus(cfg: RunConfig) -> int:
    """Of one engine."""
    return 1 if cfg.rollout.engine == "native" else cfg.rollout.vllm.tensor_parallel_size


def _devices(engines: int, each: int = 1) -> list[dict[str, str]]:
    """Variables of the learner and of the engines, of which each takes so many GPUs. Where there are
    several the learner has the first, and the engines share the others."""
    name = "CUDA_VISIBLE_DEVICES"
    if name in os.environ:
        found = [one for one in os.environ[name].split(",") if one]
    else:
        found = sorted(p.name[6:] for p in Path("/dev").glob("nvidia[0-9]*"))
    if len(found) < 2:
        return [{}] * (1 + engines)
    own, *others = found
    shares = [others[i : i + each] for i in range(0, len(others) - each + 1, each)] or [others]
    return [
        {name: own},
        *({name: ",".join(shares[i % len(shares)])} for i in range(engines)),
    ]
