"""The host's C++ compiler, and calls of its libraries on torch's own threads."""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import cast

import torch

from lowroll.kernels import build
from lowroll.kernels.support import NO_CPU, Support, no

HEADERS = Path(__file__).parent
# no fused operations: sums are computed as the source says
FLAGS = ["-std=c++17", "-O3", "-ffp-contract=off", "-mavx2", "-mfma", "-mf16c", "-shared", "-fPIC"]
DEADLINE_S = 120  # of a build
NO_COMPILER = no("no C++ compiler in $CXX or on the PATH (c++, g++, clang++)")


@cache
def compiler() -> Path | None:
    """Return the first that exists of $CXX, c++, g++ and clang++."""
    paths = map(shutil.which, (os.environ.get("CXX", ""), "c++", "g++", "clang++"))
    return next((Path(path) for path in paths if path), None)


def library(source: Path) -> ctypes.CDLL:
    """Return the shared library of a source. RuntimeError without a compiler; else as
    `build.library`."""
    compiler_path = compiler()
    if compiler_path is None:
        raise RuntimeError(f"{source.name}: {NO_COMPILER.why_not}")
    return build.library(source, sorted(HEADERS.glob("*.h")), compiler_path, FLAGS, DEADLINE_S)


def run(source: Path, name: str, arguments: ctypes.Structure) -> None:
    """Call a library's function on torch's threads, whose number it sets. Errors as of
    `library`."""
    arguments.threads = torch.get_num_threads()
    _function(source, name)(ctypes.byref(arguments), team())


@cache
def _function(source: Path, name: str) -> Callable[..., None]:
    function = getattr(library(source), name)
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_void_p], None
    return cast(Callable[..., None], function)


@cache
def supports(source: Path, device: torch.device, otherwise: str) -> Support:
    """Return whether the device is a CPU that builds and runs the source (`build.supports`)."""
    if device.type != "cpu":
        return NO_CPU
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        return no("needs a CPU with AVX2")
    if team() is None:
        return no("finds no OpenMP in this torch, whose threads it would run on")
    if compiler() is None:
        return NO_COMPILER
    return build.supports(lambda: library(source), otherwise)


@cache
def team() -> ctypes.c_void_p | None:
    """Return libgomp's call that runs a function on torch's threads; None without libgomp."""
    try:
        return ctypes.cast(ctypes.CDLL(None).GOMP_parallel, ctypes.c_void_p)
    except (AttributeError, OSError, TypeError):
        return None
