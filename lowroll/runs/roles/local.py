"""`launcher: local`: the roles of a run as children, which the kernel kills with the command."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from lowroll.checkpoint.logfile import last_error
from lowroll.config import RunConfig
from lowroll.runs.roles import devices
from lowroll.runs.roles.role import Exit, RoleProcess, is_writer
from lowroll.runs.roles.run_paths import (
    ENGINE_ROLE,
    ORCHESTRATOR,
    TRAINER,
    RunPaths,
    engine_roles,
    new_tokens,
)

log = logging.getLogger(__name__)

PARENT = "LOWROLL_LAUNCHER_PID"
REAP_S = 30.0  # to reap a killed process
_PR_SET_PDEATHSIG = 1


def processes(cfg: RunConfig, paths: RunPaths) -> dict[str, LocalProcess]:
    """Return the roles' processes with their devices, not started."""
    env = dict(os.environ)
    engines = engine_roles(cfg)
    if engines:  # else they have their own tokens
        env |= new_tokens()
    placement = devices.of_run(cfg)
    log.info("%s", placement.line())
    env_by_role = {TRAINER: placement.learner, ORCHESTRATOR: {}}
    for number, role in enumerate(engines):
        env_by_role[role] = placement.engine(number) | {ENGINE_ROLE: role}
    return {
        role: LocalProcess(env | role_env, paths.log(role))
        for role, role_env in env_by_role.items()
    }


class LocalProcess(RoleProcess):
    """A child of this process. env: all of it. folder: its working directory."""

    def __init__(self, env: Mapping[str, str], log: Path, folder: Path | None = None) -> None:
        self.env = dict(env)
        self.log = log
        self.folder = folder
        self.log_start = 0  # the log's size at the child's start
        self.child: subprocess.Popen[bytes] | None = None

    def start(self, words: Sequence[str]) -> None:
        self.exit = None
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as out:
            self.log_start = out.tell()
            self.child = subprocess.Popen(
                [sys.executable, "-m", "lowroll", *words],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env={**self.env, PARENT: str(os.getpid())},
                start_new_session=True,
                cwd=self.folder,
            )

    @property
    def pid(self) -> int:
        return 0 if self.child is None else self.child.pid

    def is_alive(self) -> bool:
        """Return whether the process runs. An ended one keeps its ID until `kill`."""
        if self.child is None or self.child.returncode is not None:
            return False
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self.child.pid, flags) is None

    def wrote(self, heartbeat: Mapping[str, object]) -> bool:
        return is_writer(self.pid, heartbeat)

    def is_port_free(self, port: int) -> bool:
        return is_port_free(self.address, port)

    def signal(self, number: int) -> None:
        if self.is_alive():
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the group and wait. Idempotent, because a released ID may be another's."""
        if self.child is None or self.exit is not None:
            return
        if self.child.returncode is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            self.child.wait(timeout=REAP_S)
        self.exit = exit_of(self.child.returncode, self.log, self.log_start)

    def describe(self) -> str:
        return f"process {self.pid}"


def exit_of(code: int, log: Path, log_start: int, cause: str = "") -> Exit:
    if not cause:
        cause = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return Exit(code, cause, f"{last_error(log, log_start)} (log: {log})")


def die_with_parent() -> None:
    """Have the kernel kill this process with the launcher in PARENT."""
    parent = os.environ.get(PARENT)
    if parent is None:
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        os._exit(128 + signal.SIGKILL)


def reserve_port(host: str) -> socket.socket:
    """Return a socket that reserves a port, where a process may listen."""
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind((host, 0))
    return reserved


def is_port_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
