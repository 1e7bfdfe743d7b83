"""The engine of a run, for `lowroll serve FILE`.

A vLLM listens on a Unix socket that only this user can reach, since its control routes need no
token. The role's heartbeat holds the address; a restarted engine keeps it.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from lowroll.checkpoint.lock import RunLockedError
from lowroll.config import RunConfig
from lowroll.runs.folder import LOGS
from lowroll.runs.roles.heartbeat import Heartbeat
from lowroll.runs.roles.limits import refuse_budget
from lowroll.runs.roles.run_paths import ENGINE, RunPaths
from lowroll.runs.session import own
from lowroll.runs.stop import SIGNALS
from lowroll.types import RunFailed

if TYPE_CHECKING:
    from lowroll.engine.native import NativeEngine

MOST = 64  # of one run folder
POLL_S = 0.2


def take_role(paths: RunPaths, stack: ExitStack, named: str | None) -> tuple[str, int]:
    """Take a role; return its name and attempt. RunLockedError names the holder."""
    names = [named] if named else [f"{ENGINE}-{i}" for i in range(MOST)]
    for name in names[:-1]:
        with suppress(RunLockedError):
            return name, stack.enter_context(own(paths.roles / name)).attempt
    return names[-1], stack.enter_context(own(paths.roles / names[-1])).attempt


def build(cfg: RunConfig) -> NativeEngine:
    """Build an engine over the learner's initial model."""
    from lowroll.engine.native import NativeEngine
    from lowroll.runs.assembly import engines, models
    from lowroll.runs.assembly.compute import Compute

    refuse_budget(cfg)
    compute = Compute.of(cfg)
    chat = models.chat_of(cfg)
    engine = engines.make(cfg, compute, models.learner(cfg, compute), chat)
    assert isinstance(engine, NativeEngine)
    return engine


def arguments_of(cfg: RunConfig, given: argparse.Namespace) -> argparse.Namespace:
    """Return the options of `lowroll serve` for a run."""
    paths = RunPaths(cfg.output_dir)
    paths.broadcasts.mkdir(parents=True, exist_ok=True)
    arguments = argparse.Namespace(**vars(given))
    arguments.model = cfg.model
    arguments.weights_dir = given.weights_dir or str(paths.broadcasts)
    arguments.host, arguments.port = cfg.serve.host, cfg.serve.port
    broadcast_cfg = cfg.weight_broadcast
    if broadcast_cfg.type != "filesystem" and arguments.weights_from is None:
        arguments.weights_from = (
            f"{broadcast_cfg.host}:{broadcast_cfg.port}"
            if broadcast_cfg.port
            else str(paths.direct)
        )
    arguments.device = cfg.device
    arguments.tool_call_parser = cfg.rollout.tool_call_parser
    group_sizes = [stage.rollouts_per_example for stage in cfg.each_stage()]
    arguments.max_n = max(given.max_n, *group_sizes, cfg.eval.rollouts_per_example)
    arguments.max_requests = max(given.max_requests, 8192)
    return arguments


def serve_vllm(cfg: RunConfig, paths: RunPaths, role: str, heartbeat: Heartbeat) -> NoReturn:
    """Run a vLLM until a signal, which raises SystemExit. ValueError names an unsupported setting,
    RunFailed how it ended."""
    from lowroll.engine.remote.vllm.process import lasting_folder
    from lowroll.runs.assembly import vllm

    socket_folder = lasting_folder(f"{paths.run.resolve()} {role}")
    with _exit_on_signals():
        engine = vllm.serve(cfg, paths.run / LOGS / f"{role}-vllm.log", socket_folder)
        process = engine.process
        assert process is not None
        try:
            heartbeat.update(url=process.url, phase="serving")
            print(f"serving {cfg.model} at {process.url}", flush=True)
            while (reason := process.lost()) is None:
                time.sleep(POLL_S)
            raise RunFailed(reason)
        finally:
            engine.close()


@contextmanager
def _exit_on_signals() -> Iterator[None]:
    def end(number: int, _: FrameType | None) -> None:
        sys.exit(128 + number)

    previous_handlers = {number: signal.signal(number, end) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)
