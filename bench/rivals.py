"""vLLM in every setting that might be its fastest, each a process of its own, started together.

A setting is a model runner (V1, and V2 by `VLLM_USE_V2_MODEL_RUNNER=1`) and the format that it runs:
that of ours, and for 4 bits also int4 in groups of 128, which vLLM multiplies by Machete on Hopper.
Settings of one format are a family. In the first round of a batch all of them run, in the others the
fastest of each family: that is the one whose name stands in the row.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.peer import Peer, PeerFailed, start_vllm, vllm_environment, vllm_python
from bench.work import MACHETE
from lowroll.quant.formats import get_format

RUNNERS = {"V1": "0", "V2": "1"}
ASK_S = 60.0
VERSION = "import importlib.metadata as m; print(m.version('vllm'))"


@dataclass(frozen=True)
class Setting:
    """A vLLM of a version that runs a format by a model runner."""

    version: str
    runner: str
    format: str

    def __str__(self) -> str:
        return f"vLLM {self.version}, {self.runner}, {self.format}"

    @property
    def variables(self) -> dict[str, str]:
        """Return the environment of its process: settings that start together keep their compiled
        graphs apart."""
        cache = Path(tempfile.gettempdir()) / "bench-vllm" / f"cache-{self.version}-{self.runner}"
        return {"VLLM_USE_V2_MODEL_RUNNER": RUNNERS[self.runner], "VLLM_CACHE_ROOT": str(cache)}


def version() -> str:
    """Return the version of vLLM. PeerFailed when there is none."""
    command, env = [vllm_python(), "-P", "-c", VERSION], vllm_environment()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_S, env=env)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PeerFailed(f"{command[0]}: {error}") from None
    if done.returncode:
        where = os.environ.get("LOWROLL_VLLM_PATH") or command[0]
        raise PeerFailed(f"{where}: no vLLM: {done.stderr.strip()[-200:]}")
    return done.stdout.strip()


def settings(format: str, runners: Sequence[str]) -> list[Setting]:
    """Return all settings that a format of ours is held against, its own family first. PeerFailed
    where there is no vLLM."""
    found = version()
    families = [format]
    if get_format(format).bits < 8 and format != MACHETE:
        families.append(MACHETE)
    return [Setting(found, runner, family) for family in families for runner in runners]


@contextmanager
def started(
    chosen: Sequence[Setting], asked: Mapping[str, Any], notes: list[str]
) -> Iterator[dict[str, Peer]]:
    """Start the settings; yield those that can be had, by name, and note each that cannot.
    asked: what the worker is told beside its format."""

    def start(setting: Setting) -> Peer | PeerFailed:
        try:
            return start_vllm({**asked, "format": setting.format}, **setting.variables)
        except PeerFailed as error:
            return error

    with ExitStack() as stack, ThreadPoolExecutor(max(1, len(chosen))) as pool:
        peers = {}
        for setting, peer in zip(chosen, pool.map(start, chosen), strict=True):
            if isinstance(peer, PeerFailed):
                notes.append(f"{setting}: not run ({peer})")
            else:
                peers[str(setting)] = stack.enter_context(peer)
        yield peers


def fastest(seconds: Mapping[str, float], families: Mapping[str, str]) -> set[str]:
    """Return the sides that go on: those of no family, and the fastest of each."""
    best: dict[str, str] = {}
    for name, family in families.items():
        if name in seconds and seconds[name] < seconds.get(best.get(family, ""), float("inf")):
            best[family] = name
    return {name for name in seconds if name not in families or best[families[name]] == name}
