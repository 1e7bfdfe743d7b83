"""The engine of a run, for `lowroll serve FILE`: what one process would make of the same settings."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from typing import TYPE_CHECKING

from lowroll.checkpoint.lock import RunLockedError
from lowroll.config import RunConfig
from lowroll.runs.attempt import own
from lowroll.runs.roles.heartbeat import Heartbeat
from lowroll.runs.roles.run_paths import ENGINE, RunPaths

if TYPE_CHECKING:
    from lowroll.engine.native import NativeEngine

ROLE = "LOWROLL_ENGINE_ROLE"  # of a launcher: which of several
MOST = 64  # engines of one run folder


def take_role(place: RunPaths, stack: ExitStack, named: str | None) -> tuple[str, int]:
    """Have a role in the run folder: (its name, the attempt). RunLockedError names who has it."""
    names = [named] if named else [f"{ENGINE}-{i}" for i in range(MOST)]
    for name in names:
        try:
            lock = stack.enter_context(own(place.roles / name))
            return name, lock.attempt
        except RunLockedError:
            if name == names[-1]:
                raise
    raise AssertionError("not reached")


def heart(place: RunPaths, role: str, attempt: int) -> Heartbeat:
    """Return the engine's heartbeat; its `url`, once it serves, is where the orchestrator finds
    it."""
    return Heartbeat(place.heart(role), role, attempt)


def engine(cfg: RunConfig) -> NativeEngine:
    """Build an engine over the model that the learner begins with, so that version 0 is the
    learner's. ValueError names the setting that is wrong."""
    from lowroll.engine.native import NativeEngine
    from lowroll.runs.build import engines, models
    from lowroll.runs.build.compute import Compute
    from lowroll.runs.roles.limits import refuse_budget

    refuse_budget(cfg)
    compute = Compute.of(cfg)
    chat = models.chat_of(cfg)
    made = engines.make(cfg, compute, models.learner(cfg, compute), chat)
    assert isinstance(made, NativeEngine)
    return made


def arguments_of(cfg: RunConfig, given: argparse.Namespace) -> argparse.Namespace:
    """Return the options of `lowroll serve` that a run's settings stand for."""
    place = RunPaths(cfg.output_dir)
    place.broadcasts.mkdir(parents=True, exist_ok=True)
    found = argparse.Namespace(**vars(given))
    found.model = cfg.model
    found.weights_dir = given.weights_dir or str(place.broadcasts)
    found.host, found.port = cfg.serve.host, cfg.serve.port
    way = cfg.weight_broadcast
    if way.type != "filesystem" and found.weights_from is None:
        found.weights_from = f"{way.host}:{way.port}" if way.port else str(place.direct)
    found.device = cfg.device
    found.tool_call_parser = cfg.rollout.tool_call_parser
    groups = [stage.rollouts_per_example for stage in cfg.each_stage()]
    found.max_n = max(given.max_n, *groups, cfg.eval.rollouts_per_example)
    found.max_requests = max(given.max_requests, 8192)
    return found
