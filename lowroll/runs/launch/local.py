"""`launcher: local`: the roles of a run as children of one command, on this machine, which end with it."""

from __future__ import annotations

import logging
import os
import secrets
from contextlib import ExitStack

from lowroll.config import RunConfig
from lowroll.runs.launch import devices
from lowroll.runs.launch.child import Child
from lowroll.runs.launch.fleet import Make, engines
from lowroll.runs.roles.run_paths import ADMIN, TOKEN, TRAINER, RunPaths
from lowroll.runs.roles.serve import ROLE

log = logging.getLogger(__name__)


def crew(cfg: RunConfig, place: RunPaths, stack: ExitStack) -> Make:
    """Return a function that makes a role a child of this process, on its share of the devices."""
    env = dict(os.environ)
    roles = engines(cfg)
    if roles:  # else they have tokens of their own
        env |= {TOKEN: secrets.token_hex(16), ADMIN: secrets.token_hex(16)}
    placed = devices.of_run(cfg)
    log.info("%s", placed.line())
    named = [placed.engine(number) | {ROLE: role} for number, role in enumerate(roles)]
    own = dict(zip(roles, named, strict=True)) | {TRAINER: placed.learner}

    def make(role: str, words: list[str]) -> Child:
        return Child(role, words, env | own.get(role, {}), place.heart(role), place.log(role))

    return make
