"""A vLLM as the engine of a run, for `lowroll serve FILE` where `rollout.engine` is vllm.

It listens on a Unix socket that this user alone can reach, since vLLM's control routes ask nobody for
a token, and its role's sign of life says where. One that is started again has the same socket.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from lowroll.config import RunConfig
from lowroll.engine.remote.vllm_process import lasting_folder
from lowroll.runs.build import vllm
from lowroll.runs.folder import LOGS
from lowroll.runs.roles.heartbeat import Heartbeat
from lowroll.runs.roles.run_paths import RunPaths
from lowroll.types import RunFailed

LOOK_S = 0.2


def serve(cfg: RunConfig, place: RunPaths, role: str, heart: Heartbeat) -> NoReturn:
    """Have one answer until a signal comes, which is SystemExit. ValueError names what it cannot do
    for the run, RunFailed how it ended."""
    socket = lasting_folder(f"{place.run.resolve()} {role}")
    with _ended_by_signals():
        engine = vllm.serve(cfg, place.run / LOGS / f"{role}-vllm.log", socket)
        process = engine.process
        assert process is not None
        try:
            heart.say(url=process.url, phase="serving")
            print(f"serving {cfg.model} at {process.url}", flush=True)
            while (why := process.lost()) is None:
                time.sleep(LOOK_S)
            raise RunFailed(why)
        finally:
            engine.close()


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Exit at a signal in the block, which unwinds what there is, also while vLLM starts."""

    def end(number: int, _: FrameType | None) -> None:
        sys.exit(128 + number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, end) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
