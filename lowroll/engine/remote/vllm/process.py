"""A vLLM server as a child, in a process group of its own. Its Unix socket is in a private folder,
because its control routes (`VLLM_SERVER_DEV_MODE`) need no token: on loopback every user of the
machine could call them."""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from lowroll import machine
from lowroll.checkpoint.logfile import last_error
from lowroll.engine.remote.http_client import EngineLost
from lowroll.types import printable

REAPER = Path(__file__).with_name("reaper.py")
ENDING = 15.0  # seconds: the reaper's grace with a margin
TELLING = 15.0  # seconds between two lines about a start
PASSED = ("CUDA_VISIBLE_DEVICES", "CUDA_HOME", "HF_HOME", "XDG_CACHE_HOME", "OMP_NUM_THREADS")
PREFIXES = ("VLLM_", "NCCL_", "TRITON_", "TORCH")
ALWAYS = {  # routes for updates and pauses, and no telemetry
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "0",
    "HF_HUB_OFFLINE": "1",
}
UNLESS_SET = {  # for the CPU; but the last: it cannot return processed log-probs
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}


class VllmProcess:
    """A vLLM. arguments: of `vllm serve`, without an address. python: default LOWROLL_VLLM_PYTHON,
    or this one. site: the folder of an unpacked vLLM; default LOWROLL_VLLM_PATH. devices: its
    CUDA_VISIBLE_DEVICES. log: appended to. folder: of its socket, removed with it. ValueError when
    it does not start."""

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        log: Path,
        python: str | None = None,
        site: str | None = None,
        devices: str | None = None,
        folder: Path | None = None,
    ) -> None:
        self.log = log
        if folder is None:
            folder = Path(tempfile.mkdtemp(prefix="lowroll-vllm-", dir=_short_temporary_folder()))
        else:
            _make_private(folder)
        self.folder = folder
        self.url = f"unix:{folder / 'socket'}"
        python = python or os.environ.get("LOWROLL_VLLM_PYTHON") or sys.executable
        command = [python, "-P", str(REAPER), *arguments, "--uds", str(self.folder / "socket")]
        environment = {
            **_environment(site or os.environ.get("LOWROLL_VLLM_PATH"), devices),
            "VLLM_RPC_BASE_PATH": str(folder),  # sockets that it leaves behind
        }
        log.parent.mkdir(parents=True, exist_ok=True)
        try:
            with log.open("ab") as log_file:
                self._began = log_file.tell()  # older lines are of other processes
                self.child = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,  # its end tells the reaper that this process has ended
                    stdout=log_file,
                    stderr=log_file,
                    env=environment,
                    cwd=self.folder,
                    start_new_session=True,
                )
        except OSError as error:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise ValueError(
                f"python: {printable(python)} does not start: {error.strerror or error}"
            ) from None

    def wait_ready(self, deadline_s: float, tell: Callable[[str], object]) -> None:
        """Wait until it accepts connections. tell: receives the state of the wait. EngineLost."""
        began_at = told_at = time.monotonic()
        end = began_at + deadline_s
        tell(f"starting vLLM, which takes a minute or more; what it says: {self.log}")
        while (now := time.monotonic()) < end:
            if now - told_at >= TELLING:
                told_at = now
                tell(f"vLLM is starting: {now - began_at:.0f} s of {deadline_s:g} at most")
            if (reason := self.lost()) is not None:
                self.close()
                raise EngineLost(f"vLLM did not start: {reason}")
            if _accepts(self.folder / "socket"):
                tell(f"vLLM answers after {now - began_at:.0f} s")
                return
            time.sleep(0.1)
        error_text = last_error(self.log, self._began)
        self.close()
        raise EngineLost(
            f"vLLM was not ready within {deadline_s:g} s; the end of {self.log}: {error_text}"
        )

    def lost(self) -> str | None:
        """Return why vLLM has ended, by its log; None while it runs."""
        if self.child.poll() is None:
            return None
        return f"vLLM has ended; the last error of {self.log}: {last_error(self.log, self._began)}"

    def close(self) -> None:
        """End all of its processes and wait for them. Idempotent."""
        assert self.child.stdin is not None
        self.child.stdin.close()
        try:
            self.child.wait(timeout=ENDING)
        except subprocess.TimeoutExpired:
            os.killpg(self.child.pid, 9)
            self.child.wait(timeout=ENDING)
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def pid(self) -> int:
        return self.child.pid


def _environment(site: str | None, devices: str | None) -> Mapping[str, str]:
    prefixed_names = [name for name in os.environ if name.startswith(PREFIXES)]
    environment = machine.kept_env(*PASSED, *prefixed_names)
    environment.pop("VIRTUAL_ENV", None)
    environment = UNLESS_SET | environment
    if devices is not None:
        environment["CUDA_VISIBLE_DEVICES"] = devices
    environment |= ALWAYS
    if site is not None:
        environment["PYTHONPATH"] = site
    return environment


def lasting_folder(of: str) -> Path:
    name = hashlib.sha256(f"{os.getuid()} {of}".encode()).hexdigest()[:16]
    return Path(_short_temporary_folder() or tempfile.gettempdir()) / f"lowroll-vllm-{name}"


def _make_private(folder: Path) -> None:
    """Create the folder for this user alone, without an old socket. ValueError when it is somebody
    else's."""
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ValueError(f"{folder}: it is no folder that this user alone can open; remove it")
    (folder / "socket").unlink(missing_ok=True)


def _short_temporary_folder() -> str | None:
    """Return a folder whose socket's path fits into 107 bytes; None for the usual one."""
    return None if len(tempfile.gettempdir()) < 60 else "/tmp"


def _accepts(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True
