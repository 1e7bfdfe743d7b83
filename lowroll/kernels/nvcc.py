"""The CUDA compiler of this package's sources (`build`)."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import torch

from lowroll.kernels import build
from lowroll.kernels.support import YES, Support, cuda_supports, no

HEADERS = Path(__file__).parent
SHARED = ["--shared", "-Xcompiler", "-fPIC"]

DEADLINE_S = 300  # of a build
TRIAL_S = 30  # of a trial
NO_NVCC = no("no nvcc in $CUDA_HOME, on the PATH or in /usr/local/cuda")


@cache
def compiler() -> Path | None:
    """Return nvcc of `$CUDA_HOME`, the PATH or /usr/local/cuda, or None."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    candidates = [Path(home) / "bin/nvcc"] if home else []
    if on_path := shutil.which("nvcc"):
        candidates.append(Path(on_path))
    candidates.append(Path("/usr/local/cuda/bin/nvcc"))
    return next((path for path in candidates if os.access(path, os.X_OK)), None)


def version() -> str:
    """Return nvcc's release, or ""."""
    nvcc = compiler()
    if nvcc is None:
        return ""
    try:
        output = build.run([str(nvcc), "--version"], "nvcc", TRIAL_S)
    except (RuntimeError, OSError):
        return ""
    match = re.search(r"release ([\d.]+)", output)
    return match[1] if match else ""


def options(capability: tuple[int, int], macros: Mapping[str, str]) -> list[str]:
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
    """Return the shared library of a source. RuntimeError without nvcc; else as `build.library`."""
    nvcc = compiler()
    if nvcc is None:
        raise RuntimeError(f"{source.name}: {NO_NVCC.why_not}")
    flags = [*options(capability, macros), *SHARED]
    return build.library(source, sorted(HEADERS.glob("*.cuh")), nvcc, flags, DEADLINE_S)


def supports(make: Callable[[], object], otherwise: str) -> Support:
    """Return whether nvcc exists and makes the library (`build.supports`)."""
    return NO_NVCC if compiler() is None else build.supports(make, otherwise)


@cache
def supports_device(device: torch.device) -> Support:
    """Return whether nvcc compiles for this device, by a trial of a second or two."""
    if not (support := cuda_supports(device)):
        return support
    nvcc = compiler()
    if nvcc is None:
        return NO_NVCC
    flags = options(torch.cuda.get_device_capability(device), {})
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "empty.cu"
        source.write_text("__global__ void nothing() {}\n")
        try:
            command = [str(nvcc), *flags, *SHARED, str(source), "-o", f"{source}.so"]
            build.run(command, "a trial", TRIAL_S)
        except (RuntimeError, OSError) as error:
            return no(f"{nvcc} cannot compile for it: {error}")
    return YES
