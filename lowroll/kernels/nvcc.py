"""CUDA C++ sources of this room, compiled by nvcc on first use and called through ctypes.

The library lies in a folder of the user's own (`$XDG_CACHE_HOME/lowroll/kernels` or
`~/.cache/lowroll/kernels`, mode 0700), under a name that is the digest of the source, its headers
(*.cuh beside it), the compiler and the options. It is made beside its name and moved there, so that
processes that build at once do not meet. No torch headers take part: a build takes seconds, and a
library fits every version of torch.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import torch

from lowroll.kernels.support import YES, Support, cuda_supports, no

log = logging.getLogger(__name__)

HEADERS = Path(__file__).parent

DEADLINE_S = 300  # of a build
TRIAL_S = 30  # of a question
NO_NVCC = no("no nvcc in $CUDA_HOME, on the PATH or in /usr/local/cuda")


@cache
def compiler() -> Path | None:
    """nvcc of `$CUDA_HOME`, the PATH or /usr/local/cuda; None where there is none."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    found = [Path(home) / "bin/nvcc"] if home else []
    if on_path := shutil.which("nvcc"):
        found.append(Path(on_path))
    found.append(Path("/usr/local/cuda/bin/nvcc"))
    return next((path for path in found if os.access(path, os.X_OK)), None)


def version() -> str:
    """The release that nvcc says it is; "" where it says none."""
    nvcc = compiler()
    if nvcc is None:
        return ""
    try:
        told = _run([str(nvcc), "--version"], "nvcc", TRIAL_S)
    except (RuntimeError, OSError):
        return ""
    found = re.search(r"release ([\d.]+)", told)
    return found[1] if found else ""


def options(capability: tuple[int, int], macros: Mapping[str, str]) -> list[str]:
    """nvcc's options for devices of that capability."""
    chip = f"{capability[0]}{capability[1]}" + ("a" if capability[0] == 9 else "")
    return [
        "-std=c++17",
        "-O3",
        "-gencode",
        f"arch=compute_{chip},code=sm_{chip}",
        f"-DHOPPER={capability[0] == 9:d}",
        *(f"-D{name}={value}" for name, value in sorted(macros.items())),
    ]


def library(source: Path, capability: tuple[int, int], macros: Mapping[str, str]) -> ctypes.CDLL:
    """The shared library of a source for devices of that capability, built when the cache does not
    hold it.

    RuntimeError when there is no nvcc, when it fails (with the first lines that it says) or takes
    too long; PermissionError when the folder belongs to someone else.
    """
    folder, flags, nvcc = cache_folder(), options(capability, macros), compiler()
    if nvcc is None:
        raise RuntimeError(f"{source.name}: {NO_NVCC.why_not}")
    version = _run([str(nvcc), "--version"], source.name)
    texts = [path.read_text() for path in (source, *sorted(HEADERS.glob("*.cuh")))]
    digest = hashlib.sha256("\0".join([*texts, version, *flags]).encode()).hexdigest()[:24]
    path = folder / f"{source.stem}-{digest}.so"
    if not path.exists():
        handle, made = tempfile.mkstemp(suffix=".so", dir=folder)
        os.close(handle)
        try:
            shared = ["--shared", "-Xcompiler", "-fPIC", str(source), "-o", made]
            _run([str(nvcc), *flags, *shared], source.name)
            os.replace(made, path)
        finally:
            Path(made).unlink(missing_ok=True)
    return ctypes.CDLL(str(path))


def supports(make: Callable[[], object], otherwise: str) -> Support:
    """Is there an nvcc, and does it make the library? Where it fails, a warning says what happens
    `otherwise`."""
    if compiler() is None:
        return NO_NVCC
    try:
        make()
    except (RuntimeError, OSError) as error:
        log.warning("%s: their kernel cannot be built (%s)", otherwise, error)
        return no(f"cannot be built: {error}")
    return YES


@cache
def supports_device(device: torch.device) -> Support:
    """Does nvcc compile for this device? It is tried on a source without kernels, in a second or
    two, and nothing is kept."""
    if not (found := cuda_supports(device)):
        return found
    nvcc = compiler()
    if nvcc is None:
        return NO_NVCC
    flags = options(torch.cuda.get_device_capability(device), {})
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "empty.cu"
        source.write_text("__global__ void nothing() {}\n")
        try:
            shared = ["--shared", "-Xcompiler", "-fPIC", str(source), "-o", f"{source}.so"]
            _run([str(nvcc), *flags, *shared], "a trial", TRIAL_S)
        except (RuntimeError, OSError) as error:
            return no(f"{nvcc} cannot compile for it: {error}")
    return YES


def cache_folder() -> Path:
    """The user's folder of libraries. PermissionError when another user owns it."""
    root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    folder = Path(root) / "lowroll" / "kernels"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode):
        raise PermissionError(
            f"{folder}: expected a folder of the user's own, to load compiled kernels from"
        )
    if status.st_mode & 0o077:
        folder.chmod(0o700)
    return folder


def _run(command: list[str], what: str, deadline_s: float | None = None) -> str:
    deadline_s = DEADLINE_S if deadline_s is None else deadline_s
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=deadline_s)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{what}: nvcc did not end within {deadline_s} s") from None
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()[:8]
        raise RuntimeError(f"{what}: nvcc failed ({done.returncode}):\n" + "\n".join(lines))
    return done.stdout
